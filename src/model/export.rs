//! The flatbuffer that `jax.export` writes: an `Exported` table, of which the facts and the modules are read.
//!
//! A table begins with the distance back to its vtable; the vtable tells where in the table each field lies, 0 for one
//! that is absent. Fields are known by their number, which the schema never changes. References are unsigned distances
//! forward. Nothing marks the file (the schema has no identifier), so [`recognise`] looks for a table whose module
//! bytes begin with MLIR's magic.

use super::{Export, bytecode};
use crate::error::{Error, Result};

/// Numbers of the fields of `Exported`.
mod field {
    pub(super) const SERIALIZATION_VERSION: usize = 0;
    pub(super) const FUNCTION_NAME: usize = 1;
    /// 16 bits wide; superseded by `DEVICES`.
    pub(super) const DEVICES_SHORT: usize = 6;
    pub(super) const PLATFORMS: usize = 9;
    pub(super) const MODULE: usize = 13;
    pub(super) const CALLING_CONVENTION: usize = 14;
    pub(super) const VJP: usize = 17;
    pub(super) const DEVICES: usize = 18;
}

/// More derivative orders than anybody serialises.
const MAX_ORDERS: usize = 16;
/// More platforms than XLA has.
const MAX_PLATFORMS: usize = 64;

/// True if the bytes look like an artifact of `jax.export`.
pub(super) fn recognise(bytes: &[u8]) -> bool {
    let module = Table::root(bytes).and_then(|table| table.bytes(field::MODULE));
    matches!(module, Ok(Some(module)) if module.starts_with(bytecode::MAGIC))
}

/// The facts, and the bytes of the module and of each derivative's module.
pub(super) fn read(bytes: &[u8]) -> Result<(Export, Vec<&[u8]>)> {
    let root = Table::root(bytes)?;
    let export = Export {
        serialization_version: root.u16(field::SERIALIZATION_VERSION)?,
        calling_convention_version: root.u16(field::CALLING_CONVENTION)?,
        function: root.bytes(field::FUNCTION_NAME)?.map(lossy).unwrap_or_default(),
        platforms: root.strings(field::PLATFORMS)?,
        devices: match root.u32(field::DEVICES)? {
            0 => u32::from(root.u16(field::DEVICES_SHORT)?),
            devices => devices,
        },
        modules: Vec::new(),
    };
    let mut modules = Vec::new();
    let mut next = Some(root);
    while let Some(table) = next {
        if modules.len() > MAX_ORDERS {
            return Err(Error::invalid(format!("more than {MAX_ORDERS} derivative orders")));
        }
        let module = table.bytes(field::MODULE)?.unwrap_or_default();
        if !module.starts_with(bytecode::MAGIC) {
            return Err(Error::invalid(format!(
                "the module of derivative order {} is no MLIR bytecode",
                modules.len()
            )));
        }
        modules.push(module);
        next = table.table(field::VJP)?;
    }
    Ok((export, modules))
}

fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// A table in a flatbuffer.
#[derive(Clone, Copy)]
struct Table<'a> {
    buffer: &'a [u8],
    at: usize,
    vtable: usize,
    vtable_bytes: usize,
}

impl<'a> Table<'a> {
    fn root(buffer: &'a [u8]) -> Result<Self> {
        Self::at(buffer, follow(buffer, 0)?)
    }

    fn at(buffer: &'a [u8], at: usize) -> Result<Self> {
        let back = i64::from(i32::from_le_bytes(array(buffer, at)?));
        let vtable = i64::try_from(at)
            .ok()
            .and_then(|at| at.checked_sub(back))
            .and_then(|vtable| usize::try_from(vtable).ok())
            .ok_or_else(|| outside(at))?;
        let vtable_bytes = usize::from(u16::from_le_bytes(array(buffer, vtable)?));
        if vtable_bytes < 4 || vtable.checked_add(vtable_bytes).is_none_or(|end| end > buffer.len()) {
            return Err(Error::invalid(format!("flatbuffer: no vtable at byte {vtable}")));
        }
        Ok(Self { buffer, at, vtable, vtable_bytes })
    }

    /// Where a field lies; `None` if it is absent.
    fn field(&self, number: usize) -> Result<Option<usize>> {
        let slot = 4 + 2 * number;
        if slot + 2 > self.vtable_bytes {
            return Ok(None); // Written before the schema had this field.
        }
        let offset = usize::from(u16::from_le_bytes(array(self.buffer, self.vtable + slot)?));
        Ok((offset != 0).then_some(self.at + offset))
    }

    fn u16(&self, number: usize) -> Result<u16> {
        self.field(number)?.map_or(Ok(0), |at| Ok(u16::from_le_bytes(array(self.buffer, at)?)))
    }

    fn u32(&self, number: usize) -> Result<u32> {
        self.field(number)?.map_or(Ok(0), |at| Ok(u32::from_le_bytes(array(self.buffer, at)?)))
    }

