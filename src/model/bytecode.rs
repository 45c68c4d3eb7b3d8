//! MLIR bytecode, format versions 0 to 6: the sections, the tables, and a walk over every operation.
//!
//! The file is a magic, a version, a producer and sections. Strings, dialects with their operation names, and attributes
//! with types are tables; the section `IR` holds the operations, which refer to the tables by index. An operation is
//! read field by field, since the only way to find the next one is to read this one, but of most operations nothing is
//! kept: only result types (an operand is a number, and its type is that of the value it names), functions and their
//! calls, and custom calls. Locations are never decoded.
//!
//! Regions are walked with a stack of our own. A region that is isolated from above has its own numbering of values and,
//! since version 2, its own section; other regions continue the numbers of the region around them, and their numbers are
//! free again at their end.
//!
//! Memory: every count is followed by at least one byte for each thing counted, so tables grow while they are read and
//! end with the file. The one number without that property, how many values a region defines, is drawn from a budget of
//! one value per byte of the file.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use super::attributes::{Dialect, Entry, Table};
use super::functions::Functions;
use super::{Attribute, Bytecode, CustomCall, Members, ValueType, member};
use crate::error::{Error, Result};

/// What every bytecode file begins with.
pub(super) const MAGIC: &[u8] = b"ML\xefR";
/// The newest version of the format that is read.
pub(super) const NEWEST_VERSION: u64 = 6;

/// Versions in which something changed that matters here.
mod since {
    /// A dialect may carry a version of its own.
    pub(super) const DIALECT_VERSIONS: u64 = 1;
    /// An isolated region is a section, so that it can be skipped.
    pub(super) const LAZY_REGIONS: u64 = 2;
    /// Operations and block arguments may carry the order of their uses.
    pub(super) const USE_LIST_ORDER: u64 = 3;
    /// The location of a block argument may be left out; the number of operation names is written.
    pub(super) const ELIDED_LOCATIONS: u64 = 4;
    /// Properties are apart from the attributes.
    pub(super) const PROPERTIES: u64 = 5;
}

/// Numbers of the sections.
mod section {
    pub(super) const STRINGS: u8 = 0;
    pub(super) const DIALECTS: u8 = 1;
    pub(super) const ATTRIBUTES: u8 = 2;
    pub(super) const ATTRIBUTE_OFFSETS: u8 = 3;
    pub(super) const IR: u8 = 4;
    pub(super) const DIALECT_VERSIONS: u8 = 7;
    pub(super) const PROPERTIES: u8 = 8;
    pub(super) const COUNT: usize = 9;
}

/// Which parts an operation has.
mod mask {
    pub(super) const ATTRIBUTES: u8 = 1;
    pub(super) const RESULTS: u8 = 1 << 1;
    pub(super) const OPERANDS: u8 = 1 << 2;
    pub(super) const SUCCESSORS: u8 = 1 << 3;
    pub(super) const REGIONS: u8 = 1 << 4;
    pub(super) const USE_LIST_ORDER: u8 = 1 << 5;
    pub(super) const PROPERTIES: u8 = 1 << 6;
}

/// A place in the file, and where what is being read ends. Positions count from the start of the file.
#[derive(Clone, Copy)]
pub(super) struct Cursor<'a> {
    file: &'a [u8],
    at: usize,
    end: usize,
}

impl<'a> Cursor<'a> {
    pub(super) fn new(file: &'a [u8]) -> Self {
        Self { file, at: 0, end: file.len() }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.at >= self.end
    }

    pub(super) fn remaining(&self) -> usize {
        self.end - self.at
    }

    /// An error at this place.
    pub(super) fn error(&self, what: impl std::fmt::Display) -> Error {
        Error::invalid(format!("MLIR bytecode: byte {}: {what}", self.at))
    }

    pub(super) fn bytes(&mut self, count: u64) -> Result<&'a [u8]> {
        let taken = self.sub(count)?;
        Ok(&self.file[taken.at..taken.end])
    }

    /// Steps over `count` bytes and gives a cursor over just them.
    pub(super) fn sub(&mut self, count: u64) -> Result<Self> {
        match usize::try_from(count) {
            Ok(count) if count <= self.remaining() => {
                let sub = Self { file: self.file, at: self.at, end: self.at + count };
                self.at += count;
                Ok(sub)
            }
            _ => Err(self.error(format_args!("{count} bytes wanted, {} left: cut short?", self.remaining()))),
        }
    }

    pub(super) fn byte(&mut self) -> Result<u8> {
        Ok(self.bytes(1)?[0])
    }

    /// An integer whose first byte tells, by its trailing zeros, how many bytes follow.
    pub(super) fn varint(&mut self) -> Result<u64> {
        let first = self.byte()?;
        let more = first.trailing_zeros();
        let mut value = [0; 8];
        if more == 8 {
            value.copy_from_slice(self.bytes(8)?);
            return Ok(u64::from_le_bytes(value));
        }
        value[0] = first;
        let rest = self.bytes(u64::from(more))?;
        value[1..=rest.len()].copy_from_slice(rest);
        Ok(u64::from_le_bytes(value) >> (more + 1))
    }

    /// A signed integer: its sign is the lowest bit.
    pub(super) fn signed(&mut self) -> Result<i64> {
        let value = self.varint()?;
        let folded = (value >> 1) ^ (value & 1).wrapping_neg();
        Ok(i64::from_le_bytes(folded.to_le_bytes()))
    }

    /// An integer with a flag in its lowest bit.
    pub(super) fn flagged(&mut self) -> Result<(u64, bool)> {
        let value = self.varint()?;
        Ok((value >> 1, value & 1 == 1))
    }

    /// A number of things of which each takes at least one byte here.
    pub(super) fn count(&mut self, things: &str) -> Result<usize> {
        let count = self.varint()?;
        match usize::try_from(count) {
            Ok(count) if count <= self.remaining() => Ok(count),
            _ => Err(self.error(format_args!("{count} {things} in {} bytes", self.remaining()))),
        }
    }

    /// An index into a table.
    pub(super) fn index(&mut self, length: usize, table: &str) -> Result<usize> {
        let index = self.varint()?;
        self.checked(index, length, table)
    }

    fn checked(&self, index: u64, length: usize, table: &str) -> Result<usize> {
        match usize::try_from(index) {
            Ok(index) if index < length => Ok(index),
            _ => Err(self.error(format_args!("{table} {index} of {length}"))),
        }
    }

    /// Bytes up to a zero, which is stepped over.
    pub(super) fn terminated(&mut self) -> Result<&'a [u8]> {
        let rest = &self.file[self.at..self.end];
        let Some(length) = rest.iter().position(|&byte| byte == 0) else {
            return Err(self.error("a text without an end"));
        };
        self.at += length + 1;
        Ok(&rest[..length])
    }

    /// A section: its number, and its content.
    fn section(&mut self) -> Result<(u8, Self)> {
        let head = self.byte()?;
        let length = self.varint()?;
        if head & 0x80 != 0 {
            let alignment = self.varint()?;
            if !alignment.is_power_of_two() || alignment > 1 << 20 {
                return Err(self.error(format_args!("section aligned to {alignment}")));
            }
            // The padding's length follows from the place in the file, whose start the writer took as aligned.
            while self.at as u64 & (alignment - 1) != 0 {
                self.byte()?;
            }
        }
        Ok((head & 0x7f, self.sub(length)?))
    }
}

