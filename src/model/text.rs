//! MLIR assembly: `StableHLO` as people and `str(exported.mlir_module())` write it.
//!
//! Not a parser of MLIR, which has as many syntaxes as operations. One pass over the tokens, with strings and comments
//! told apart so that nothing in them counts, looks for functions, for references to them, and for custom calls in both
//! forms that MLIR prints:
//!
//! ```text
//! %0:2 = stablehlo.custom_call @target(%a, %b) {name = value, ...} : (type, type) -> (type, type)
//! %0 = "stablehlo.custom_call"(%a) <{call_target_name = "target", ...}> {name = value} : (type) -> type
//! ```

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use super::functions::Functions;
use super::{Attribute, CustomCall, ValueType, member};
use crate::error::{Error, Result};

/// How deep dictionaries and lists of attributes may nest; what is deeper is [`Attribute::Other`].
const MAX_DEPTH: usize = 32;

/// The text, if the bytes look like MLIR assembly.
pub(super) fn recognise(bytes: &[u8]) -> Option<&str> {
    let text = std::str::from_utf8(bytes).ok()?;
    let start = text.trim_start();
    let known = ["stablehlo.", "func.func", "builtin.module"];
    (start.starts_with("module") || known.iter().any(|known| text.contains(known))).then_some(text)
}

/// Every custom call in the text.
pub(super) fn read(text: &str) -> Result<Vec<CustomCall>> {
    let mut reader = Reader {
        tokens: Tokens { text, at: 0 },
        functions: Functions::default(),
        function: None,
        calls: Vec::new(),
        shared: HashMap::new(),
    };
    reader.run()?;
    let reached = reader.functions.reached();
    let functions = reader.functions;
    let finish = |(mut call, function): (CustomCall, Option<usize>)| {
        call.sites = function.map_or(1, |function| reached[function]);
        call.function = function.and_then(|function| functions.name(function));
        call
    };
    Ok(reader.calls.into_iter().map(finish).collect())
}

