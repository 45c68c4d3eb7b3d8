//! The stage functions that XLA calls, one set per target.
//!
//! Each is an `extern "C"` function monomorphised from a [`Target`], so there is no user data and no table to search. Each
//! body runs inside `guard`, which answers metadata calls, turns errors into XLA's and lets no panic out.
//!
//! | stage | does | never |
//! | --- | --- | --- |
//! | instantiate | parse, intern, make the state, check shapes if they are known, schedule compilation | touches a device context, waits |
//! | initialize | make the launcher if the images are ready | waits for the compiler |
//! | execute | wait if a compilation is pending, load once, zero, launch | locks, allocates or formats once warm |
//!
//! There is no prepare: nothing needs one, and XLA would call it before every run.
//!
//! A handler that was registered without instantiate has no state. Execute then goes by its attributes, see
//! [`super::stateless`].

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;

use smallvec::SmallVec;

use super::api::Api;
use super::ffi;
use super::frame::{Attribute, Attributes, Frame, Tensors, metadata_of};
use super::types;
use crate::driver::Stream;
use crate::error::{Code, Error, Result};
use crate::kernel::state::{Addresses, Prepared};
use crate::kernel::{CallState, Payload};
use crate::layout::TensorView;
use crate::payload::{DictionaryPayload, Dtype};
use crate::registry::{Derivative, Target};
use crate::runtime::Runtime;

/// Stage function: makes the call site's state and schedules its compilation.
///
/// # Safety
/// Called by XLA with a frame of its own.
pub unsafe extern "C" fn instantiate<T: Target>(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: by this function's contract.
    unsafe { guard(frame, T::NAME, "instantiate", instantiate_call::<T>) }
}

/// Stage function: makes the launcher ahead of execute where that needs no waiting.
///
/// # Safety
/// Called by XLA with a frame of its own.
pub unsafe extern "C" fn initialize<T: Target>(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: by this function's contract.
    unsafe { guard(frame, T::NAME, "initialize", initialize_call) }
}

/// Stage function: runs the call.
///
/// # Safety
/// Called by XLA with a frame of its own.
pub unsafe extern "C" fn execute<T: Target>(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: by this function's contract.
    unsafe { guard(frame, T::NAME, "execute", execute_call::<T>) }
}