/// What is before the sections. The dialects are left empty.
pub(super) fn header(bytes: &[u8]) -> Result<Bytecode> {
    Ok(start(bytes)?.0)
}

fn start(bytes: &[u8]) -> Result<(Bytecode, Cursor<'_>)> {
    let mut cursor = Cursor::new(bytes);
    if cursor.bytes(MAGIC.len() as u64)? != MAGIC {
        return Err(Error::invalid("MLIR bytecode: the magic ML\\xefR is missing"));
    }
    let version = cursor.varint()?;
    let producer = String::from_utf8_lossy(cursor.terminated()?).into_owned();
    Ok((Bytecode { version, producer, bytes: bytes.len(), dialects: Vec::new() }, cursor))
}

/// Reads one module. `order` is put into every call as [`CustomCall::module`].
pub(super) fn read(bytes: &[u8], order: usize) -> Result<(Bytecode, Vec<CustomCall>)> {
    let (mut facts, mut cursor) = start(bytes)?;
    let version = facts.version;
    let mut sections = [None; section::COUNT];
    while !cursor.is_empty() {
        let (number, content) = cursor.section()?;
        match sections.get_mut(usize::from(number)) {
            Some(slot @ None) => *slot = Some(content),
            Some(_) => return Err(content.error(format_args!("a second section {number}"))),
            None => return Err(content.error(format_args!("section {number}, which version {version} does not have"))),
        }
    }
    let needed = |number: u8, name: &str| {
        sections[usize::from(number)].ok_or_else(|| {
            Error::invalid(format!("MLIR bytecode: the section of {name} (number {number}) is missing: cut short?"))
        })
    };
    let strings = strings(needed(section::STRINGS, "strings")?)?;
    let (dialects, operations) = dialects(needed(section::DIALECTS, "dialects")?, &strings, version)?;
    let (attributes, types) = entries(
        needed(section::ATTRIBUTES, "attributes")?,
        needed(section::ATTRIBUTE_OFFSETS, "attribute offsets")?,
        &dialects,
    )?;
    let properties = sections[usize::from(section::PROPERTIES)].map_or(Ok(Vec::new()), properties)?;
    let ir = needed(section::IR, "operations")?;
    let mut walk = Walk {
        version,
        operations,
        properties,
        table: Table::new(strings, attributes, types),
        budget: bytes.len(),
        cursors: vec![ir],
        scopes: vec![Vec::new()],
        frames: Vec::new(),
        memo: HashMap::new(),
        functions: Functions::default(),
        calls: Vec::new(),
        order,
    };
    walk.run()?;
    let mut named = HashSet::new();
    let distinct = dialects.iter().filter(|name| named.insert(**name));
    facts.dialects = distinct.map(|name| String::from_utf8_lossy(name).into_owned()).collect();
    Ok((facts, walk.finish()))
}

/// The strings. Their lengths are written last to first, and each counts a zero at the string's end.
fn strings(mut section: Cursor<'_>) -> Result<Vec<&[u8]>> {
    let count = section.count("strings")?;
    let mut lengths = Vec::with_capacity(count);
    for _ in 0..count {
        lengths.push(section.varint()?);
    }
    let mut strings = Vec::with_capacity(count);
    for &length in lengths.iter().rev() {
        let text = section.bytes(length)?;
        let Some((_, text)) = text.split_last() else {
            return Err(section.error("a string without its zero"));
        };
        strings.push(text);
    }
    Ok(strings)
}