    /// A string or a vector of bytes.
    fn bytes(&self, number: usize) -> Result<Option<&'a [u8]>> {
        self.field(number)?.map(|at| bytes_at(self.buffer, at)).transpose()
    }

    fn table(&self, number: usize) -> Result<Option<Self>> {
        self.field(number)?.map(|at| Self::at(self.buffer, follow(self.buffer, at)?)).transpose()
    }

    fn strings(&self, number: usize) -> Result<Vec<String>> {
        let Some(at) = self.field(number)? else { return Ok(Vec::new()) };
        let vector = follow(self.buffer, at)?;
        let count = usize::try_from(u32::from_le_bytes(array(self.buffer, vector)?)).unwrap_or(usize::MAX);
        if count > MAX_PLATFORMS {
            return Err(Error::invalid(format!(
                "flatbuffer: {count} strings at byte {vector}, at most {MAX_PLATFORMS}"
            )));
        }
        (0..count).map(|index| Ok(lossy(bytes_at(self.buffer, vector + 4 + 4 * index)?))).collect()
    }
}

/// What the reference at `at` points to.
fn follow(buffer: &[u8], at: usize) -> Result<usize> {
    let distance = usize::try_from(u32::from_le_bytes(array(buffer, at)?)).unwrap_or(usize::MAX);
    at.checked_add(distance).filter(|&to| to < buffer.len()).ok_or_else(|| outside(at))
}

/// The bytes of the vector that the reference at `at` points to.
fn bytes_at(buffer: &[u8], at: usize) -> Result<&[u8]> {
    let vector = follow(buffer, at)?;
    let length = usize::try_from(u32::from_le_bytes(array(buffer, vector)?)).unwrap_or(usize::MAX);
    buffer.get(vector + 4..).and_then(|rest| rest.get(..length)).ok_or_else(|| {
        let have = buffer.len();
        Error::invalid(format!("flatbuffer: {length} bytes at byte {vector} in a file of {have}: cut short?"))
    })
}

fn array<const N: usize>(buffer: &[u8], at: usize) -> Result<[u8; N]> {
    buffer.get(at..).and_then(|rest| rest.first_chunk()).copied().ok_or_else(|| outside(at))
}

fn outside(at: usize) -> Error {
    Error::invalid(format!("flatbuffer: the reference at byte {at} leads out of the file: cut short?"))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    /// An `Exported` with a name, two platforms, a module and, if `vjp`, itself as its own derivative.
    fn artifact(vjp: bool) -> Vec<u8> {
        let mut bytes = vec![0; 4 + 4 + 2 * 19];
        let vtable = 4;
        let table = bytes.len();
        let mut slot = |number: usize, offset: u16| {
            let at = vtable + 4 + 2 * number;
            bytes[at..at + 2].copy_from_slice(&offset.to_le_bytes());
        };
        slot(field::SERIALIZATION_VERSION, 4);
        slot(field::CALLING_CONVENTION, 6);
        slot(field::DEVICES_SHORT, 8);
        slot(field::FUNCTION_NAME, 12);
        slot(field::PLATFORMS, 16);
        slot(field::MODULE, 20);
        if vjp {
            slot(field::VJP, 24);
        }
        let root = u32::try_from(table).unwrap();
        bytes[..4].copy_from_slice(&root.to_le_bytes());
        bytes[4..6].copy_from_slice(&(4 + 2 * 19_u16).to_le_bytes());
        bytes.extend_from_slice(&(root - 4).to_le_bytes());
        for value in [3_u16, 10, 2, 0] {
            bytes.extend_from_slice(&value.to_le_bytes());
        }
        bytes.extend_from_slice(&[0; 16]);
        let point = |bytes: &mut Vec<u8>, at: usize| {
            let distance = u32::try_from(bytes.len() - at).unwrap();
            bytes[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        };
        let vector = |bytes: &mut Vec<u8>, content: &[u8]| {
            bytes.extend_from_slice(&u32::try_from(content.len()).unwrap().to_le_bytes());
            bytes.extend_from_slice(content);
        };
        point(&mut bytes, table + 12);
        vector(&mut bytes, b"energy");
        point(&mut bytes, table + 16);
        let platforms = bytes.len() + 4;
        bytes.extend_from_slice(&2_u32.to_le_bytes());
        bytes.extend_from_slice(&[0; 8]);
        point(&mut bytes, platforms);
        vector(&mut bytes, b"cuda");
        point(&mut bytes, platforms + 4);
        vector(&mut bytes, b"rocm");
        point(&mut bytes, table + 20);
        vector(&mut bytes, b"ML\xefR\x0d");
        if vjp {
            point(&mut bytes, table + 24);
            let own = bytes.len();
            bytes.extend_from_slice(&i32::try_from(own - vtable).unwrap().to_le_bytes());
            bytes.extend_from_slice(&[0; 24]);
        }
        bytes
    }

    #[test]
    fn facts_and_module_are_found() {
        let bytes = artifact(false);
        assert!(recognise(&bytes));
        let (export, modules) = read(&bytes).unwrap();
        assert_eq!((export.serialization_version, export.calling_convention_version, export.devices), (3, 10, 2));
        assert_eq!((export.function.as_str(), export.platforms), ("energy", vec!["cuda".into(), "rocm".into()]));
        assert_eq!(modules, [b"ML\xefR\x0d"]);
    }

    #[test]
    fn a_derivative_without_a_module_is_an_error() {
        let error = read(&artifact(true)).unwrap_err();
        assert!(error.message().contains("derivative order 1"), "{error}");
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_survived() {
        let whole = artifact(true);
        for end in 0..whole.len() {
            let _ = (recognise(&whole[..end]), read(&whole[..end]).is_ok());
        }
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut bytes = whole.clone();
                bytes[at] = value;
                let _ = (recognise(&bytes), read(&bytes).is_ok());
            }
        }
        assert!(read(&whole[..whole.len() / 2]).is_err());
    }
}
