//! The attributes and types in MLIR bytecode, decoded when they are first asked for.
//!
//! Each entry belongs to a dialect, and begins with a code that this dialect gives a meaning. Known are those codes of
//! the dialects `builtin` and `vhlo` (what portable `StableHLO` artifacts are written in) that a custom call's attributes
//! and operands are made of; everything else is [`Attribute::Other`]. Entries refer to each other by index, so what is
//! decoded is a graph: shared parts stay shared, and one that is deeper than anybody writes is refused, in whatever order
//! its parts are asked for.

use std::collections::HashMap;
use std::sync::Arc;

use super::bytecode::Cursor;
use super::{Attribute, Members, ValueType, text};
use crate::error::Result;

/// How deep attributes and types may nest.
const MAX_DEPTH: usize = 32;
/// How many members a dictionary may have. They are searched one by one, for every operation that has the dictionary.
const MAX_MEMBERS: usize = 4096;
/// How much of a type's text is kept where only a text is known.
const MAX_TEXT: usize = 200;

/// Codes of attributes and types in the builtin dialect.
mod builtin {
    pub(super) const ARRAY: u64 = 0;
    pub(super) const DICTIONARY: u64 = 1;
    pub(super) const STRING: u64 = 2;
    pub(super) const TYPED_STRING: u64 = 3;
    pub(super) const SYMBOL: u64 = 4;
    pub(super) const UNIT: u64 = 7;
    pub(super) const INTEGER: u64 = 8;

    pub(super) const INTEGER_TYPE: u64 = 0;
    pub(super) const SIGNLESS: u64 = 0;
    pub(super) const UNSIGNED: u64 = 2;
    pub(super) const INDEX_TYPE: u64 = 1;
    pub(super) const COMPLEX_TYPE: u64 = 9;
    pub(super) const TENSOR_TYPE: u64 = 13;
    pub(super) const ENCODED_TENSOR_TYPE: u64 = 14;
    pub(super) const UNRANKED_TENSOR_TYPE: u64 = 18;
    /// Types that are only a code.
    pub(super) const PLAIN_TYPES: &[(u64, &str)] =
        &[(1, "index"), (3, "bf16"), (4, "f16"), (5, "f32"), (6, "f64"), (7, "f80"), (8, "f128"), (12, "none")];
}

/// Codes of attributes and types in the dialect `vhlo`.
mod vhlo {
    pub(super) const ARRAY: u64 = 1;
    pub(super) const BOOLEAN: u64 = 2;
    pub(super) const API_VERSION: u64 = 5;
    pub(super) const DICTIONARY: u64 = 6;
    pub(super) const INTEGER: u64 = 9;
    pub(super) const STRING: u64 = 14;

    pub(super) const COMPLEX_TYPE: u64 = 1;
    pub(super) const INDEX_TYPE: u64 = 9;
    pub(super) const TENSOR_TYPE: u64 = 20;
    pub(super) const ENCODED_TENSOR_TYPE: u64 = 21;
    pub(super) const UNRANKED_TENSOR_TYPE: u64 = 25;
    /// Types that are only a code, with the width of those that are integers.
    pub(super) const PLAIN_TYPES: &[(u64, &str, u64)] = &[
        (0, "i1", 1),
        (2, "bf16", 0),
        (3, "f16", 0),
        (4, "f32", 0),
        (5, "f64", 0),
        (6, "f8E4M3FN", 0),
        (7, "f8E5M2", 0),
        (INDEX_TYPE, "index", 64),
        (10, "i4", 4),
        (11, "i8", 8),
        (12, "i16", 16),
        (13, "i32", 32),
        (14, "i64", 64),
        (15, "ui4", 4),
        (16, "ui8", 8),
        (17, "ui16", 16),
        (18, "ui32", 32),
        (19, "ui64", 64),
        (22, "!stablehlo.token", 0),
        (27, "f8E4M3FNUZ", 0),
        (28, "f8E5M2FNUZ", 0),
        (29, "f8E4M3B11FNUZ", 0),
        (31, "i2", 2),
        (32, "ui2", 2),
        (33, "none", 0),
        (34, "tf32", 0),
        (35, "f8E4M3", 0),
        (36, "f8E3M4", 0),
        (37, "f4E2M1FN", 0),
        (38, "f6E2M3FN", 0),
        (39, "f6E3M2FN", 0),
        (40, "f8E8M0FNU", 0),
    ];
}