/// A piece of the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Token<'a> {
    /// A bare identifier: `module`, `func.func`, `true`.
    Word(&'a str),
    /// What is between quotes, escapes and all.
    Quoted(&'a str),
    /// A symbol, without its `@` and quotes.
    Symbol(&'a str),
    /// A number as written.
    Number(&'a str),
    /// `->`.
    Arrow,
    /// Any other character.
    Mark(u8),
}

/// A place in the text.
#[derive(Clone, Copy)]
struct Tokens<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Tokens<'a> {
    fn error(&self, what: impl std::fmt::Display) -> Error {
        let line = self.text.as_bytes()[..self.at].split(|&byte| byte == b'\n').count();
        Error::invalid(format!("line {line}: {what}"))
    }

    fn rest(&self) -> &'a [u8] {
        &self.text.as_bytes()[self.at..]
    }

    /// Steps over blanks and comments.
    fn skip_blanks(&mut self) {
        loop {
            let rest = self.rest();
            self.at += rest.len() - rest.trim_ascii_start().len();
            if !self.rest().starts_with(b"//") {
                return;
            }
            self.at += self.rest().iter().position(|&byte| byte == b'\n').unwrap_or(self.rest().len());
        }
    }

    /// Takes as many bytes as `belongs` holds for.
    fn take(&mut self, belongs: impl Fn(u8) -> bool) -> &'a str {
        let length = self.rest().iter().position(|&byte| !belongs(byte)).unwrap_or(self.rest().len());
        let start = self.at;
        self.at += length;
        // Not on a character boundary only if `belongs` splits one: then the piece is of no interest either.
        self.text.get(start..self.at).unwrap_or("")
    }

    /// Takes a string after its opening quote.
    fn quoted(&mut self) -> Result<&'a str> {
        let bytes = self.rest();
        let mut length = 0;
        loop {
            match bytes.get(length) {
                Some(b'"') => break,
                Some(b'\\') => length += 2,
                Some(_) => length += 1,
                None => return Err(self.error("a string without an end: cut short?")),
            }
        }
        let start = self.at;
        self.at += length + 1;
        Ok(self.text.get(start..start + length).unwrap_or(""))
    }

    /// The next token; `None` at the end.
    fn next(&mut self) -> Result<Option<Token<'a>>> {
        self.skip_blanks();
        let in_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'.' | b'-');
        let Some(&first) = self.rest().first() else { return Ok(None) };
        let second = self.rest().get(1).copied().unwrap_or(0);
        if first.is_ascii_alphabetic() || first == b'_' {
            return Ok(Some(Token::Word(self.take(|byte| in_name(byte) && byte != b'-'))));
        }
        if first.is_ascii_digit() || (first == b'-' && second.is_ascii_digit()) {
            let start = self.at;
            self.at += 1;
            self.take(|byte| byte.is_ascii_alphanumeric() || byte == b'.');
            return Ok(Some(Token::Number(&self.text[start..self.at])));
        }
        self.at += 1;
        Ok(Some(match (first, second) {
            (b'"', _) => Token::Quoted(self.quoted()?),
            (b'@', b'"') => {
                self.at += 1;
                Token::Symbol(self.quoted()?)
            }
            (b'@', _) => Token::Symbol(self.take(in_name)),
            (b'-', b'>') => {
                self.at += 1;
                Token::Arrow
            }
            // Aliases and values: their names must not be taken for words.
            (b'%' | b'#' | b'!' | b'^', _) => {
                self.take(|byte| in_name(byte) && byte != b'-');
                Token::Mark(first)
            }
            _ => {
                // The rest of a character of several bytes goes with its first.
                self.take(|byte| !first.is_ascii() && byte & 0xc0 == 0x80);
                Token::Mark(first)
            }
        }))
    }

    fn peek(&self) -> Result<Option<Token<'a>>> {
        let mut ahead = *self;
        ahead.next()
    }

    /// Takes the mark if it comes next.
    fn eat(&mut self, mark: u8) -> Result<bool> {
        let mut ahead = *self;
        let found = ahead.next()? == Some(Token::Mark(mark));
        if found {
            *self = ahead;
        }
        Ok(found)
    }

    fn expect(&mut self, mark: u8) -> Result<()> {
        if self.eat(mark)? {
            return Ok(());
        }
        Err(self.error(format_args!("`{}` expected", char::from(mark))))
    }

    /// Steps over everything up to a `,` or a closing bracket that belongs to what is around, which is left.
    fn skip_value(&mut self) -> Result<()> {
        let mut depth = 0_usize;
        loop {
            match self.peek()? {
                None => return Err(self.error("a bracket without an end: cut short?")),
                Some(Token::Mark(b'(' | b'[' | b'{' | b'<')) => depth += 1,
                Some(Token::Mark(b',')) if depth == 0 => return Ok(()),
                Some(Token::Mark(b')' | b']' | b'}' | b'>')) => {
                    if depth == 0 {
                        return Ok(());
                    }
                    depth -= 1;
                }
                Some(_) => {}
            }
            self.next()?;
        }
    }

    /// Takes the text of a type.
    fn take_type(&mut self) -> Result<&'a str> {
        self.skip_blanks();
        let start = self.at;
        let (mut depth, mut before) = (0_usize, 0);
        while let Some(&byte) = self.rest().first() {
            match byte {
                b'"' => {
                    self.at += 1;
                    self.quoted()?;
                    continue;
                }
                b'<' | b'(' | b'[' | b'{' => depth += 1,
                b'>' if before == b'-' => {}
                b'>' | b')' | b']' | b'}' if depth > 0 => depth -= 1,
                b'>' | b')' | b']' | b'}' => break,
                b',' if depth == 0 => break,
                _ if depth == 0 && byte.is_ascii_whitespace() => break,
                _ => {}
            }
            before = byte;
            self.at += 1;
        }
        if depth > 0 || start == self.at {
            return Err(self.error("a type expected"));
        }
        Ok(self.text.get(start..self.at).unwrap_or(""))
    }
}

struct Reader<'a> {
    tokens: Tokens<'a>,
    functions: Functions,
    /// The function that the text is in: functions do not nest, so it is the last one that began.
    function: Option<usize>,
    calls: Vec<(CustomCall, Option<usize>)>,
    /// Strings by how they are written: a payload is written at every call that uses it.
    shared: HashMap<&'a str, Arc<[u8]>>,
}

