//! What has to change in a payload's text before a C++ compiler for the host takes it. The built-ins themselves are in
//! `kernels/host/oeq_host.h`.
//!
//! - `extern __shared__ T name[];` has no counterpart in C++ and becomes a pointer to the block's memory.
//! - A sum over the warp, written as a loop of shuffles, becomes one call: it is what kernels spend most barriers on.
//! - On a GPU the lanes of a warp run in step at every statement, on the host only at barriers. Some payloads lean on the
//!   former, and there a barrier is put in. Lanes read an array in one order and then write it in another, with no barrier
//!   between: no lane's write overtakes another's read when both are single instructions of the whole warp. And a kernel
//!   that works in several passes, each a block at the level of the function, puts the next one's data where lanes still
//!   take the last one's results from. And what a device function leaves in shared memory is taken up in another order
//!   right after the call.
//!
//! A barrier that only some lanes come to would shift all their later ones against the others'. So none is put in where the
//! text shows that lanes may part: in a block whose condition names the lane, or something that was computed from it in the
//! same function, and in a function where such a condition decides over a jump. What macros and calls hide is not seen.

use std::collections::HashSet;
use std::ops::Range;

use smallvec::SmallVec;

use super::{ATTRIBUTES, Lexer, Token, TokenKind, is_in};
use crate::error::{Error, Result};

/// How long a chain of values, each computed from the next, may be.
const MAX_STEPS: usize = 32;
/// How many tokens of a value are looked at.
const MAX_VALUE: usize = 256;

/// The program as a C++ compiler for the host takes it, with `oeq_host.h` before it.
///
/// # Errors
/// The text cannot be lexed, or declares shared memory whose size is not given at launch.
pub fn for_host(source: &str) -> Result<String> {
    let mut lexer = Lexer::new(source);
    let mut tokens = Vec::new();
    while let Some(token) = lexer.next_token()? {
        tokens.push(token);
    }
    let text = Text { source, tokens: &tokens };
    let mut edits = Vec::new();
    text.shared_memory(&mut edits)?;
    text.sums(&mut edits);
    let together = text.together();
    text.barriers(&together, &mut edits);
    text.passes(&mut edits);
    text.calls(&together, &mut edits);
    edits.sort_by_key(|edit| edit.start);

    let mut translated = String::with_capacity(source.len() + 64 * edits.len());
    let mut at = 0;
    for edit in edits {
        // Inside what was replaced already.
        if edit.start < at {
            continue;
        }
        translated.push_str(&source[at..edit.start]);
        translated.push_str(&edit.text);
        at = edit.end;
    }
    translated.push_str(&source[at..]);
    Ok(translated)
}

/// Bytes `start..end` become `text`.
struct Edit {
    start: usize,
    end: usize,
    text: String,
}

/// An element of an array: the array's name, and the index as it is written.
#[derive(PartialEq, Eq, Clone)]
struct Element<'a> {
    array: &'a str,
    index: &'a str,
}

/// What the lanes of one guarded block read and overwrite.
#[derive(Default)]
struct Block<'a> {
    read: Vec<Element<'a>>,
    written: Vec<Element<'a>>,
}

struct Text<'a> {
    source: &'a str,
    tokens: &'a [Token],
}

