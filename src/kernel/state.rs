//! What one call site keeps, and how its call runs once its launcher is there.
//!
//! Shapes never change at one call site, so everything about a call but its addresses is worked out once, into a
//! [`Prepared`]: which results are zeroed and how many bytes they have, the words of all kernel parameters, and where each
//! address goes among them. A warm call copies the words to its stack, puts the addresses in and enqueues.

use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::record::Record;
use crate::driver::replay::Replays;
use crate::driver::{LaunchSpec, Stream, Work, Zero};
use crate::error::{Error, Result};
use crate::layout::{self, Call, Extent, Extents, Parameter, TensorView};
use crate::payload::KernelPlan;
use crate::runtime::Runtime;

/// The most tensors that a call may have: a convolution's second derivative has sixteen.
pub const MAX_TENSORS: usize = 24;
/// The most 64-bit words that the parameters of a call's launches may take: a deterministic convolution's second derivative
/// takes thirty-eight.
pub const MAX_WORDS: usize = 56;
/// The most results of a call that may be zeroed.
pub const MAX_ZEROED: usize = 8;

/// The device addresses of one call: its operands, in order, then its results, the extra workspace included.
#[derive(Debug)]
pub struct Addresses {
    list: [u64; MAX_TENSORS],
    count: usize,
}

impl Default for Addresses {
    #[inline]
    fn default() -> Self {
        Self { list: [0; MAX_TENSORS], count: 0 }
    }
}

impl Addresses {
    /// Puts another address in the place of a tensor's; the tensor is one of the call's.
    #[inline]
    pub fn replace(&mut self, tensor: usize, address: u64) {
        if let Some(place) = self.list.get_mut(tensor) {
            *place = address;
        }
    }
}

impl Extend<u64> for Addresses {
    /// Counts every address; those past the most that a call may have are not kept, and the call is refused for its count.
    #[inline]
    fn extend<I: IntoIterator<Item = u64>>(&mut self, addresses: I) {
        for address in addresses {
            if let Some(place) = self.list.get_mut(self.count) {
                *place = address;
            }
            self.count += 1;
        }
    }
}

/// The state of one call site: which kernel, which derivative order, and the prepared call once its shapes are known.
#[derive(Debug)]
pub struct CallState {
    record: Arc<Record>,
    order: usize,
    call: &'static Call,
    prepared: OnceLock<Prepared>,
    replays: Replays,
}

/// A call of known shapes: everything but the addresses.
#[derive(Debug)]
pub struct Prepared {
    /// Tensors that the call has, operands and results.
    tensors: usize,
    /// What is zeroed; addresses are 0.
    zeros: [Zero; MAX_ZEROED],
    /// Which tensor each of the zeros is.
    zeroed: SmallVec<[u8; MAX_ZEROED]>,
    /// The parameters of all launches, one after another; addresses are 0.
    words: [u64; MAX_WORDS],
    /// How many of the words are used.
    used: usize,
    /// Which word gets the address of which tensor.
    addresses: SmallVec<[(u8, u8); MAX_WORDS]>,
    /// The launches, fix-ups included; none where there is no work.
    launches: SmallVec<[LaunchSpec; 4]>,
    /// The operand that the launches write scratch to, and its bytes.
    written: Option<(u8, u64)>,
}

