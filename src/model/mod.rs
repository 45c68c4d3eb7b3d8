//! Reads model files and finds the custom calls in them (feature `cli`).
//!
//! A model reaches a deployment as a `jax.export` artifact, as the MLIR bytecode inside of one, as `StableHLO` text, or,
//! while somebody looks into a problem, as a bare payload. [`read`] tells them apart by their content, never by a file
//! name. Everything here reads untrusted bytes: every offset and count is checked, no format recursion becomes recursion
//! of ours beyond a fixed depth, and memory stays proportional to the size of the file.
//!
//! | file | reads |
//! | --- | --- |
//! | `export` | the flatbuffer that `jax.export` writes |
//! | `bytecode` | MLIR bytecode, versions 0 to 6: sections, tables, and a walk over all operations |
//! | `attributes` | the attributes and types in bytecode, as far as custom calls need them |
//! | `text` | MLIR assembly |
//! | `functions` | which functions call which, to tell how often a custom call is reached |
//! | `survey` | which calls are ours, which kernels they name, and what is wrong with them |
//! | `scan` | the last resort for bytecode newer than known: looks for payloads among the strings |

mod attributes;
mod bytecode;
mod export;
mod functions;
mod scan;
mod survey;
mod text;

use std::fmt;
use std::sync::Arc;

pub use survey::{Kernel, Site, Survey, survey};

use crate::error::{Error, Result};

/// A model file: what it is, and the custom calls in it.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Model {
    /// The format that the bytes were recognised as.
    pub container: Container,
    /// How the calls were found.
    pub found: Found,
    /// Every custom call operation, in the order of the file; operations of a derivative's module (`vjp`) come last.
    pub calls: Vec<CustomCall>,
    /// Payloads that stand without a call: the bare payload itself, or what a scan found.
    pub payloads: Vec<Arc<[u8]>>,
}

/// What a model file is.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Container {
    /// An artifact of `jax.export`.
    Export(Export),
    /// MLIR bytecode by itself.
    Bytecode(Bytecode),
    /// MLIR assembly.
    Text,
    /// A payload: the JSON text that OEQ puts into the attribute `kernel`.
    Payload,
}

/// How the calls of a model were found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Found {
    /// The format was read.
    Read,
    /// The format is newer than this crate knows. Payloads were looked for among the bytes; calls are not known.
    Scanned,
}

/// The facts of a `jax.export` artifact.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Export {
    /// The version of the flatbuffer's schema as the file tells it (jax up to 0.12 writes 3 for compatibility).
    pub serialization_version: u16,
    /// The version of the calling convention of the exported `main`.
    pub calling_convention_version: u16,
    /// The name of the exported Python function.
    pub function: String,
    /// The platforms that the model was lowered for, in lower case, for example `cuda`.
    pub platforms: Vec<String>,
    /// How many devices the model runs on.
    pub devices: u32,
    /// The modules: the model's, then one per derivative order that was serialised with it (`vjp_order`).
    pub modules: Vec<Bytecode>,
}

/// The facts of one MLIR bytecode module.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Bytecode {
    /// The version of the bytecode format.
    pub version: u64,
    /// Who wrote it, for example `StableHLO_v1.15.0` or `MLIR23.0.0git`.
    pub producer: String,
    /// Size in bytes.
    pub bytes: usize,
    /// The dialects that occur in it.
    pub dialects: Vec<String>,
}

/// One custom call operation.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct CustomCall {
    /// The name of the handler that is called.
    pub target: Arc<str>,
    /// Which module of the file it is in: 0 is the model, `n` its `n`-th derivative's module.
    pub module: usize,
    /// The function that holds the operation; `None` where the file does not tell.
    pub function: Option<Arc<str>>,
    /// The types of the operands.
    pub operands: Vec<Arc<ValueType>>,
    /// The types of the results.
    pub results: Vec<Arc<ValueType>>,
    /// The version of the custom call API; 4 is XLA's FFI. jax does not write it beside `mhlo.backend_config`, which
    /// implies 4.
    pub api_version: i64,
    /// The attributes that the handler sees. For a call with a plain string instead of a dictionary: that string, named
    /// `backend_config`.
    pub attributes: Members,
    /// How often a run from the module's entry gets to this operation when every called function is put in place of its
    /// call, which is what XLA does before it makes call sites. A loop's body counts once. 0: nothing calls the function
    /// that it is in.
    pub sites: u64,
}

