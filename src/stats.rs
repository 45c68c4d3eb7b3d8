//! Counters of what the runtime did, cheap enough for the hot path.
//!
//! Only launches are counted per call. Their counter is split over cache lines so that threads do not share one.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use crossbeam_utils::CachePadded;

const SHARDS: usize = 16;

/// A snapshot of the counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stats {
    /// Distinct (family, payload) records made.
    pub kernels_interned: u64,
    /// Call sites that found their record already there.
    pub kernels_shared: u64,
    /// Programs compiled.
    pub compiled: u64,
    /// Units that could not be had: their compilation failed, or there is no compiler.
    pub failed: u64,
    /// Images loaded onto a device.
    pub loaded: u64,
    /// Calls executed.
    pub launches: u64,
    /// Units found in the store.
    pub store_hits: u64,
    /// Units looked for in the store in vain.
    pub store_misses: u64,
    /// Images written to the store.
    pub store_writes: u64,
    /// Images that could not be written to the store.
    pub store_write_failures: u64,
    /// Entries of the store that were damaged and moved aside.
    pub store_damaged: u64,
    /// Entries removed because the store was full.
    pub store_evictions: u64,
    /// Units for which another process was waited for.
    pub store_waits: u64,
    /// Units found in a bundle.
    pub bundle_hits: u64,
}

/// The counters of one runtime.
#[derive(Debug, Default)]
pub struct Counters {
    pub(crate) kernels_interned: AtomicU64,
    pub(crate) kernels_shared: AtomicU64,
    pub(crate) compiled: AtomicU64,
    pub(crate) failed: AtomicU64,
    pub(crate) loaded: AtomicU64,
    pub(crate) store_hits: AtomicU64,
    pub(crate) store_misses: AtomicU64,
    pub(crate) store_writes: AtomicU64,
    pub(crate) store_write_failures: AtomicU64,
    pub(crate) store_damaged: AtomicU64,
    pub(crate) store_evictions: AtomicU64,
    pub(crate) store_waits: AtomicU64,
    pub(crate) bundle_hits: AtomicU64,
    launches: [CachePadded<AtomicU64>; SHARDS],
}

thread_local! {
    static SHARD: Cell<usize> = const { Cell::new(usize::MAX) };
}

fn shard() -> usize {
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    SHARD
        .try_with(|shard| {
            if shard.get() == usize::MAX {
                shard.set(NEXT.fetch_add(1, Ordering::Relaxed) % SHARDS);
            }
            shard.get()
        })
        .unwrap_or(0)
}

impl Counters {
    #[inline]
    pub(crate) fn count_launch(&self) {
        self.launches[shard()].fetch_add(1, Ordering::Relaxed);
    }

    /// The counters now.
    #[must_use]
    pub fn snapshot(&self) -> Stats {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Stats {
            kernels_interned: get(&self.kernels_interned),
            kernels_shared: get(&self.kernels_shared),
            compiled: get(&self.compiled),
            failed: get(&self.failed),
            loaded: get(&self.loaded),
            launches: self.launches.iter().map(|shard| get(shard)).sum(),
            store_hits: get(&self.store_hits),
            store_misses: get(&self.store_misses),
            store_writes: get(&self.store_writes),
            store_write_failures: get(&self.store_write_failures),
            store_damaged: get(&self.store_damaged),
            store_evictions: get(&self.store_evictions),
            store_waits: get(&self.store_waits),
            bundle_hits: get(&self.bundle_hits),
        }
    }
}

pub(crate) fn bump(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}