/// Runs a stage's body: answers metadata calls, turns errors into XLA's, catches panics.
///
/// # Safety
/// `raw` is null or a frame that XLA made, alive through the call.
#[inline]
pub(super) unsafe fn guard(
    raw: *mut ffi::CallFrame,
    target: &str,
    stage: &str,
    body: impl FnOnce(&Frame<'_>) -> Result<()>,
) -> *mut ffi::Error {
    // SAFETY: by the function's contract.
    let Some(raw) = (unsafe { raw.as_ref() }) else { return ptr::null_mut() };
    // SAFETY: the api table in a frame is XLA's static one.
    let api = unsafe { Api::from_raw(raw.api) };
    if !raw.extension_start.is_null() {
        // SAFETY: the frame is XLA's.
        if let Some(metadata) = unsafe { metadata_of(raw) } {
            // SAFETY: the extension says where the answer goes.
            unsafe { answer_metadata(metadata, target, stage, api.and_then(Result::ok)) };
            return ptr::null_mut();
        }
    }
    let api = match api {
        Some(Ok(api)) => api,
        // Without an api there is nothing to make an error with; XLA never sends such a frame outside metadata calls.
        None => return ptr::null_mut(),
        // The error slot has been where it is since the first version, so even an unknown one can be told.
        Some(Err(error)) => {
            // SAFETY: the table is XLA's.
            return unsafe { Api::error_in_unknown_version(raw.api, &error) };
        }
    };
    // SAFETY: the frame is XLA's and carries this api.
    let frame = unsafe { Frame::new(raw, api) };
    match catch_unwind(AssertUnwindSafe(|| body(&frame))) {
        Ok(Ok(())) => ptr::null_mut(),
        Ok(Err(error)) => told(api, target, stage, error),
        Err(_) => told(api, target, stage, Error::internal("a panic was caught; this is a bug in oeq-native")),
    }
}

#[cold]
fn told(api: Api, target: &str, stage: &str, error: Error) -> *mut ffi::Error {
    api.error(&error.context(format_args!("oeq-native: {target}, {stage}")))
}

/// Tells XLA what these handlers are made for.
///
/// Version 0.1 is the only one that every XLA takes; it says what may be called, not which layouts are used, which follow
/// the framework's own version.
///
/// # Safety
/// `metadata` is XLA's structure for the answer.
#[cold]
unsafe fn answer_metadata(metadata: *mut ffi::Metadata, target: &str, stage: &str, api: Option<Api>) {
    super::register::note(target, stage, api);
    let minor = api.map_or(1, super::register::reported_minor);
    // The type is registered here, in time for an XLA that asks for its id with the handler.
    let type_id = api.filter(|api| api.minor() >= 2).and_then(|api| {
        types::id_in(api).map_err(|error| log::warn!("oeq-native: state type not registered: {error}")).ok()
    });
    // SAFETY: by the function's contract; the id exists from 0.2 on.
    unsafe {
        (*metadata).api_version.major_version = ffi::API_MAJOR;
        (*metadata).api_version.minor_version = minor;
        (*metadata).traits = ffi::TRAIT_COMMAND_BUFFER_COMPATIBLE;
        if let Some(id) = type_id {
            (*metadata).state_type_id = id;
        }
    }
}

fn instantiate_call<T: Target>(frame: &Frame<'_>) -> Result<()> {
    instantiate_in::<T>(Runtime::global()?, frame, |_| Ok(()))
}

/// Instantiate on a platform's runtime. `ready` has the last word before XLA gets the state.
pub(super) fn instantiate_in<T: Target>(
    runtime: &Runtime,
    frame: &Frame<'_>,
    ready: impl FnOnce(&CallState) -> Result<()>,
) -> Result<()> {
    let state = Box::new(state_of::<T>(runtime, frame)?);
    // On CPU XLA shows no tensors here, on GPU it does.
    if !frame.operands().is_empty() || !frame.results().is_empty() {
        let (operands, results) = views(frame)?;
        state.check(&operands, &results)?;
    }
    runtime.schedule(state.record(), state.order())?;
    ready(&state)?;
    let api = frame.api();
    let id = types::id_in(api)?;
    let raw = Box::into_raw(state);
    // SAFETY: the deleter takes what `into_raw` gave, and the type was registered with it.
    let given = unsafe { api.set_state(frame.context(), id, raw.cast(), types::delete_state) };
    if given.is_err() {
        // SAFETY: XLA refused, so the state is still ours.
        drop(unsafe { Box::from_raw(raw) });
    }
    given
}

fn initialize_call(frame: &Frame<'_>) -> Result<()> {
    let runtime = Runtime::global()?;
    // SAFETY: the state is used within this call only.
    let Some(state) = (unsafe { site_state(frame) })? else { return Ok(()) };
    state.prepare(runtime, ordinal(frame)?, false)
}

fn execute_call<T: Target>(frame: &Frame<'_>) -> Result<()> {
    // SAFETY: the state is used within this call only.
    let Some(state) = (unsafe { site_state(frame) })? else { return super::stateless::execute_call::<T>(frame) };
    let call = call(frame)?;
    let prepared = prepared(frame, state)?;
    // After the check, because a wrong tensor is wrong with and without a GPU.
    let stream = frame.api().stream(frame.context()).map_err(|error| no_stream(call.runtime, &error))?;
    // SAFETY: the state is this call site's, and the stream this call's.
    unsafe { execute_state(&call, frame, state, prepared, Stream(stream)) }
}

/// What an execute call runs on.
pub(super) struct Call<'a> {
    pub(super) runtime: &'a Runtime,
    ordinal: u32,
}

#[inline]
pub(super) fn call(frame: &Frame<'_>) -> Result<Call<'static>> {
    Ok(Call { runtime: Runtime::global()?, ordinal: ordinal(frame)? })
}

/// The prepared call of a state, its tensors checked if they were not.
#[inline]
pub(super) fn prepared<'a>(frame: &Frame<'_>, state: &'a CallState) -> Result<&'a Prepared> {
    state.prepared().map_or_else(|| check(frame, state), Ok)
}

#[cold]
fn check<'a>(frame: &Frame<'_>, state: &'a CallState) -> Result<&'a Prepared> {
    let (operands, results) = views(frame)?;
    state.check(&operands, &results)
}

/// Runs a call of a known state.
///
/// # Safety
/// The state is that of the frame's payload, derivative order and tensor shapes, `prepared` is its prepared call, and the
/// stream is the frame's.
#[inline]
pub(super) unsafe fn execute_state(
    call: &Call<'_>,
    frame: &Frame<'_>,
    state: &CallState,
    prepared: &Prepared,
    stream: Stream,
) -> Result<()> {
    // SAFETY: XLA's stream, ordinal and buffers belong together, and by this function's contract the prepared call is of
    // this frame's tensors.
    unsafe { state.execute(call.runtime, call.ordinal, stream, prepared, &addresses(frame)) }
}

/// Whether what a call enqueues goes into a graph.
///
/// # Safety
/// The stream is the call's.
#[inline]
pub(super) unsafe fn is_captured(call: &Call<'_>, stream: Stream) -> bool {
    // SAFETY: by this function's contract; XLA's stream and ordinal belong together.
    unsafe { call.runtime.driver.is_capturing(call.ordinal, stream) }
}

/// Why there is no stream: usually because there is no GPU, which is the more useful thing to say.
#[cold]
pub(super) fn no_stream(runtime: &Runtime, error: &Error) -> Error {
    match runtime.driver.architectures() {
        Err(reason) => reason,
        Ok(_) => Error::new(
            Code::FailedPrecondition,
            format!("this target runs on CUDA, and XLA has no GPU stream for this call ({})", error.message()),
        ),
    }
}

/// The device of the invocation. XLAs that cannot tell have one.
fn ordinal(frame: &Frame<'_>) -> Result<u32> {
    Ok(frame.api().device_ordinal(frame.context())?.unwrap_or(0))
}

/// The state that instantiate gave to XLA.
///
/// # Safety
/// The reference must not be kept past the stage call.
pub(super) unsafe fn site_state<'a>(frame: &Frame<'a>) -> Result<Option<&'a CallState>> {
    let api = frame.api();
    let state = api.state(frame.context(), types::id_in(api)?)?;
    // SAFETY: XLA answers only states of our own type, which it keeps alive while the executable runs.
    Ok(state.map(|state| unsafe { &*state.cast::<CallState>() }))
}