/// The names of the dialects, and the operations in the order of their indices.
fn dialects<'a>(
    mut section: Cursor<'a>,
    strings: &[&'a [u8]],
    version: u64,
) -> Result<(Vec<&'a [u8]>, Vec<Operation>)> {
    let count = section.count("dialects")?;
    let mut dialects = Vec::with_capacity(count);
    for _ in 0..count {
        let (name, versioned) =
            if version < since::DIALECT_VERSIONS { (section.varint()?, false) } else { section.flagged()? };
        dialects.push(strings[section.checked(name, strings.len(), "string")?]);
        if versioned && section.section()?.0 != section::DIALECT_VERSIONS {
            return Err(section.error("the version of a dialect is missing"));
        }
    }
    if version >= since::ELIDED_LOCATIONS {
        section.varint()?; // How many names there are; what follows tells as well.
    }
    let mut operations = Vec::new();
    while !section.is_empty() {
        let dialect = dialects[section.index(dialects.len(), "dialect")?];
        for _ in 0..section.count("operation names")? {
            let (name, registered) =
                if version < since::PROPERTIES { (section.varint()?, true) } else { section.flagged()? };
            let name = strings[section.checked(name, strings.len(), "string")?];
            operations.push(Operation::of(dialect, name, registered));
        }
    }
    Ok((dialects, operations))
}

/// Where the attributes and the types lie. The offsets section gives the size of each, grouped by dialect.
fn entries<'a>(
    mut data: Cursor<'a>,
    mut offsets: Cursor<'a>,
    dialects: &[&[u8]],
) -> Result<(Vec<Entry<'a>>, Vec<Entry<'a>>)> {
    let counts = [offsets.count("attributes")?, offsets.count("types")?];
    let mut read = |count: usize| {
        let mut entries = Vec::with_capacity(count);
        while entries.len() < count {
            let dialect = Dialect::of(dialects[offsets.index(dialects.len(), "dialect")?]);
            for _ in 0..offsets.count("attributes or types")? {
                let (size, custom) = offsets.flagged()?;
                entries.push(Entry { content: data.sub(size)?, dialect, custom });
            }
        }
        if entries.len() > count { Err(offsets.error("more attributes or types than announced")) } else { Ok(entries) }
    };
    Ok((read(counts[0])?, read(counts[1])?))
}

/// The properties of operations, each a sized stretch of bytes.
fn properties(mut section: Cursor<'_>) -> Result<Vec<Cursor<'_>>> {
    let count = section.count("properties")?;
    let mut properties = Vec::with_capacity(count);
    for _ in 0..count {
        let size = section.varint()?;
        properties.push(section.sub(size)?);
    }
    Ok(properties)
}

/// A kind of operation, as the file names it once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Operation {
    kind: Kind,
    /// Of the dialect `vhlo`, which leaves nothing optional.
    vhlo: bool,
    /// Whether the writer knew the operation: else its properties are an ordinary attribute.
    registered: bool,
}

/// What an operation is to us.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Kind {
    CustomCall,
    Function,
    Call,
    /// An operation that stands for a function.
    Composite,
    Other,
}

/// Names of properties in the order in which they are written, and whether each is always there.
type Layout = &'static [(&'static str, bool)];

impl Operation {
    fn of(dialect: &[u8], name: &[u8], registered: bool) -> Self {
        let vhlo = dialect == b"vhlo";
        let kind = match (dialect, name) {
            (b"vhlo", _) if name.starts_with(b"custom_call_v") => Kind::CustomCall,
            (b"vhlo", _) if name.starts_with(b"func_v") => Kind::Function,
            (b"vhlo", _) if name.starts_with(b"call_v") => Kind::Call,
            (b"vhlo", _) if name.starts_with(b"composite_v") => Kind::Composite,
            (b"stablehlo" | b"mhlo", b"custom_call") => Kind::CustomCall,
            (b"func", b"func") => Kind::Function,
            (b"func", b"call") => Kind::Call,
            (b"stablehlo" | b"mhlo", b"composite") => Kind::Composite,
            _ => Kind::Other,
        };
        Self { kind, vhlo, registered }
    }

    /// The properties of a known operation of which `count` were written, up to the last one that is of use. They are
    /// written in the order of their names; which ones there are has changed over the years.
    fn layout(self, count: usize) -> Layout {
        match (self.kind, self.vhlo, count) {
            (Kind::CustomCall, true, _) => &[
                ("api_version", true),
                ("backend_config", true),
                ("call_target_name", true),
                ("called_computations", true),
            ],
            (Kind::CustomCall, false, _) => &[
                ("api_version", false),
                ("backend_config", false),
                ("call_target_name", true),
                ("called_computations", false),
            ],
            (Kind::Function, true, _) => &[
                ("arg_attrs", true),
                ("function_type", true),
                ("res_attrs", true),
                ("sym_name", true),
                ("sym_visibility", true),
            ],
            (Kind::Function, false, ..=5) => &[
                ("arg_attrs", false),
                ("function_type", true),
                ("res_attrs", false),
                ("sym_name", true),
                ("sym_visibility", false),
            ],
            (Kind::Function, false, _) => &[
                ("arg_attrs", false),
                ("function_type", true),
                ("no_inline", false),
                ("res_attrs", false),
                ("sym_name", true),
                ("sym_visibility", false),
            ],
            (Kind::Call, true, _) | (Kind::Call, false, ..=1) => &[("callee", true)],
            (Kind::Call, false, _) => &[("arg_attrs", false), ("callee", true)],
            (Kind::Composite, vhlo, _) if vhlo => &[("composite_attributes", true), ("decomposition", true)],
            (Kind::Composite, ..) => &[("composite_attributes", false), ("decomposition", true)],
            (Kind::Other, ..) => &[],
        }
    }
}

/// What an operation's attributes say, kept per dictionary: many operations share one.
#[derive(Clone)]
enum Facts {
    Nothing,
    Call(Arc<[Arc<str>]>),
    Function { name: Option<Arc<str>>, private: bool },
    CustomCall { target: Arc<str>, api_version: i64, attributes: Members, computations: Arc<[Arc<str>]> },
}

