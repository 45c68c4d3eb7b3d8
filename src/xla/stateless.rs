//! Execute functions for hosts that register one function per target and nothing else.
//!
//! Such a call has no state: all it brings is the payload itself, among its attributes. What was worked out for earlier
//! calls is kept per thread, as [`CallState`]s, and the question at every call is whether this payload is that of a kept
//! one. The answer must never be wrong.
//!
//! Nothing short of reading the bytes proves it. The address of an attribute proves nothing: it lives as long as its
//! executable, whose end a handler without state never learns, and older XLAs build the frame anew for every call, so that
//! one address can carry two payloads within one run. The exported `hash` is a hint, and a fingerprint of samples misses
//! what differs between them. So the payload is compared, whole, with the one that was interned: one `memcmp`, of a record
//! found by its length and hint, and only if everything cheaper (target, order, element types, dimensions) agrees. The rest
//! of the call costs what a call with state costs: no lock, no allocation, no shape check, no state look-up, whose failure
//! XLA would wrap into an error object. `benches/dispatch.rs` measures it. Until it was captured once, the driver is asked
//! whether it is: what a command buffer holds stays loaded, because nobody here learns of its end.
//!
//! Such a host gives one function for every platform. Which one calls is seen from the frame, each time, because one XLA
//! may have several: a GPU call has a stream, which it needs anyway. Where XLA has none but lends threads, it is the CPU,
//! and the call goes to `xla::host`.

use std::cell::{Cell, RefCell};
use std::ffi::c_int;
use std::thread::LocalKey;

use smallvec::SmallVec;

use super::ffi;
use super::frame::{Attribute, Frame, Tensors};
use super::stages::{self, Call};
use crate::driver::Stream;
use crate::error::{Error, Result};
use crate::kernel::CallState;
use crate::registry::{Derivative, Target};
use crate::runtime::Runtime;
use crate::targets::{convolution, tensor_product, variadic};

/// Kept calls per thread. One more displaces the one that was made first.
const KEPT: usize = 256;

/// Element types and dimensions of a call's tensors, one after another: type, rank, dimensions.
type Shapes = SmallVec<[i64; 48]>;

pub(super) struct Kept {
    target: &'static str,
    order: i64,
    shapes: Shapes,
    /// Where its payload was last seen: a hint.
    address: Cell<usize>,
    state: CallState,
}

/// The calls of one platform that a thread has kept.
pub(super) type Calls = RefCell<Vec<Kept>>;

thread_local! {
    static CALLS: Calls = const { RefCell::new(Vec::new()) };
}

/// Execute function of a target for hosts that register no other stage.
///
/// # Safety
/// Called by XLA with a frame of its own.
pub unsafe extern "C" fn execute<T: Target>(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: by this function's contract.
    unsafe { stages::guard(frame, T::NAME, "execute", execute_call::<T>) }
}

/// Runs a call that has nothing but its frame.
pub(super) fn execute_call<T: Target>(frame: &Frame<'_>) -> Result<()> {
    let stream = match frame.api().stream(frame.context()) {
        Ok(stream) => Stream(stream),
        Err(error) => return without_stream::<T>(frame, &error),
    };
    let call = stages::call(frame)?;
    // SAFETY: the state is that of this frame's payload, order and shapes: made from it, or found equal.
    execute_kept::<T>(&CALLS, call.runtime, frame, |state| unsafe { run(&call, frame, state, stream) })
}

/// Runs a call of a platform that has no streams.
#[cold]
fn without_stream<T: Target>(frame: &Frame<'_>, error: &Error) -> Result<()> {
    #[cfg(feature = "host")]
    if frame.api().pool_threads(frame.context()).is_ok() {
        return super::host::execute_stateless::<T>(frame);
    }
    let call = stages::call(frame)?;
    // A wrong call is wrong with and without a GPU.
    stages::prepared(frame, &stages::state_of::<T>(call.runtime, frame)?)?;
    Err(stages::no_stream(call.runtime, error))
}

/// Finds the state of a frame among the kept ones of a platform, or makes it on that platform's runtime and keeps it, and
/// runs the call with it.
#[inline]
pub(super) fn execute_kept<T: Target>(
    calls: &'static LocalKey<Calls>,
    runtime: &Runtime,
    frame: &Frame<'_>,
    run: impl Fn(&CallState) -> Result<()>,
) -> Result<()> {
    let anew = || {
        let state = stages::state_of::<T>(runtime, frame)?;
        run(&state)?;
        Ok(state)
    };
    let Some((kernel, order)) = key::<T>(frame) else { return anew().map(|_| ()) };
    let outcome = calls.try_with(|calls| {
        // Nothing that a call does comes back to this thread's list; if it did, the call would just not be kept.
        let Ok(kept) = calls.try_borrow() else { return None };
        // Layers of one model have much in common: the call that was last seen at this address is compared first, so that
        // in a model at rest no other payload is read.
        let address = kernel.as_ptr().addr();
        let find = |there: bool| {
            kept.iter().find(|kept| {
                (kept.address.get() == address) == there
                    && kept.target == T::NAME
                    && kept.order == order
                    && same_shapes(&kept.shapes, frame.operands(), frame.results())
                    && kept.state.record().identity().is(kernel)
            })
        };
        let found = find(true).or_else(|| find(false))?;
        found.address.set(address);
        Some(run(&found.state))
    });
    if let Ok(Some(outcome)) = outcome {
        return outcome;
    }
    let state = anew()?;
    let _ = calls.try_with(|calls| {
        let Ok(mut calls) = calls.try_borrow_mut() else { return };
        if calls.len() >= KEPT {
            calls.remove(0);
        }
        let (shapes, address) = (shapes(frame.operands(), frame.results()), Cell::new(kernel.as_ptr().addr()));
        calls.push(Kept { target: T::NAME, order, shapes, address, state });
    });
    Ok(())
}

