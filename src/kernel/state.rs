//! What one call site keeps, and how its call runs once its launcher is there.

use std::ffi::c_void;
use std::sync::{Arc, OnceLock};

use smallvec::SmallVec;

use super::record::Record;
use crate::driver::{KernelCall, Stream, Zero};
use crate::error::{Error, Result};
use crate::layout::{self, Call, Extents, Parameter, TensorView};
use crate::runtime::Runtime;

/// Words of kernel parameters that fit on the stack: more than any launch of the classic families has.
const PARAMETER_WORDS: usize = 24;

/// The state of one call site: which kernel, which derivative order, and its extents once they are known.
#[derive(Debug)]
pub struct CallState {
    record: Arc<Record>,
    order: usize,
    call: &'static Call,
    extents: OnceLock<Extents>,
}

/// The device addresses of one call.
#[derive(Debug, Default)]
pub struct Addresses {
    /// Of the operands, in order.
    pub operands: SmallVec<[u64; 12]>,
    /// Of the results, in order, the extra workspace included.
    pub results: SmallVec<[u64; 6]>,
}

impl CallState {
    /// The state of a call of one derivative order.
    ///
    /// # Errors
    /// The family has no such order.
    pub fn new(record: Arc<Record>, order: usize) -> Result<Self> {
        let call = record.call(order)?;
        Ok(Self { record, order, call, extents: OnceLock::new() })
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

    /// The extents, if the tensors were checked already.
    #[inline]
    #[must_use]
    pub fn extents(&self) -> Option<&Extents> {
        self.extents.get()
    }

    /// Checks the call site's tensors, and remembers the outcome: XLA's shapes never change at one call site.
    ///
    /// # Errors
    /// See [`layout::check`].
    pub fn check(&self, operands: &[TensorView<'_>], results: &[TensorView<'_>]) -> Result<&Extents> {
        let extents = layout::check(self.call, self.record.plan(), operands, results)?;
        Ok(self.extents.get_or_init(|| extents))
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
    /// What [`Record::prepare`] or the driver says.
    ///
    /// # Safety
    /// The stream belongs to the device, `extents` came from checking this call's tensors, and the addresses are those
    /// tensors' on that device, valid until the work on the stream is done.
    pub unsafe fn execute(
        &self,
        runtime: &Runtime,
        ordinal: u32,
        stream: Stream,
        extents: &Extents,
        addresses: &Addresses,
    ) -> Result<()> {
        let mut ready = self.record.launcher(self.order, ordinal);
        if ready.is_none() {
            self.record.prepare(runtime, self.order, ordinal, true)?;
            ready = self.record.launcher(self.order, ordinal);
        }
        let launcher = ready
            .as_ref()
            .and_then(|ready| ready.get())
            .ok_or_else(|| Error::internal("a launcher was made but is not there"))?;

        let plan = self.record.plan();
        let mut zeros: SmallVec<[Zero; 4]> = SmallVec::new();
        for &index in self.call.zeroed {
            let bytes = extents.result_bytes[index];
            if bytes > 0 {
                zeros.push(Zero { address: addresses.results[index], bytes });
            }
        }

        // Values first, then pointers to them: a vector that grows moves its values.
        let busy = extents.get(self.call.work) > 0;
        let todo = if busy { self.call.launches } else { &[] };
        let mut values: SmallVec<[u64; 2 * PARAMETER_WORDS]> = SmallVec::new();
        let mut starts: SmallVec<[usize; 2 * PARAMETER_WORDS]> = SmallVec::new();
        let mut counts: SmallVec<[(usize, usize); 4]> = SmallVec::new();
        for (launch, resolved) in todo.iter().zip(&launcher.launches) {
            let fixup = launch.fixup.as_ref().filter(|_| resolved.fixup.is_some());
            let fixup_parameters = fixup.map_or(&[] as &[Parameter], |fixup| fixup.parameters);
            for parameter in launch.parameters.iter().chain(fixup_parameters) {
                starts.push(values.len());
                push(&mut values, *parameter, plan.deterministic, self.call, extents, addresses);
            }
            counts.push((launch.parameters.len(), fixup_parameters.len()));
        }
        let base = values.as_mut_ptr();
        let pointers: SmallVec<[*mut c_void; 2 * PARAMETER_WORDS]> =
            starts.iter().map(|start| base.wrapping_add(*start).cast()).collect();

        let mut calls: SmallVec<[KernelCall<'_>; 4]> = SmallVec::new();
        let mut rest: &[*mut c_void] = &pointers;
        for ((launch, resolved), (own, after)) in todo.iter().zip(&launcher.launches).zip(&counts) {
            let size = launch.size.of(plan);
            let (parameters, tail) = rest.split_at(*own);
            let (fixup_parameters, tail) = tail.split_at(*after);
            rest = tail;
            calls.push(KernelCall {
                function: resolved.function,
                blocks: size.blocks,
                threads: size.threads,
                shared_bytes: size.shared_bytes,
                parameters,
                entry: launch.entry,
            });
            if let (Some(function), Some(fixup)) = (resolved.fixup, &launch.fixup) {
                calls.push(KernelCall {
                    function,
                    blocks: size.blocks,
                    threads: size.threads,
                    shared_bytes: 0,
                    parameters: fixup_parameters,
                    entry: fixup.entry,
                });
            }
        }
        // SAFETY: by this function's contract; the launcher, held by `ready`, keeps the functions loaded, and a record
        // keeps its launchers.
        unsafe { runtime.driver.enqueue(ordinal, stream, &zeros, &calls)? };
        runtime.counters.count_launch();
        Ok(())
    }
}

#[inline]
fn push(
    values: &mut SmallVec<[u64; 2 * PARAMETER_WORDS]>,
    parameter: Parameter,
    deterministic: bool,
    call: &Call,
    extents: &Extents,
    addresses: &Addresses,
) {
    match parameter {
        Parameter::Count(extent) => values.push(extents.get(extent)),
        Parameter::Result(index) => values.push(addresses.results[index]),
        Parameter::Graph { rows, cols } => {
            values.extend_from_slice(&[
                addresses.operands[rows],
                addresses.operands[cols],
                extents.get(layout::Extent::Edges),
                extents.get(layout::Extent::Nodes),
            ]);
        }
        Parameter::Workspace(_) if !deterministic => values.push(0),
        Parameter::Workspace(_) if extents.has_workspace_result => values.push(addresses.results[call.results.len()]),
        Parameter::Operand(index) | Parameter::Workspace(index) => values.push(addresses.operands[index]),
    }
}