/// Where an operation's attributes lie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Source {
    /// A dictionary with this index in the attribute table.
    Attribute(usize),
    /// The properties with this index, and a dictionary with the attributes that are not among them.
    Properties(usize, Option<usize>),
}

/// One operation's regions, while they are walked.
struct Frame {
    /// Regions that have not begun.
    regions: u64,
    /// Blocks of the present region that have not begun.
    blocks: u64,
    /// Operations of the present block that have not been read.
    operations: u64,
    /// True between the beginning and the end of a region.
    inside: bool,
    /// Whether the frame has a cursor and a scope of its own.
    own_cursor: bool,
    own_scope: bool,
    /// The number of the region's first value, of its next value, and of the first one after it.
    first: usize,
    next: usize,
    limit: usize,
    /// The function that this is in.
    function: Option<usize>,
}

/// A value that no operation has defined (yet).
const UNKNOWN: u32 = u32::MAX;
/// Longer names of functions and targets are refused.
const MAX_NAME: usize = 4096;
/// More functions than this in one operation's list are not followed.
const MAX_COMPUTATIONS: usize = 64;

/// The walk over the operations.
struct Walk<'a> {
    version: u64,
    operations: Vec<Operation>,
    properties: Vec<Cursor<'a>>,
    table: Table<'a>,
    /// How many more values regions may define.
    budget: usize,
    /// The sections that are being read, innermost last.
    cursors: Vec<Cursor<'a>>,
    /// Per isolated region: the index of each value's type.
    scopes: Vec<Vec<u32>>,
    frames: Vec<Frame>,
    memo: HashMap<(Operation, Source), Facts>,
    functions: Functions,
    /// The calls, each with the function it is in.
    calls: Vec<(CustomCall, Option<usize>)>,
    order: usize,
}

impl<'a> Walk<'a> {
    fn run(&mut self) -> Result<()> {
        // The section is the one block of a region that nothing surrounds.
        self.frames.push(Frame {
            regions: 0,
            blocks: 0,
            operations: 0,
            inside: true,
            own_cursor: true,
            own_scope: true,
            first: 0,
            next: 0,
            limit: 0,
            function: None,
        });
        self.block()?;
        while let Some(frame) = self.frames.last_mut() {
            if !frame.inside {
                if frame.regions == 0 {
                    self.leave();
                    continue;
                }
                frame.regions -= 1;
                self.region()?;
            } else if frame.operations > 0 {
                frame.operations -= 1;
                self.operation()?;
            } else if frame.blocks > 0 {
                frame.blocks -= 1;
                self.block()?;
            } else {
                frame.inside = false;
                let first = frame.first;
                if let Some(scope) = self.scopes.last_mut() {
                    scope.truncate(first);
                }
            }
        }
        Ok(())
    }

    /// The calls, with how often each is reached.
    fn finish(self) -> Vec<CustomCall> {
        let reached = self.functions.reached();
        self.calls
            .into_iter()
            .map(|(mut call, function)| {
                call.sites = function.map_or(1, |function| reached[function]);
                call.function = function.and_then(|function| self.functions.name(function));
                call
            })
            .collect()
    }