/// Runs a call on its stream.
///
/// # Safety
/// The state is that of the frame's payload, order and shapes, and the stream is the frame's.
#[inline]
unsafe fn run(call: &Call<'_>, frame: &Frame<'_>, state: &CallState, stream: Stream) -> Result<()> {
    let prepared = stages::prepared(frame, state)?;
    // SAFETY: by this function's contract.
    unsafe { stages::execute_state(call, frame, state, prepared, stream)? };
    // A command buffer holds the kernel as long as an executable whose end is never told here.
    // SAFETY: as above.
    if !state.record().is_pinned() && unsafe { stages::is_captured(call, stream) } {
        state.record().pin();
    }
    Ok(())
}

/// The payload and the order of a call whose payload is one text. `None` for the rest: what is wrong, and the dictionaries
/// of OEQ 0.5.0 to 0.5.3, whose identity is put together from many parts.
#[allow(clippy::inline_always, reason = "used for two platforms, it is otherwise a call of its own in every warm call")]
#[inline(always)]
fn key<'a, T: Target>(frame: &Frame<'a>) -> Option<(&'a [u8], i64)> {
    let (mut kernel, mut order) = (
        None,
        match T::DERIVATIVE {
            Derivative::Order(_) => Some(0),
            Derivative::Attribute => None,
        },
    );
    for (name, value) in frame.attributes().iter() {
        match (name, value) {
            (b"kernel", Attribute::Text(text)) => kernel = Some(text),
            (b"derivative", Attribute::Integer(value)) if order.is_none() => order = Some(value),
            (b"kernel_prop", _) => return None,
            _ => {}
        }
    }
    Some((kernel?, order?))
}

fn shapes(operands: Tensors<'_>, results: Tensors<'_>) -> Shapes {
    let mut shapes = Shapes::new();
    for tensors in [operands, results] {
        for tensor in (0..tensors.len()).filter_map(|index| tensors.get(index)) {
            shapes.push(head(tensor.dtype(), tensor.dimensions()));
            shapes.extend_from_slice(tensor.dimensions());
        }
    }
    shapes
}

/// Type and rank of a tensor in one word.
#[inline]
fn head(dtype: c_int, dimensions: &[i64]) -> i64 {
    (i64::from(dtype) << 32) | i64::try_from(dimensions.len()).unwrap_or(i64::MAX)
}

#[inline]
fn same_shapes(mut kept: &[i64], operands: Tensors<'_>, results: Tensors<'_>) -> bool {
    for tensors in [operands, results] {
        for index in 0..tensors.len() {
            let Some(tensor) = tensors.get(index) else { return false };
            let dimensions = tensor.dimensions();
            let Some((&first, rest)) = kept.split_first() else { return false };
            if first != head(tensor.dtype(), dimensions) || !rest.starts_with(dimensions) {
                return false;
            }
            kept = &rest[dimensions.len()..];
        }
    }
    kept.is_empty()
}

/// Symbols that `build.rs` gives the targets' plain names in the shared library. In the static one they keep these: there
/// plain names would collide with those of other libraries.
macro_rules! symbols {
    ($($symbol:ident = $target:ty),+ $(,)?) => {
        $(
            #[doc = concat!("[`execute`] of `", stringify!($target), "`.")]
            ///
            /// # Safety
            /// Called by XLA with a frame of its own.
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $symbol(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
                // SAFETY: by this function's contract.
                unsafe { execute::<$target>(frame) }
            }
        )+

        /// The symbols and the targets that they execute.
        #[cfg(test)]
        const SYMBOLS: &[(&str, &str)] = &[$((stringify!($symbol), <$target as Target>::NAME)),+];
    };
}

symbols! {
    oeq_execute_conv_backward = convolution::Backward,
    oeq_execute_conv_double_backward = convolution::DoubleBackward,
    oeq_execute_conv_forward = convolution::Forward,
    oeq_execute_oeq_convolution = variadic::Convolution,
    oeq_execute_oeq_tensor_product = variadic::TensorProduct,
    oeq_execute_tp_backward = tensor_product::Backward,
    oeq_execute_tp_double_backward = tensor_product::DoubleBackward,
    oeq_execute_tp_forward = tensor_product::Forward,
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a failed test should panic")]

    use super::*;
    use crate::registry;

    #[test]
    fn every_target_of_the_table_has_a_symbol_and_a_plain_name() {
        let names: Vec<_> = registry::table().unwrap().entries.iter().map(|entry| entry.descriptor.name).collect();
        assert_eq!(SYMBOLS.iter().map(|(_, name)| *name).collect::<Vec<_>>(), names);
        for (symbol, name) in SYMBOLS {
            assert_eq!(*symbol, format!("oeq_execute_{name}"));
            assert!(include_str!("../../build.rs").contains(&format!("\"{name}\"")), "{name}");
        }
    }
}