impl Reader<'_> {
    fn run(&mut self) -> Result<()> {
        let mut braces = 0_i64;
        while let Some(token) = self.tokens.next()? {
            match token {
                Token::Mark(b'{') => braces += 1,
                Token::Mark(b'}') => braces -= 1,
                Token::Word("func.func") => self.function()?,
                Token::Word("stablehlo.custom_call" | "mhlo.custom_call") => self.custom_call()?,
                Token::Quoted(name) if self.tokens.peek()? == Some(Token::Mark(b'(')) => match name {
                    "func.func" => self.generic_function()?,
                    "stablehlo.custom_call" | "mhlo.custom_call" => self.generic_custom_call()?,
                    _ if name.starts_with("vhlo.") => {
                        return Err(self
                            .tokens
                            .error("VHLO as text is not read: give the bytecode that it came from, or StableHLO"));
                    }
                    _ => {}
                },
                Token::Symbol(name) => {
                    if let Some(function) = self.function {
                        self.functions.call(function, &String::from_utf8_lossy(&unescape(name)));
                    }
                }
                _ => {}
            }
        }
        if braces == 0 { Ok(()) } else { Err(self.tokens.error("the text ends inside of a block: cut short?")) }
    }

    /// `func.func private @name(...)`, of which the first word is taken.
    fn function(&mut self) -> Result<()> {
        let mut private = false;
        loop {
            match self.tokens.next()? {
                Some(Token::Word(visibility)) => private = visibility == "private",
                Some(Token::Symbol(name)) => {
                    self.function = Some(self.functions.add(Some(symbol(name)), private));
                    return Ok(());
                }
                _ => return Err(self.tokens.error("func.func without a name")),
            }
        }
    }

    /// `"func.func"() <{sym_name = "name", ...}> (...)`, of which the string is taken.
    fn generic_function(&mut self) -> Result<()> {
        let members = self.generic_head()?;
        let name = match member(&members, "sym_name") {
            Some(Attribute::Text(name)) => Some(Arc::from(String::from_utf8_lossy(name))),
            _ => None, // Written after the body, as MLIR did before it had properties.
        };
        let private =
            matches!(member(&members, "sym_visibility"), Some(Attribute::Text(text)) if **text == *b"private");
        self.function = Some(self.functions.add(name, private));
        Ok(())
    }

    /// `@target(%a, %b) {name = value} : (type, type) -> type`.
    fn custom_call(&mut self) -> Result<()> {
        let Some(Token::Symbol(target)) = self.tokens.next()? else {
            return Err(self.tokens.error("custom_call without a target"));
        };
        self.skip_operands()?;
        let members = if self.tokens.eat(b'{')? { self.dictionary(0)? } else { Vec::new() };
        self.push(symbol(target), &members)
    }

    /// `(%a, %b) <{name = value}> {name = value} : (type, type) -> type`.
    fn generic_custom_call(&mut self) -> Result<()> {
        let mut members = self.generic_head()?;
        if self.tokens.eat(b'{')? {
            members.extend(self.dictionary(0)?);
        }
        let target = match member(&members, "call_target_name") {
            Some(Attribute::Text(target)) => Arc::from(String::from_utf8_lossy(target)),
            _ => return Err(self.tokens.error("custom_call without call_target_name")),
        };
        self.push(target, &members)
    }

    fn skip_operands(&mut self) -> Result<()> {
        self.tokens.expect(b'(')?;
        loop {
            self.tokens.skip_value()?;
            if !self.tokens.eat(b',')? {
                return self.tokens.expect(b')');
            }
        }
    }

    /// The operands and properties of an operation in its general form.
    fn generic_head(&mut self) -> Result<Vec<(Arc<str>, Attribute)>> {
        self.skip_operands()?;
        let mut members = Vec::new();
        if self.tokens.eat(b'<')? {
            self.tokens.expect(b'{')?;
            members = self.dictionary(0)?;
            self.tokens.expect(b'>')?;
        }
        Ok(members)
    }

    /// Takes the type of a custom call, and keeps the call.
    fn push(&mut self, target: Arc<str>, members: &[(Arc<str>, Attribute)]) -> Result<()> {
        self.tokens.expect(b':')?;
        self.tokens.expect(b'(')?;
        let operands = self.types()?;
        if self.tokens.next()? != Some(Token::Arrow) {
            return Err(self.tokens.error("`->` expected"));
        }
        let results = if self.tokens.eat(b'(')? { self.types()? } else { vec![self.value_type()?] };
        if let (Some(function), Some(Attribute::List(list))) = (self.function, member(members, "called_computations")) {
            for one in &**list {
                if let Attribute::Text(name) = one {
                    self.functions.call(function, &String::from_utf8_lossy(name));
                }
            }
        }
        let (api_version, attributes) = super::call_attributes(members);
        let call =
            CustomCall { target, module: 0, function: None, operands, results, api_version, attributes, sites: 0 };
        self.calls.push((call, self.function));
        Ok(())
    }

    /// Types up to the closing parenthesis.
    fn types(&mut self) -> Result<Vec<Arc<ValueType>>> {
        let mut types = Vec::new();
        while !self.tokens.eat(b')')? {
            types.push(self.value_type()?);
            if !self.tokens.eat(b',')? && self.tokens.peek()? != Some(Token::Mark(b')')) {
                return Err(self.tokens.error("`,` or `)` expected"));
            }
        }
        Ok(types)
    }

    fn value_type(&mut self) -> Result<Arc<ValueType>> {
        Ok(Arc::new(value_type(self.tokens.take_type()?)))
    }

    /// The members of a dictionary, after its opening brace.
    fn dictionary(&mut self, depth: usize) -> Result<Vec<(Arc<str>, Attribute)>> {
        let mut members = Vec::new();
        while !self.tokens.eat(b'}')? {
            let name = match self.tokens.next()? {
                Some(Token::Word(name)) => Arc::from(name),
                Some(Token::Quoted(name)) => symbol(name),
                _ => return Err(self.tokens.error("the name of an attribute expected")),
            };
            let value = if self.tokens.eat(b'=')? { self.value(depth)? } else { Attribute::Int(1) };
            members.push((name, value));
            if !self.tokens.eat(b',')? && self.tokens.peek()? != Some(Token::Mark(b'}')) {
                return Err(self.tokens.error("`,` or `}` expected"));
            }
        }
        Ok(members)
    }

    /// The value of an attribute, up to the `,` or bracket after it.
    fn value(&mut self, depth: usize) -> Result<Attribute> {
        let before = self.tokens;
        let value = match self.tokens.next()? {
            Some(Token::Mark(b'{')) if depth < MAX_DEPTH => Attribute::Dictionary(self.dictionary(depth + 1)?.into()),
            Some(Token::Mark(b'[')) if depth < MAX_DEPTH => {
                let mut list = Vec::new();
                while !self.tokens.eat(b']')? {
                    list.push(self.value(depth + 1)?);
                    self.tokens.eat(b',')?;
                }
                Attribute::List(list.into())
            }
            Some(Token::Quoted(text)) => {
                Attribute::Text(Arc::clone(self.shared.entry(text).or_insert_with(|| Arc::from(unescape(text)))))
            }
            Some(Token::Symbol(name)) => Attribute::Text(Arc::from(unescape(name))),
            Some(Token::Number(number)) => number.parse().map_or(Attribute::Other, Attribute::Int),
            Some(Token::Word("true" | "unit")) => Attribute::Int(1),
            Some(Token::Word("false")) => Attribute::Int(0),
            None => return Err(self.tokens.error("a value expected: cut short?")),
            Some(Token::Mark(b',' | b']' | b'}' | b')' | b'>')) => return Err(self.tokens.error("a value expected")),
            Some(_) => {
                self.tokens = before;
                Attribute::Other
            }
        };
        self.tokens.skip_value()?; // The rest of what is of no use, or the type of a number.
        Ok(value)
    }
}