    /// The section that is being read. It is copied out, and put back with [`Self::advance`].
    fn cursor(&self) -> Cursor<'a> {
        self.cursors.last().copied().unwrap_or(Cursor { file: &[], at: 0, end: 0 })
    }

    fn advance(&mut self, to: Cursor<'a>) {
        if let Some(cursor) = self.cursors.last_mut() {
            *cursor = to;
        }
    }

    /// Leaves the regions of an operation.
    fn leave(&mut self) {
        if let Some(frame) = self.frames.pop() {
            if frame.own_cursor {
                self.cursors.pop();
            }
            if frame.own_scope {
                self.scopes.pop();
            }
        }
    }

    /// Begins a region, up to and including the head of its first block.
    fn region(&mut self) -> Result<()> {
        let mut cursor = self.cursor();
        let blocks = cursor.varint()?;
        if blocks == 0 {
            self.advance(cursor);
            return Ok(());
        }
        let values = cursor.varint()?;
        let values = match usize::try_from(values) {
            Ok(values) if values <= self.budget => values,
            _ => return Err(cursor.error(format_args!("a region of {values} values in a file of this size"))),
        };
        self.budget -= values;
        if let (Some(frame), Some(scope)) = (self.frames.last_mut(), self.scopes.last_mut()) {
            frame.inside = true;
            frame.blocks = blocks - 1;
            frame.first = scope.len();
            frame.next = frame.first;
            frame.limit = frame.first + values;
            scope.resize(frame.limit, UNKNOWN);
        }
        self.advance(cursor);
        self.block()
    }

    /// Begins a block: reads its head, and defines its arguments.
    fn block(&mut self) -> Result<()> {
        let mut cursor = self.cursor();
        let (operations, arguments) = cursor.flagged()?;
        if let Some(frame) = self.frames.last_mut() {
            frame.operations = operations;
        }
        if arguments {
            let count = cursor.count("block arguments")?;
            for _ in 0..count {
                let (kind, located) =
                    if self.version < since::ELIDED_LOCATIONS { (cursor.varint()?, true) } else { cursor.flagged()? };
                let kind = cursor.checked(kind, self.table.type_count(), "type")?;
                if located {
                    cursor.index(self.table.attribute_count(), "location")?;
                }
                self.define(&cursor, kind)?;
            }
            if self.version >= since::USE_LIST_ORDER && cursor.byte()? != 0 {
                use_list_order(&mut cursor, count)?;
            }
        }
        self.advance(cursor);
        Ok(())
    }

    /// Gives the region's next value its type.
    fn define(&mut self, cursor: &Cursor<'_>, kind: usize) -> Result<()> {
        let (Some(frame), Some(scope)) = (self.frames.last_mut(), self.scopes.last_mut()) else { return Ok(()) };
        if frame.limit == frame.first {
            return Ok(()); // A region that numbers no values, such as a module's.
        }
        if frame.next >= frame.limit {
            return Err(cursor.error("a region defines more values than it announced"));
        }
        scope[frame.next] = u32::try_from(kind).unwrap_or(UNKNOWN);
        frame.next += 1;
        Ok(())
    }

    /// Reads one operation, and enters its regions if it has any.
    fn operation(&mut self) -> Result<()> {
        let mut cursor = self.cursor();
        let named = self.operations[cursor.index(self.operations.len(), "operation name")?];
        let parts = cursor.byte()?;
        let (attributes, types) = (self.table.attribute_count(), self.table.type_count());
        cursor.index(attributes, "location")?;
        let mut source = None;
        let mut dictionary = None;
        if parts & mask::ATTRIBUTES != 0 {
            let index = cursor.index(attributes, "attribute")?;
            dictionary = Some(index);
            source = Some(Source::Attribute(index));
        }
        if parts & mask::PROPERTIES != 0 {
            if named.registered {
                let index = cursor.index(self.properties.len(), "properties")?;
                source = Some(Source::Properties(index, dictionary));
            } else {
                source = Some(Source::Attribute(cursor.index(attributes, "attribute")?));
            }
        }
        let facts = self.facts(named, source, &cursor)?;
        let wanted = matches!(facts, Facts::CustomCall { .. });
        let mut results = Vec::new();
        let mut result_count = 0;
        if parts & mask::RESULTS != 0 {
            result_count = cursor.count("results")?;
            for _ in 0..result_count {
                let result = cursor.index(types, "type")?;
                if wanted {
                    results.push(self.table.value_type(result)?);
                }
                self.define(&cursor, result)?;
            }
        }
        let mut operands = Vec::new();
        if parts & mask::OPERANDS != 0 {
            for _ in 0..cursor.count("operands")? {
                let value = cursor.varint()?;
                if wanted {
                    operands.push(self.operand(&cursor, value)?);
                }
            }
        }
        if parts & mask::SUCCESSORS != 0 {
            for _ in 0..cursor.count("successors")? {
                cursor.varint()?;
            }
        }
        if self.version >= since::USE_LIST_ORDER && parts & mask::USE_LIST_ORDER != 0 {
            use_list_order(&mut cursor, result_count)?;
        }
        let (regions, isolated) = if parts & mask::REGIONS != 0 { cursor.flagged()? } else { (0, false) };
        let function = self.note(facts, operands, results);
        if regions == 0 {
            self.advance(cursor);
            return Ok(());
        }
        let own_cursor = isolated && self.version >= since::LAZY_REGIONS;
        let inner = own_cursor.then(|| cursor.section()).transpose()?;
        self.advance(cursor);
        if let Some((number, content)) = inner {
            if number != section::IR {
                return Err(content.error(format_args!("section {number} where a region's (4) should be")));
            }
            self.cursors.push(content);
        }
        if isolated {
            self.scopes.push(Vec::new());
        }
        self.frames.push(Frame {
            regions,
            blocks: 0,
            operations: 0,
            inside: false,
            own_cursor,
            own_scope: isolated,
            first: 0,
            next: 0,
            limit: 0,
            function,
        });
        Ok(())
    }

    /// The type of a value.
    fn operand(&mut self, cursor: &Cursor<'_>, value: u64) -> Result<Arc<ValueType>> {
        let scope = self.scopes.last().map_or(&[][..], Vec::as_slice);
        let kind = scope[cursor.checked(value, scope.len(), "value")?];
        // StableHLO has no use before a definition, so this stays unknown only in other people's dialects.
        if kind == UNKNOWN { Ok(Arc::new(ValueType::Other("?".into()))) } else { self.table.value_type(kind as usize) }
    }

    /// Keeps what an operation says; gives the function that its regions are in.
    fn note(&mut self, facts: Facts, operands: Vec<Arc<ValueType>>, results: Vec<Arc<ValueType>>) -> Option<usize> {
        let function = self.frames.last().and_then(|frame| frame.function);
        match facts {
            Facts::Nothing => {}
            Facts::Function { name, private } => return Some(self.functions.add(name, private)),
            Facts::Call(callees) => self.edges(function, &callees),
            Facts::CustomCall { target, api_version, attributes, computations } => {
                self.edges(function, &computations);
                let module = self.order;
                let call =
                    CustomCall { target, module, function: None, operands, results, api_version, attributes, sites: 0 };
                self.calls.push((call, function));
            }
        }
        function
    }

    fn edges(&mut self, function: Option<usize>, callees: &[Arc<str>]) {
        if let Some(function) = function {
            for callee in callees {
                self.functions.call(function, callee);
            }
        }
    }

    fn facts(&mut self, operation: Operation, source: Option<Source>, at: &Cursor<'_>) -> Result<Facts> {
        let kind = operation.kind;
        if kind == Kind::Other {
            return Ok(Facts::Nothing);
        }
        let Some(source) = source else {
            return Err(at.error(format_args!("{kind:?} without attributes")));
        };
        if let Some(facts) = self.memo.get(&(operation, source)) {
            return Ok(facts.clone());
        }
        let members = self.members(operation, source)?;
        let name = |key: &str| match member(&members, key).map(symbol) {
            Some(Ok(name)) => Ok(name),
            Some(Err(bytes)) => Err(at.error(format_args!("{key} of {bytes} bytes, at most {MAX_NAME}"))),
            None => Err(at.error(format_args!("{kind:?} without {key}"))),
        };
        let facts = match kind {
            Kind::Other => Facts::Nothing,
            Kind::Call => Facts::Call(Arc::from([name("callee")?])),
            Kind::Composite => Facts::Call(Arc::from([name("decomposition")?])),
            Kind::Function => {
                let visibility = member(&members, "sym_visibility");
                let private = matches!(visibility, Some(Attribute::Text(text)) if **text == *b"private");
                Facts::Function { name: Some(name("sym_name")?), private }
            }
            Kind::CustomCall => {
                let computations = match member(&members, "called_computations") {
                    Some(Attribute::List(list)) => list.iter().take(MAX_COMPUTATIONS).flat_map(symbol).collect(),
                    _ => Arc::from([]),
                };
                let (api_version, attributes) = super::call_attributes(&members);
                Facts::CustomCall { target: name("call_target_name")?, api_version, attributes, computations }
            }
        };
        self.memo.insert((operation, source), facts.clone());
        Ok(facts)
    }

    /// All attributes of an operation.
    fn members(&mut self, operation: Operation, source: Source) -> Result<Members> {
        let dictionary = |table: &mut Table<'_>, index| match table.attribute(index)? {
            Attribute::Dictionary(members) => Ok(members),
            _ => Err(Error::invalid(format!("MLIR bytecode: attribute {index} should be a dictionary"))),
        };
        match source {
            Source::Attribute(index) => dictionary(&mut self.table, index),
            Source::Properties(index, rest) => {
                let mut members = match rest {
                    Some(rest) => dictionary(&mut self.table, rest)?.to_vec(),
                    None => Vec::new(),
                };
                let mut content = self.properties[index];
                let mut counted = content;
                let mut count = 0;
                while !counted.is_empty() {
                    counted.varint()?;
                    count += 1;
                }
                for &(name, always) in operation.layout(count) {
                    let value = content.varint()?;
                    // What may be absent is an index with a flag, or 0.
                    let index = match (always, value & 1) {
                        (true, _) => value,
                        (false, 1) => value >> 1,
                        (false, _) => continue,
                    };
                    let index = content.checked(index, self.table.attribute_count(), "attribute")?;
                    members.push((name.into(), self.table.attribute(index)?));
                }
                Ok(members.into())
            }
        }
    }
}

