//! Payloads by identity, and how long their kernels live.
//!
//! Identity is the family plus the complete payload as it came, unknown members included. The hash that exported models
//! carry only picks a bucket: two payloads with one hash are two kernels.
//!
//! A record lives while a call site uses it. Afterwards it is kept, with its images and loaded modules, until newer ones have
//! pushed it out: compiling a model again then costs nothing, and a server that sees ever new models does not grow. What is
//! pushed out is dropped on a compiler thread, because unloading a module waits for the device.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, Weak};

use ahash::RandomState;
use smallvec::SmallVec;

use super::record::Record;
use crate::compile::Pool;
use crate::compile::key::{Digest, digest};
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

    /// What a stored image of the kernel is known by.
    #[must_use]
    pub fn digest(&self) -> Digest {
        digest(&self.0)
    }
}

type Bucket = SmallVec<[Weak<Record>; 1]>;
type Key = (usize, i64);

/// Buckets are swept of dead entries when there are this many, and then whenever their number has doubled.
const FIRST_SWEEP: usize = 64;

#[derive(Debug)]
struct Buckets {
    map: HashMap<Key, Bucket, RandomState>,
    sweep_at: usize,
}

impl Buckets {
    fn find(&self, key: Key, identity: &[u8]) -> Option<Arc<Record>> {
        let bucket = self.map.get(&key)?;
        bucket.iter().filter_map(Weak::upgrade).find(|record| *record.identity().0 == *identity)
    }

    fn add(&mut self, key: Key, record: &Arc<Record>) {
        let bucket = self.map.entry(key).or_default();
        bucket.retain(|record| record.strong_count() > 0);
        bucket.push(Arc::downgrade(record));
        if self.map.len() >= self.sweep_at {
            self.map.retain(|_, bucket| {
                bucket.retain(|record| record.strong_count() > 0);
                !bucket.is_empty()
            });
            self.sweep_at = FIRST_SWEEP.max(2 * self.map.len());
        }
    }
}

/// Records that no call site uses, the most recently used last, and the bytes that each holds.
#[derive(Debug, Default)]
struct Kept {
    list: VecDeque<(Arc<Record>, u64)>,
    bytes: u64,
}

impl Kept {
    fn take(&mut self, record: &Record) -> Option<Arc<Record>> {
        let index = self.list.iter().position(|(kept, _)| std::ptr::eq(&raw const **kept, record))?;
        let (kept, bytes) = self.list.remove(index)?;
        self.bytes -= bytes;
        Some(kept)
    }
}

/// All records, each kernel once.
#[derive(Debug)]
pub struct Interner {
    buckets: Mutex<Buckets>,
    kept: Mutex<Kept>,
    /// Those that somebody else's graph may hold, for the life of the process.
    pinned: Mutex<Vec<Arc<Record>>>,
    keep_bytes: u64,
    pool: Arc<Pool>,
}

impl Interner {
    /// An interner that keeps unused records of up to `keep_bytes`. What it drops, the pool's threads drop.
    #[must_use]
    pub fn new(keep_bytes: u64, pool: Arc<Pool>) -> Arc<Self> {
        let buckets = Buckets { map: HashMap::default(), sweep_at: FIRST_SWEEP };
        Arc::new(Self {
            buckets: Mutex::new(buckets),
            kept: Mutex::default(),
            pinned: Mutex::default(),
            keep_bytes,
            pool,
        })
    }

    /// The record of a payload, made if it is new.
    ///
    /// # Errors
    /// The payload is not valid for the family. Nothing is kept of it.
    pub fn intern(
        self: &Arc<Self>,
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
        let known = lock(&self.buckets).find(key, identity);
        if let Some(record) = known {
            bump(&counters.kernels_shared);
            return Ok(record);
        }
        // Parsed outside the lock, so that a large payload holds nobody up. Two threads may both parse a new payload; the
        // second finds the first one's record below and drops its own.
        let plan = match payload {
            Payload::Json(text) => KernelPlan::from_json(text, &family.requirements)?,
            Payload::Dictionaries(dictionaries) => KernelPlan::from_dictionaries(&dictionaries, &family.requirements)?,
        };
        let record = Arc::new(Record::new(family, Identity(identity.into()), plan, policy, Arc::downgrade(self)));
        let mut buckets = lock(&self.buckets);
        let known = buckets.find(key, identity);
        if let Some(known) = known {
            drop(buckets);
            bump(&counters.kernels_shared);
            return Ok(known);
        }
        buckets.add(key, &record);
        bump(&counters.kernels_interned);
        Ok(record)
    }

    /// A call site begins to use a record that none used.
    pub(super) fn used(&self, record: &Record) {
        // The site holds the record, so this is never the last reference.
        drop(lock(&self.kept).take(record));
    }

    /// Keeps a record as long as the process.
    pub(super) fn pin(&self, record: &Arc<Record>) {
        lock(&self.pinned).push(Arc::clone(record));
    }

    /// The last call site of a record is gone, or one that has none has grown.
    pub(super) fn unused(&self, record: &Arc<Record>) {
        let bytes = record.bytes();
        let mut kept = lock(&self.kept);
        let again = kept.take(record);
        kept.list.push_back((Arc::clone(record), bytes));
        kept.bytes += bytes;
        let mut gone = Vec::new();
        while kept.bytes > self.keep_bytes || (self.keep_bytes == 0 && !kept.list.is_empty()) {
            let Some((oldest, bytes)) = kept.list.pop_front() else { break };
            kept.bytes -= bytes;
            gone.push(oldest);
        }
        drop(kept);
        drop(again);
        if !gone.is_empty() {
            // Where no thread can be had, the job comes back and is dropped here, with what it holds.
            drop(self.pool.submit(0, Box::new(move || drop(gone))));
        }
    }

    /// How many records there are, used or kept.
    #[must_use]
    pub fn live(&self) -> usize {
        let buckets = lock(&self.buckets);
        buckets.map.values().flatten().filter(|record| record.strong_count() > 0).count()
    }

    /// Every record there is, used or kept.
    #[must_use]
    pub fn records(&self) -> Vec<Arc<Record>> {
        lock(&self.buckets).map.values().flatten().filter_map(Weak::upgrade).collect()
    }
}
