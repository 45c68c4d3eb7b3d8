//! Payloads by identity.
//!
//! Identity is the family plus the complete payload as it came, unknown members included. The hash that exported models
//! carry only picks a bucket: two payloads with one hash are two kernels.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use ahash::RandomState;
use smallvec::SmallVec;

use super::record::Record;
use crate::config::CompileUnits;
use crate::error::Result;
use crate::layout::Family;
use crate::payload::{DictionaryPayload, KernelPlan};
use crate::stats::{Counters, bump};
use crate::sync::lock;

/// A payload in one of the forms that OEQ ever exported.
#[derive(Debug, Clone, Copy)]
pub enum Payload<'a> {
    /// JSON text, since OEQ 0.5.4.
    Json(&'a [u8]),
    /// A source and dictionaries, OEQ 0.5.0 to 0.5.3.
    Dictionaries(DictionaryPayload<'a>),
}

/// What a kernel is equal by, besides its family.
#[derive(Debug, PartialEq, Eq)]
pub struct Identity(Box<[u8]>);

impl Identity {
    /// Bytes that it holds.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.0.len()
    }

    /// Whether a payload is this one: all bytes are compared.
    #[inline]
    #[must_use]
    pub fn is(&self, payload: &[u8]) -> bool {
        *self.0 == *payload
    }
}

type Bucket = SmallVec<[Arc<Record>; 1]>;

/// All records, each kernel once.
#[derive(Debug, Default)]
pub struct Interner {
    buckets: Mutex<HashMap<(usize, i64), Bucket, RandomState>>,
}

impl Interner {
    /// The record of a payload, made if it is new.
    ///
    /// # Errors
    /// The payload is not valid for the family. Nothing is kept of it.
    pub fn intern(
        &self,
        family: &'static Family,
        hash: i64,
        payload: Payload<'_>,
        policy: CompileUnits,
        counters: &Counters,
    ) -> Result<Arc<Record>> {
        let encoded;
        let identity: &[u8] = match payload {
            Payload::Json(text) => text,
            Payload::Dictionaries(dictionaries) => {
                encoded = dictionaries.identity_bytes();
                &encoded
            }
        };
        let key = (std::ptr::from_ref(family) as usize, hash);
        if let Some(record) = find(&lock(&self.buckets), key, identity) {
            bump(&counters.kernels_shared);
            return Ok(record);
        }
        // Parsed outside the lock, so that a large payload holds nobody up. Two threads may both parse a new payload; the
        // second finds the first one's record below and drops its own.
        let plan = match payload {
            Payload::Json(text) => KernelPlan::from_json(text, &family.requirements)?,
            Payload::Dictionaries(dictionaries) => KernelPlan::from_dictionaries(&dictionaries, &family.requirements)?,
        };
        let record = Arc::new(Record::new(family, Identity(identity.into()), plan, policy));
        let mut buckets = lock(&self.buckets);
        if let Some(record) = find(&buckets, key, identity) {
            bump(&counters.kernels_shared);
            return Ok(record);
        }
        buckets.entry(key).or_default().push(Arc::clone(&record));
        bump(&counters.kernels_interned);
        Ok(record)
    }
}

fn find(
    buckets: &HashMap<(usize, i64), Bucket, RandomState>,
    key: (usize, i64),
    identity: &[u8],
) -> Option<Arc<Record>> {
    buckets.get(&key)?.iter().find(|record| *record.identity().0 == *identity).cloned()
}