/// Whose codes an entry is written in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Dialect {
    Builtin,
    Vhlo,
    Other,
}

impl Dialect {
    pub(super) fn of(name: &[u8]) -> Self {
        match name {
            b"builtin" => Self::Builtin,
            b"vhlo" => Self::Vhlo,
            _ => Self::Other,
        }
    }
}

/// Where an attribute or a type lies.
pub(super) struct Entry<'a> {
    pub(super) content: Cursor<'a>,
    pub(super) dialect: Dialect,
    /// Written in the dialect's codes, else as text.
    pub(super) custom: bool,
}

/// What a code turned out to mean, across dialects.
enum Shape {
    Array,
    Dictionary,
    Text,
    Symbol,
    Integer,
    Varint,
    Unit,
    Other,
}

/// How deep an entry lies inside others, and how many lie inside one another in it.
#[derive(Default)]
struct Depth {
    outside: usize,
    inside: usize,
}

impl Depth {
    /// That of a part: an entry, which is as high as is known by now. Refused where this would be too deep.
    fn enter<T>(&mut self, entry: &Entry<'_>, known: Option<&(T, usize)>, what: &str) -> Result<Self> {
        let height = known.map_or(1, |(_, height)| *height);
        self.inside = self.inside.max(height);
        if self.outside + height > MAX_DEPTH {
            return Err(entry.content.error(format_args!("{what} nested more than {MAX_DEPTH} deep")));
        }
        Ok(Self { outside: self.outside + 1, inside: 0 })
    }

    /// How high a part has turned out to be.
    fn leave(&mut self, part: &Self) -> usize {
        let height = part.inside + 1;
        self.inside = self.inside.max(height);
        height
    }
}

/// A string that several attributes may be.
type Shared = Arc<[u8]>;

/// What an entry was decoded to, and how many entries lie inside one another in it.
type Known<T> = Option<(T, usize)>;

