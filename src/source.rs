//! A lexer for CUDA C++ text, and what the runtime needs to know about a kernel source.
//!
//! [`entry_points`] finds the `__global__` functions that a source defines. [`keep_only`] makes a program that holds
//! only some of them, so that entry points can be compiled separately and at the same time: those that are not wanted are
//! left out, and with them the `__device__` functions that only they use, which in OEQ's sources are most of the text.
//! The rest stays as it was, line for line.
//!
//! Neither function knows C++. The outline that both stand on follows comments, literals, preprocessor lines and
//! brackets, and at file scope the declarations between them. `keep_only` therefore works from a list of what it knows
//! to be harmless: anything else in the text (conditional compilation, variables that entry points could share,
//! namespaces, ...) makes it answer `None`, and the whole program is compiled instead.
//!
//! Both take time linear in the text and do not recurse, whatever the text is.

#[cfg(feature = "host")]
pub mod host;

use std::collections::{HashMap, HashSet};
use std::ops::Range;

use crate::error::{Error, Result};

/// The most brackets inside one another. The compiler recurses over them and would take the process down where its stack
/// ends, at some thousands; OEQ nests a dozen.
const MAX_NESTING: usize = 256;
/// The most tokens of one statement or of one preprocessor line, for the same reason: operators, conditions without braces
/// and labels nest without brackets. OEQ's longest statement has 64.
const MAX_STATEMENT: usize = 12_288;
/// The most `else` and `for` in one function where it is not known which parentheses are whose: each may be inside the one
/// before.
const MAX_CHAIN: usize = 4096;

/// Where a `__global__` function is defined in a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EntryPointSpan {
    /// The function's name as written, without any namespace.
    pub name: String,
    /// Byte offset of the `__global__` keyword.
    pub global_at: usize,
    /// Byte range of the whole definition, from its first token to the closing brace of its body.
    pub body: Range<usize>,
}

/// All `__global__` function definitions in the text, in order of appearance.
///
/// Declarations without a body and functions that only a macro would define are not in the list.
///
/// # Errors
/// [`Code::InvalidArgument`](crate::error::Code::InvalidArgument) when the text cannot be lexed: an unterminated
/// comment, string or character literal, brackets nested deeper than the compiler can bear, or brackets that do not
/// match. The last is forgiven when the text has conditional compilation or macros with unmatched brackets, since then
/// they may well match after preprocessing.
pub fn entry_points(source: &str) -> Result<Vec<EntryPointSpan>> {
    Ok(Outline::of(source)?.entries)
}

/// The same program without the entry points that are not in `keep`, and without the `__device__` functions that only those
/// use.
///
/// Line numbers and the text of everything else are those of `source`.
///
/// The answer is `None` when a name in `keep` is not defined, and when anything in the text looks unfamiliar: an entry
/// point that is a template, is `extern "C"`, is declared twice or is mentioned anywhere else; variables at file scope or
/// `static` ones, which separately compiled entry points would no longer share; conditional compilation, includes,
/// namespaces, inline assembly. The caller then compiles the whole program.
#[must_use]
pub fn keep_only(source: &str, keep: &[&str]) -> Option<String> {
    let outline = outline_to_cut(source, keep)?;
    let dropped: Vec<&EntryPointSpan> =
        outline.entries.iter().filter(|entry| !keep.contains(&entry.name.as_str())).collect();
    let mut helpers = Helpers::of(&outline, &dropped);
    each_word(&outline, |word, at| helpers.mention(word, at))?;
    let mut program = String::with_capacity(source.len() + dropped.len() * DROP.len());
    let mut copied = 0;
    for (span, whole) in helpers.left_out() {
        program.push_str(source.get(copied..span.start)?);
        copied = span.start;
        if whole {
            let lines = source.get(span.clone())?.matches('\n').count();
            program.extend(std::iter::repeat_n('\n', lines));
            copied = span.end;
        } else {
            program.push_str(DROP);
        }
    }
    program.push_str(source.get(copied..)?);
    Some(program)
}

/// Whether [`keep_only`] makes a program of these entry points, which it does for the same sources whatever is kept of
/// them. Takes less time than making it.
#[must_use]
pub fn can_keep_only(source: &str, keep: &[&str]) -> bool {
    outline_to_cut(source, keep).is_some_and(|outline| each_word(&outline, |_, _| ()).is_some())
}

/// The outline of a source, if it is familiar and defines all that is to be kept, and nothing twice.
fn outline_to_cut<'a>(source: &'a str, keep: &[&str]) -> Option<Outline<'a>> {
    let outline = Outline::of(source).ok()?;
    let names: HashSet<&str> = outline.entries.iter().map(|entry| entry.name.as_str()).collect();
    let whole = names.len() == outline.entries.len() && keep.iter().all(|name| names.contains(name));
    (whole && !outline.unfamiliar).then_some(outline)
}

/// Looks at every word and where it stands. `None` if an entry point's name stands anywhere but where it is defined: that
/// excludes calls between entry points, separate declarations, overloads and macros that touch them.
fn each_word(outline: &Outline<'_>, mut look: impl FnMut(&str, usize)) -> Option<()> {
    let mut unseen: HashSet<&str> = outline.entries.iter().map(|entry| entry.name.as_str()).collect();
    let names = unseen.clone();
    let mut lexer = Lexer::new(outline.source);
    while let Some(token) = lexer.next_token().ok()? {
        if token.kind == TokenKind::Word {
            let word = outline.source.get(token.range())?;
            if names.contains(word) && !unseen.remove(word) {
                return None;
            }
            look(word, token.start);
        }
    }
    Some(())
}

/// What goes before the `__global__` of an entry point that cannot be left out because a macro is defined within it: a
/// template that nobody instantiates is parsed but produces no code.
const DROP: &str = "template<int> ";

/// Which `__device__` functions only the dropped entry points use.
struct Helpers<'a> {
    /// The dropped entry points and all helpers, in the order of the text.
    spans: Vec<Span>,
    /// The helper of a name, an index into `spans`. A name that several have leads to none.
    named: HashMap<&'a str, usize>,
    /// Who mentions whom, as indices into `spans`.
    mentions: Vec<(usize, usize)>,
    /// Mentioned in what stays in any case.
    needed: Vec<usize>,
}

/// A part of the text that may be left out.
struct Span {
    range: Range<usize>,
    is_entry: bool,
    /// No macro is defined in it.
    removable: bool,
}

impl<'a> Helpers<'a> {
    fn of(outline: &Outline<'a>, dropped: &[&EntryPointSpan]) -> Self {
        let removable = |range: &Range<usize>| {
            let next = outline.defines_at.partition_point(|at| *at < range.start);
            !outline.defines_at.get(next).is_some_and(|at| range.contains(at))
        };
        let span =
            |range: &Range<usize>, is_entry| Span { range: range.clone(), is_entry, removable: removable(range) };
        let mut spans: Vec<Span> = dropped.iter().map(|entry| span(&entry.body, true)).collect();
        spans.extend(outline.helpers.iter().map(|(_, range)| span(range, false)));
        spans.sort_by_key(|span| span.range.start);
        let mut count = HashMap::new();
        for (name, _) in &outline.helpers {
            *count.entry(*name).or_insert(0) += 1;
        }
        let place = |range: &Range<usize>| spans.binary_search_by_key(&range.start, |span| span.range.start).ok();
        let named = outline.helpers.iter().filter(|(name, _)| count.get(name) == Some(&1));
        let named = named.filter_map(|(name, range)| Some((*name, place(range)?))).collect();
        Self { spans, named, mentions: Vec::new(), needed: Vec::new() }
    }