pub(super) fn state_of<T: Target>(runtime: &Runtime, frame: &Frame<'_>) -> Result<CallState> {
    let attributes = frame.attributes();
    let order = match T::DERIVATIVE {
        Derivative::Order(order) => order,
        Derivative::Attribute => {
            let value = attributes.integer("derivative")?;
            usize::try_from(value).map_err(|_| {
                Error::invalid(format!(
                    "attribute `derivative` is {value}; expected 0 to {}",
                    T::FAMILY.calls.len().saturating_sub(1)
                ))
            })?
        }
    };
    if order >= T::FAMILY.calls.len() {
        return Err(Error::invalid(format!(
            "attribute `derivative` is {order}; expected 0 to {}",
            T::FAMILY.calls.len().saturating_sub(1)
        )));
    }
    CallState::new(record_of::<T>(runtime, attributes)?, order)
}

fn record_of<T: Target>(
    runtime: &Runtime,
    attributes: Attributes<'_>,
) -> Result<std::sync::Arc<crate::kernel::Record>> {
    let kernel = attributes.text("kernel")?;
    // Only a hint, and any i64 is legal; without it all such kernels share one bucket.
    let hash = match attributes.get("hash") {
        None => 0,
        Some(_) => attributes.integer("hash")?,
    };
    if !matches!(attributes.get("kernel_prop"), Some(Attribute::Dictionary(_))) {
        return runtime.intern(T::FAMILY, hash, Payload::Json(kernel));
    }
    let dictionary = |name| attributes.integers(name);
    let (forward, backward) = (dictionary("forward_config")?, dictionary("backward_config")?);
    let (double_backward, properties) = (dictionary("double_backward_config")?, dictionary("kernel_prop")?);
    let payload = DictionaryPayload {
        source: kernel,
        forward_config: &forward,
        backward_config: &backward,
        double_backward_config: &double_backward,
        kernel_prop: &properties,
    };
    runtime.intern(T::FAMILY, hash, Payload::Dictionaries(payload))
}

pub(super) type Views<'a> = SmallVec<[TensorView<'a>; 12]>;

/// Element types and dimensions of a call's tensors.
pub(super) fn views<'a>(frame: &Frame<'a>) -> Result<(Views<'a>, Views<'a>)> {
    Ok((list(frame.operands(), "operand")?, list(frame.results(), "result")?))
}

fn list<'a>(tensors: Tensors<'a>, what: &str) -> Result<Views<'a>> {
    (0..tensors.len())
        .map(|index| {
            let tensor = tensors
                .get(index)
                .ok_or_else(|| Error::invalid(format!("{what} {index} is not a plain tensor (a token or a tuple?)")))?;
            let dtype = match tensor.dtype() {
                ffi::data_type::F32 => Ok(Dtype::F32),
                ffi::data_type::F64 => Ok(Dtype::F64),
                ffi::data_type::S32 => Ok(Dtype::I32),
                ffi::data_type::S64 => Ok(Dtype::I64),
                ffi::data_type::U8 => Ok(Dtype::U8),
                other => Err(other),
            };
            Ok(TensorView { dtype, dimensions: tensor.dimensions() })
        })
        .collect()
}

#[inline]
pub(super) fn addresses(frame: &Frame<'_>) -> Addresses {
    let mut addresses = Addresses::default();
    frame.operands().addresses(&mut addresses);
    frame.results().addresses(&mut addresses);
    addresses
}