impl CustomCall {
    /// The attribute of this name.
    #[must_use]
    pub fn attribute(&self, name: &str) -> Option<&Attribute> {
        member(&self.attributes, name)
    }
}

/// Named attributes.
pub type Members = Arc<[(Arc<str>, Attribute)]>;

/// The member of this name.
#[must_use]
pub fn member<'a>(members: &'a [(Arc<str>, Attribute)], name: &str) -> Option<&'a Attribute> {
    members.iter().find(|(key, _)| &**key == name).map(|(_, value)| value)
}

/// The value of an attribute. Contents are shared: a clone is cheap, whatever its size.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub enum Attribute {
    /// A string (any bytes), or the name in a symbol reference.
    Text(Arc<[u8]>),
    /// An integer or a truth value.
    Int(i64),
    /// A dictionary.
    Dictionary(Members),
    /// A list.
    List(Arc<[Attribute]>),
    /// Anything that this crate has no use for.
    Other,
}

/// The type of an operand or a result.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum ValueType {
    /// An array.
    Tensor {
        /// The element type as `StableHLO` writes it: `f32`, `f64`, `i32`, `i64`, `ui8`...
        dtype: Arc<str>,
        /// The dimensions; `None` is one that is not known before the model is loaded.
        dims: Vec<Option<u64>>,
    },
    /// Anything else: its text as far as it is known, for example `!stablehlo.token`.
    Other(Arc<str>),
}

impl fmt::Display for ValueType {
    /// `f32[10,32]`, with `?` for a dimension that is not known.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tensor { dtype, dims } => {
                write!(f, "{dtype}[")?;
                for (index, dim) in dims.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    match dim {
                        Some(dim) => write!(f, "{comma}{dim}")?,
                        None => write!(f, "{comma}?")?,
                    }
                }
                f.write_str("]")
            }
            Self::Other(text) => f.write_str(text),
        }
    }
}

/// Reads a model file.
///
/// # Errors
/// `InvalidArgument` if the bytes are none of the known formats, or are damaged; the text tells the format that was
/// recognised, and where reading stopped.
pub fn read(bytes: &[u8]) -> Result<Model> {
    if bytes.starts_with(bytecode::MAGIC) {
        let (facts, calls, payloads) = module(bytes, 0)?;
        let found = found(&payloads);
        return Ok(Model { container: Container::Bytecode(facts), found, calls, payloads });
    }
    let start = bytes.trim_ascii_start();
    if start.first() == Some(&b'{') {
        return payload(bytes);
    }
    if export::recognise(bytes) {
        return exported(bytes).map_err(|error| error.context("jax.export artifact"));
    }
    if let Some(text) = text::recognise(bytes) {
        let calls = text::read(text).map_err(|error| error.context("StableHLO text"))?;
        return Ok(Model { container: Container::Text, found: Found::Read, calls, payloads: Vec::new() });
    }
    Err(Error::invalid(format!(
        "{} bytes that are no model: expected a jax.export artifact, MLIR bytecode (ML\\xefR), StableHLO text or a JSON \
         payload{}",
        bytes.len(),
        if bytes.is_empty() { "; the file is empty" } else { "" }
    )))
}

/// The version of the custom call API that has attributes.
const TYPED_FFI: i64 = 4;

/// From all attributes of a custom call operation: the version of its API, and the attributes that its handler sees.
fn call_attributes(members: &[(Arc<str>, Attribute)]) -> (i64, Members) {
    let written = match member(members, "api_version") {
        Some(&Attribute::Int(version)) => version,
        _ => 1, // What StableHLO means by leaving it out.
    };
    if let Some(Attribute::Dictionary(config)) = member(members, "mhlo.backend_config") {
        return (TYPED_FFI, Arc::clone(config));
    }
    match member(members, "backend_config") {
        Some(Attribute::Dictionary(config)) => (written, Arc::clone(config)),
        Some(config @ Attribute::Text(text)) if !text.is_empty() => {
            (written, Arc::from([("backend_config".into(), config.clone())]))
        }
        _ => (written, Arc::from([])),
    }
}