    /// Notes that a word stands somewhere.
    fn mention(&mut self, word: &str, at: usize) {
        let Some(&helper) = self.named.get(word) else { return };
        let before = self.spans.partition_point(|span| span.range.start <= at);
        match before.checked_sub(1).filter(|index| self.spans.get(*index).is_some_and(|s| s.range.contains(&at))) {
            Some(within) => self.mentions.push((within, helper)),
            None => self.needed.push(helper),
        }
    }

    /// All that the parts at these indices lead to. The mentions are in order.
    fn reach(&self, from: impl IntoIterator<Item = usize>) -> Vec<bool> {
        let mut reached = vec![false; self.spans.len()];
        let mut next: Vec<usize> = from.into_iter().collect();
        while let Some(index) = next.pop() {
            if let Some(reached) = reached.get_mut(index).filter(|reached| !**reached) {
                *reached = true;
                let first = self.mentions.partition_point(|(within, _)| *within < index);
                let own = self.mentions.iter().skip(first).take_while(|(within, _)| *within == index);
                next.extend(own.map(|(_, helper)| *helper));
            }
        }
        reached
    }

    /// What is left out, in the order of the text, and whether it goes as a whole.
    fn left_out(mut self) -> Vec<(Range<usize>, bool)> {
        self.mentions.sort_unstable();
        self.mentions.dedup();
        let (mut kept, mut gone) = (std::mem::take(&mut self.needed), Vec::new());
        // What stays because a macro is defined in it keeps what it uses. A helper stays for its macros in any case.
        for (index, span) in self.spans.iter().enumerate() {
            if !span.removable {
                kept.push(index);
            } else if span.is_entry {
                gone.push(index);
            }
        }
        let gone = self.reach(gone);
        // A helper that only what is dropped uses goes; every other one stays, and what it uses with it.
        kept.extend((0..self.spans.len()).filter(|index| !gone.get(*index).is_some_and(|gone| *gone)));
        let kept = self.reach(kept);
        let all = self.spans.iter().zip(kept).zip(gone);
        all.filter(|((span, kept), gone)| span.is_entry || (*gone && !*kept))
            .map(|((span, _), _)| (span.range.clone(), span.removable))
            .collect()
    }
}

/// Words whose parentheses belong to an attribute and not to a parameter list.
const ATTRIBUTES: &[&str] = &[
    "__launch_bounds__",
    "__attribute__",
    "__maxnreg__",
    "__cluster_dims__",
    "__block_size__",
    "__align__",
    "__declspec",
    "alignas",
    "decltype",
    "noexcept",
];

/// Words that `keep_only` never accepts, wherever they stand: they make or hide state that entry points would share
/// across separately compiled programs, or change what the outline means.
const FORBIDDEN: &[&str] = &[
    "__asm",
    "__asm__",
    "__constant__",
    "__managed__",
    "asm",
    "extern",
    "friend",
    "namespace",
    "static",
    "thread_local",
];

/// Words that the outline gives a meaning to, so that a macro of that name would mislead it.
const MEANINGFUL: &[&str] = &[
    "__device__",
    "__global__",
    "__shared__",
    "class",
    "constexpr",
    "enum",
    "static_assert",
    "struct",
    "template",
    "typedef",
    "union",
    "using",
    "void",
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TokenKind {
    /// An identifier or keyword.
    Word,
    /// A number.
    Number,
    /// A string or character literal, without its prefix.
    Literal,
    /// Any other single character.
    Punct(u8),
    /// The `#` that begins a preprocessor line. The line's own tokens follow.
    DirectiveStart,
    /// The end of that line, or of the text.
    DirectiveEnd,
}

#[derive(Debug, Clone, Copy)]
struct Token {
    kind: TokenKind,
    start: usize,
    end: usize,
}

impl Token {
    fn range(self) -> Range<usize> {
        self.start..self.end
    }
}

/// Splits a text into tokens. Comments and white space disappear.
struct Lexer<'a> {
    text: &'a [u8],
    at: usize,
    /// No token yet since the last line break, so that a `#` begins a preprocessor line.
    fresh_line: bool,
    in_directive: bool,
    /// Something was seen whose meaning depends on the compiler, or that this lexer does not model.
    unfamiliar: bool,
}

impl<'a> Lexer<'a> {
    fn new(text: &'a str) -> Self {
        Self { text: text.as_bytes(), at: 0, fresh_line: true, in_directive: false, unfamiliar: false }
    }

    fn peek(&self, ahead: usize) -> Option<u8> {
        self.text.get(self.at.checked_add(ahead)?).copied()
    }

    /// The length of the line break at a position: 0 when there is none.
    fn line_break(&self, at: usize) -> usize {
        match (self.text.get(at), self.text.get(at + 1)) {
            (Some(b'\n'), _) => 1,
            (Some(b'\r'), Some(b'\n')) => 2,
            _ => 0,
        }
    }

    fn error(&self, what: &str, at: usize) -> Error {
        let line = 1 + self.text.iter().take(at).filter(|&&byte| byte == b'\n').count();
        Error::invalid(format!("the source has {what} in line {line} (byte {at})"))
    }

    fn next_token(&mut self) -> Result<Option<Token>> {
        self.skip_blank()?;
        let start = self.at;
        let Some(byte) = self.peek(0) else {
            if self.in_directive {
                self.in_directive = false;
                return Ok(Some(Token { kind: TokenKind::DirectiveEnd, start, end: start }));
            }
            return Ok(None);
        };
        let fresh_line = std::mem::replace(&mut self.fresh_line, false);
        let kind = match byte {
            // skip_blank stops at a line break only at the end of a preprocessor line.
            b'\n' | b'\r' if self.in_directive => {
                self.in_directive = false;
                self.fresh_line = true;
                self.at += self.line_break(start).max(1);
                TokenKind::DirectiveEnd
            }
            b'#' if fresh_line => {
                self.in_directive = true;
                self.at += 1;
                TokenKind::DirectiveStart
            }
            b'"' | b'\'' => {
                self.quoted(byte)?;
                TokenKind::Literal
            }
            b'0'..=b'9' => self.number(),
            b'.' if self.peek(1).is_some_and(|next| next.is_ascii_digit()) => self.number(),
            _ if is_word(byte) => {
                while self.peek(0).is_some_and(|next| is_word(next) || next.is_ascii_digit()) {
                    self.at += 1;
                }
                let prefix = self.text.get(start..self.at);
                if self.peek(0) == Some(b'"') && matches!(prefix, Some(b"R" | b"LR" | b"uR" | b"UR" | b"u8R")) {
                    self.raw_string()?;
                    TokenKind::Literal
                } else {
                    TokenKind::Word
                }
            }
            _ => {
                self.punct(byte);
                TokenKind::Punct(byte)
            }
        };
        Ok(Some(Token { kind, start, end: self.at }))
    }

