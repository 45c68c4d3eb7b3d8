//! A safe view of one call frame: operands, results, attributes and the metadata extension.

use std::ffi::{c_int, c_void};
use std::slice;

use super::api::{Api, Context};
use super::ffi;
use crate::error::{Error, Result};

/// One call of a stage function.
#[derive(Debug, Clone, Copy)]
pub struct Frame<'a> {
    raw: &'a ffi::CallFrame,
    api: Api,
}

impl<'a> Frame<'a> {
    /// Wraps a frame that carries an api.
    ///
    /// # Safety
    /// `raw` is a frame of the running call, laid out as XLA does, and `api` is its api.
    #[must_use]
    pub unsafe fn new(raw: &'a ffi::CallFrame, api: Api) -> Self {
        Self { raw, api }
    }

    /// The XLA that calls.
    #[must_use]
    pub fn api(&self) -> Api {
        self.api
    }

    /// The invocation.
    #[must_use]
    pub fn context(&self) -> Context {
        Context(self.raw.ctx)
    }

    /// The operands.
    #[must_use]
    pub fn operands(&self) -> Tensors<'a> {
        Tensors { raw: &self.raw.args }
    }

    /// The results.
    #[must_use]
    pub fn results(&self) -> Tensors<'a> {
        Tensors { raw: &self.raw.rets }
    }

    /// The attributes.
    #[must_use]
    pub fn attributes(&self) -> Attributes<'a> {
        Attributes { raw: &self.raw.attrs }
    }
}

/// Where a metadata call wants its answer; `None` for an ordinary call.
///
/// # Safety
/// `frame` is a frame of the running call.
#[must_use]
pub unsafe fn metadata_of(frame: &ffi::CallFrame) -> Option<*mut ffi::Metadata> {
    let mut extension = frame.extension_start;
    while !extension.is_null() {
        // SAFETY: XLA's chain of extensions lives through the call; the metadata kind says what the rest of it is.
        unsafe {
            if (*extension).kind == ffi::EXTENSION_METADATA {
                let metadata = (*extension.cast::<ffi::MetadataExtension>()).metadata;
                return (!metadata.is_null()).then_some(metadata);
            }
            extension = (*extension).next;
        }
    }
    None
}

/// Operands or results.
#[derive(Debug, Clone, Copy)]
pub struct Tensors<'a> {
    raw: &'a ffi::Tensors,
}

impl<'a> Tensors<'a> {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        usize::try_from(self.raw.size).unwrap_or(0)
    }

    /// Whether there are none, as in instantiate on XLA's CPU platform.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The tensor at `index`; `None` past the end, or when it is not a plain buffer.
    #[inline]
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Tensor<'a>> {
        if index >= self.len() || self.raw.items.is_null() || self.raw.types.is_null() {
            return None;
        }
        // SAFETY: `items` and `types` hold `size` entries, and an entry of kind buffer points to a buffer; both live
        // through the call.
        unsafe {
            if *self.raw.types.add(index) != ffi::TENSOR_BUFFER {
                return None;
            }
            (*self.raw.items.add(index)).cast::<ffi::Buffer>().as_ref().map(|raw| Tensor { raw })
        }
    }
}

impl Tensors<'_> {
    /// Appends the device address of each tensor, 0 for what is not a plain buffer.
    #[inline]
    pub fn addresses<A: Extend<u64>>(&self, list: &mut A) {
        list.extend((0..self.len()).map(|index| self.get(index).map_or(0, |tensor| tensor.address())));
    }
}

/// One operand or result.
#[derive(Debug, Clone, Copy)]
pub struct Tensor<'a> {
    raw: &'a ffi::Buffer,
}

impl<'a> Tensor<'a> {
    /// The element type, one of [`ffi::data_type`].
    #[must_use]
    pub fn dtype(&self) -> c_int {
        self.raw.dtype
    }

    /// The device address; 0 in instantiate and for empty tensors.
    #[inline]
    #[must_use]
    pub fn address(&self) -> u64 {
        self.raw.data as u64
    }

    /// The dimensions.
    #[must_use]
    pub fn dimensions(&self) -> &'a [i64] {
        let rank = usize::try_from(self.raw.rank).unwrap_or(0);
        if rank == 0 || self.raw.dims.is_null() {
            return &[];
        }
        // SAFETY: `dims` holds `rank` values that live through the call.
        unsafe { slice::from_raw_parts(self.raw.dims, rank) }
    }
}

/// The attributes of a call, or of a dictionary attribute.
#[derive(Debug, Clone, Copy)]
pub struct Attributes<'a> {
    raw: &'a ffi::Attrs,
}