/// The name that an attribute is, or its length if that is too long (0: it is no name).
fn symbol(attribute: &Attribute) -> std::result::Result<Arc<str>, usize> {
    match attribute {
        Attribute::Text(name) if name.len() <= MAX_NAME => Ok(Arc::from(String::from_utf8_lossy(name))),
        Attribute::Text(name) => Err(name.len()),
        _ => Err(0),
    }
}

/// Steps over the order of the uses of `values` values.
fn use_list_order(cursor: &mut Cursor<'_>, values: usize) -> Result<()> {
    let orders = if values > 1 { cursor.count("use-list orders")? } else { 1 };
    for _ in 0..orders {
        if values > 1 {
            cursor.varint()?;
        }
        let (count, _) = cursor.flagged()?;
        for _ in 0..count {
            cursor.varint()?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn varint(value: u64) -> Vec<u8> {
        match u8::try_from(value) {
            Ok(small) if small < 0x80 => vec![small << 1 | 1],
            _ => [vec![0], value.to_le_bytes().to_vec()].concat(),
        }
    }

    fn varints(values: &[u64]) -> Vec<u8> {
        values.iter().flat_map(|&value| varint(value)).collect()
    }

    fn signed(value: i64) -> u64 {
        u64::from_le_bytes(((value << 1) ^ (value >> 63)).to_le_bytes())
    }

    fn section_bytes(number: u8, content: &[u8]) -> Vec<u8> {
        [vec![number], varint(content.len() as u64), content.to_vec()].concat()
    }

    /// The parts of a module; a test changes one of them.
    struct Parts {
        version: u64,
        strings: Vec<&'static [u8]>,
        attributes: Vec<Vec<u8>>,
        types: Vec<Vec<u8>>,
        ir: Vec<u8>,
    }

    impl Parts {
        /// A module with a function `main` that has a loop in which `tp_forward` is called with the function's argument.
        fn new(version: u64) -> Self {
            let strings: Vec<&[u8]> = vec![
                b"builtin",
                b"stablehlo",
                b"func",
                b"module",
                b"while",
                b"custom_call",
                b"sym_name",
                b"main",
                b"call_target_name",
                b"tp_forward",
                b"mhlo.backend_config",
                b"hash",
                b"kernel",
                b"{\"k\0\"}",
            ];
            let text = |index: u64| varints(&[2, index]);
            let attributes = vec![
                varint(15),                    // 0: an unknown location
                text(6),                       // 1: sym_name
                text(7),                       // 2: main
                varints(&[1, 1, 1, 2]),        // 3: {sym_name = "main"}
                text(8),                       // 4: call_target_name
                text(9),                       // 5: tp_forward
                text(10),                      // 6: mhlo.backend_config
                text(11),                      // 7: hash
                varints(&[8, 2, signed(-5)]),  // 8: -5 : i64
                text(12),                      // 9: kernel
                text(13),                      // 10: the payload
                varints(&[1, 2, 7, 8, 9, 10]), // 11: {hash = ..., kernel = ...}
                varints(&[1, 2, 4, 5, 6, 11]), // 12: the call's attributes
            ];
            let types = vec![
                varint(5),                                         // 0: f32
                varints(&[13, 2, signed(3), signed(i64::MIN), 0]), // 1: tensor<3x?xf32>
                varints(&[0, 64 << 2]),                            // 2: i64
            ];
            Self { version, strings, attributes, types, ir: Self::operations(version) }
        }

        fn operations(version: u64) -> Vec<u8> {
            let body = |blocks: &[u8], values: u64| [varint(1), varint(values), blocks.to_vec()].concat();
            let isolated = |region: Vec<u8>| {
                let head = varint(1 << 1 | 1);
                if version < since::LAZY_REGIONS {
                    [head, region].concat()
                } else {
                    [head, section_bytes(section::IR, &region)].concat()
                }
            };
            let operation = |name: u64, parts: u8, rest: Vec<u8>| [varint(name), vec![parts], varint(0), rest].concat();
            // The call: two results, of which the second has its uses reordered, and the argument twice.
            let mut rest = varints(&[12, 2, 1, 0, 2, 0, 0]);
            let mut parts = mask::ATTRIBUTES | mask::RESULTS | mask::OPERANDS;
            if version >= since::USE_LIST_ORDER {
                parts |= mask::USE_LIST_ORDER;
                rest.extend(varints(&[1, 1, 2 << 1, 1, 0]));
            }
            let call = operation(2, parts, rest);
            let looped = body(&[varint(1 << 1), call].concat(), 2);
            let a_loop = operation(1, mask::REGIONS, [varint(1 << 1), looped].concat());
            let argument = if version < since::ELIDED_LOCATIONS { varints(&[1, 0]) } else { varint(1 << 1) };
            let order = if version < since::USE_LIST_ORDER { vec![] } else { vec![0] };
            let block = [varint(1 << 1 | 1), varint(1), argument, order, a_loop].concat();
            let function =
                operation(3, mask::ATTRIBUTES | mask::REGIONS, [varint(3), isolated(body(&block, 1))].concat());
            let module = operation(0, mask::REGIONS, isolated(body(&[varint(1 << 1), function].concat(), 0)));
            [varint(1 << 1), module].concat()
        }

        fn bytes(&self) -> Vec<u8> {
            let version = self.version;
            let mut strings = varint(self.strings.len() as u64);
            strings.extend(self.strings.iter().rev().flat_map(|text| varint(text.len() as u64 + 1)));
            strings.extend(self.strings.iter().flat_map(|text| [text, &b"\0"[..]].concat()));
            let flagged = |since: u64, index: u64| varint(if version < since { index } else { index << 1 });
            let mut dialects = varint(3);
            dialects.extend([0, 1, 2].iter().flat_map(|&name| flagged(since::DIALECT_VERSIONS, name)));
            if version >= since::ELIDED_LOCATIONS {
                dialects.extend(varint(4));
            }
            for (dialect, names) in [(0, &[3][..]), (1, &[4, 5]), (2, &[2])] {
                dialects.extend(varints(&[dialect, names.len() as u64]));
                dialects.extend(names.iter().flat_map(|&name| flagged(since::PROPERTIES, name)));
            }
            let mut offsets = varints(&[self.attributes.len() as u64, self.types.len() as u64]);
            for entries in [&self.attributes, &self.types] {
                offsets.extend(varints(&[0, entries.len() as u64]));
                offsets.extend(entries.iter().flat_map(|entry| varint((entry.len() as u64) << 1 | 1)));
            }
            let data = [self.attributes.concat(), self.types.concat()].concat();
            let mut bytes = [MAGIC, &varint(version), b"test\0"].concat();
            for (number, content) in [
                (section::STRINGS, strings),
                (section::DIALECTS, dialects),
                (section::ATTRIBUTES, data),
                (section::ATTRIBUTE_OFFSETS, offsets),
                (section::IR, self.ir.clone()),
            ] {
                bytes.extend(section_bytes(number, &content));
            }
            bytes
        }
    }

    #[test]
    fn integers_of_every_length_are_read() {
        let mut bytes = Vec::new();
        let mut expected = Vec::new();
        for more in 0..8_u32 {
            // The largest value with so many bytes after the first.
            let value = (1_u64 << (7 * (more + 1))) - 1;
            let coded = (u128::from(value) << (more + 1)) | (1 << more);
            bytes.extend_from_slice(&coded.to_le_bytes()[..=more as usize]);
            expected.push(value);
        }
        bytes.push(0);
        bytes.extend_from_slice(&u64::MAX.to_le_bytes());
        expected.push(u64::MAX);
        let mut cursor = Cursor::new(&bytes);
        let read: Vec<u64> = expected.iter().map(|_| cursor.varint().unwrap()).collect();
        assert_eq!(read, expected);
        assert!(cursor.is_empty() && cursor.varint().is_err());
        for value in [0, -1, 1, i64::MIN, i64::MAX] {
            assert_eq!(Cursor::new(&varint(signed(value))).signed().unwrap(), value);
        }
    }

    #[test]
    fn every_version_says_the_same() {
        for version in 0..=NEWEST_VERSION {
            let (facts, calls) = read(&Parts::new(version).bytes(), 7).unwrap();
            assert_eq!((facts.version, facts.producer.as_str()), (version, "test"));
            assert_eq!(facts.dialects, ["builtin", "stablehlo", "func"]);
            let [call] = &calls[..] else { unreachable!("{} calls", calls.len()) };
            assert_eq!((&*call.target, call.function.as_deref(), call.sites), ("tp_forward", Some("main"), 1));
            assert_eq!((call.module, call.api_version), (7, 4));
            let types = |types: &[Arc<ValueType>]| types.iter().map(ToString::to_string).collect::<Vec<_>>();
            assert_eq!(types(&call.operands), ["f32[3,?]", "f32[3,?]"]);
            assert_eq!(types(&call.results), ["f32[3,?]", "f32"]);
            assert!(matches!(call.attribute("hash"), Some(Attribute::Int(-5))));
            assert!(matches!(call.attribute("kernel"), Some(Attribute::Text(text)) if **text == *b"{\"k\0\"}"));
        }
    }

    #[test]
    fn damage_is_an_error_that_says_where() {
        let refused = |change: &dyn Fn(&mut Parts), text: &str| {
            let mut parts = Parts::new(6);
            change(&mut parts);
            let error = read(&parts.bytes(), 0).unwrap_err();
            assert!(error.message().contains(text) && error.message().contains("MLIR bytecode"), "{error}");
        };
        refused(&|parts| parts.attributes[12] = varints(&[1, 2, 4, 5, 6, 12]), "nested more than");
        refused(&|parts| parts.attributes[12] = varints(&[1, u64::MAX, 4, 5]), "dictionary members");
        refused(&|parts| parts.attributes[12] = varints(&[1, 1, 4, 99]), "attribute 99 of 13");
        refused(
            &|parts| parts.attributes[12] = [varints(&[1, 4097]), varints(&[4, 5]).repeat(4097)].concat(),
            "at most 4096",
        );
        refused(&|parts| parts.attributes[12] = varints(&[1, 1, 6, 11]), "without call_target_name");
        refused(&|parts| parts.attributes[5] = varints(&[2, 99]), "string 99 of 14");
        refused(&|parts| parts.types[1] = varints(&[13, 1 << 40]), "dimensions");
        refused(&|parts| parts.types[1] = varints(&[13, 0, 1]), "nested more than");
        refused(&|parts| parts.strings[9] = &[b'x'; MAX_NAME + 1], "call_target_name of 4097 bytes");
        refused(&|parts| parts.ir = varint(3 << 1), "cut short");
        // A region that claims more values than the file has bytes.
        let huge = [varint(1 << 1), varint(0), vec![mask::REGIONS], varints(&[0, 2, 1, 1 << 40, 0])].concat();
        refused(&|parts| parts.ir.clone_from(&huge), "values in a file of this size");
        let whole = Parts::new(6).bytes();
        let twice = [whole.clone(), section_bytes(section::IR, b"")].concat();
        assert!(read(&twice, 0).unwrap_err().message().contains("a second section 4"));
        for end in 0..whole.len() {
            assert!(read(&whole[..end], 0).is_err(), "{end}");
        }
    }

    fn table<'a>(strings: &[&'a [u8]], attributes: &'a [Vec<u8>], types: &'a [Vec<u8>]) -> Table<'a> {
        let entry = |bytes: &'a Vec<u8>| Entry { content: Cursor::new(bytes), dialect: Dialect::Builtin, custom: true };
        Table::new(strings.to_vec(), attributes.iter().map(entry).collect(), types.iter().map(entry).collect())
    }

    #[test]
    fn how_deep_entries_nest_does_not_depend_on_who_asks_first() {
        // Each holds the one before: an array, and a complex type.
        let attributes: Vec<Vec<u8>> =
            (0..100).map(|i: u64| varints(&[0, 1, i.saturating_sub(1)][..2 + usize::from(i > 0)])).collect();
        let attributes = [vec![varints(&[7])], attributes[1..].to_vec()].concat();
        let types: Vec<Vec<u8>> =
            (0..100).map(|i: u64| if i == 0 { varint(5) } else { varints(&[9, i - 1]) }).collect();
        let mut entries = table(&[], &attributes, &types);
        let deep = |index: usize| index >= 32;
        for index in 0..100 {
            assert_eq!(entries.attribute(index).is_err(), deep(index), "{index}");
            assert_eq!(entries.value_type(index).is_err(), deep(index), "{index}");
        }
        let mut entries = table(&[], &attributes, &types);
        for index in (0..100).rev() {
            assert_eq!(entries.attribute(index).is_err(), deep(index), "{index}");
            assert_eq!(entries.value_type(index).is_err(), deep(index), "{index}");
        }
    }

    #[test]
    fn names_that_come_again_are_one() {
        let long = vec![b'n'; 1 << 20];
        // 0: the name; 1: a unit; 2: { name = unit } four thousand times; 3: another attribute of the same string.
        let many = [varints(&[1, 4000]), [varints(&[0, 1]), varints(&[3, 1])].concat().repeat(2000)].concat();
        let attributes = [varints(&[2, 0]), varints(&[7]), many, varints(&[2, 0])];
        let mut entries = table(&[&long], &attributes, &[]);
        let Attribute::Dictionary(members) = entries.attribute(2).unwrap() else { unreachable!() };
        assert_eq!((members.len(), members[0].0.len()), (4000, 1 << 20));
        assert!(members.iter().all(|(name, _)| Arc::ptr_eq(name, &members[0].0)));
    }

    #[test]
    fn nesting_takes_no_stack() {
        // Each level is an operation with one region of one block that holds one operation.
        let level = [varint(1), vec![mask::REGIONS], varints(&[0, 2, 1, 0, 2])].concat();
        let mut parts = Parts::new(6);
        parts.ir = [varint(2), level.repeat(200_000)].concat();
        assert!(read(&parts.bytes(), 0).unwrap_err().message().contains("cut short"));
        parts.ir.extend([varint(1), vec![0], varint(0)].concat());
        assert!(read(&parts.bytes(), 0).unwrap().1.is_empty());
    }
}