    /// Skips white space and comments. In a preprocessor line it stops before the line break that ends the line.
    fn skip_blank(&mut self) -> Result<()> {
        while let Some(byte) = self.peek(0) {
            match byte {
                b'\n' if self.in_directive => return Ok(()),
                b'\r' if self.in_directive && self.peek(1) == Some(b'\n') => return Ok(()),
                b'\n' => {
                    self.fresh_line = true;
                    self.at += 1;
                }
                b' ' | b'\t' | 0x0b | 0x0c => self.at += 1,
                b'\r' => {
                    // Alone it is a line break for some compilers and white space for others.
                    self.unfamiliar |= self.peek(1) != Some(b'\n');
                    self.at += 1;
                }
                b'\\' if self.line_break(self.at + 1) > 0 => {
                    // Within a preprocessor line this is how lines continue. Elsewhere it may split a token.
                    self.unfamiliar |= !self.in_directive;
                    self.at += 1 + self.line_break(self.at + 1);
                }
                b'/' if self.peek(1) == Some(b'/') => self.line_comment(),
                b'/' if self.peek(1) == Some(b'*') => self.block_comment()?,
                _ => return Ok(()),
            }
        }
        Ok(())
    }

    fn line_comment(&mut self) {
        while let Some(byte) = self.peek(0) {
            if byte == b'\\' {
                self.at += 1;
                let splice = self.line_break(self.at);
                self.at += splice;
                if splice == 0 {
                    // Some compilers continue the line even if blanks follow the backslash.
                    let blanks = self.text.iter().skip(self.at).take_while(|&&next| matches!(next, b' ' | b'\t'));
                    let blanks = blanks.count();
                    self.unfamiliar |= blanks > 0 && self.line_break(self.at + blanks) > 0;
                    self.at += blanks;
                }
            } else if self.line_break(self.at) > 0 {
                return;
            } else {
                self.unfamiliar |= byte == b'\r' || self.is_trigraph();
                self.at += 1;
            }
        }
    }

    fn block_comment(&mut self) -> Result<()> {
        let start = self.at;
        self.at += 2;
        while let Some(byte) = self.peek(0) {
            if byte == b'*' && self.peek(1) == Some(b'/') {
                self.at += 2;
                return Ok(());
            }
            // A `*` and `/` on two spliced lines would end the comment too.
            self.unfamiliar |= byte == b'\\' && self.line_break(self.at + 1) > 0;
            self.at += 1;
        }
        Err(self.error("an unterminated /* comment", start))
    }

    fn quoted(&mut self, quote: u8) -> Result<()> {
        let start = self.at;
        self.at += 1;
        while let Some(byte) = self.peek(0) {
            if byte == quote {
                self.at += 1;
                return Ok(());
            }
            if byte == b'\\' {
                self.at += 1;
                self.at += self.line_break(self.at).max(1);
                continue;
            }
            if self.line_break(self.at) > 0 {
                break;
            }
            self.unfamiliar |= byte == b'\r' || self.is_trigraph();
            self.at += 1;
        }
        self.at = self.at.min(self.text.len());
        if self.in_directive {
            // Text after #error or #pragma need not be C++: an apostrophe there is no mistake.
            self.unfamiliar = true;
            return Ok(());
        }
        let what = if quote == b'"' { "an unterminated string" } else { "an unterminated character literal" };
        Err(self.error(what, start))
    }

    /// Takes a raw string whose prefix has been read: `"delimiter( ... )delimiter"`.
    fn raw_string(&mut self) -> Result<()> {
        let start = self.at;
        // A line break in here would end a preprocessor line for some compilers.
        self.unfamiliar |= self.in_directive;
        let rest = self.text.get(start + 1..).unwrap_or_default();
        let length = rest.iter().take(17).position(|&byte| byte == b'(');
        let Some(delimiter) = length.and_then(|length| rest.get(..length)) else {
            return Err(self.error("a raw string without a `(` after its delimiter of at most 16 characters", start));
        };
        let mut close = Vec::with_capacity(delimiter.len() + 2);
        close.push(b')');
        close.extend_from_slice(delimiter);
        close.push(b'"');
        let content = start + 1 + delimiter.len() + 1;
        let text = self.text.get(content..).unwrap_or_default();
        let Some(length) = text.windows(close.len()).position(|window| window == close) else {
            return Err(self.error("an unterminated raw string", start));
        };
        self.at = content + length + close.len();
        Ok(())
    }

    /// Takes a preprocessing number: hexadecimal floats, digit separators and suffixes included.
    fn number(&mut self) -> TokenKind {
        let mut last = 0;
        while let Some(byte) = self.peek(0) {
            let goes_on = byte.is_ascii_digit()
                || is_word(byte)
                || byte == b'.'
                || (matches!(byte, b'+' | b'-') && matches!(last, b'e' | b'E' | b'p' | b'P'))
                || (byte == b'\'' && self.peek(1).is_some_and(|next| next.is_ascii_digit() || is_word(next)));
            if !goes_on {
                break;
            }
            last = byte;
            self.at += 1;
        }
        TokenKind::Number
    }

    fn punct(&mut self, byte: u8) {
        let next = self.peek(1);
        self.unfamiliar |= match byte {
            // Alternative spellings of brackets and of `#`.
            b'<' => matches!(next, Some(b'%' | b':')),
            b'%' => matches!(next, Some(b':' | b'>')),
            b':' => next == Some(b'>'),
            b'?' => self.is_trigraph(),
            // Pasting makes words that are not in the text. Alone it makes a string of a macro's argument.
            b'#' => !self.in_directive || next == Some(b'#'),
            _ => !b"!&()*+,-./;=>[]^{|}~".contains(&byte),
        };
        self.at += 1;
    }

    /// Whether a trigraph starts here. Which compilers still replace them varies, and one of them is a backslash.
    fn is_trigraph(&self) -> bool {
        self.peek(0) == Some(b'?')
            && self.peek(1) == Some(b'?')
            && self.peek(2).is_some_and(|third| b"=/'()!<>-".contains(&third))
    }
}

/// Whether a byte can begin an identifier. Every byte of a multi-byte character counts.
const fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphabetic() || matches!(byte, b'_' | b'$') || byte >= 0x80
}

/// A preprocessor line while it is read.
#[derive(Default)]
struct Directive {
    tokens: usize,
    words: usize,
    name: Option<Range<usize>>,
    /// The macro that a `#define` defines.
    defines: Option<Range<usize>>,
    brackets: Vec<u8>,
    unbalanced: bool,
}

/// A declaration at file scope while it is read.
#[derive(Default)]
struct Declaration {
    /// Offset of the first token.
    start: usize,
    /// The first token if it is a word.
    first: Option<Range<usize>>,
    tokens: usize,
    device: bool,
    /// Offset of `__global__`.
    global_at: Option<usize>,
    /// The token just before the current one, if it is a word at file scope.
    last_word: Option<Range<usize>>,
    name: Option<Range<usize>>,
    /// Open angle brackets of a `template<...>`, in which `=` and parentheses mean something else.
    angles: usize,
    /// A parameter list has been seen.
    parameters: bool,
    /// A `=` has been seen outside all brackets.
    assigned: bool,
    part: Part,
}

/// How far a declaration at file scope has come.
#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Before its braces.
    #[default]
    Head,
    /// In the body of a function.
    Body,
    /// In the braces of a struct, class, union or enum.
    Members,
    /// In other braces, those of an initialiser.
    Braces,
    /// After braces that were no function body.
    Tail,
}

/// The brace that opens a namespace or an `extern "C"` block on the outline's stack of brackets: what is inside is
/// still at file scope.
const SCOPE: u8 = b'N';