impl Prepared {
    /// Works a call out.
    ///
    /// # Errors
    /// The family's call has more tensors, parameters or zeroed results than are provided for.
    fn new(call: &Call, plan: &KernelPlan, extents: &Extents) -> Result<Self> {
        let operands = call.operands.len();
        let mut prepared = Self {
            tensors: operands + call.results.len() + usize::from(extents.has_workspace_result),
            zeros: [Zero { address: 0, bytes: 0 }; MAX_ZEROED],
            zeroed: SmallVec::new(),
            words: [0; MAX_WORDS],
            used: 0,
            addresses: SmallVec::new(),
            launches: SmallVec::new(),
            written: None,
        };
        if prepared.tensors > MAX_TENSORS || call.zeroed.len() > MAX_ZEROED {
            return Err(too_many());
        }
        for &result in call.zeroed {
            let bytes = extents.result_bytes[result];
            if bytes > 0 {
                prepared.zeros[prepared.zeroed.len()].bytes = bytes;
                prepared.zeroed.push(number(operands + result)?);
            }
        }
        if extents.get(call.work) == 0 {
            return Ok(prepared);
        }
        for launch in call.launches {
            let size = launch.size.of(plan);
            let mut add = |entry, parameters: &[Parameter], shared_bytes| {
                let first = prepared.used;
                let mut starts = SmallVec::new();
                for parameter in parameters {
                    starts.push(number(prepared.used - first)?);
                    prepared.push(*parameter, call, plan, extents)?;
                }
                prepared.launches.push(LaunchSpec {
                    entry,
                    blocks: size.blocks,
                    threads: size.threads,
                    shared_bytes,
                    words: first..prepared.used,
                    parameters: starts,
                });
                Ok(())
            };
            add(launch.entry, launch.parameters, size.shared_bytes)?;
            if let Some(fixup) = launch.fixup.as_ref().filter(|_| plan.deterministic) {
                add(fixup.entry, fixup.parameters, 0)?;
            }
        }
        Ok(prepared)
    }

    fn push(&mut self, parameter: Parameter, call: &Call, plan: &KernelPlan, extents: &Extents) -> Result<()> {
        let operands = call.operands.len();
        match parameter {
            Parameter::Count(extent) => self.word(extents.get(extent)),
            Parameter::Workspace(_) if !plan.deterministic => self.word(0),
            Parameter::Workspace(_) if extents.has_workspace_result => self.address(operands + call.results.len()),
            Parameter::Workspace(index) => {
                self.written = Some((number(index)?, plan.workspace_bytes));
                self.address(index)
            }
            Parameter::Operand(index) => self.address(index),
            Parameter::Result(index) => self.address(operands + index),
            Parameter::Graph { rows, cols } => {
                self.address(rows)?;
                self.address(cols)?;
                self.word(extents.get(Extent::Edges))?;
                self.word(extents.get(Extent::Nodes))
            }
        }
    }

    /// The operand that the call uses as scratch memory, and its bytes: none where a result is there for that.
    #[inline]
    #[must_use]
    pub fn written_operand(&self) -> Option<(usize, u64)> {
        self.written.map(|(tensor, bytes)| (usize::from(tensor), bytes))
    }

    fn address(&mut self, tensor: usize) -> Result<()> {
        self.addresses.push((number(self.used)?, number(tensor)?));
        self.word(0)
    }

    fn word(&mut self, value: u64) -> Result<()> {
        *self.words.get_mut(self.used).ok_or_else(too_many)? = value;
        self.used += 1;
        Ok(())
    }
}

fn number(index: usize) -> Result<u8> {
    u8::try_from(index).map_err(|_| too_many())
}

fn too_many() -> Error {
    Error::internal(format!(
        "a target's call has more than {MAX_TENSORS} tensors, {MAX_WORDS} words of parameters or {MAX_ZEROED} zeroed results"
    ))
}

impl Drop for CallState {
    fn drop(&mut self) {
        // Before the functions in them may be unloaded.
        drop(std::mem::take(&mut self.replays));
        self.record.release();
    }
}

impl CallState {
    /// The state of a call of one derivative order.
    ///
    /// # Errors
    /// The family has no such order.
    pub fn new(record: Arc<Record>, order: usize) -> Result<Self> {
        let call = record.call(order)?;
        record.acquire();
        Ok(Self { record, order, call, prepared: OnceLock::new(), replays: Replays::default() })
    }

