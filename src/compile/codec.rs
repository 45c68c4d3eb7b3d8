//! The bytes of one compiled image, as the store and bundles keep it.
//!
//! Numbers are little-endian, texts and lists have their length before them. Reading trusts nothing: a length that leads
//! outside is an error. Whether the bytes are those that were written is for the digest around them to tell.

use super::Image;
use super::key::{FORMAT, Key};
use crate::error::{Error, Result};

/// One image with what it is known by.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// What it is looked up by.
    pub key: Key,
    /// The family whose payload it came from, for people.
    pub family: String,
    /// What it was made for, for example `sm_90`.
    pub target: String,
    /// Major and minor version of the NVRTC that made it.
    pub compiler: (u16, u16),
    /// The image. Its log is not kept.
    pub image: Image,
}

impl Stored {
    /// Writes it.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.image.code.len() + 512);
        out.extend_from_slice(&FORMAT.to_le_bytes());
        out.extend_from_slice(&self.key.0);
        bytes(&mut out, self.family.as_bytes());
        bytes(&mut out, self.target.as_bytes());
        out.extend_from_slice(&self.compiler.0.to_le_bytes());
        out.extend_from_slice(&self.compiler.1.to_le_bytes());
        out.extend_from_slice(&(self.image.symbols.len() as u64).to_le_bytes());
        for (entry, symbol) in &self.image.symbols {
            bytes(&mut out, entry.as_bytes());
            bytes(&mut out, symbol.as_bytes());
        }
        bytes(&mut out, &self.image.code);
        out
    }

    /// Reads it.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` if the bytes are not an image, or one in another format.
    pub fn decode(from: &[u8]) -> Result<Self> {
        let mut reader = Reader(from);
        let format = reader.u32()?;
        if format != FORMAT {
            return Err(Error::invalid(format!("the image has format {format}; this library reads {FORMAT}")));
        }
        let key = Key(reader.array()?);
        let (family, target) = (reader.text()?, reader.text()?);
        let compiler = (reader.u16()?, reader.u16()?);
        let count = reader.u64()?;
        let mut symbols = Vec::new();
        for _ in 0..count {
            symbols.push((reader.text()?, reader.text()?));
        }
        let code = reader.bytes()?.to_vec();
        if !reader.0.is_empty() {
            return Err(Error::invalid(format!("{} bytes follow the image", reader.0.len())));
        }
        Ok(Self { key, family, target, compiler, image: Image { code, symbols, log: String::new() } })
    }
}

fn bytes(out: &mut Vec<u8>, part: &[u8]) {
    out.extend_from_slice(&(part.len() as u64).to_le_bytes());
    out.extend_from_slice(part);
}

/// Takes values from the front of some bytes.
pub(super) struct Reader<'a>(pub(super) &'a [u8]);

impl<'a> Reader<'a> {
    pub(super) fn take(&mut self, length: usize) -> Result<&'a [u8]> {
        let (front, rest) = self.0.split_at_checked(length).ok_or_else(|| {
            Error::invalid(format!("the bytes end early: {length} more were announced, {} are there", self.0.len()))
        })?;
        self.0 = rest;
        Ok(front)
    }

    pub(super) fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let mut array = [0; N];
        array.copy_from_slice(self.take(N)?);
        Ok(array)
    }

    pub(super) fn u16(&mut self) -> Result<u16> {
        Ok(u16::from_le_bytes(self.array()?))
    }

    pub(super) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    pub(super) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_le_bytes(self.array()?))
    }

    fn bytes(&mut self) -> Result<&'a [u8]> {
        let length = self.u64()?;
        self.take(usize::try_from(length).unwrap_or(usize::MAX))
    }

    fn text(&mut self) -> Result<String> {
        let bytes = self.bytes()?;
        String::from_utf8(bytes.to_vec()).map_err(|_| Error::invalid("a text in the image is not UTF-8"))
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
pub(super) mod tests {
    use super::*;
    use crate::compile::key::digest;

    /// An image that differs by its number.
    pub(in crate::compile) fn stored(number: u32) -> Stored {
        let code = format!("\x7fELF {number} {}", "x".repeat(100)).into_bytes();
        let symbols =
            vec![("forward".to_owned(), "_Z7forward".to_owned()), ("fixup".to_owned(), "_Z5fixup".to_owned())];
        let key = Key(digest(&number.to_le_bytes()));
        let image = Image { code, symbols, log: String::new() };
        Stored { key, family: "convolution".into(), target: "sm_90".into(), compiler: (13, 0), image }
    }

    #[test]
    fn what_is_written_is_read() {
        let stored = stored(3);
        assert_eq!(Stored::decode(&stored.encode()).unwrap(), stored);
    }

    #[test]
    fn every_truncation_is_an_error_and_so_is_more() {
        let encoded = stored(3).encode();
        for length in 0..encoded.len() {
            assert!(Stored::decode(&encoded[..length]).is_err(), "{length}");
        }
        assert!(Stored::decode(&[encoded.as_slice(), b"x"].concat()).unwrap_err().message().contains("1 bytes follow"));
    }

    #[test]
    fn no_flipped_bit_makes_it_panic_or_allocate_without_bound() {
        let encoded = stored(3).encode();
        for bit in 0..encoded.len() * 8 {
            let mut flipped = encoded.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let _ = Stored::decode(&flipped);
        }
        let mut other = encoded;
        other[0] = 9;
        assert!(Stored::decode(&other).unwrap_err().message().contains("format 9"));
    }
}