impl<'a> Text<'a> {
    fn token(&self, at: usize) -> Option<&'a str> {
        self.tokens.get(at).map(|token| &self.source[token.range()])
    }

    fn is_word(&self, at: usize) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == TokenKind::Word)
    }

    fn is_number(&self, at: usize) -> bool {
        self.tokens.get(at).is_some_and(|token| token.kind == TokenKind::Number)
    }

    /// Whether the tokens from `at` on are these.
    fn matches(&self, at: usize, words: &[&str]) -> bool {
        words.iter().enumerate().all(|(offset, word)| self.token(at + offset) == Some(*word))
    }

    /// The token that closes what the one at `open` opens.
    fn closing(&self, open: usize, opener: &str, closer: &str) -> Option<usize> {
        let mut depth = 0_usize;
        for at in open..self.tokens.len() {
            if self.token(at) == Some(opener) {
                depth += 1;
            } else if self.token(at) == Some(closer) {
                depth = depth.checked_sub(1)?;
                if depth == 0 {
                    return Some(at);
                }
            }
        }
        None
    }

    fn shared_memory(&self, edits: &mut Vec<Edit>) -> Result<()> {
        let mut at = 0;
        while at < self.tokens.len() {
            if self.token(at) != Some("__shared__") {
                at += 1;
                continue;
            }
            let unknown = || {
                let start = self.tokens[at].start;
                let line = 1 + self.source[..start].bytes().filter(|&byte| byte == b'\n').count();
                Error::invalid(format!(
                    "line {line} of the source declares shared memory in a way that the host platform does not have; \
                     expected `extern __shared__ type name[];`"
                ))
            };
            let first = at.checked_sub(1).filter(|first| self.token(*first) == Some("extern")).ok_or_else(unknown)?;
            let end = (at..self.tokens.len()).find(|end| self.token(*end) == Some(";")).ok_or_else(unknown)?;
            let mut kind = at + 1;
            if self.token(kind) == Some("__align__") {
                kind = self.closing(kind + 1, "(", ")").ok_or_else(unknown)? + 1;
            }
            let name = end.checked_sub(3).filter(|name| *name > kind).ok_or_else(unknown)?;
            if !self.is_word(name) || !self.matches(name + 1, &["[", "]"]) || !(kind..name).all(|at| self.is_word(at)) {
                return Err(unknown());
            }
            let kind = &self.source[self.tokens[kind].start..self.tokens[name - 1].end];
            edits.push(Edit {
                start: self.tokens[first].start,
                end: self.tokens[end].end,
                text: format!("{kind}* const {} = OEQ_HOST_SHARED({kind});", &self.source[self.tokens[name].range()]),
            });
            at = end;
        }
        Ok(())
    }

    /// Looks for `for(int offset = 16; offset > 0; offset /= 2) { x += __shfl_down_sync(mask, x, offset); }`.
    fn sums(&self, edits: &mut Vec<Edit>) {
        const CALL: [&str; 4] = ["+", "=", "__shfl_down_sync", "("];
        for at in 0..self.tokens.len() {
            let Some(offset) = self.token(at + 3).filter(|_| self.matches(at, &["for", "(", "int"])) else { continue };
            let head = ["=", "16", ";", offset, ">", "0", ";", offset, "/", "=", "2", ")", "{"];
            if !self.matches(at + 4, &head) {
                continue;
            }
            let open = at + 3 + head.len();
            let Some(end) = self.closing(open, "{", "}") else { continue };
            let Some(call) = (open + 1..end).find(|at| self.matches(*at, &CALL)) else { continue };
            // The mask, and after it the value as it stands before the call.
            let value: Vec<&str> = (open + 1..call).filter_map(|at| self.token(at)).collect();
            let mut tail = vec![","];
            tail.extend_from_slice(&value);
            tail.extend_from_slice(&[",", offset, ")", ";", "}"]);
            let mask = call + CALL.len();
            if value.is_empty() || !self.matches(mask + 1, &tail) || mask + tail.len() != end {
                continue;
            }
            let value = &self.source[self.tokens[open + 1].start..self.tokens[call - 1].end];
            edits.push(Edit {
                start: self.tokens[at].start,
                end: self.tokens[end].end,
                text: format!("{value} = oeq_host::sum_down({value});"),
            });
        }
    }

    /// Names declared as `type name[number];`: arrays that each lane has for itself.
    fn own_arrays(&self) -> Vec<&'a str> {
        let declares = |at: &usize| {
            self.is_word(*at)
                && self.is_word(at + 1)
                && self.token(at + 2) == Some("[")
                && self.is_number(at + 3)
                && self.matches(at + 4, &["]", ";"])
        };
        let mut names: Vec<&str> =
            (0..self.tokens.len()).filter(declares).filter_map(|at| self.token(at + 1)).collect();
        names.sort_unstable();
        names.dedup();
        names
    }

    /// Looks at the blocks `if(lane_id < N) { ... }`, which is how payloads have some lanes of a warp work on an array.
    fn barriers(&self, together: &[bool], edits: &mut Vec<Edit>) {
        let own = self.own_arrays();
        let mut read: Vec<Element<'_>> = Vec::new();
        let mut at = 0;
        while at < self.tokens.len() {
            let word = self.token(at);
            if matches!(word, Some("__syncwarp" | "__shfl_down_sync" | "__device__" | "__global__")) {
                read.clear();
            }
            let guarded = self.matches(at, &["if", "(", "lane_id", "<"])
                && self.is_number(at + 4)
                && self.matches(at + 5, &[")", "{"]);
            let Some(end) = guarded.then(|| self.closing(at + 6, "{", "}")).flatten() else {
                at += 1;
                continue;
            };
            let block = self.block(at + 7, end, &own);
            let overtakes = |written: &Element<'_>| {
                read.iter().any(|earlier| earlier.array == written.array && earlier.index != written.index)
            };
            if together.get(at) == Some(&true) && block.written.iter().any(overtakes) {
                let start = self.tokens[at].start;
                edits.push(Edit { start, end: start, text: "__syncwarp(); ".to_owned() });
                read.clear();
            }
            read.extend(block.read);
            at = end + 1;
        }
    }

    /// Looks for blocks that follow each other in a function's body.
    fn passes(&self, edits: &mut Vec<Edit>) {
        let mut depth = 0_usize;
        for (at, token) in self.tokens.iter().enumerate() {
            match token.kind {
                TokenKind::Punct(b'{') => depth += 1,
                TokenKind::Punct(b'}') => {
                    depth = depth.saturating_sub(1);
                    if depth == 1 && self.token(at + 1) == Some("{") {
                        edits.push(Edit { start: token.end, end: token.end, text: " __syncwarp();".to_owned() });
                    }
                }
                _ => {}
            }
        }
    }

    /// Looks for statements that are a call of a device function of the source and are not followed by a barrier already.
    fn calls(&self, together: &[bool], edits: &mut Vec<Edit>) {
        let functions: HashSet<&str> = (0..self.tokens.len())
            .filter(|at| self.token(*at) == Some("__device__"))
            .filter_map(|at| (at..self.tokens.len()).find(|at| self.is_word(*at) && self.token(at + 1) == Some("(")))
            .filter_map(|at| self.token(at))
            .collect();
        for at in together.iter().enumerate().filter_map(|(at, together)| together.then_some(at)) {
            if !self.token(at).is_some_and(|name| functions.contains(&name)) {
                continue;
            }
            let open = if self.token(at + 1) == Some("<") {
                self.closing(at + 1, "<", ">").map(|close| close + 1)
            } else {
                Some(at + 1)
            };
            let close = open
                .filter(|open| self.token(*open) == Some("("))
                .and_then(|open| self.closing(open, "(", ")"))
                .filter(|close| self.token(close + 1) == Some(";"));
            if let Some(close) = close {
                if self.token(close + 2) != Some("__syncwarp") {
                    let end = self.tokens[close + 1].end;
                    edits.push(Edit { start: end, end, text: " __syncwarp();".to_owned() });
                }
            }
        }
    }

    /// Of each token, whether a statement of a function's body begins with it that all lanes of a warp come to together,
    /// as far as the text tells.
    fn together(&self) -> Vec<bool> {
        let mut together = vec![false; self.tokens.len()];
        let code = self.code();
        // One definition at file scope after another: what a name means ends with it.
        let (mut first, mut depth) = (0, 0_usize);
        for (place, &at) in code.iter().enumerate() {
            match self.token(at) {
                // A scope, in which definitions are at file scope still.
                Some("{")
                    if depth == 0
                        && matches!(self.token(code[first]), Some("namespace" | "extern" | "inline"))
                        && !(first..place).any(|place| self.token(code[place]) == Some("(")) =>
                {
                    first = place + 1;
                }
                Some("{") => depth += 1,
                // Never legal inside a function: brackets went astray, as where `#if` has two heads of one function.
                Some("__global__") if depth > 0 => (first, depth) = (place, 0),
                Some(";") if depth == 0 => first = place + 1,
                Some("}") => {
                    depth = depth.saturating_sub(1);
                    if depth == 0 {
                        Definition { text: self, code: &code[first..=place] }.together(&mut together);
                        first = place + 1;
                    }
                }
                _ => {}
            }
        }
        together
    }

    /// The tokens outside of preprocessor lines.
    fn code(&self) -> Vec<usize> {
        let mut directive = false;
        let code = self.tokens.iter().enumerate().filter(|(_, token)| {
            directive |= token.kind == TokenKind::DirectiveStart;
            let of_line = directive;
            directive &= token.kind != TokenKind::DirectiveEnd;
            !of_line
        });
        code.map(|(at, _)| at).collect()
    }

    /// The arrays that the statements between two tokens read and assign to, without those of the lane itself. Adding to
    /// an element is neither: every lane adds to its own.
    fn block(&self, first: usize, end: usize, own: &[&str]) -> Block<'a> {
        let mut block = Block::default();
        let mut assigned = false;
        let mut at = first;
        while at < end {
            match self.token(at) {
                Some(";") => assigned = false,
                Some("=") => assigned = true,
                _ => {}
            }
            let Some(close) = (self.is_word(at) && self.token(at + 1) == Some("["))
                .then(|| self.closing(at + 1, "[", "]"))
                .flatten()
                .filter(|close| *close < end)
            else {
                at += 1;
                continue;
            };
            let element = Element {
                array: self.token(at).unwrap_or_default(),
                index: self.source[self.tokens[at + 1].end..self.tokens[close].start].trim(),
            };
            if own.binary_search(&element.array).is_err() {
                if assigned {
                    block.read.push(element);
                } else if self.token(close + 1) == Some("=") && self.token(close + 2) != Some("=") {
                    block.written.push(element);
                }
            }
            at = close + 1;
        }
        block
    }
}