fn few_brackets(open: &[u8], lexer: &Lexer<'_>, token: Token) -> Result<()> {
    if open.len() > MAX_NESTING {
        return Err(lexer.error(&format!("more than {MAX_NESTING} brackets inside one another"), token.start));
    }
    Ok(())
}

/// What a text defines at file scope.
struct Outline<'a> {
    source: &'a str,
    entries: Vec<EntryPointSpan>,
    /// Names and whole definitions of `__device__` functions that are no templates.
    helpers: Vec<(&'a str, Range<usize>)>,
    /// Where macros are defined.
    defines_at: Vec<usize>,
    unfamiliar: bool,
    /// Brackets in the text need not match: what the compiler sees depends on the preprocessor.
    loose: bool,
    macros: HashSet<&'a str>,
    brackets: Vec<u8>,
    /// How many of `brackets` are not [`SCOPE`].
    depth: usize,
    declaration: Declaration,
    /// The last token was `extern`, which is accepted in `extern __shared__` within a body.
    after_extern: bool,
    nesting: Nesting,
}

/// What nests without brackets.
#[derive(Default)]
struct Nesting {
    /// Tokens of the statement so far, those before its innermost brace left out.
    statement: usize,
    /// The same outside of each open brace, and whether this is an initialiser's.
    outer: Vec<(usize, bool)>,
    ended: Ended,
    /// The last token may be followed by an initialiser.
    before_list: bool,
    /// `do` since a function began whose `while` has not come.
    loops: usize,
    /// Words since a function began that may each be inside the one before.
    chain: usize,
}

/// Whether the last token has ended a statement, if what follows does not go on with it.
#[derive(Default, PartialEq, Eq)]
enum Ended {
    #[default]
    No,
    Statement,
    Braces,
}

/// Operators that are words.
const OPERATORS: &[&str] = &["and", "and_eq", "bitand", "bitor", "not_eq", "or", "or_eq", "xor", "xor_eq"];

impl<'a> Outline<'a> {
    fn of(source: &'a str) -> Result<Self> {
        let mut outline = Self {
            source,
            entries: Vec::new(),
            helpers: Vec::new(),
            defines_at: Vec::new(),
            unfamiliar: false,
            loose: false,
            macros: HashSet::new(),
            brackets: Vec::new(),
            depth: 0,
            declaration: Declaration::default(),
            after_extern: false,
            nesting: Nesting::default(),
        };
        let mut lexer = Lexer::new(source);
        let mut directive: Option<Directive> = None;
        while let Some(token) = lexer.next_token()? {
            match (&mut directive, token.kind) {
                (_, TokenKind::DirectiveStart) => directive = Some(Directive::default()),
                (_, TokenKind::DirectiveEnd) => {
                    if let Some(done) = directive.take() {
                        outline.end_directive(done);
                    }
                }
                (Some(current), _) => outline.directive_token(&lexer, current, token)?,
                (None, _) => {
                    outline.depth_of(&lexer, token)?;
                    outline.token(&lexer, token)?;
                }
            }
        }
        if !outline.brackets.is_empty() {
            outline.unfamiliar = true;
            if !outline.loose {
                let open = outline.brackets.len();
                return Err(lexer.error(&format!("{open} brackets that are still open at its end"), source.len()));
            }
            outline.end_function(source.len());
        }
        outline.unfamiliar |= lexer.unfamiliar || outline.after_extern || outline.declaration.tokens > 0;
        Ok(outline)
    }