/// The tables of strings, attributes and types.
pub(super) struct Table<'a> {
    strings: Vec<(&'a [u8], Option<Shared>)>,
    attributes: Vec<(Entry<'a>, Known<Attribute>)>,
    types: Vec<(Entry<'a>, Known<Arc<ValueType>>)>,
    /// Names of dictionaries' members, by the address of their string.
    names: HashMap<*const u8, Arc<str>>,
}

impl<'a> Table<'a> {
    pub(super) fn new(strings: Vec<&'a [u8]>, attributes: Vec<Entry<'a>>, types: Vec<Entry<'a>>) -> Self {
        Self {
            strings: strings.into_iter().map(|text| (text, None)).collect(),
            attributes: attributes.into_iter().map(|entry| (entry, None)).collect(),
            types: types.into_iter().map(|entry| (entry, None)).collect(),
            names: HashMap::new(),
        }
    }

    pub(super) fn attribute_count(&self) -> usize {
        self.attributes.len()
    }

    pub(super) fn type_count(&self) -> usize {
        self.types.len()
    }

    /// The attribute with this index, which must be within [`Self::attribute_count`].
    pub(super) fn attribute(&mut self, index: usize) -> Result<Attribute> {
        self.attribute_at(index, &mut Depth::default())
    }

    /// The type with this index, which must be within [`Self::type_count`].
    pub(super) fn value_type(&mut self, index: usize) -> Result<Arc<ValueType>> {
        self.type_at(index, &mut Depth::default())
    }

    fn attribute_below(&mut self, cursor: &mut Cursor<'_>, outer: &mut Depth) -> Result<Attribute> {
        let index = cursor.index(self.attributes.len(), "attribute")?;
        self.attribute_at(index, outer)
    }

    fn attribute_at(&mut self, index: usize, outer: &mut Depth) -> Result<Attribute> {
        let (entry, known) = &self.attributes[index];
        let mut depth = outer.enter(entry, known.as_ref(), "attributes")?;
        if let Some((known, _)) = known {
            return Ok(known.clone());
        }
        let mut cursor = entry.content;
        let shape = match (entry.custom, entry.dialect) {
            (true, Dialect::Builtin) => match cursor.varint()? {
                builtin::ARRAY => Shape::Array,
                builtin::DICTIONARY => Shape::Dictionary,
                builtin::STRING | builtin::TYPED_STRING => Shape::Text,
                builtin::SYMBOL => Shape::Symbol,
                builtin::INTEGER => Shape::Integer,
                builtin::UNIT => Shape::Unit,
                _ => Shape::Other,
            },
            (true, Dialect::Vhlo) => match cursor.varint()? {
                vhlo::ARRAY => Shape::Array,
                vhlo::DICTIONARY => Shape::Dictionary,
                vhlo::STRING => Shape::Text,
                vhlo::INTEGER => Shape::Integer,
                vhlo::BOOLEAN | vhlo::API_VERSION => Shape::Varint,
                _ => Shape::Other,
            },
            _ => Shape::Other,
        };
        let attribute = match shape {
            Shape::Array => {
                let count = cursor.count("array elements")?;
                let elements: Result<Arc<[_]>> =
                    (0..count).map(|_| self.attribute_below(&mut cursor, &mut depth)).collect();
                Attribute::List(elements?)
            }
            Shape::Dictionary => Attribute::Dictionary(self.dictionary(&mut cursor, &mut depth)?),
            Shape::Text => {
                let index = cursor.index(self.strings.len(), "string")?;
                Attribute::Text(self.text(index))
            }
            Shape::Symbol => self.attribute_below(&mut cursor, &mut depth)?,
            Shape::Integer => self.integer(&mut cursor)?,
            Shape::Varint => Attribute::Int(i64::try_from(cursor.varint()?).unwrap_or(i64::MAX)),
            Shape::Unit => Attribute::Int(1),
            Shape::Other => Attribute::Other,
        };
        self.attributes[index].1 = Some((attribute.clone(), outer.leave(&depth)));
        Ok(attribute)
    }

    fn dictionary(&mut self, cursor: &mut Cursor<'_>, depth: &mut Depth) -> Result<Members> {
        let count = cursor.count("dictionary members")?;
        if count > MAX_MEMBERS {
            return Err(cursor.error(format_args!("a dictionary of {count} members, at most {MAX_MEMBERS}")));
        }
        let mut members = Vec::with_capacity(count);
        for _ in 0..count {
            let Attribute::Text(name) = self.attribute_below(cursor, depth)? else {
                return Err(cursor.error("the name of a dictionary's member is no string"));
            };
            let value = self.attribute_below(cursor, depth)?;
            // Strings are decoded once and live as long as the table, so an address is one string's.
            let text = || Arc::from(String::from_utf8_lossy(&name));
            members.push((Arc::clone(self.names.entry(name.as_ptr()).or_insert_with(text)), value));
        }
        Ok(members.into())
    }

    /// An integer: its type, then the value in a form that the type's width picks.
    fn integer(&mut self, cursor: &mut Cursor<'_>) -> Result<Attribute> {
        let kind = cursor.index(self.types.len(), "type")?;
        let Some((width, unsigned)) = self.integer_type(kind)? else { return Ok(Attribute::Other) };
        Ok(match (width, unsigned) {
            (65.., _) => Attribute::Other,
            (0..=8, true) => Attribute::Int(i64::from(cursor.byte()?)),
            (0..=8, false) => Attribute::Int(i64::from(i8::from_le_bytes([cursor.byte()?]))),
            _ => match cursor.signed()? {
                ..0 if unsigned => Attribute::Other, // 2^63 and more.
                value => Attribute::Int(value),
            },
        })
    }

    /// The width of an integer type in bits, and whether it has no sign. A truth value counts as having none.
    fn integer_type(&self, index: usize) -> Result<Option<(u64, bool)>> {
        let entry = &self.types[index].0;
        let mut cursor = entry.content;
        if !entry.custom {
            return Ok(None);
        }
        Ok(match entry.dialect {
            Dialect::Builtin => match cursor.varint()? {
                builtin::INTEGER_TYPE => {
                    let form = cursor.varint()?;
                    Some((form >> 2, form & 3 == builtin::UNSIGNED || form >> 2 == 1))
                }
                builtin::INDEX_TYPE => Some((64, false)),
                _ => None,
            },
            Dialect::Vhlo => {
                let code = cursor.varint()?;
                let plain = vhlo::PLAIN_TYPES.iter().find(|plain| plain.0 == code && plain.2 > 0);
                plain.map(|&(_, name, width)| (width, name.starts_with('u') || width == 1))
            }
            Dialect::Other => None,
        })
    }

    fn text(&mut self, index: usize) -> Shared {
        let (text, shared) = &mut self.strings[index];
        Arc::clone(shared.get_or_insert_with(|| Arc::from(*text)))
    }

    fn type_at(&mut self, index: usize, outer: &mut Depth) -> Result<Arc<ValueType>> {
        let (entry, known) = &self.types[index];
        let depth = &mut outer.enter(entry, known.as_ref(), "types")?;
        if let Some((known, _)) = known {
            return Ok(Arc::clone(known));
        }
        let mut cursor = entry.content;
        let found = match (entry.custom, entry.dialect) {
            (false, _) => {
                let text = cursor.terminated()?;
                text::value_type(&String::from_utf8_lossy(&text[..text.len().min(MAX_TEXT)]))
            }
            (true, Dialect::Builtin) => match cursor.varint()? {
                builtin::INTEGER_TYPE => {
                    let form = cursor.varint()?;
                    let sign = match form & 3 {
                        builtin::SIGNLESS => "i",
                        builtin::UNSIGNED => "ui",
                        _ => "si",
                    };
                    ValueType::Other(format!("{sign}{}", form >> 2).into())
                }
                builtin::COMPLEX_TYPE => self.complex(&mut cursor, depth)?,
                builtin::TENSOR_TYPE => self.tensor(&mut cursor, false, depth)?,
                builtin::ENCODED_TENSOR_TYPE => self.tensor(&mut cursor, true, depth)?,
                builtin::UNRANKED_TENSOR_TYPE => self.unranked(&mut cursor, depth)?,
                code => plain(code, builtin::PLAIN_TYPES.iter().copied()),
            },
            (true, Dialect::Vhlo) => match cursor.varint()? {
                vhlo::COMPLEX_TYPE => self.complex(&mut cursor, depth)?,
                vhlo::TENSOR_TYPE => self.tensor(&mut cursor, false, depth)?,
                vhlo::ENCODED_TENSOR_TYPE => self.tensor(&mut cursor, true, depth)?,
                vhlo::UNRANKED_TENSOR_TYPE => self.unranked(&mut cursor, depth)?,
                code => plain(code, vhlo::PLAIN_TYPES.iter().map(|plain| (plain.0, plain.1))),
            },
            (true, Dialect::Other) => ValueType::Other("?".into()),
        };
        let found = Arc::new(found);
        self.types[index].1 = Some((Arc::clone(&found), outer.leave(depth)));
        Ok(found)
    }

    /// The text of the element type that comes next.
    fn element(&mut self, cursor: &mut Cursor<'_>, depth: &mut Depth) -> Result<Arc<str>> {
        let index = cursor.index(self.types.len(), "type")?;
        Ok(match &*self.type_at(index, depth)? {
            ValueType::Other(text) => Arc::clone(text),
            ValueType::Tensor { .. } => "?".into(),
        })
    }

    fn complex(&mut self, cursor: &mut Cursor<'_>, depth: &mut Depth) -> Result<ValueType> {
        Ok(ValueType::Other(format!("complex<{}>", self.element(cursor, depth)?).into()))
    }

    fn unranked(&mut self, cursor: &mut Cursor<'_>, depth: &mut Depth) -> Result<ValueType> {
        Ok(ValueType::Other(format!("tensor<*x{}>", self.element(cursor, depth)?).into()))
    }

    fn tensor(&mut self, cursor: &mut Cursor<'_>, encoded: bool, depth: &mut Depth) -> Result<ValueType> {
        if encoded {
            cursor.index(self.attributes.len(), "attribute")?;
        }
        let rank = cursor.count("dimensions")?;
        let mut dims = Vec::with_capacity(rank);
        for _ in 0..rank {
            dims.push(u64::try_from(cursor.signed()?).ok()); // One that is not known is negative.
        }
        Ok(ValueType::Tensor { dtype: self.element(cursor, depth)?, dims })
    }
}

fn plain(code: u64, mut plain: impl Iterator<Item = (u64, &'static str)>) -> ValueType {
    ValueType::Other(plain.find(|&(known, _)| known == code).map_or("?", |(_, text)| text).into())
}