/// One attribute's value.
#[derive(Debug, Clone, Copy)]
pub enum Attribute<'a> {
    /// A string; not NUL-terminated, of any bytes.
    Text(&'a [u8]),
    /// An integer scalar.
    Integer(i64),
    /// A dictionary.
    Dictionary(Attributes<'a>),
    /// Something that no OEQ target uses, named for error texts.
    Other(&'static str),
}

impl Attribute<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Self::Text(_) => "a string",
            Self::Integer(_) => "an integer",
            Self::Dictionary(_) => "a dictionary",
            Self::Other(kind) => kind,
        }
    }
}

impl<'a> Attributes<'a> {
    /// Name and value of each, in XLA's order (sorted by name).
    pub fn iter(&self) -> impl Iterator<Item = (&'a [u8], Attribute<'a>)> + use<'a> {
        let raw = self.raw;
        let present = !raw.names.is_null() && !raw.attrs.is_null() && !raw.types.is_null();
        let count = if present { usize::try_from(raw.size).unwrap_or(0) } else { 0 };
        (0..count).filter_map(move |index| {
            // SAFETY: `names`, `types` and `attrs` hold `size` entries that live through the call, and the kind says
            // what the value pointer points to.
            unsafe {
                let name = (*raw.names.add(index)).as_ref()?;
                let value = *raw.attrs.add(index);
                if value.is_null() {
                    return None;
                }
                Some((bytes(name), attribute(*raw.types.add(index), value)))
            }
        })
    }

    /// The attribute of this name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<Attribute<'a>> {
        self.iter().find(|(found, _)| *found == name.as_bytes()).map(|(_, value)| value)
    }

    /// The string attribute `name`.
    ///
    /// # Errors
    /// It is absent or of another kind.
    pub fn text(&self, name: &str) -> Result<&'a [u8]> {
        match self.get(name) {
            Some(Attribute::Text(text)) => Ok(text),
            other => Err(wrong(name, "a string", other)),
        }
    }

    /// The integer attribute `name`.
    ///
    /// # Errors
    /// It is absent or of another kind.
    pub fn integer(&self, name: &str) -> Result<i64> {
        match self.get(name) {
            Some(Attribute::Integer(value)) => Ok(value),
            other => Err(wrong(name, "an i64", other)),
        }
    }

    /// The dictionary attribute `name`, whose members must all be integers.
    ///
    /// # Errors
    /// It is absent or of another kind, or a member's name is not UTF-8 or its value is not an integer.
    pub fn integers(&self, name: &str) -> Result<Vec<(&'a str, i64)>> {
        let Some(Attribute::Dictionary(dictionary)) = self.get(name) else {
            return Err(wrong(name, "a dictionary of i64", self.get(name)));
        };
        dictionary
            .iter()
            .map(|(member, value)| {
                let member = std::str::from_utf8(member).map_err(|_| {
                    Error::invalid(format!(
                        "attribute `{name}`: a member's name is not UTF-8: {}",
                        member.escape_ascii()
                    ))
                })?;
                match value {
                    Attribute::Integer(value) => Ok((member, value)),
                    other => Err(wrong(&format!("{name}.{member}"), "an i64", Some(other))),
                }
            })
            .collect()
    }
}

fn wrong(name: &str, expected: &str, found: Option<Attribute<'_>>) -> Error {
    Error::invalid(match found {
        None => format!("attribute `{name}` is missing; expected {expected}"),
        Some(found) => format!("attribute `{name}` is {}; expected {expected}", found.kind()),
    })
}

/// # Safety
/// The span points to `len` bytes that live for `'a`.
unsafe fn bytes<'a>(span: &ffi::ByteSpan) -> &'a [u8] {
    if span.ptr.is_null() {
        return &[];
    }
    // SAFETY: by the function's contract.
    unsafe { slice::from_raw_parts(span.ptr.cast(), span.len) }
}

/// # Safety
/// `value` points to the structure that `kind` names, and lives for `'a`.
unsafe fn attribute<'a>(kind: c_int, value: *mut c_void) -> Attribute<'a> {
    // SAFETY: by the function's contract; scalars are aligned for their type.
    unsafe {
        match kind {
            ffi::attr_type::STRING => Attribute::Text(bytes(&*value.cast::<ffi::ByteSpan>())),
            ffi::attr_type::DICTIONARY => Attribute::Dictionary(Attributes { raw: &*value.cast::<ffi::Attrs>() }),
            ffi::attr_type::ARRAY => Attribute::Other("an array"),
            ffi::attr_type::SCALAR => {
                let scalar = &*value.cast::<ffi::Scalar>();
                match scalar.dtype {
                    _ if scalar.value.is_null() => Attribute::Other("a scalar without a value"),
                    ffi::data_type::S64 => Attribute::Integer(scalar.value.cast::<i64>().read_unaligned()),
                    ffi::data_type::S32 => Attribute::Integer(scalar.value.cast::<i32>().read_unaligned().into()),
                    _ => Attribute::Other("a scalar that is not an i64"),
                }
            }
            _ => Attribute::Other("of an unknown kind"),
        }
    }
}
