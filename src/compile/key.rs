//! What a compiled unit is known by, in the store and in bundles.
//!
//! A key is a digest of everything that decides what the compiler is given: the whole payload, the family, the entry
//! points, the architecture and the options. It never covers what the compiler gave. The compiler's version stands beside
//! it, not in it: who looks for an image need not have a compiler.

use std::fmt;

use sha2::{Digest as _, Sha256};

use super::Architecture;
use super::nvrtc::options;
use super::target::Target;
use crate::error::{Error, Result};

/// Changes whenever the same key would name another program: when the cut, the options' meaning or the encoding of a
/// stored image change.
pub const FORMAT: u32 = 2;

/// SHA-256 of some bytes.
pub type Digest = [u8; 32];

/// SHA-256.
#[must_use]
pub fn digest(bytes: &[u8]) -> Digest {
    Sha256::digest(bytes).into()
}

/// Names one unit of one payload for one target.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key(pub(crate) Digest);

impl Key {
    /// The key of a unit. `payload` is the digest of a record's whole identity.
    #[must_use]
    pub fn new(family: &str, payload: &Digest, entry_points: &[&str], target: Target) -> Self {
        let mut hash = Sha256::new();
        let mut part = |bytes: &[u8]| {
            // Lengths first, so that no two lists of parts run into the same bytes.
            hash.update((bytes.len() as u64).to_le_bytes());
            hash.update(bytes);
        };
        part(b"oeq-native image");
        part(&FORMAT.to_le_bytes());
        part(family.as_bytes());
        part(payload);
        part(&(entry_points.len() as u64).to_le_bytes());
        for entry in entry_points {
            part(entry.as_bytes());
        }
        part(target.to_string().as_bytes());
        if target.base == Architecture::HOST {
            #[cfg(feature = "host")]
            super::host::dependencies().for_each(|dependency| part(dependency.as_bytes()));
            return Self(hash.finalize().into());
        }
        for option in options(target.base, &target.options()) {
            part(option.as_bytes());
        }
        Self(hash.finalize().into())
    }

    /// Reads what `Display` writes.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for anything but 64 lower-case hexadecimal digits.
    pub fn parse(text: &str) -> Result<Self> {
        let bad = || Error::invalid(format!("{text:?} is not the key of an image: expected 64 hexadecimal digits"));
        let digit = |byte: u8| match byte {
            b'0'..=b'9' => Ok(byte - b'0'),
            b'a'..=b'f' => Ok(byte - b'a' + 10),
            _ => Err(bad()),
        };
        if text.len() != 64 {
            return Err(bad());
        }
        let mut key = [0; 32];
        for (byte, pair) in key.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        Ok(Self(key))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test that cannot go on should stop")]
mod tests {
    use super::*;

    fn target(text: &str) -> Target {
        text.parse().unwrap()
    }

    #[test]
    fn every_part_counts() {
        let payload = digest(b"payload");
        let key = Key::new("tp", &payload, &["forward", "fixup"], target("sm_90"));
        assert_eq!(key, Key::new("tp", &payload, &["forward", "fixup"], target("sm_90")));
        let others = [
            Key::new("conv", &payload, &["forward", "fixup"], target("sm_90")),
            Key::new("tp", &digest(b"payloae"), &["forward", "fixup"], target("sm_90")),
            Key::new("tp", &payload, &["forward"], target("sm_90")),
            Key::new("tp", &payload, &["forwardfixup"], target("sm_90")),
            Key::new("tp", &payload, &["forward", "fixup"], target("sm_90a")),
            Key::new("tp", &payload, &["forward", "fixup"], target("sm_80")),
        ];
        for (index, other) in others.iter().enumerate() {
            assert!(*other != key && !others[index + 1..].contains(other), "{index}");
        }
    }

    #[test]
    fn text_survives_the_round_trip_and_nothing_else_is_read() {
        let key = Key(digest(b"some"));
        assert_eq!(Key::parse(&key.to_string()).unwrap(), key);
        let text = key.to_string();
        for bad in [&text[1..], &text.to_uppercase(), &format!("{}g", &text[1..]), ""] {
            assert!(Key::parse(bad).is_err(), "{bad}");
        }
    }
}