/// Payloads that a scan found.
type Scanned = Vec<Arc<[u8]>>;

/// One module of bytecode: its facts, its calls, and the payloads of a scan if its version is not known.
fn module(bytes: &[u8], order: usize) -> Result<(Bytecode, Vec<CustomCall>, Scanned)> {
    let header = bytecode::header(bytes)?;
    if header.version > bytecode::NEWEST_VERSION {
        let payloads = scan::payloads(bytes);
        if payloads.is_empty() {
            return Err(Error::invalid(format!(
                "MLIR bytecode of version {} by {:?}: this build reads versions 0 to {}, and the bytes hold no payload \
                 in plain sight",
                header.version,
                header.producer,
                bytecode::NEWEST_VERSION
            )));
        }
        return Ok((header, Vec::new(), payloads));
    }
    let (facts, calls) = bytecode::read(bytes, order)?;
    Ok((facts, calls, Vec::new()))
}

fn found(scanned: &[Arc<[u8]>]) -> Found {
    if scanned.is_empty() { Found::Read } else { Found::Scanned }
}

fn payload(bytes: &[u8]) -> Result<Model> {
    // Only that it is one JSON value is found out here; what a payload must hold is `payload`'s business.
    serde_json::from_slice::<serde::de::IgnoredAny>(bytes)
        .map_err(|error| Error::invalid(format!("payload: not JSON: {error}")))?;
    let payloads = vec![Arc::from(bytes)];
    Ok(Model { container: Container::Payload, found: Found::Read, calls: Vec::new(), payloads })
}

fn exported(bytes: &[u8]) -> Result<Model> {
    let (mut export, modules) = export::read(bytes)?;
    let (mut calls, mut payloads) = (Vec::new(), Vec::new());
    for (order, data) in modules.into_iter().enumerate() {
        let (facts, found, scanned) = module(data, order)?;
        export.modules.push(facts);
        calls.extend(found);
        payloads.extend(scanned);
    }
    let found = found(&payloads);
    Ok(Model { container: Container::Export(export), found, calls, payloads })
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn a_payload_is_taken_whole_and_garbage_is_refused() {
        let model = read(b" {\"kernel\": \"x\"}\n").unwrap();
        assert!(matches!(model.container, Container::Payload));
        assert_eq!(&*model.payloads[0], b" {\"kernel\": \"x\"}\n");
        assert!(read(b"{\"kernel\": ").unwrap_err().message().contains("not JSON"));
        for (bytes, text) in [
            (&b""[..], "the file is empty"),
            (b"\x7fELF", "are no model"),
            (b"\x00\x01\x02\xff", "are no model"),
            (b"hello", "are no model"),
        ] {
            let error = read(bytes).unwrap_err();
            assert!(error.message().contains(text), "{error}");
        }
    }

    #[test]
    fn newer_bytecode_is_scanned_and_says_so() {
        let mut bytes = b"ML\xefR\x0fsomeone\0\x00\x01".to_vec(); // version 7
        let error = read(&bytes).unwrap_err();
        assert!(error.message().contains("version 7") && error.message().contains("0 to 6"), "{error}");
        bytes.extend_from_slice(b"junk {\"kernel\": \"a } b\", \"hash\": 1}\0more");
        let model = read(&bytes).unwrap();
        assert_eq!(model.found, Found::Scanned);
        assert_eq!(&*model.payloads[0], b"{\"kernel\": \"a } b\", \"hash\": 1}");
        assert!(model.calls.is_empty());
    }

    #[test]
    fn types_print_like_xla_shapes() {
        let tensor = ValueType::Tensor { dtype: "f32".into(), dims: vec![Some(10), None] };
        assert_eq!(tensor.to_string(), "f32[10,?]");
        assert_eq!(ValueType::Tensor { dtype: "i32".into(), dims: vec![] }.to_string(), "i32[]");
        assert_eq!(ValueType::Other("!stablehlo.token".into()).to_string(), "!stablehlo.token");
    }
}
