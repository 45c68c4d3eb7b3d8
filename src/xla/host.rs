//! The stage functions of the host platform.
//!
//! XLA's CPU runtime calls instantiate and execute only, shows no tensors in the former and has no stream in the latter. So
//! execute resolves everything by itself, and has run the kernels when it returns. The CPU is one device, whatever ordinal
//! XLA gives to its share of it.

use super::ffi;
use super::frame::Frame;
use super::stages::{addresses, guard, instantiate_in, site_state, state_of, views};
use crate::driver::Stream;
use crate::error::Result;
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
    // Told here rather than by every execute: the model cannot run on this machine as it is.
    runtime.images.available()?;
    instantiate_in::<T>(runtime, frame)
}

fn execute_call<T: Target>(frame: &Frame<'_>) -> Result<()> {
    let runtime = Runtime::host()?;
    // SAFETY: the state is used within this call only.
    let site = (unsafe { site_state(frame) })?;
    let stateless;
    let state = if let Some(site) = site {
        site
    } else {
        stateless = state_of::<T>(runtime, frame)?;
        &stateless
    };
    let prepared = if let Some(prepared) = state.prepared() {
        prepared
    } else {
        let (operands, results) = views(frame)?;
        state.check(&operands, &results)?
    };
    // SAFETY: the host has no streams; the buffers are this call's, and the prepared call is that of this call site.
    unsafe { state.execute(runtime, 0, Stream(std::ptr::null_mut()), prepared, &addresses(frame)) }
}
