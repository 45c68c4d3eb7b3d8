//! Arrays in NumPy's `.npy` files, versions 1 to 3: little-endian, row by row.

use std::ffi::c_int;
use std::path::Path;

use crate::pjrt::Result;

/// Type codes of NumPy, the bytes of an element, and the `PJRT_Buffer_Type`s.
const TYPES: [(&str, usize, c_int); 14] = [
    ("b1", 1, 1),
    ("i1", 1, 2),
    ("i2", 2, 3),
    ("i4", 4, 4),
    ("i8", 8, 5),
    ("u1", 1, 6),
    ("u2", 2, 7),
    ("u4", 4, 8),
    ("u8", 8, 9),
    ("f2", 2, 10),
    ("f4", 4, 11),
    ("f8", 8, 12),
    ("c8", 8, 14),
    ("c16", 16, 15),
];

/// An array: `PJRT_Buffer_Type`, dimensions, elements.
pub(crate) struct Array {
    pub(crate) kind: c_int,
    pub(crate) dimensions: Vec<i64>,
    pub(crate) data: Vec<u8>,
}

impl Array {
    pub(crate) fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path)?;
        Self::parse(&bytes).map_err(|error| format!("{}: {error}", path.display()).into())
    }

    fn parse(bytes: &[u8]) -> Result<Self> {
        let (size, start) = match bytes {
            [0x93, b'N', b'U', b'M', b'P', b'Y', 1, _, a, b, ..] => (usize::from(u16::from_le_bytes([*a, *b])), 10),
            [0x93, b'N', b'U', b'M', b'P', b'Y', 2 | 3, _, a, b, c, d, ..] => {
                (usize::try_from(u32::from_le_bytes([*a, *b, *c, *d]))?, 12)
            }
            _ => return Err("not an .npy file".into()),
        };
        let header = bytes.get(start..start + size).ok_or("cut short")?;
        let header = std::str::from_utf8(header)?;
        // The header is a Python dictionary: {'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }
        let value = |key: &str| header.split_once(&format!("'{key}':")).map(|(_, rest)| rest.trim_start());
        let code = value("descr").and_then(|text| text.split('\'').nth(1)).ok_or("no descr")?;
        let &(_, bytes_each, kind) = TYPES
            .iter()
            .find(|(name, size, _)| {
                code.trim_start_matches(['<', '|', '=']) == *name && (*size == 1 || !code.starts_with('|'))
            })
            .ok_or_else(|| format!("elements of type {code} are not taken"))?;
        let shape = value("shape").and_then(|text| text.strip_prefix('(')?.split_once(')')).ok_or("no shape")?.0;
        let dimensions: Vec<i64> = shape
            .split(',')
            .map(str::trim)
            .filter(|text| !text.is_empty())
            .map(|text| text.trim_end_matches('L').parse())
            .collect::<std::result::Result<_, _>>()?;
        if value("fortran_order").is_none_or(|text| text.starts_with("True")) && dimensions.len() > 1 {
            return Err("columns come first; save it with numpy.ascontiguousarray".into());
        }
        let count = dimensions.iter().try_fold(1_usize, |count, &d| count.checked_mul(usize::try_from(d).ok()?));
        let length = count.and_then(|count| count.checked_mul(bytes_each)).ok_or("too large")?;
        let data = bytes[start + size..].get(..length).ok_or("cut short")?.to_vec();
        Ok(Self { kind, dimensions, data })
    }

    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let &(code, bytes_each, _) = TYPES
            .iter()
            .find(|(_, _, kind)| *kind == self.kind)
            .ok_or_else(|| format!("NumPy has no name for PJRT's element type {}", self.kind))?;
        let mut shape: Vec<String> = self.dimensions.iter().map(ToString::to_string).collect();
        if shape.len() == 1 {
            // A tuple of one has a comma.
            shape.push(String::new());
        }
        let order = if bytes_each == 1 { '|' } else { '<' };
        let shape = shape.join(", ");
        let mut header = format!("{{'descr': '{order}{code}', 'fortran_order': False, 'shape': ({shape}), }}");
        // The elements begin at a multiple of 64.
        let padding = 63 - (10 + header.len()) % 64;
        header.extend(std::iter::repeat_n(' ', padding));
        header.push('\n');
        let mut bytes = b"\x93NUMPY\x01\x00".to_vec();
        bytes.extend(u16::try_from(header.len())?.to_le_bytes());
        bytes.extend(header.as_bytes());
        bytes.extend(&self.data);
        Ok(std::fs::write(path, bytes)?)
    }
}
