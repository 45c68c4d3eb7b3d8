//! Looks for payloads among bytes whose format is not known.
//!
//! Only for bytecode that is newer than this crate: what is found has no call around it, and nothing tells whether it is
//! used. The format itself is always read where it is known.

use std::collections::HashSet;
use std::sync::Arc;

/// How a payload begins: OEQ writes this member first.
const BEGIN: &[u8] = b"{\"kernel\":";

/// How many beginnings may turn out to be no payload. Each may cost a look at all that follows.
const MAX_BROKEN: usize = 64;

/// Every different JSON object in `bytes` that begins like a payload.
pub(super) fn payloads(bytes: &[u8]) -> Vec<Arc<[u8]>> {
    let (mut found, mut seen, mut at, mut broken) = (Vec::new(), HashSet::new(), 0, 0);
    while let Some(offset) = bytes[at..].windows(BEGIN.len()).position(|window| window == BEGIN) {
        let start = at + offset;
        let mut values = serde_json::Deserializer::from_slice(&bytes[start..]).into_iter::<serde::de::IgnoredAny>();
        at = if let Some(Ok(_)) = values.next() {
            let end = start + values.byte_offset();
            if seen.insert(&bytes[start..end]) {
                found.push(Arc::from(&bytes[start..end]));
            }
            end
        } else {
            broken += 1;
            if broken == MAX_BROKEN {
                break;
            }
            start + BEGIN.len()
        };
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn beginnings_without_an_end_do_not_cost_their_square() {
        let one = br#"{"kernel":"a"}"#;
        let mut bytes = one.to_vec();
        bytes.extend(BEGIN.repeat(10));
        bytes.extend(one);
        assert_eq!(payloads(&bytes).len(), 1);
        // Each by itself would take a look at a megabyte.
        assert_eq!(payloads(&BEGIN.repeat(100_000)).len(), 0);
    }
}
