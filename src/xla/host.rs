//! The stage functions of the host platform.
//!
//! XLA's CPU runtime calls instantiate and execute only, shows no tensors in the former and has no stream in the latter. So
//! execute resolves everything by itself, and has run the kernels when it returns: on the thread on which XLA calls, and on
//! those that XLA lends to the call. The CPU is one device, whatever ordinal XLA gives to its share of it.
//!
//! Older exports have deterministic convolutions write scratch to an operand. On a GPU that is safe while calls are on one
//! stream. Here XLA runs calls side by side that it has given one and the same operand, so each writes to memory of its own.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;

use super::api::{Api, Context};
use super::ffi;
use super::frame::Frame;
use super::stages::{addresses, guard, instantiate_in, prepared, site_state};
use super::stateless::{self, Calls};
use crate::driver::Stream;
use crate::driver::host::{Lender, Task, Threads};
use crate::error::{Code, Error, Result};
use crate::kernel::CallState;
use crate::kernel::state::Addresses;
use crate::registry::Target;
use crate::runtime::Runtime;

/// Stage function: makes the call site's state and schedules its compilation.
///
/// # Safety
/// Called by XLA with a frame of its own.
pub unsafe extern "C" fn instantiate<T: Target>(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: by this function's contract.
    unsafe { guard(frame, T::NAME, "instantiate", instantiate_call::<T>) }
}

/// Stage function: runs the call.
///
/// # Safety
/// Called by XLA with a frame of its own.
pub unsafe extern "C" fn execute<T: Target>(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: by this function's contract.
    unsafe { guard(frame, T::NAME, "execute", execute_call::<T>) }
}

fn instantiate_call<T: Target>(frame: &Frame<'_>) -> Result<()> {
    let runtime = Runtime::host()?;
    instantiate_in::<T>(runtime, frame, |state| match runtime.images.compiler_available() {
        Ok(()) => Ok(()),
        // What is in the store or in a bundle is soon found there. What is not cannot run on this machine as it is, and
        // that is told here rather than by every execute.
        Err(_) => state.prepare(runtime, 0, true),
    })
}

fn execute_call<T: Target>(frame: &Frame<'_>) -> Result<()> {
    // SAFETY: the state is used within this call only.
    let Some(state) = (unsafe { site_state(frame) })? else { return execute_stateless::<T>(frame) };
    // SAFETY: the state is this call site's.
    unsafe { run(Runtime::host()?, frame, state) }
}

thread_local! {
    static CALLS: Calls = const { RefCell::new(Vec::new()) };
}

/// Runs a call that has nothing but its frame.
pub(super) fn execute_stateless<T: Target>(frame: &Frame<'_>) -> Result<()> {
    let runtime = Runtime::host()?;
    // SAFETY: the state is that of this frame's payload, order and shapes: made from it, or found equal.
    stateless::execute_kept::<T>(&CALLS, runtime, frame, |state| unsafe { run(runtime, frame, state) })
}

/// Runs a call of a known state.
///
/// # Safety
/// The state is that of the frame's payload, derivative order and tensor shapes.
unsafe fn run(runtime: &Runtime, frame: &Frame<'_>, state: &CallState) -> Result<()> {
    let prepared = prepared(frame, state)?;
    let mut addresses = addresses(frame);
    let _scratch =
        prepared.written_operand().map(|(operand, bytes)| Scratch::new(operand, bytes, &mut addresses)).transpose()?;
    let pool = XlaPool::of(frame);
    let threads = pool.as_ref().map(|pool| Threads(pool));
    // An XLA without threads to lend leaves the work to the device's own.
    let stream = threads.as_ref().map_or(Stream(std::ptr::null_mut()), Threads::as_stream);
    // SAFETY: the stream is none, or threads that live to the end of this function; the buffers are this call's, and by this
    // function's contract the prepared call is of them.
    unsafe { state.execute(runtime, 0, stream, prepared, &addresses) }
}

thread_local! {
    /// What the calls before have used on this thread.
    static SCRATCH: Cell<Vec<u128>> = const { Cell::new(Vec::new()) };
}

/// Memory that one call writes to in the place of an operand.
struct Scratch(Vec<u128>);

impl Scratch {
    fn new(operand: usize, bytes: u64, addresses: &mut Addresses) -> Result<Self> {
        let needed = usize::try_from(bytes.div_ceil(size_of::<u128>() as u64)).unwrap_or(usize::MAX);
        // A call that helps this one out on this thread finds none, and makes its own.
        let mut memory = SCRATCH.take();
        if memory.len() < needed {
            let more = needed - memory.len();
            memory.try_reserve_exact(more).map_err(|_| {
                Error::new(Code::ResourceExhausted, format!("no memory for the workspace of a call ({bytes} bytes)"))
            })?;
            memory.resize(needed, 0);
        }
        addresses.replace(operand, memory.as_mut_ptr() as u64);
        Ok(Self(memory))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let mine = std::mem::take(&mut self.0);
        // No thread-local is left when the thread ends; then the memory goes.
        let _ = SCRATCH.try_with(|kept| {
            let other = kept.take();
            kept.set(if other.len() > mine.len() { other } else { mine });
        });
    }
}

/// The threads that XLA lends to one call.
struct XlaPool {
    api: Api,
    context: Context,
    threads: usize,
}

impl XlaPool {
    /// Those of a call; `None` where XLA lends none.
    fn of(frame: &Frame<'_>) -> Option<Self> {
        let (api, context) = (frame.api(), frame.context());
        let threads = api.pool_threads(context).ok().filter(|threads| *threads > 0)?;
        Some(Self { api, context, threads })
    }
}

impl Lender for XlaPool {
    fn threads(&self) -> usize {
        self.threads
    }

    unsafe fn lend(&self, task: Task, data: *mut c_void) -> Result<()> {
        // SAFETY: by this function's contract; tasks of the driver do not unwind.
        unsafe { self.api.schedule(self.context, task, data) }
    }
}