    /// The same for a call site that took the place of one with other sizes, and may soon lose it.
    ///
    /// # Errors
    /// The family has no such order.
    pub fn after_change(record: Arc<Record>, order: usize) -> Result<Self> {
        let mut state = Self::new(record, order)?;
        state.replays = Replays::after_change();
        Ok(state)
    }

    /// The kernel.
    #[must_use]
    pub fn record(&self) -> &Arc<Record> {
        &self.record
    }

    /// The derivative order.
    #[must_use]
    pub fn order(&self) -> usize {
        self.order
    }

    /// The prepared call, if the tensors were checked already.
    #[inline]
    #[must_use]
    pub fn prepared(&self) -> Option<&Prepared> {
        self.prepared.get()
    }

    /// Checks the call site's tensors, and remembers the outcome: XLA's shapes never change at one call site.
    ///
    /// # Errors
    /// See [`layout::check`].
    pub fn check(&self, operands: &[TensorView<'_>], results: &[TensorView<'_>]) -> Result<&Prepared> {
        let extents = layout::check(self.call, self.record.plan(), operands, results)?;
        let prepared = Prepared::new(self.call, self.record.plan(), &extents)?;
        Ok(self.prepared.get_or_init(|| prepared))
    }

    /// Makes the launcher for a device if it can be had; with `wait`, waits for the compiler.
    ///
    /// # Errors
    /// See [`Record::prepare`].
    #[inline]
    pub fn prepare(&self, runtime: &Runtime, ordinal: u32, wait: bool) -> Result<()> {
        if self.record.launcher(self.order, ordinal).is_some() {
            return Ok(());
        }
        self.record.prepare(runtime, self.order, ordinal, wait).map(|_| ())
    }

    /// Zeroes and launches. Compiles and loads first if that was not done; once warm, only enqueues.
    ///
    /// # Errors
    /// What [`Record::prepare`] or the driver says, or addresses that are not those of the checked call.
    ///
    /// # Safety
    /// The stream belongs to the device, `prepared` came from checking this call's tensors, and the addresses are those
    /// tensors' on that device, valid until the work on the stream is done.
    #[inline]
    pub unsafe fn execute(
        &self,
        runtime: &Runtime,
        ordinal: u32,
        stream: Stream,
        prepared: &Prepared,
        addresses: &Addresses,
    ) -> Result<()> {
        let ready = match self.record.launcher(self.order, ordinal) {
            Some(ready) => ready,
            None => self.first(runtime, ordinal)?,
        };
        let (Some(launcher), true) = (ready.get(), addresses.count == prepared.tensors) else {
            return Err(Error::internal(format!(
                "the call has {} tensors; the one that was checked had {}",
                addresses.count, prepared.tensors
            )));
        };
        let mut zeros = prepared.zeros;
        for (zero, tensor) in zeros.iter_mut().zip(&prepared.zeroed) {
            zero.address = addresses.list[usize::from(*tensor)];
        }
        let mut words = prepared.words;
        for &(word, tensor) in &prepared.addresses {
            words[usize::from(word)] = addresses.list[usize::from(tensor)];
        }
        let work = Work {
            zeros: &zeros[..prepared.zeroed.len()],
            launches: &prepared.launches,
            functions: &launcher.functions,
            words: &words[..prepared.used],
            replays: runtime.config.replay.then_some(&self.replays),
        };
        // SAFETY: by this function's contract; the record, which this state holds, keeps the launcher and so the functions.
        unsafe { runtime.driver.enqueue(ordinal, stream, &work)? };
        runtime.counters.count_launch();
        Ok(())
    }

    /// The launcher, made now.
    #[cold]
    fn first(&self, runtime: &Runtime, ordinal: u32) -> Result<super::record::Ready> {
        self.record.prepare(runtime, self.order, ordinal, true)?;
        let ready = self.record.launcher(self.order, ordinal);
        ready.ok_or_else(|| Error::internal("a launcher was made but is not there"))
    }
}