    fn text(&self, range: Range<usize>) -> &'a str {
        self.source.get(range).unwrap_or_default()
    }

    /// Refuses what the compiler would recurse over too deeply.
    #[inline]
    fn depth_of(&mut self, lexer: &Lexer<'_>, token: Token) -> Result<()> {
        few_brackets(&self.brackets, lexer, token)?;
        match token.kind {
            TokenKind::Punct(_) => self.nest(token),
            // Most tokens say nothing about it.
            TokenKind::Word
                if self.nesting.ended != Ended::No
                    || self.loose
                    || self.depth == 0
                    || self.source.get(token.range()) == Some("do") =>
            {
                self.nest(token);
            }
            _ => {
                let ended = std::mem::take(&mut self.nesting.ended) == Ended::Statement;
                self.nesting.statement = if ended { 1 } else { self.nesting.statement + 1 };
                self.nesting.before_list = false;
            }
        }
        let what = if self.nesting.statement > MAX_STATEMENT {
            format!("a statement of more than {MAX_STATEMENT} tokens")
        } else if self.nesting.chain > MAX_CHAIN {
            format!("a function with more than {MAX_CHAIN} `else` and `for`")
        } else {
            return Ok(());
        };
        Err(lexer.error(&what, token.start))
    }

    fn nest(&mut self, token: Token) {
        let word = if token.kind == TokenKind::Word { self.text(token.range()) } else { "" };
        let inner = self.brackets.last().copied();
        let nesting = &mut self.nesting;
        let goes_on = match std::mem::take(&mut nesting.ended) {
            Ended::No => true,
            _ if self.depth > 0 && word == "else" => true,
            // The end of a `do`.
            _ if word == "while" && nesting.loops > 0 => {
                nesting.loops -= 1;
                true
            }
            Ended::Statement => false,
            // The braces may have been a value's, and the expression goes on.
            Ended::Braces if token.kind == TokenKind::Word => is_in(word, OPERATORS),
            Ended::Braces => !matches!(token.kind, TokenKind::Punct(b'{' | b'}' | b';')),
        };
        nesting.statement = if goes_on { nesting.statement + 1 } else { 1 };
        let in_list = nesting.outer.last().is_some_and(|(_, list)| *list);
        let listed = std::mem::take(&mut nesting.before_list);
        match token.kind {
            TokenKind::Punct(b'=') => nesting.before_list = true,
            TokenKind::Punct(b'{') => {
                nesting.outer.push((std::mem::take(&mut nesting.statement), listed));
                nesting.before_list = listed;
            }
            TokenKind::Punct(b'}') => {
                nesting.statement = nesting.outer.pop().map_or(0, |(statement, _)| statement);
                // The bracket that is closed here is still the last one.
                let outer = self.brackets.iter().nth_back(1);
                nesting.ended = if matches!(outer, Some(b'(' | b'[')) { Ended::No } else { Ended::Braces };
            }
            // Those in the parentheses of a `for` end nothing.
            TokenKind::Punct(b';') if self.loose || inner != Some(b'(') => nesting.ended = Ended::Statement,
            TokenKind::Punct(b',') if in_list && inner == Some(b'{') => {
                nesting.ended = Ended::Statement;
                nesting.before_list = true;
            }
            TokenKind::Word if self.depth == 0 => (nesting.chain, nesting.loops) = (0, 0),
            TokenKind::Word => {
                nesting.loops += usize::from(word == "do");
                nesting.chain += usize::from(self.loose && matches!(word, "else" | "for"));
            }
            _ => {}
        }
    }

    fn directive_token(&mut self, lexer: &Lexer<'_>, directive: &mut Directive, token: Token) -> Result<()> {
        directive.tokens += 1;
        if directive.tokens > MAX_STATEMENT {
            return Err(lexer.error(&format!("a preprocessor line of more than {MAX_STATEMENT} tokens"), token.start));
        }
        few_brackets(&directive.brackets, lexer, token)?;
        match token.kind {
            TokenKind::Word => {
                let word = self.text(token.range());
                match directive.words {
                    0 => directive.name = Some(token.range()),
                    1 if directive.name.clone().is_some_and(|name| self.text(name) == "define") => {
                        directive.defines = Some(token.range());
                    }
                    // File scope words in a macro could declare things out of the outline's sight.
                    _ => self.unfamiliar |= is_in(word, FORBIDDEN) || (is_in(word, MEANINGFUL) && word != "void"),
                }
                directive.words += 1;
            }
            TokenKind::Punct(open @ (b'(' | b'[' | b'{')) => directive.brackets.push(open),
            TokenKind::Punct(close @ (b')' | b']' | b'}')) => {
                directive.unbalanced |= directive.brackets.pop() != Some(opener(close));
            }
            _ => {}
        }
        // `# 12 "file"` is legal, but no line that this outline knows.
        self.unfamiliar |= directive.words == 0;
        Ok(())
    }

    fn end_directive(&mut self, directive: Directive) {
        let name = directive.name.map_or("", |range| self.text(range));
        match name {
            "define" => {
                let defines = directive.defines.clone().map_or("", |range| self.text(range));
                let misleading = is_in(defines, FORBIDDEN) || is_in(defines, MEANINGFUL) || is_in(defines, ATTRIBUTES);
                let unbalanced = directive.unbalanced || !directive.brackets.is_empty();
                self.loose |= unbalanced;
                self.unfamiliar |= unbalanced || misleading || defines.is_empty();
                self.defines_at.extend(directive.defines.map(|range| range.start));
                self.macros.insert(defines);
            }
            "pragma" => {}
            "if" | "ifdef" | "ifndef" | "elif" | "elifdef" | "elifndef" | "else" | "endif" => {
                self.loose = true;
                self.unfamiliar = true;
            }
            _ => self.unfamiliar = true,
        }
    }

    fn token(&mut self, lexer: &Lexer<'_>, token: Token) -> Result<()> {
        if token.kind == TokenKind::Word {
            self.word(token);
            return Ok(());
        }
        self.unfamiliar |= std::mem::take(&mut self.after_extern) && self.depth > 0;
        let outside = self.depth == 0;
        if outside {
            self.begin(token);
        }
        match token.kind {
            TokenKind::Punct(b'(') => {
                self.brackets.push(b'(');
                self.depth += 1;
                if outside && self.declaration.angles == 0 {
                    self.parameters();
                }
            }
            TokenKind::Punct(b'[') => {
                self.brackets.push(b'[');
                self.depth += 1;
            }
            TokenKind::Punct(b'{') => self.open_brace(outside),
            TokenKind::Punct(close @ (b')' | b']' | b'}')) => self.close(lexer, token, close)?,
            TokenKind::Punct(b';') if outside => self.end_statement(),
            TokenKind::Punct(b'<') if outside => {
                let opens = self.declaration.last_word.clone().is_some_and(|word| self.text(word) == "template");
                self.declaration.angles += usize::from(opens || self.declaration.angles > 0);
            }
            TokenKind::Punct(b'>') if outside => {
                self.declaration.angles = self.declaration.angles.saturating_sub(1);
            }
            TokenKind::Punct(b'=') if outside => self.declaration.assigned |= self.declaration.angles == 0,
            _ => {}
        }
        // A string keeps the `extern` before it in view: `extern "C"`.
        if self.depth == 0 {
            self.declaration.last_word = None;
        }
        Ok(())
    }

    /// Notes that a token belongs to the declaration at file scope.
    fn begin(&mut self, token: Token) {
        if matches!(token.kind, TokenKind::Punct(b'}')) {
            return;
        }
        if self.declaration.tokens == 0 {
            self.declaration.start = token.start;
            self.declaration.first = (token.kind == TokenKind::Word).then(|| token.range());
        } else {
            // `struct A { ... } variable;`
            self.unfamiliar |= self.declaration.part == Part::Tail && token.kind != TokenKind::Punct(b';');
        }
        self.declaration.tokens += 1;
    }

    fn word(&mut self, token: Token) {
        let word = self.text(token.range());
        let after_extern = std::mem::take(&mut self.after_extern);
        self.unfamiliar |= after_extern && word != "__shared__";
        if word == "__global__" && self.depth > 0 {
            // Never legal inside a function, so brackets went astray: start afresh if that can be explained.
            self.unfamiliar = true;
            if self.loose {
                self.end_function(token.start);
                self.brackets.clear();
                self.depth = 0;
                self.declaration = Declaration::default();
            }
        }
        if self.depth > 0 {
            match word {
                "extern" if self.declaration.part == Part::Body => self.after_extern = true,
                "__device__" => self.unfamiliar |= self.declaration.part != Part::Members,
                _ => self.unfamiliar |= is_in(word, FORBIDDEN),
            }
            return;
        }
        self.begin(token);
        match word {
            "__device__" => self.declaration.device = true,
            "__global__" => {
                // The word that turns an entry point into a template must come first.
                self.unfamiliar |= self.declaration.tokens > 1;
                self.declaration.global_at = Some(token.start);
            }
            "__shared__" => self.unfamiliar = true,
            _ => self.unfamiliar |= is_in(word, FORBIDDEN) || self.macros.contains(word),
        }
        self.declaration.last_word = Some(token.range());
    }

    /// An opening parenthesis at file scope: an attribute's argument, or the parameters of a function.
    fn parameters(&mut self) {
        let name = self.declaration.last_word.clone();
        if name.clone().is_some_and(|name| is_in(self.text(name), ATTRIBUTES)) || self.declaration.parameters {
            return;
        }
        self.declaration.parameters = true;
        self.declaration.name = name;
    }

    fn open_brace(&mut self, outside: bool) {
        if !outside {
            self.brackets.push(b'{');
            self.depth += 1;
            return;
        }
        let first = self.declaration.first.clone().map_or("", |range| self.text(range));
        let function = self.declaration.parameters && !self.declaration.assigned;
        if !function && matches!(first, "namespace" | "extern" | "inline") {
            // Already unfamiliar: `namespace`, or `extern` at file scope.
            self.unfamiliar = true;
            self.brackets.push(SCOPE);
            self.declaration = Declaration::default();
            return;
        }
        self.brackets.push(b'{');
        self.depth += 1;
        self.declaration.part = match first {
            _ if function => Part::Body,
            "struct" | "class" | "union" | "enum" => Part::Members,
            _ => Part::Braces,
        };
    }

    fn close(&mut self, lexer: &Lexer<'_>, token: Token, close: u8) -> Result<()> {
        let top = self.brackets.last().copied();
        let matches = match top {
            Some(SCOPE) => close == b'}',
            Some(open) => open == opener(close),
            None => false,
        };
        if !matches {
            self.unfamiliar = true;
            if self.loose {
                // It closes what a macro or another branch opened, so that a new declaration may begin.
                if self.depth == 0 && close == b'}' {
                    self.declaration = Declaration::default();
                }
                return Ok(());
            }
            let what = format!("a `{}` that closes nothing", char::from(close));
            return Err(lexer.error(&what, token.start));
        }
        self.brackets.pop();
        if top == Some(SCOPE) {
            self.declaration = Declaration::default();
            return Ok(());
        }
        self.depth -= 1;
        if self.depth == 0 && close == b'}' {
            if self.declaration.part == Part::Body {
                self.end_function(token.end);
            } else {
                self.declaration.part = Part::Tail;
            }
        }
        Ok(())
    }

    /// The body of a function at file scope has ended: the declaration is complete.
    fn end_function(&mut self, end: usize) {
        let done = std::mem::take(&mut self.declaration);
        if done.part != Part::Body {
            return;
        }
        let first = done.first.map_or("", |range| self.text(range));
        match (done.global_at, done.name) {
            (Some(global_at), Some(name)) => {
                let name = self.text(name).to_owned();
                self.entries.push(EntryPointSpan { name, global_at, body: done.start..end });
            }
            (Some(_), None) => self.unfamiliar = true,
            (None, name) => {
                self.unfamiliar |= !done.device && first != "constexpr";
                if let Some(name) = name.filter(|_| first == "__device__") {
                    self.helpers.push((self.text(name), done.start..end));
                }
            }
        }
    }

    /// A semicolon at file scope has ended a declaration.
    fn end_statement(&mut self) {
        let done = std::mem::take(&mut self.declaration);
        let first = done.first.map_or("", |range| self.text(range));
        let harmless = match first {
            "using" | "typedef" | "static_assert" => true,
            "constexpr" => !done.device,
            "struct" | "class" | "union" | "enum" => done.part == Part::Tail || done.tokens == 3,
            // A variable, a declared function, or a semicolon alone. The last matters because what was taken for a
            // function before it may have been a variable with an initialiser in braces.
            _ => false,
        };
        self.unfamiliar |= !harmless || done.global_at.is_some();
    }
}