fn symbol(name: &str) -> Arc<str> {
    Arc::from(String::from_utf8_lossy(&unescape(name)))
}

/// The bytes that a string stands for: `\22` is the byte 0x22, and there are `\n`, `\t`, `\"` and `\\`.
fn unescape(text: &str) -> Cow<'_, [u8]> {
    let bytes = text.as_bytes();
    if !bytes.contains(&b'\\') {
        return Cow::Borrowed(bytes);
    }
    let hex = |byte: Option<&u8>| byte.and_then(|&byte| u8::try_from(char::from(byte).to_digit(16)?).ok());
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        let (value, length) = match (byte, bytes.get(at + 1), bytes.get(at + 2)) {
            (b'\\', Some(b'n'), _) => (b'\n', 2),
            (b'\\', Some(b't'), _) => (b'\t', 2),
            (b'\\', Some(&quote @ (b'"' | b'\\')), _) => (quote, 2),
            (b'\\', high, low) => match (hex(high), hex(low)) {
                (Some(high), Some(low)) => (high << 4 | low, 3),
                _ => (byte, 1),
            },
            _ => (byte, 1),
        };
        plain.push(value);
        at += length;
    }
    Cow::Owned(plain)
}

/// The type with this text.
pub(super) fn value_type(text: &str) -> ValueType {
    let other = || ValueType::Other(text.into());
    let Some(mut inner) = text.strip_prefix("tensor<").and_then(|inner| inner.strip_suffix('>')) else {
        return other();
    };
    if inner.starts_with('*') {
        return other();
    }
    let mut dims = Vec::new();
    while let Some((dim, rest)) = inner.split_once('x') {
        match dim {
            "?" => dims.push(None),
            _ => match dim.parse() {
                Ok(dim) => dims.push(Some(dim)),
                Err(_) => break,
            },
        }
        inner = rest;
    }
    // After the element type there may be an encoding.
    let mut depth = 0_usize;
    let end = inner.bytes().position(|byte| {
        match byte {
            b'<' => depth += 1,
            b'>' => depth = depth.saturating_sub(1),
            _ => {}
        }
        byte == b',' && depth == 0
    });
    ValueType::Tensor { dtype: inner[..end.unwrap_or(inner.len())].trim_end().into(), dims }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    const MODEL: &str = r#"#loc = loc("x.py":1:2)
module @m attributes {mhlo.num_partitions = 1 : i32} {
  // stablehlo.custom_call @commented(%0) : () -> ()
  func.func public @main(%arg0: tensor<2x?xf32> loc("stablehlo.custom_call @quoted")) -> (tensor<f32> {jax.result_info = ""}) {
    %c = stablehlo.constant dense<"0x00FF"> : tensor<2xui8>
    %0:2 = stablehlo.custom_call @tp_forward(%arg0, %c) {api_version = 4 : i32, backend_config = {deep = [1, {a = dense<[1, 2]> : tensor<2xi64>}],
      flag = true, half = 1.5 : f32, hash = -5 : i64, kernel = "{\22k\22: \22\5C\0A} \C3\A9", note, prop = {L1_dim = 8 : i64}}} :
      (tensor<2x?xf32>, tensor<2xui8>) -> (tensor<2x3xf64, #stablehlo.bounds<?, 3>>, !stablehlo.token) loc(#loc)
    %1 = call @"<inner> \22f\22"(%arg0) : (tensor<2x?xf32>) -> tensor<f32>
    %2 = func.call @"<inner> \22f\22"(%arg0) : (tensor<2x?xf32>) -> tensor<f32>
    return %2 : tensor<f32>
  }
  func.func private @"<inner> \22f\22"(%arg0: tensor<2x?xf32>) -> tensor<f32> {
    %0 = "stablehlo.custom_call"(%arg0) <{api_version = 1 : i32, backend_config = "opaque", call_target_name = "other"}> : (tensor<2x?xf32>) -> tuple<tensor<f32>, tensor<4xcomplex<f32>>>
    return %0 : tensor<f32>
  }
  func.func private @unused() {
    stablehlo.custom_call @nothing() : () -> ()
  }
} loc(#loc)
"#;

    #[test]
    fn both_forms_are_read_and_strings_and_comments_are_not() {
        let calls = read(recognise(MODEL.as_bytes()).unwrap()).unwrap();
        let found: Vec<_> =
            calls.iter().map(|call| (&*call.target, call.function.as_deref().unwrap(), call.sites)).collect();
        assert_eq!(found, [("tp_forward", "main", 1), ("other", "<inner> \"f\"", 2), ("nothing", "unused", 0)]);
        let types = |types: &[Arc<ValueType>]| types.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(types(&calls[0].operands), ["f32[2,?]", "ui8[2]"]);
        assert_eq!(types(&calls[0].results), ["f64[2,3]", "!stablehlo.token"]);
        assert_eq!(types(&calls[1].results), ["tuple<tensor<f32>, tensor<4xcomplex<f32>>>"]);
        assert!(calls[2].operands.is_empty() && calls[2].results.is_empty());
    }

    #[test]
    fn attributes_have_their_values() {
        let calls = read(MODEL).unwrap();
        let call = &calls[0];
        assert_eq!((call.api_version, calls[1].api_version, calls[2].api_version), (4, 1, 1));
        assert!(matches!(call.attribute("hash"), Some(Attribute::Int(-5))));
        assert!(matches!(call.attribute("flag"), Some(Attribute::Int(1))));
        assert!(matches!(call.attribute("note"), Some(Attribute::Int(1))));
        assert!(matches!(call.attribute("half"), Some(Attribute::Other)));
        assert!(matches!(call.attribute("deep"), Some(Attribute::List(list)) if list.len() == 2));
        let Some(Attribute::Text(kernel)) = call.attribute("kernel") else { unreachable!("{call:?}") };
        assert_eq!(std::str::from_utf8(kernel).unwrap(), "{\"k\": \"\\\n} é");
        let Some(Attribute::Dictionary(prop)) = call.attribute("prop") else { unreachable!("{call:?}") };
        assert!(matches!(member(prop, "L1_dim"), Some(Attribute::Int(8))));
        assert!(matches!(calls[1].attribute("backend_config"), Some(Attribute::Text(text)) if **text == *b"opaque"));
    }

    #[test]
    fn damage_is_an_error_that_says_where() {
        let call = |rest: &str| format!("module {{\n stablehlo.custom_call @x(%0) {rest}\n}}");
        for (text, expected) in [
            (call("{a = 1 : (tensor<f32>) -> ()"), "line 3: `:` expected"),
            (call("{a = \"x} : () -> ()"), "without an end"),
            (call("{a 1} : () -> ()"), "`,` or `}`"),
            (call("{a = } : () -> ()"), "a value expected"),
            (call(": (tensor<f32>"), "line 2: `,` or `)` expected"),
            (call(": (tensor<f32>) tensor<f32>"), "`->` expected"),
            (call("").replace("(%0)", "(%0}"), "`)` expected"),
            (call(": () -> ()").replace("\n}", ""), "cut short"),
            ("module { \"vhlo.func_v1\"() }".into(), "VHLO"),
            ("module { \"stablehlo.custom_call\"() : () -> () }".into(), "without call_target_name"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.message().contains(expected), "{text}: {error}");
        }
        let deep = call(&format!("{{a = {} : () -> ()", "[{a = ".repeat(100_000)));
        assert!(read(&deep).unwrap_err().message().contains("without an end"));
        let deep = call(&format!("{{a = {}1{}}} : () -> ()", "[".repeat(100_000), "]".repeat(100_000)));
        assert_eq!(read(&deep).unwrap().len(), 1);
        for end in (0..MODEL.len()).filter(|&end| MODEL.is_char_boundary(end)) {
            let _ = read(&MODEL[..end]); // It must only come back.
        }
    }

    #[test]
    fn types_are_taken_apart() {
        for (text, expected) in [
            ("tensor<f32>", "f32[]"),
            ("tensor<0x1xi64>", "i64[0,1]"),
            ("tensor<?x?xbf16>", "bf16[?,?]"),
            ("tensor<4xcomplex<f64>>", "complex<f64>[4]"),
            ("tensor<2x!quant.uniform<i8:f32, 0.1>>", "!quant.uniform<i8:f32, 0.1>[2]"),
            ("tensor<*xf32>", "tensor<*xf32>"),
            ("index", "index"),
        ] {
            assert_eq!(value_type(text).to_string(), expected, "{text}");
        }
    }
}