/// A function, or something else that a text defines at file scope: the places of its tokens, without preprocessor lines.
struct Definition<'t, 'a> {
    text: &'t Text<'a>,
    code: &'t [usize],
}

impl<'a> Definition<'_, 'a> {
    /// The token at a place in `code`.
    fn token(&self, place: usize) -> Option<&'a str> {
        self.text.token(*self.code.get(place)?)
    }

    fn before(&self, place: usize) -> Option<&'a str> {
        self.token(place.checked_sub(1)?)
    }

    fn is_word(&self, place: usize) -> bool {
        self.code.get(place).is_some_and(|at| self.text.is_word(*at))
    }

    fn is_condition(&self, place: usize) -> bool {
        matches!(self.token(place), Some("if" | "for" | "while" | "switch"))
    }

    /// See [`Text::together`].
    fn together(&self, together: &mut [bool]) {
        let Some(lanes) = self.lane_words() else { return };
        let apart =
            |places: Range<usize>| places.into_iter().any(|at| self.token(at).is_some_and(|word| lanes.contains(word)));
        // What an `else` follows is known only if it is a block.
        let otherwise = |at: usize, last: bool| last || self.before(at) != Some("}");
        let partners = self.partners();
        // Whether a condition whose parentheses end at a place is one by itself, and lanes may part by it.
        let parts = |close: usize, last: bool| {
            let Some((word, condition)) = self.header(&partners, close) else { return true };
            let follows = match self.before(word) {
                Some(";" | "{" | "}") => false,
                Some("else") => otherwise(word - 1, last),
                // What follows a condition without braces is under it. Other parentheses are a macro's.
                Some(")") => self.header(&partners, word - 1).is_none_or(|(word, _)| self.is_condition(word)),
                _ => self.is_condition(word),
            };
            follows || apart(condition)
        };
        // The same of a block or a jump, by what is before it.
        let parted = |place: usize, last: bool| match self.before(place) {
            Some("else") => otherwise(place - 1, last),
            // The condition of a `do` comes later; `if (c) [[likely]] {`.
            Some("do" | "]") => true,
            Some(")") => parts(place - 1, last),
            _ => false,
        };
        // For each block that is open, whether lanes may have parted in it; the block that was closed last; parentheses.
        let (mut blocks, mut last, mut depth): (Vec<bool>, bool, usize) = (Vec::new(), true, 0);
        let mut found = Vec::new();
        for (place, &at) in self.code.iter().enumerate() {
            match self.token(place) {
                Some("(") => depth += 1,
                Some(")") => depth = depth.saturating_sub(1),
                Some("{") => {
                    let outside = blocks.last().is_some_and(|apart| *apart);
                    blocks.push(outside || parted(place, last));
                }
                Some("}") => last = blocks.pop().unwrap_or(true),
                // Where lanes have gone, and when they are back, is not followed.
                Some("break" | "continue" | "goto") if parted(place, last) || blocks.last() != Some(&false) => return,
                _ => {}
            }
            let begins = matches!(self.before(place), Some(";" | "{" | "}")) && depth == 0;
            if begins && blocks.last() == Some(&false) {
                found.push(at);
            }
        }
        for at in found {
            together[at] = true;
        }
    }

    /// For each place of a `)`, that of its `(`.
    fn partners(&self) -> Vec<Option<usize>> {
        let mut open = Vec::new();
        let partner = |place| match self.token(place) {
            Some("(") => {
                open.push(place);
                None
            }
            Some(")") => open.pop(),
            _ => None,
        };
        (0..self.code.len()).map(partner).collect()
    }

    /// The word before the parentheses that end at a place, and what is in them if it is a condition.
    fn header(&self, partners: &[Option<usize>], close: usize) -> Option<(usize, Range<usize>)> {
        let open = (*partners.get(close)?)?;
        let mut word = open.checked_sub(1)?;
        if self.token(word) == Some("constexpr") {
            word = word.checked_sub(1)?;
        }
        // The parameters of a function may well name a lane.
        Some((word, if self.is_condition(word) { open..close } else { open..open }))
    }

    /// Words that may have another value in each lane: the lane's number by its usual name, the thread's, what a device
    /// function is given by value, and what is computed from them. A thread's number divided is its warp's, which all lanes
    /// have in common. `None` where that takes too many steps to tell.
    fn lane_words(&self) -> Option<HashSet<&'a str>> {
        let mut lanes: HashSet<&str> = HashSet::from(["lane_id", "threadIdx"]);
        let mut threads: HashSet<&str> = HashSet::from(["threadIdx"]);
        lanes.extend(self.parameters());
        for _ in 0..MAX_STEPS {
            let known = (lanes.len(), threads.len());
            for place in 1..self.code.len() {
                let Some((name, value)) = self.value(place) else { continue };
                let of = |words: &HashSet<&str>| value.iter().any(|word| words.contains(word));
                // What is made of a thread's number alone tells lanes apart, but a quotient of it does not.
                let numbers = of(&threads);
                let others = value.iter().any(|word| lanes.contains(word) && !threads.contains(word));
                if others || (numbers && value.contains(&"%")) {
                    lanes.insert(name);
                } else if numbers && !value.contains(&"/") {
                    lanes.insert(name);
                    threads.insert(name);
                }
            }
            if known == (lanes.len(), threads.len()) {
                return Some(lanes);
            }
        }
        None
    }

    /// The name that gets a value at a place, and the value: `name = ...;`, `name[...] = ...;`, `name += ...;`,
    /// `type name(...)`, `type name{...}`.
    fn value(&self, place: usize) -> Option<(&'a str, SmallVec<[&'a str; 16]>)> {
        let mut name = place.checked_sub(1)?;
        let closing = match self.token(place)? {
            "=" if self.token(place + 1) != Some("=") => {
                let shift = |sign| self.token(name) == Some(sign) && self.before(name) == Some(sign);
                if shift("<") || shift(">") {
                    name = name.checked_sub(2)?;
                } else if matches!(self.token(name), Some("+" | "-" | "*" | "/" | "%" | "&" | "|" | "^")) {
                    name = name.checked_sub(1)?;
                }
                if self.token(name) == Some("]") {
                    let from = name.saturating_sub(MAX_VALUE);
                    name = (from..name).rev().find(|at| self.token(*at) == Some("["))?.checked_sub(1)?;
                }
                ";"
            }
            "(" if place >= 2 && self.is_word(place - 2) => ")",
            "{" if place >= 2 && self.is_word(place - 2) => "}",
            _ => return None,
        };
        let name = self.token(name).filter(|_| self.is_word(name))?;
        let value = (place + 1..self.code.len()).map_while(|at| self.token(at));
        let value = value.take_while(|word| *word != ";" && *word != closing);
        Some((name, value.take(MAX_VALUE).collect()))
    }

    /// The names of what a device function is given by value. A kernel's own are the same for all lanes.
    fn parameters(&self) -> Vec<&'a str> {
        let head = 0..(0..self.code.len()).find(|place| self.token(*place) == Some("{")).unwrap_or_default();
        let is = |word| head.clone().any(|place| self.token(place) == Some(word));
        if !is("__device__") || is("__global__") {
            return Vec::new();
        }
        let list = |place: &usize| {
            self.token(*place) == Some("(") && !self.before(*place).is_some_and(|w| is_in(w, ATTRIBUTES))
        };
        let Some(open) = head.clone().find(list) else { return Vec::new() };
        let (mut depth, mut names) = (0_usize, Vec::new());
        // The last word of the parameter so far; none after a `*`, which makes it a pointer, or in its default value.
        let (mut name, mut pointer, mut default) = (None, false, false);
        for place in open..head.end {
            let word = self.token(place).unwrap_or_default();
            match word {
                "(" | "[" => depth += 1,
                ")" | "]" if depth > 1 => depth -= 1,
                ")" | "," if depth == 1 => {
                    names.extend(name.filter(|_| !pointer));
                    (name, pointer, default) = (None, false, false);
                    if word == ")" {
                        break;
                    }
                }
                "*" if depth == 1 => pointer = true,
                "=" if depth == 1 => default = true,
                _ if depth == 1 && !default && self.is_word(place) => name = Some(word),
                _ => {}
            }
        }
        names
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed test should panic")]

    use super::*;

    #[test]
    fn shared_memory_becomes_a_pointer() {
        for (declared, pointer) in [
            ("extern __shared__ char s[];", "char* const s = OEQ_HOST_SHARED(char);"),
            ("extern  __shared__ /* all */ float\n  arena [ ] ;", "float* const arena = OEQ_HOST_SHARED(float);"),
            (
                "extern __shared__ __align__(16) unsigned char s[];",
                "unsigned char* const s = OEQ_HOST_SHARED(unsigned char);",
            ),
        ] {
            let program = format!("__global__ void forward() {{ {declared} s[0] = 1; }} // __shared__");
            let expected = format!("__global__ void forward() {{ {pointer} s[0] = 1; }} // __shared__");
            assert_eq!(for_host(&program).unwrap(), expected);
        }
        for declared in
            ["__shared__ float tile[32];", "extern __shared__ float s;", "extern __shared__ s[];", "extern __shared__"]
        {
            let error = for_host(&format!("\n__global__ void forward() {{ {declared}")).unwrap_err();
            assert!(
                error.message().contains("line 2") && error.message().contains("__shared__ type name[]"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_sum_over_the_warp_becomes_one_call() {
        let head = "for (int o = 16; o > 0; o /= 2)";
        let sum = format!("{head} {{ l2[j + 1] += __shfl_down_sync(FULL_MASK, l2[j + 1], o); }} done();");
        assert_eq!(for_host(&sum).unwrap(), "l2[j + 1] = oeq_host::sum_down(l2[j + 1]); done();");
        for other in [
            format!("{head} {{ x += __shfl_down_sync(FULL_MASK, y, o); }}"),
            format!("{head} {{ x += __shfl_down_sync(FULL_MASK, x, 1); }}"),
            format!("{head} {{ x += __shfl_down_sync(FULL_MASK, x, o) * 2; }}"),
            format!("{head} {{ x += __shfl_down_sync(FULL_MASK, x, o); n++; }}"),
            format!("{head} {{ x = __shfl_down_sync(FULL_MASK, x, o); }}"),
            "for (int o = 8; o > 0; o /= 2) { x += __shfl_down_sync(FULL_MASK, x, o); }".to_owned(),
        ] {
            assert_eq!(for_host(&other).unwrap(), other);
        }
    }

    const READ: &str = "float r[3]; if(lane_id < 16) { r[0] = scratch[0 + lane_id * 3 + 0]; }";

    #[test]
    fn a_write_that_would_overtake_other_lanes_reads_waits_for_them() {
        let write = "if(lane_id < 16) { scratch[0 + lane_id + 16] = r[0] * 1.0; }";
        let program = |between: &str| format!("__device__ void f() {{ {READ} {between} {write} }}");
        assert_eq!(for_host(&program("x += r[0];")).unwrap(), program("x += r[0]; __syncwarp();"));
        for barrier in ["__syncwarp();", "x = __shfl_down_sync(FULL_MASK, x, 1);"] {
            assert_eq!(for_host(&program(barrier)).unwrap(), program(barrier));
        }
    }

    #[test]
    fn passes_wait_for_each_other() {
        let program = "__global__ void f() { { a(); if (x) { b(); } { c(); } } { d(); }\n {} } void g() {}";
        let expected = "__global__ void f() { { a(); if (x) { b(); } { c(); } } __syncwarp(); { d(); } __syncwarp();\n {} } void g() {}";
        assert_eq!(for_host(program).unwrap(), expected);
    }

    #[test]
    fn what_a_device_function_did_is_done_by_all_lanes() {
        let program = |after: &str| {
            format!(
                "template<int N> __device__ __forceinline__ void add(float* c) {{ c[0] += N; }}\n\
                 __device__ int get(int n) {{ return n; }} __global__ void f() {{ add<24>(c);{after} g(get(1)); add<1>(c); __syncwarp(); }}"
            )
        };
        assert_eq!(for_host(&program("")).unwrap(), program(" __syncwarp();"));
    }

    #[test]
    fn no_barrier_is_put_where_lanes_have_parted_or_in_the_middle_of_a_statement() {
        let program = |body: &str| {
            format!(
                "__device__ void f(float* x) {{ x[0] *= 2; }}\n__device__ int get(int n) {{ return n; }}\n\
                 __global__ void k(float* x, int n) {{\n\
                 int t_idx = blockIdx.x * blockDim.x + threadIdx.x; int warp = t_idx / 32; int lane = t_idx % 32;\n\
                 int half = lane / 16; float mine = x[lane];\n{body}\n}}"
            )
        };
        for same in [
            "if (lane_id >= 16) { f(x); }",
            "if (threadIdx.x >= 16) { f(x); }",
            "if (t_idx >= 16) { f(x); }",
            "if (half) { f(x); }",
            "if (mine > 0) { { f(x); } }",
            "for (int i = lane; i < n; i += 32) { f(x); }",
            "for (int i = 0; i < n; i++) { if (warp) { while (i < lane) { f(x); } } }",
            "if (n) { } else if (lane) { f(x); }",
            "if (lane) { } else { f(x); }",
            "if (lane) { } else if (n) { f(x); }",
            "if (lane) { } else if (n) { } else { f(x); }",
            "if (lane) for (int i = 0; i < n; i++) { f(x); }",
            "if (lane) while (n) if (n) { f(x); }",
            "int other = 0; other += t_idx % 32; if (other) { f(x); }",
            "int other(threadIdx.x % 32); if (other) { f(x); }",
            "int other{lane}; while (other) { f(x); }",
            "for (int i = 0; i < n; i++) { if (lane > i) continue; f(x); }",
            "#pragma unroll\nfor (int i = 0; i < lane; i++) { f(x); }",
            "for (int i = 0; i < n; i++) { f(x); if (lane > i) break; }",
            "for (int i = 0; i < n; i++) { f(x); if (lane > i) { continue; } }",
            "int o[2]; o[0] = lane; if (o[0] > 4) { f(x); }",
            "int o = 1; o <<= lane; if (o) { f(x); }",
            "int a, o(lane); if (a) { } if (x[lane]) { f(x); }",
            "if constexpr (1) { } else if constexpr (lane) { f(x); }",
            "if (lane) if constexpr (1) { f(x); }",
            "if (lane) [[likely]] { f(x); }",
            "} namespace n { __device__ void g(float* x, int l) { if (l) { f(x); } }",
            "} __device__ void g(float* x, int l = 0) { if (l) { f(x); }",
            "} __device__ __launch_bounds__(32) void g(float* x, const int& l) noexcept(true) { if (l) { f(x); }",
            "if (lane) x[0] = 1; else { f(x); }",
            "do { f(x); } while (get(lane));",
            "do f(x); while (n);",
            "if (n) f(x); else f(x);",
            "for (int i = get(n); i < get(9); i++) x[i] = 0;",
            "for (f(x); get(n); f(x)) ;",
            "int v = get(n); v = get(v); return get(v);",
            "switch (lane) { case 1: f(x); }",
            "float r[3]; if(lane_id < 16) { r[0] = x[lane_id * 3]; } if (lane >= 16) { if(lane_id < 20) { x[lane_id] = r[0]; } }",
        ] {
            let program = program(same);
            assert_eq!(for_host(&program).unwrap(), program);
        }
        for (before, after) in [
            ("if (n > 16) { f(x); }", "if (n > 16) { f(x); __syncwarp(); }"),
            ("if (warp) { f(x); } else { f(x); }", "if (warp) { f(x); __syncwarp(); } else { f(x); __syncwarp(); }"),
            ("for (int i = warp; i < n; i++) { f(x); }", "for (int i = warp; i < n; i++) { f(x); __syncwarp(); }"),
            ("if (lane) { x[0] = 1; }\nf(x);", "if (lane) { x[0] = 1; }\nf(x); __syncwarp();"),
            ("MACRO(lane) if (n) { f(x); }", "MACRO(lane) if (n) { f(x); __syncwarp(); }"),
            (
                "#pragma unroll\nfor (int i = 0; i < n; i++) { f(x); }",
                "#pragma unroll\nfor (int i = 0; i < n; i++) { f(x); __syncwarp(); }",
            ),
            ("if (n) {}\n#if N\nelse {\n#endif\nf(x); }", "if (n) {}\n#if N\nelse {\n#endif\nf(x); __syncwarp(); }"),
            (
                "for (int i = 0; i < n; i++) { if (n == 3) break; f(x); }",
                "for (int i = 0; i < n; i++) { if (n == 3) break; f(x); __syncwarp(); }",
            ),
            ("switch (n) { case 1: n++; break; } f(x);", "switch (n) { case 1: n++; break; } f(x); __syncwarp();"),
            (
                "} __device__ void later(int); __global__ void l(float* x, int n) { if (n) { f(x); }",
                "} __device__ void later(int); __global__ void l(float* x, int n) { if (n) { f(x); __syncwarp(); }",
            ),
            (
                "} \n#if A\n__global__ void l(float* x) {\n#else\n__global__ void l(int* x) {\n#endif\nf(x); }\n__global__ void m() { f(0);",
                "} \n#if A\n__global__ void l(float* x) {\n#else\n__global__ void l(int* x) {\n#endif\nf(x); __syncwarp(); }\n__global__ void m() { f(0); __syncwarp();",
            ),
            (
                "} extern \"C\" { __global__ void l(int* x) { for (int i = 0; i < lane_id; i++) { break; } } __global__ void m() { f(0); }",
                "} extern \"C\" { __global__ void l(int* x) { for (int i = 0; i < lane_id; i++) { break; } } __global__ void m() { f(0); __syncwarp(); }",
            ),
            // What a name means is a matter of its function.
            (
                "} __global__ void l(float* x, int lane) { if (lane) { f(x); }",
                "} __global__ void l(float* x, int lane) { if (lane) { f(x); __syncwarp(); }",
            ),
            (
                "} __device__ void g(float* x, int n) { if (n) { f(x); } if (x[0]) { f(x); }",
                "} __device__ void g(float* x, int n) { if (n) { f(x); } if (x[0]) { f(x); __syncwarp(); }",
            ),
            ("#define N 3\nf(x);", "#define N 3\nf(x); __syncwarp();"),
        ] {
            assert_eq!(for_host(&program(before)).unwrap(), program(after));
        }
    }

    #[test]
    fn what_every_lane_does_in_its_own_place_needs_no_barrier() {
        for after in [
            "if(lane_id < 16) { scratch[0 + lane_id * 3 + 0] = r[0]; }",
            "if(lane_id < 16) { scratch[offset] += r[0]; }",
            "if(lane_id < 16) { other[0 + lane_id] = r[0]; r[1] = 2; }",
            "} __device__ void g() { if(lane_id < 16) { scratch[0 + lane_id + 16] = r[0]; }",
        ] {
            let program = format!("__device__ void f() {{ {READ} {after} }}");
            assert_eq!(for_host(&program).unwrap(), program);
        }
    }
}