const fn opener(close: u8) -> u8 {
    match close {
        b')' => b'(',
        b']' => b'[',
        _ => b'{',
    }
}

fn is_in(word: &str, list: &[&str]) -> bool {
    list.contains(&word)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use proptest::prelude::*;

    use super::*;

    /// A program with the shapes that generated sources have.
    const PROGRAM: &str = r#"
#define EACH(LENGTH, INDEX, ...) \
    _Pragma ("unroll") \
    for (int INDEX = 0; INDEX < LENGTH; INDEX += WARP) { \
        __VA_ARGS__ \
    }
#define WARP 32 // used by first and by second
using REAL = float;

struct Graph {
    void* rows;
    unsigned long count;
};

template<int LENGTH>
__device__ __forceinline__ void add(REAL* a, const REAL* b) {
    #pragma unroll
    for (int i = 0; i < LENGTH; i++) a[i] += b[i] * 0x1.8p-1f;
}

__global__ void

__launch_bounds__(192)
first(REAL* a, Graph graph) {
    extern __shared__ char s[];
    EACH(4, i, a[i] = 1'000.5f;)
}

/* second( is a comment here */
__global__ void __launch_bounds__(WARP * (2 + 4), 1) second(REAL* a) { add<3>(a, a); }

__global__ void third(const REAL* __restrict__ a)
    __attribute__((used))
{ { char c = '"'; } }
"#;

    fn names(source: &str) -> Vec<String> {
        entry_points(source).unwrap().into_iter().map(|entry| entry.name).collect()
    }

    #[test]
    fn finds_the_definitions_and_where_they_are() {
        let entries = entry_points(PROGRAM).unwrap();
        assert_eq!(names(PROGRAM), ["first", "second", "third"]);
        for entry in &entries {
            let text = &PROGRAM[entry.body.clone()];
            assert!(text.starts_with("__global__ void") && text.ends_with('}'), "{text}");
            assert_eq!(entry.global_at, entry.body.start);
            assert_eq!(names(text), [entry.name.as_str()]);
        }
    }

    #[test]
    fn finds_entry_points_whatever_stands_around_them() {
        for (source, expected) in [
            ("extern \"C\" __global__ void a() {}", &["a"][..]),
            ("extern \"C\" { __global__ void a() {} __global__ void b() {} }", &["a", "b"]),
            ("namespace n { namespace { __global__ void a() {} } }", &["a"]),
            ("template<typename T = decltype(f(1)), int N = (3)> __global__ void a(T t) {}", &["a"]),
            ("static void __global__ __launch_bounds__(1)\n__maxnreg__(32) a(int (*f)(int)) noexcept(true) {}", &["a"]),
            ("__global__ void a(); __global__ void b(int = sizeof(int[2])) {}", &["b"]),
            ("#define MAKE(n) __global__ void n() {}\nMAKE(a)", &[]),
            ("// __global__ void a() {} \\\n __global__ void b() {}\n__global__ void c() {}", &["c"]),
            ("const char* s = \"__global__ void a() {}\\\"\"; __global__ void b() {}", &["b"]),
            ("auto s = R\"x(\n__global__ void a() { \" )\" )x\"; __global__ void b() {}", &["b"]),
            ("int i = 1'000'000; char c = '\\''; char d = u8'{'; __global__ void b() {}", &["b"]),
            ("#if 0\n__global__ void a() {\n#else\n__global__ void b() {\n#endif\n}\n", &["a", "b"]),
            ("#define OPEN {\n__device__ void f() OPEN }\n__global__ void b() {}", &["b"]),
            ("#error don't\n__global__ void b() {}", &["b"]),
            ("__global__ void größe(float é) {}", &["größe"]),
            ("", &[]),
        ] {
            assert_eq!(names(source), expected, "{source}");
        }
    }

    #[test]
    fn says_where_a_text_cannot_be_lexed() {
        for (source, expected) in [
            ("int a;\n/* no end", "an unterminated /* comment in line 2 (byte 7)"),
            ("a = \"no end\n\";", "an unterminated string in line 1 (byte 4)"),
            ("a = 'no end", "an unterminated character literal in line 1 (byte 4)"),
            ("a = '\\", "an unterminated character literal in line 1 (byte 4)"),
            ("a = R\"x(no end)\";", "an unterminated raw string in line 1 (byte 5)"),
            ("a = R\"x\";", "a raw string without a `(`"),
            ("void f() {\n  if (x) {\n}\n", "1 brackets that are still open at its end in line 4 (byte 24)"),
            ("void f() {}\n}\n", "a `}` that closes nothing in line 2 (byte 12)"),
            ("void f( {)}\n", "a `)` that closes nothing in line 1 (byte 9)"),
        ] {
            let error = entry_points(source).unwrap_err();
            assert!(error.message().contains(expected), "{error}");
            assert_eq!(keep_only(source, &[]), None);
        }
    }

    #[test]
    fn keeps_what_is_asked_for_and_nothing_else() {
        let mut expected = PROGRAM.to_owned();
        for entry in entry_points(PROGRAM).unwrap() {
            if entry.name != "second" {
                expected = expected.replace(&PROGRAM[entry.body.clone()], &blank(&PROGRAM[entry.body]));
            }
        }
        assert_eq!(keep_only(PROGRAM, &["second"]).unwrap(), expected);
        assert_eq!(keep_only(PROGRAM, &["third", "first", "second", "first"]).unwrap(), PROGRAM);
        assert_eq!(keep_only(PROGRAM, &[]).unwrap().matches("__global__").count(), 0);
        assert_eq!(keep_only(PROGRAM, &["fourth"]), None);
        assert_eq!(keep_only(&expected, &["second"]), Some(expected));
    }

    /// What is left of a text that was taken out.
    fn blank(text: &str) -> String {
        text.chars().filter(|c| *c == '\n').collect()
    }

    #[test]
    fn leaves_out_the_functions_that_only_dropped_entry_points_use() {
        let device = |name: &str, body: &str| format!("__device__ __forceinline__ void {name}(int n) {{\n{body}\n}}");
        let global = |name: &str, body: &str| format!("__global__ void {name}(int n) {{\n{body}\n}}");
        let parts = [
            device("of_a", "deep(n);"),
            device("deep", "deep(n - 1);"),
            device("of_both", ""),
            device("of_macro", ""),
            device("of_template", ""),
            device("of_nobody", "of_those_who_stay(n);"),
            device("twice", ""),
            device("twice", "of_those_who_stay(n); deeper(n);"),
            device("with_macro", "\n#define IN_BODY 3\n"),
            "#define CALL of_macro(1)".to_owned(),
            "template<int N> __device__ void t() { of_template(N); }".to_owned(),
            global("a", "of_a(n); of_both(n); of_macro(n); of_template(n); twice(n); with_macro(n); deeper(n);"),
            global("b", "of_both(n); CALL; of_b(IN_BODY);"),
            device("of_b", ""),
            device("of_those_who_stay", ""),
            device("deeper", "of_those_who_stay(n);"),
        ];
        let source = parts.join("\n");
        let without = |gone: &[usize]| {
            let part = |(index, part): (usize, &String)| if gone.contains(&index) { blank(part) } else { part.clone() };
            parts.iter().enumerate().map(part).collect::<Vec<_>>().join("\n")
        };
        assert_eq!(keep_only(&source, &["a", "b"]).unwrap(), source);
        assert_eq!(keep_only(&source, &["b"]).unwrap(), without(&[0, 1, 11]));
        assert_eq!(keep_only(&source, &["a"]).unwrap(), without(&[12, 13]));
        assert_eq!(keep_only(&source, &[]).unwrap(), without(&[0, 1, 2, 11, 12, 13]));
    }

    #[test]
    fn an_entry_point_that_defines_a_macro_stays_as_a_template() {
        let source = "__device__ void f() {}\n__device__ void g() {}\n__global__ void a() {\n#define N 3\nf(); }\n\
                      __global__ void c() { f(); g(); }\n__global__ void b() { int n = N; }\n";
        let expected = source.replace("__global__ void a", "template<int> __global__ void a");
        let expected = expected.replace("__global__ void c() { f(); g(); }", "").replace("__device__ void g() {}", "");
        assert_eq!(keep_only(source, &["b"]), Some(expected));
    }

    #[test]
    fn what_the_compiler_would_recurse_over_is_refused() {
        let body = |text: &str| format!("__global__ void a(int* x) {{ {text} }}\n");
        for (what, source) in [
            ("a statement of more than 12288 tokens", body(&format!("*x = {} 1;", "- ".repeat(13_000)))),
            ("a statement of more than 12288 tokens", body(&format!("*x = {} 1;", "x[0]+".repeat(3000)))),
            ("a statement of more than 12288 tokens", body(&format!("{} *x = 1;", "if(x)".repeat(4000)))),
            ("a statement of more than 12288 tokens", body(&format!("{} *x = 1;", "for(;;)".repeat(3000)))),
            ("a statement of more than 12288 tokens", body(&format!("{}1;", "1,".repeat(7000)))),
            ("a statement of more than 12288 tokens", body(&format!("int y[] = {{ {} 1 }};", "!".repeat(13_000)))),
            (
                "a preprocessor line of more than 12288 tokens",
                format!("#define D {}\n{}", "- ".repeat(13_000), body("D 1;")),
            ),
            (
                "more than 256 brackets inside one another",
                format!("#define D {}1{}\n{}", "(".repeat(300), ")".repeat(300), body("*x = D;")),
            ),
            (
                "a statement of more than 12288 tokens",
                body(&format!("{} *x = 1;", "if (*x) *x = 2; else ".repeat(1500))),
            ),
            (
                "a statement of more than 12288 tokens",
                body(&format!("{} *x = 1;", "if (*x) { *x = 2; } else ".repeat(2500))),
            ),
            (
                "a statement of more than 12288 tokens",
                body(&format!("{} ;", format!("if(*x) ; else {}", "for(;;)".repeat(400)).repeat(60))),
            ),
            ("a statement of more than 12288 tokens", body(&format!("*x = {} 1;", "int{}?*x:".repeat(3000)))),
            ("a statement of more than 12288 tokens", body(&format!("*x = {} 1;", "x[int{}]=".repeat(3000)))),
            ("a statement of more than 12288 tokens", body(&format!("*x = {} 1;", "int{}+".repeat(5000)))),
            ("a statement of more than 12288 tokens", body(&format!("*x = {} 1;", "int{} and ".repeat(5000)))),
            (
                "a statement of more than 12288 tokens",
                body(&format!("int y[] = {{ [&]{{ {} return 1; }}() }};", "*x=2,".repeat(4000))),
            ),
            (
                "a statement of more than 12288 tokens",
                body(&format!("{} ;", "if(*x) do ; while(0); else ".repeat(2000))),
            ),
            (
                "a function with more than 4096 `else` and `for`",
                format!("#if 1\n#endif\n{}", body(&format!("{} *x = 1;", "for(;;)".repeat(5000)))),
            ),
            (
                "a function with more than 4096 `else` and `for`",
                format!("#if 1\n#endif\n{}", body(&format!("{} ;", "if(*x) for(;;) ; else ".repeat(2500)))),
            ),
        ] {
            let error = entry_points(&source).unwrap_err();
            assert!(error.message().contains(what), "{what}: {error}");
        }
        let many = "if (*x) { *x = 2; } else { *x = 3; }\n".repeat(2000);
        for source in [
            body(&format!("{} {{}}", "if (*x == 4 && x[1] == 7) { *x = 2; } else ".repeat(600))),
            body(&"while (atomicCAS(&x[1], 0, 1) != 0) { } *x = 2; { x[0]++; } (*x)++;\n".repeat(3000)),
            body(&format!("if (*x) {{ {} }} else {{ {many} }}", "x[0] += x[1];\n".repeat(10_000))),
            body(&"do { x[0] += x[1]; } while (x[2]);\nx[3] = 0; while (x[4]) { x[5]--; }\nx[6] = 0;".repeat(1000)),
            body(&format!("const int y[] = {{ {} 1 }};", "1, ".repeat(10_000))),
            body(&format!("const int y[2][9] = {{ {{ {} 1 }}, {{ 1 }} }};", "f(1, 2), ".repeat(10_000))),
            body(&"x[0] += x[1];\n".repeat(10_000)),
            body(&many) + &body(&many).replace(" a(", " b(") + &body(&many).replace(" a(", " c("),
            // Whose parentheses are whose is not known.
            format!(
                "#if 1\n#define OPEN (\n#endif\n{}",
                body(&format!("f OPEN x);\n{}", "x[0] += x[1];\n".repeat(10_000)))
            ),
        ] {
            assert!(entry_points(&source).is_ok(), "{}", &source[..100]);
        }
    }

    /// Everything in here would be harmless without the `before` or the changed part, as the first assertion shows.
    #[test]
    fn refuses_to_cut_what_it_does_not_know() {
        let program = |before: &str, head: &str, body: &str| {
            format!("{before}\n{head} void a(int n) {{ {body} }}\n__global__ void b(int n) {{ int m = n; }}\n")
        };
        assert!(keep_only(&program("", "__global__", ""), &["b"]).is_some());
        for before in [
            "__device__ int count;",
            "__device__ int count{3};",
            "__device__ int (count){3};",
            "__device__ int count(3), other{4};",
            "__device__ auto f = [](int n) { return n; };",
            "template<int N> __device__ int count;",
            "__constant__ float table[4];",
            "extern __shared__ char s[];",
            "int count;",
            "struct S { int n; } count;",
            "struct S { static __device__ int count; };",
            "__device__ int next() { static int count; return count++; }",
            "__device__ int next() { static __shared__ int count; return 0; }",
            "__device__ int next() { __device__ int count; return count++; }",
            "__device__ int next() { extern __device__ int count; return count++; }",
            "#define STATE static int count",
            "#define STATE __device__ int count;\nSTATE",
            "#define KERNEL __global__",
            "#define b a",
            "#define OPEN {",
            "#define JOIN(x, y) x##y",
            "#define struct union",
            "#define VALUE 3\nusing T = VALUE;",
            "#if 1\n#endif",
            "#include <a.h>",
            "#undef X",
            "# 12 \"file\"",
            "#error don't",
            "namespace n { __device__ void f() {} }",
            "namespace { }",
            "extern \"C\" { }",
            "__global__ void a(int n);",
            "__global__ void a(float n) {}",
            "__global__ void a(int n) {}",
            "__device__ void f(void (*g)(int) = b) {}",
            "__device__ void b();",
            "__device__ void a() {}",
            "int host() { return 1; }",
            "asm(\".global .u32 count;\");",
            "__device__ void f() { asm volatile(\"\"); }",
            "__device__ void f() { struct S { friend void g(); }; }",
            "// comment \\ \n",
            "// comment ??/",
            "/* comment *\\\n/",
            "__device__ void f() <% %>",
            "__device__ void f() { int a\\\nb; }",
            "__device__ void f() { @ }",
            "MACRO(1)",
            "MACRO",
            "__device__",
            ";",
        ] {
            let source = program(before, "__global__", "");
            assert_eq!(keep_only(&source, &["b"]), None, "{source}");
        }
        for head in [
            "template<int> __global__",
            "extern \"C\" __global__",
            "static __global__",
            "inline __global__",
            "[[maybe_unused]] __global__",
            "__global__ __global__",
            "void __global__",
            "__global__ static",
            "__attribute__((weak)) __global__",
        ] {
            let source = program("", head, "");
            assert_eq!(keep_only(&source, &["b"]), None, "{source}");
        }
        for body in ["b<<<1, 1>>>(n);", "auto f = b;", "int b = 1;", "static int count;", "extern int count;", "a(n);"]
        {
            let source = program("", "__global__", body);
            assert_eq!(keep_only(&source, &["b"]), None, "{source}");
        }
    }

    #[test]
    fn deep_nesting_does_not_exhaust_the_stack() {
        let depth = 1 << 16;
        for (open, close) in [("{", "}"), ("(", ")"), ("namespace n {", "}"), ("#if 1\n", "#endif\n")] {
            let source =
                |depth: usize| format!("{}\n__global__ void a() {{}}\n{}", open.repeat(depth), close.repeat(depth));
            assert!(entry_points(&source(MAX_NESTING - 2)).is_ok(), "{open}");
            assert_eq!(keep_only(&source(depth), &["a"]), None);
            // Conditional compilation is not nesting.
            let answer = entry_points(&source(depth));
            if open.starts_with('#') {
                assert!(answer.is_ok());
            } else {
                let text = answer.unwrap_err().message().to_owned();
                assert!(text.contains("more than 256 brackets inside one another"), "{text}");
                assert!(entry_points(&open.repeat(3)).unwrap_err().message().contains("still open"));
            }
        }
    }

    /// A piece of a program that `keep_only` accepts; the bool says that it is an entry point. `{}` becomes a number.
    fn piece() -> impl Strategy<Value = (bool, &'static str)> {
        prop::sample::select(vec![
            (true, "__global__ void k{}(float* a, int n) { if (n) { a[0] = 1.0f; } }"),
            (true, "__global__ void\n\n__launch_bounds__(192)\nk{}(float* a) {\n  extern __shared__ char s[];\n}"),
            (true, "__global__ __launch_bounds__(N * (1 + 1)) void k{}() { const char* s = \"}\"; char c = '{'; }"),
            (true, "__global__ void k{}(int a = (1, 2)) /* { */ { // }\n }"),
            (false, "// __global__ void x{}() { \\\n ' "),
            (false, "/* __global__ void x{}() { ' \" */"),
            (false, "#define M{}(a, ...) \\\n  for (;;) { a; __VA_ARGS__ }"),
            (false, "#pragma unroll"),
            (false, "template<typename T, int N> __device__ __forceinline__ T f{}(T a) { return a * 1'000; }"),
            (false, "template<int N = (3), template<class> class T> __device__ auto h{}() -> int { return N; }"),
            (false, "__device__ void g{}() { auto s = R\"(\")\"; }"),
            (false, "struct S{} { int n; __device__ int get() { return n; } };"),
            (false, "constexpr int c{}[] = { 1, 2 };"),
            (false, "using T{} = float;"),
        ])
    }

    proptest! {
        #[test]
        fn cuts_any_program_of_known_pieces(pieces in prop::collection::vec((piece(), any::<bool>()), 0..20)) {
            let (mut source, mut all, mut keep, mut expected) = (String::new(), Vec::new(), Vec::new(), String::new());
            for (index, ((is_entry, text), kept)) in pieces.into_iter().enumerate() {
                let text = text.replace("{}", &index.to_string());
                source = source + &text + "\n";
                if is_entry {
                    all.push(format!("k{index}"));
                }
                if is_entry && !kept {
                    expected += &blank(&text);
                } else {
                    expected += &text;
                    keep.extend(is_entry.then(|| format!("k{index}")));
                }
                expected += "\n";
            }
            prop_assert_eq!(names(&source), all);
            let keep: Vec<&str> = keep.iter().map(String::as_str).collect();
            prop_assert_eq!(keep_only(&source, &keep), Some(expected));
        }

        #[test]
        fn any_text_is_answered(parts in prop::collection::vec(prop_oneof![
            prop::sample::select(vec![
                "__global__", " void ", "f", "(", ")", "{", "}", "[", "]", ";", "=", "\n", "\r", "\\", "\\\n", "\"", "'", "/*", "*/",
                "//", "#", "#define ", "#if ", "#endif\n", "R\"x(", ")x\"", "template<int> ", "extern \"C\" ", "namespace n ",
                "struct S ", "__device__ ", "__launch_bounds__(1)", "é", "1'0", "??/", "static ", "extern __shared__ ",
            ]).prop_map(str::to_owned),
            any::<String>(),
        ], 0..40)) {
            let source = parts.concat();
            match entry_points(&source) {
                Err(error) => {
                    prop_assert!(error.message().len() < 200);
                    prop_assert_eq!(keep_only(&source, &[]), None);
                }
                Ok(entries) => {
                    for entry in &entries {
                        prop_assert!(source[entry.global_at..].starts_with("__global__"));
                        prop_assert!(entry.body.contains(&entry.global_at));
                        prop_assert!(source[entry.body.clone()].contains(&entry.name));
                    }
                    let keep: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).step_by(2).collect();
                    let cut = keep_only(&source, &keep);
                    prop_assert_eq!(can_keep_only(&source, &keep), cut.is_some());
                    if let Some(cut) = cut {
                        prop_assert_eq!(cut.matches('\n').count(), source.matches('\n').count());
                        for entry in entries.iter().step_by(2) {
                            prop_assert!(cut.contains(&source[entry.body.clone()]));
                        }
                    }
                }
            }
        }
    }
}
