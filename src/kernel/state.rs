//! What one call site keeps, and how its call runs once its launcher is there.
//!
//! Shapes never change at one call site, so everything about a call but its addresses is worked out once, into a
//! [`Prepared`]: which results are zeroed and how many bytes they have, the words of all kernel parameters, and where each
//! address goes among them. A warm call copies the words to its stack, puts the addresses in and enqueues.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::record::{Launcher, Record};
use crate::driver::{Function, KernelCall, Stream, Zero};
use crate::error::{Error, Result};
use crate::layout::{self, Call, Extent, Extents, Parameter, TensorView};
use crate::payload::KernelPlan;
use crate::runtime::Runtime;

/// Words of kernel parameters that fit on the stack: more than any call of the families here has. A larger call works, and
/// allocates.
const WORDS: usize = 48;

/// Tensors whose addresses fit on the stack: a convolution's second derivative has eleven operands and five results.
const TENSORS: usize = 16;

/// The device addresses of one call: its operands, in order, then its results, the extra workspace included.
pub type Addresses = SmallVec<[u64; TENSORS]>;

/// The state of one call site: which kernel, which derivative order, and the prepared call once its shapes are known.
#[derive(Debug)]
pub struct CallState {
    record: Arc<Record>,
    order: usize,
    call: &'static Call,
    prepared: OnceLock<Prepared>,
}

/// A call of known shapes: everything but the addresses.
#[derive(Debug, Clone)]
pub struct Prepared {
    /// Tensors that the call has, operands and results.
    tensors: usize,
    /// Tensors to fill with zeros, and their bytes.
    zeros: SmallVec<[(usize, u64); 4]>,
    /// The parameters of all launches, one after another; addresses are 0.
    words: SmallVec<[u64; WORDS]>,
    /// Which word gets the address of which tensor.
    addresses: SmallVec<[(u8, u8); WORDS]>,
    /// The first word of each parameter.
    parameters: SmallVec<[u8; WORDS]>,
    /// The launches, fix-ups included; none where there is no work.
    launches: SmallVec<[PreparedLaunch; 4]>,
}

/// One launch of a prepared call.
#[derive(Debug, Clone, Copy)]
struct PreparedLaunch {
    entry: &'static str,
    /// Index of the launch in the family's call.
    launch: u8,
    fixup: bool,
    /// Its range in [`Prepared::parameters`].
    parameters: (u8, u8),
    blocks: u32,
    threads: u32,
    shared_bytes: u32,
}

impl PreparedLaunch {
    #[inline]
    fn function(&self, launcher: &Launcher) -> Option<Function> {
        let resolved = launcher.launches.get(usize::from(self.launch))?;
        if self.fixup { resolved.fixup } else { Some(resolved.function) }
    }
}

impl Prepared {
    /// Works a call out.
    ///
    /// # Errors
    /// The family's call has more parameters than can be numbered.
    fn new(call: &Call, plan: &KernelPlan, extents: &Extents) -> Result<Self> {
        let operands = call.operands.len();
        let mut prepared = Self {
            tensors: operands + call.results.len() + usize::from(extents.has_workspace_result),
            zeros: SmallVec::new(),
            words: SmallVec::new(),
            addresses: SmallVec::new(),
            parameters: SmallVec::new(),
            launches: SmallVec::new(),
        };
        for &result in call.zeroed {
            let bytes = extents.result_bytes[result];
            if bytes > 0 {
                prepared.zeros.push((operands + result, bytes));
            }
        }
        if extents.get(call.work) == 0 {
            return Ok(prepared);
        }
        for (index, launch) in call.launches.iter().enumerate() {
            let size = launch.size.of(plan);
            let mut add = |entry, fixup, parameters: &[Parameter], shared_bytes| {
                let first = number(prepared.parameters.len())?;
                for parameter in parameters {
                    prepared.push(*parameter, call, plan, extents)?;
                }
                prepared.launches.push(PreparedLaunch {
                    entry,
                    launch: number(index)?,
                    fixup,
                    parameters: (first, number(prepared.parameters.len())?),
                    blocks: size.blocks,
                    threads: size.threads,
                    shared_bytes,
                });
                Ok(())
            };
            add(launch.entry, false, launch.parameters, size.shared_bytes)?;
            if let Some(fixup) = launch.fixup.as_ref().filter(|_| plan.deterministic) {
                add(fixup.entry, true, fixup.parameters, 0)?;
            }
        }
        Ok(prepared)
    }

    fn push(&mut self, parameter: Parameter, call: &Call, plan: &KernelPlan, extents: &Extents) -> Result<()> {
        let operands = call.operands.len();
        self.parameters.push(number(self.words.len())?);
        match parameter {
            Parameter::Count(extent) => self.words.push(extents.get(extent)),
            Parameter::Workspace(_) if !plan.deterministic => self.words.push(0),
            Parameter::Workspace(_) if extents.has_workspace_result => self.address(operands + call.results.len())?,
            Parameter::Operand(index) | Parameter::Workspace(index) => self.address(index)?,
            Parameter::Result(index) => self.address(operands + index)?,
            Parameter::Graph { rows, cols } => {
                self.address(rows)?;
                self.address(cols)?;
                self.words.extend_from_slice(&[extents.get(Extent::Edges), extents.get(Extent::Nodes)]);
            }
        }
        Ok(())
    }

    fn address(&mut self, tensor: usize) -> Result<()> {
        self.addresses.push((number(self.words.len())?, number(tensor)?));
        self.words.push(0);
        Ok(())
    }
}

fn number(index: usize) -> Result<u8> {
    u8::try_from(index).map_err(|_| Error::internal("a target's call has more than 255 parameters, words or tensors"))
}

impl CallState {
    /// The state of a call of one derivative order.
    ///
    /// # Errors
    /// The family has no such order.
    pub fn new(record: Arc<Record>, order: usize) -> Result<Self> {
        let call = record.call(order)?;
        Ok(Self { record, order, call, prepared: OnceLock::new() })
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
        let (Some(launcher), true) = (ready.get(), addresses.len() == prepared.tensors) else {
            return Err(Error::internal(format!(
                "the call has {} tensors; the one that was checked had {}",
                addresses.len(),
                prepared.tensors
            )));
        };

        let zeros: SmallVec<[Zero; 4]> =
            prepared.zeros.iter().map(|&(tensor, bytes)| Zero { address: addresses[tensor], bytes }).collect();
        let mut words: SmallVec<[u64; WORDS]> = SmallVec::from_slice(&prepared.words);
        for &(word, tensor) in &prepared.addresses {
            words[usize::from(word)] = addresses[usize::from(tensor)];
        }
        let base = words.as_mut_ptr();
        let parameters: SmallVec<[*mut c_void; WORDS]> =
            prepared.parameters.iter().map(|word| base.wrapping_add(usize::from(*word)).cast()).collect();
        let mut calls: SmallVec<[KernelCall<'_>; 4]> = SmallVec::new();
        for launch in &prepared.launches {
            let function = launch
                .function(launcher)
                .ok_or_else(|| Error::internal(format!("the launcher has no function for `{}`", launch.entry)))?;
            calls.push(KernelCall {
                function,
                blocks: launch.blocks,
                threads: launch.threads,
                shared_bytes: launch.shared_bytes,
                parameters: &parameters[usize::from(launch.parameters.0)..usize::from(launch.parameters.1)],
                entry: launch.entry,
            });
        }
        // SAFETY: by this function's contract; the record, which this state holds, keeps the launcher and so the functions.
        unsafe { runtime.driver.enqueue(ordinal, stream, &zeros, &calls)? };
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
