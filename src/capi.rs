//! The C surface, as `ffi-headers/oeq.h` tells it.
//!
//! Every function runs inside `boundary` or `value`: a failure or a panic becomes a status and a text for the calling
//! thread. Outputs are written only on success, and required pointers are checked for null.

use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::{Arc, OnceLock};

use crate::compile::Bundle;
use crate::compile::progress::Listener;
use crate::driver::cuda::{self, Cuda, DeviceProperties, Timer};
use crate::driver::known;
use crate::error::{Code, Error, Result};
use crate::logging::{self, Sink};
use crate::registry;
use crate::runtime::{self, Runtime};
use crate::xla::api::Api;
use crate::xla::pjrt::{PjrtApi, Plugin};
use crate::xla::register::{self, Outcome, Platform, Report};
use crate::xla::{ffi, types};

/// Status of a call: 0, or one of [`Code`]'s numbers.
pub type Status = i32;

/// The newest layout of the handler table.
pub const FFI_ABI_VERSION: u32 = 3;

/// `OeqFfiHandler`.
#[repr(C)]
#[derive(Debug)]
pub struct FfiHandler {
    /// Target name.
    pub name: *const c_char,
    /// Stage function or null.
    pub instantiate: *mut c_void,
    /// Stage function or null.
    pub prepare: *mut c_void,
    /// Stage function or null.
    pub initialize: *mut c_void,
    /// Stage function.
    pub execute: *mut c_void,
    /// `XLA_FFI_HANDLER_TRAITS_*` bits.
    pub traits: u32,
}

/// `OeqFfiType`.
#[repr(C)]
#[derive(Debug)]
pub struct FfiType {
    /// Type name.
    pub name: *const c_char,
    /// Where the host writes the id.
    pub type_id: *mut c_void,
    /// How a state is destroyed.
    pub type_info: *const c_void,
}

/// `OeqFfiHandlerTableV2`.
#[repr(C)]
#[derive(Debug)]
pub struct FfiHandlerTable2 {
    /// 2.
    pub abi_version: u32,
    /// Number of handlers.
    pub handler_count: u32,
    /// The handlers.
    pub handlers: *const FfiHandler,
}

/// `OeqFfiHandlerTable`.
#[repr(C)]
#[derive(Debug)]
pub struct FfiHandlerTable3 {
    /// 3.
    pub abi_version: u32,
    /// Number of types.
    pub type_count: u32,
    /// The types.
    pub types: *const FfiType,
    /// Number of handlers.
    pub handler_count: u32,
    /// The handlers.
    pub handlers: *const FfiHandler,
}

/// `OeqStats`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FfiStats {
    /// In: the caller's size; out: how much was filled.
    pub struct_size: u64,
    /// See [`crate::stats::Stats`].
    pub kernels_interned: u64,
    /// See [`crate::stats::Stats`].
    pub kernels_shared: u64,
    /// See [`crate::stats::Stats`].
    pub compiled: u64,
    /// See [`crate::stats::Stats`].
    pub failed: u64,
    /// See [`crate::stats::Stats`].
    pub loaded: u64,
    /// See [`crate::stats::Stats`].
    pub launches: u64,
    /// See [`crate::stats::Stats`].
    pub store_hits: u64,
    /// See [`crate::stats::Stats`].
    pub store_misses: u64,
    /// See [`crate::stats::Stats`].
    pub store_writes: u64,
    /// See [`crate::stats::Stats`].
    pub store_write_failures: u64,
    /// See [`crate::stats::Stats`].
    pub store_damaged: u64,
    /// See [`crate::stats::Stats`].
    pub store_evictions: u64,
    /// See [`crate::stats::Stats`].
    pub store_waits: u64,
    /// See [`crate::stats::Stats`].
    pub bundle_hits: u64,
}

/// `OeqDeviceProperties`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FfiDeviceProperties {
    /// In: the caller's size; out: how much was filled.
    pub struct_size: u64,
    /// Name, NUL-terminated.
    pub name: [u8; 256],
    /// Compute capability, major.
    pub compute_major: i32,
    /// Compute capability, minor.
    pub compute_minor: i32,
    /// Multiprocessors.
    pub multiprocessor_count: i32,
    /// Threads in a warp.
    pub warp_size: i32,
    /// Opt-in shared memory per block, bytes.
    pub shared_memory_per_block: i32,
}

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::new(CString::default());
}

fn remember(error: &Error) -> Status {
    let text = CString::new(error.to_string().replace('\0', "\u{fffd}")).unwrap_or_default();
    // A thread that is being torn down has no place for the text any more; the status is still told.
    let _ = LAST_ERROR.try_with(|last| {
        if let Ok(mut last) = last.try_borrow_mut() {
            *last = text;
        }
    });
    error.code() as Status
}

/// Runs the body of an exported function that answers a value: null and a text on failure.
fn value<T>(body: impl FnOnce() -> Result<*const T>) -> *const T {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => value,
        Ok(Err(error)) => {
            remember(&error);
            ptr::null()
        }
        Err(_) => {
            remember(&Error::internal("a panic was caught; this is a bug in oeq-native"));
            ptr::null()
        }
    }
}

/// Runs the body of an exported function that answers a status.
fn boundary(body: impl FnOnce() -> Result<()>) -> Status {
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => 0,
        Ok(Err(error)) => remember(&error),
        Err(_) => remember(&Error::internal("a panic was caught; this is a bug in oeq-native")),
    }
}

/// # Safety
/// `pointer` is null or a NUL-terminated text that lives as long as the reference is used.
unsafe fn text<'a>(pointer: *const c_char, name: &str) -> Result<&'a str> {
    if pointer.is_null() {
        return Err(null(name));
    }
    // SAFETY: by the function's contract.
    unsafe { CStr::from_ptr(pointer) }.to_str().map_err(|_| Error::invalid(format!("argument `{name}` is not UTF-8")))
}

fn null(name: &str) -> Error {
    Error::invalid(format!("argument `{name}` is NULL"))
}

/// Copies `full` to a caller whose structure may be shorter than ours: fields are only ever added at the end.
///
/// # Safety
/// `out` is null or points to a structure whose first word is its size, and which is at least that large.
unsafe fn fill<T: Copy>(out: *mut T, name: &str, full: impl FnOnce(u64) -> Result<T>) -> Result<()> {
    if out.is_null() {
        return Err(null(name));
    }
    // SAFETY: by the function's contract the first word is the size.
    let size = unsafe { out.cast::<u64>().read() };
    let filled = usize::try_from(size).unwrap_or(usize::MAX).min(size_of::<T>());
    if filled < size_of::<u64>() {
        return Err(Error::invalid(format!("`{name}->struct_size` is {size}; set it to the size of the structure")));
    }
    let full = full(filled as u64)?;
    // SAFETY: the caller's structure holds at least `filled` bytes.
    unsafe { ptr::copy_nonoverlapping((&raw const full).cast::<u8>(), out.cast::<u8>(), filled) };
    Ok(())
}

/// The text of this thread's last failure; never null.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_last_error() -> *const c_char {
    LAST_ERROR.try_with(|last| last.try_borrow().map_or(c"".as_ptr(), |last| last.as_ptr())).unwrap_or(c"".as_ptr())
}

/// The library's version.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_version() -> *const c_char {
    concat!(env!("CARGO_PKG_VERSION"), "\0").as_ptr().cast()
}

struct Tables {
    layout2: FfiHandlerTable2,
    layout3: FfiHandlerTable3,
}

// SAFETY: the tables point to leaked or static data that never changes, but for the type id, which hosts write.
unsafe impl Send for Tables {}
// SAFETY: as above.
unsafe impl Sync for Tables {}

/// The tables of a platform. Each has handlers of its own; types are the same.
fn tables(platform: Platform) -> Result<&'static Tables> {
    static CUDA: OnceLock<Result<Tables>> = OnceLock::new();
    static HOST: OnceLock<Result<Tables>> = OnceLock::new();
    let tables = match platform {
        Platform::Cuda => &CUDA,
        Platform::Host => &HOST,
    };
    tables
        .get_or_init(|| {
            let table = registry::table()?;
            let address = |stage: Option<ffi::Handler>| stage.map_or(ptr::null_mut(), |stage| stage as *mut c_void);
            let handlers = table
                .entries
                .iter()
                .map(|entry| {
                    let bundle = entry.descriptor.bundle_on(platform)?;
                    Ok(FfiHandler {
                        name: entry.c_name.as_ptr(),
                        instantiate: address(bundle.instantiate),
                        prepare: address(bundle.prepare),
                        initialize: address(bundle.initialize),
                        execute: address(bundle.execute),
                        traits: entry.descriptor.traits,
                    })
                })
                .collect::<Result<Vec<FfiHandler>>>()?;
            let handler_count = u32::try_from(handlers.len()).map_err(|_| Error::internal("too many targets"))?;
            let handlers = Vec::leak(handlers).as_ptr();
            let types: &[FfiType] = Vec::leak(vec![FfiType {
                name: types::name().as_ptr(),
                type_id: types::TABLE_TYPE_ID.address().cast(),
                type_info: (&raw const types::TYPE_INFO).cast(),
            }]);
            Ok(Tables {
                layout2: FfiHandlerTable2 { abi_version: 2, handler_count, handlers },
                layout3: FfiHandlerTable3 {
                    abi_version: 3,
                    type_count: 1,
                    types: types.as_ptr(),
                    handler_count,
                    handlers,
                },
            })
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// The handler table in its newest layout, or null.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_ffi_handler_table() -> *const FfiHandlerTable3 {
    value(|| Ok(&raw const tables(Platform::Cuda)?.layout3))
}

/// The handler table in the layout asked for, or null.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_ffi_handler_table_for(abi_version: u32) -> *const c_void {
    value(|| table_in(abi_version, Platform::Cuda))
}

/// The handler table of a platform in the layout asked for, or null.
///
/// # Safety
/// `platform` is null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_ffi_handler_table_on(abi_version: u32, platform: *const c_char) -> *const c_void {
    // SAFETY: by this function's contract.
    value(|| table_in(abi_version, Platform::parse(unsafe { text(platform, "platform") }?)?))
}

fn table_in(abi_version: u32, platform: Platform) -> Result<*const c_void> {
    match abi_version {
        2 => Ok((&raw const tables(platform)?.layout2).cast()),
        3 => Ok((&raw const tables(platform)?.layout3).cast()),
        other => Err(Error::new(
            Code::Unimplemented,
            format!("handler table layout {other} does not exist; this library has 2 and {FFI_ABI_VERSION}"),
        )),
    }
}

/// Registers every target in an XLA.
///
/// # Safety
/// `api` is null or an XLA FFI api table; `platform` is null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_register_ffi(api: *const ffi::Api, platform: *const c_char) -> Status {
    boundary(|| {
        // SAFETY: by this function's contract.
        registered(|| unsafe {
            let api = Api::from_raw(api).ok_or_else(|| null("api"))??;
            register::register(api, Platform::parse(text(platform, "platform")?)?)
        })
    })
}

/// [`oeq_register_ffi`] under the name that connectors look up: 0 is success.
///
/// # Safety
/// As for [`oeq_register_ffi`].
#[unsafe(no_mangle)]
#[allow(non_snake_case, reason = "the name is fixed by the connectors that look it up")]
pub unsafe extern "C" fn RegisterFFi(api: *const ffi::Api, platform: *const c_char) -> c_int {
    // SAFETY: by this function's contract.
    unsafe { oeq_register_ffi(api, platform) }
}

/// `OeqTargetResult`.
#[repr(C)]
#[derive(Debug)]
pub struct FfiTargetResult {
    /// Target name.
    pub name: *const c_char,
    /// 1 registered, 2 already there, 3 refused.
    pub outcome: u32,
    /// Why it was refused: a status, 0 if it was not.
    pub status: Status,
    /// Why it was refused: a text, empty if it was not.
    pub reason: *const c_char,
}

/// `OeqRegistration`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FfiRegistration {
    /// In: the caller's size; out: how much was filled.
    pub struct_size: u64,
    /// See [`register::Door`].
    pub door: u32,
    /// Minor version of the XLA's FFI api, 0 where the door does not show it.
    pub api_minor: i32,
    /// The platform, in XLA's spelling.
    pub platform: *const c_char,
    /// The door's name.
    pub door_name: *const c_char,
    /// Number of targets.
    pub target_count: u64,
    /// One result for each target, in the handler table's order.
    pub targets: *const FfiTargetResult,
}

/// A report with its texts as C wants them.
struct KeptReport {
    registration: FfiRegistration,
    _targets: Vec<FfiTargetResult>,
    _texts: Vec<CString>,
}

thread_local! {
    static LAST_REGISTRATION: RefCell<Option<KeptReport>> = const { RefCell::new(None) };
}

impl KeptReport {
    fn new(report: &Report) -> Result<Self> {
        let table = registry::table()?;
        let mut texts = Vec::new();
        let mut keep = |text: &str| {
            texts.push(CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default());
            // The heap block of a CString stays where it is when the vector grows.
            texts.last().map_or(c"".as_ptr(), |text| text.as_ptr())
        };
        let targets: Vec<FfiTargetResult> = report
            .targets
            .iter()
            .map(|(name, outcome)| {
                let (outcome, status, reason) = match outcome {
                    Outcome::Registered => (1, 0, c"".as_ptr()),
                    Outcome::AlreadyThere => (2, 0, c"".as_ptr()),
                    Outcome::Refused(error) => (3, error.code() as Status, keep(error.message())),
                };
                let entry = table.entries.iter().find(|entry| entry.descriptor.name == *name);
                let name = entry.map_or(c"".as_ptr(), |entry| entry.c_name.as_ptr());
                FfiTargetResult { name, outcome, status, reason }
            })
            .collect();
        let registration = FfiRegistration {
            struct_size: 0,
            door: report.door as u32,
            api_minor: report.api_minor.unwrap_or(0),
            platform: keep(report.platform.name()),
            door_name: keep(report.door.name()),
            target_count: targets.len() as u64,
            targets: targets.as_ptr(),
        };
        Ok(Self { registration, _targets: targets, _texts: texts })
    }
}

/// Keeps what a registration reports for [`oeq_registration_results`], and answers its first error.
fn registered(registration: impl FnOnce() -> Result<Report>) -> Result<()> {
    let keep = |report| {
        // A thread that is being torn down has no place for it; the status is still told.
        let _ = LAST_REGISTRATION.try_with(|last| *last.borrow_mut() = report);
    };
    keep(None);
    let report = registration()?;
    keep(Some(KeptReport::new(&report)?));
    report.check()
}

/// Registers every target in the XLA of a PJRT plugin.
///
/// # Safety
/// `api` is null or what the plugin's `GetPjrtApi` answered; `platform` is null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_register_pjrt(api: *const PjrtApi, platform: *const c_char) -> Status {
    boundary(|| {
        registered(|| {
            // SAFETY: by this function's contract.
            let platform = Platform::parse(unsafe { text(platform, "platform") }?)?;
            if api.is_null() {
                return Err(null("api"));
            }
            // SAFETY: by this function's contract.
            unsafe { Plugin::from_raw(api) }?.register(platform)
        })
    })
}

/// What this thread's last registration did with each target.
///
/// # Safety
/// `registration` is null or points to an `OeqRegistration` whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_registration_results(registration: *mut FfiRegistration) -> Status {
    boundary(|| {
        // SAFETY: by this function's contract.
        unsafe {
            fill(registration, "registration", |struct_size| {
                let last = LAST_REGISTRATION.try_with(|last| last.borrow().as_ref().map(|kept| kept.registration));
                let last = last.ok().flatten().ok_or_else(|| {
                    Error::precondition(
                        "no registration on this thread has reached an XLA yet; oeq_last_error tells why",
                    )
                })?;
                Ok(FfiRegistration { struct_size, ..last })
            })
        }
    })
}

/// Sets an option.
///
/// # Safety
/// Both arguments are null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_configure(key: *const c_char, value: *const c_char) -> Status {
    // SAFETY: by this function's contract.
    boundary(|| unsafe { runtime::configure(text(key, "key")?, text(value, "value")?) })
}

/// Counters since the process began.
///
/// # Safety
/// `stats` is null or points to an `OeqStats` whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_get_stats(stats: *mut FfiStats) -> Status {
    boundary(|| {
        // SAFETY: by this function's contract.
        unsafe {
            fill(stats, "stats", |struct_size| {
                let now = Runtime::global()?.stats();
                Ok(FfiStats {
                    struct_size,
                    kernels_interned: now.kernels_interned,
                    kernels_shared: now.kernels_shared,
                    compiled: now.compiled,
                    failed: now.failed,
                    loaded: now.loaded,
                    launches: now.launches,
                    store_hits: now.store_hits,
                    store_misses: now.store_misses,
                    store_writes: now.store_writes,
                    store_write_failures: now.store_write_failures,
                    store_damaged: now.store_damaged,
                    store_evictions: now.store_evictions,
                    store_waits: now.store_waits,
                    bundle_hits: now.bundle_hits,
                })
            })
        }
    })
}

// ---- Compiled kernels ---------------------------------------------------------------------------------------------------

/// Uses a bundle's file.
///
/// # Safety
/// `path` is null or NUL-terminated.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_load_bundle(path: *const c_char) -> Status {
    boundary(|| {
        // SAFETY: by this function's contract.
        let path = unsafe { text(path, "path") }?;
        runtime::load_bundle(Bundle::open(path.as_ref())?);
        Ok(())
    })
}

/// Uses a bundle's bytes, which are copied.
///
/// # Safety
/// `bytes` is null or points to `size` readable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_load_bundle_bytes(bytes: *const u8, size: usize) -> Status {
    boundary(|| {
        if bytes.is_null() {
            return Err(null("bytes"));
        }
        // SAFETY: by this function's contract.
        let bytes = unsafe { std::slice::from_raw_parts(bytes, size) };
        runtime::load_bundle(Bundle::from_bytes("in memory", bytes)?);
        Ok(())
    })
}

/// Everything that was compiled so far, as a bundle.
///
/// # Safety
/// Both pointers are null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_export_compiled(bytes: *mut *mut u8, size: *mut usize) -> Status {
    boundary(|| {
        if bytes.is_null() || size.is_null() {
            return Err(null(if bytes.is_null() { "bytes" } else { "size" }));
        }
        let bundle = Runtime::global()?.export_compiled().into_boxed_slice();
        // SAFETY: by this function's contract.
        unsafe {
            *size = bundle.len();
            *bytes = Box::into_raw(bundle).cast();
        }
        Ok(())
    })
}

/// Gives back what [`oeq_export_compiled`] gave; null is nothing.
///
/// # Safety
/// `bytes` and `size` are what one call of [`oeq_export_compiled`] wrote, and are not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_free_bytes(bytes: *mut u8, size: usize) {
    if !bytes.is_null() {
        // SAFETY: by this function's contract the pointer came from a boxed slice of this length.
        drop(unsafe { Box::from_raw(ptr::slice_from_raw_parts_mut(bytes, size)) });
    }
}

/// `OeqProgress`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FfiProgress {
    /// Size of this structure.
    pub struct_size: u64,
    /// The unit, NUL-terminated; valid during the call.
    pub unit: *const c_char,
    /// See [`crate::compile::Step`].
    pub step: i32,
    /// Since the unit was queued.
    pub seconds: f64,
    /// See [`crate::compile::Progress`].
    pub done: u64,
    /// See [`crate::compile::Progress`].
    pub total: u64,
}

/// `OeqProgressCallback`.
pub type ProgressCallback = extern "C" fn(*const FfiProgress, *mut c_void);

/// `OeqLogCallback`.
pub type LogCallback = extern "C" fn(i32, *const c_char, *mut c_void);

/// What a host wants back in its callbacks.
#[derive(Clone, Copy)]
struct User(*mut c_void);

// SAFETY: never dereferenced here. The header tells the host that its callbacks run on any thread.
unsafe impl Send for User {}
// SAFETY: as above.
unsafe impl Sync for User {}

impl User {
    /// A method, so that closures capture the whole value and not the pointer in it.
    fn get(self) -> *mut c_void {
        self.0
    }
}

fn c_text(text: &str) -> CString {
    CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default()
}

/// Tells a callback what happens to each unit.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_set_progress(callback: Option<ProgressCallback>, user: *mut c_void) -> Status {
    let user = User(user);
    boundary(|| {
        let listener = callback.map(|callback| -> Listener {
            Arc::new(move |event| {
                let unit = c_text(event.unit);
                let progress = FfiProgress {
                    struct_size: size_of::<FfiProgress>() as u64,
                    unit: unit.as_ptr(),
                    step: event.step as i32,
                    seconds: event.elapsed.as_secs_f64(),
                    done: event.done,
                    total: event.total,
                };
                callback(&raw const progress, user.get());
            })
        });
        runtime::set_progress(listener);
        Ok(())
    })
}

/// Sends log lines to a callback.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_set_logger(callback: Option<LogCallback>, user: *mut c_void) -> Status {
    let user = User(user);
    boundary(|| {
        let sink = callback.map(|callback| -> Sink {
            Arc::new(move |level, line| callback(level as i32, c_text(line).as_ptr(), user.get()))
        });
        logging::set(sink)
    })
}

/// The driver for what is asked outside of XLA's calls.
fn devices() -> &'static Cuda {
    static DEVICES: OnceLock<Cuda> = OnceLock::new();
    DEVICES.get_or_init(Cuda::default)
}

fn device_properties(ordinal: i32) -> Result<DeviceProperties> {
    match std::env::var("OEQ_DEVICE") {
        Ok(description) if !description.is_empty() => {
            known::describe(&description).map_err(|error| error.context("environment variable OEQ_DEVICE"))
        }
        Err(std::env::VarError::NotUnicode(_)) => Err(Error::invalid("environment variable OEQ_DEVICE is not UTF-8")),
        _ => {
            let ordinal = u32::try_from(ordinal)
                .map_err(|_| Error::invalid(format!("device ordinal is {ordinal}; expected 0 or more")))?;
            devices().properties(ordinal).map_err(|error| match error.code() {
                Code::FailedPrecondition => Error::new(
                    error.code(),
                    format!(
                        "{} (to export a model for a device that is not here, name it: OEQ_DEVICE=H200)",
                        error.message()
                    ),
                ),
                _ => error,
            })
        }
    }
}

/// Properties of a device, or of the one that `OEQ_DEVICE` names.
///
/// # Safety
/// `properties` is null or points to an `OeqDeviceProperties` whose `struct_size` is set.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_device_properties(ordinal: i32, properties: *mut FfiDeviceProperties) -> Status {
    boundary(|| {
        // SAFETY: by this function's contract.
        unsafe {
            fill(properties, "properties", |struct_size| {
                let found = device_properties(ordinal)?;
                let mut name = [0_u8; 256];
                let length = found.name.len().min(name.len() - 1);
                name[..length].copy_from_slice(&found.name.as_bytes()[..length]);
                Ok(FfiDeviceProperties {
                    struct_size,
                    name,
                    compute_major: found.compute_major,
                    compute_minor: found.compute_minor,
                    multiprocessor_count: found.multiprocessor_count,
                    warp_size: found.warp_size,
                    shared_memory_per_block: found.shared_memory_per_block,
                })
            })
        }
    })
}

/// Makes a timer.
///
/// # Safety
/// `timer` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_timer_create(timer: *mut *mut Timer) -> Status {
    boundary(|| {
        if timer.is_null() {
            return Err(null("timer"));
        }
        let made = Box::new(Timer::new(devices())?);
        // SAFETY: by this function's contract.
        unsafe { *timer = Box::into_raw(made) };
        Ok(())
    })
}

/// Records a timer's start.
///
/// # Safety
/// `timer` is null or a live timer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_timer_start(timer: *mut Timer) -> Status {
    // SAFETY: by this function's contract.
    boundary(|| unsafe { timer.as_ref() }.ok_or_else(|| null("timer"))?.start())
}

/// Records a timer's end, waits, and writes the milliseconds since its start.
///
/// # Safety
/// `timer` is null or a live timer; `milliseconds` is null or may be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_timer_stop(timer: *mut Timer, milliseconds: *mut f32) -> Status {
    boundary(|| {
        if milliseconds.is_null() {
            return Err(null("milliseconds"));
        }
        // SAFETY: by this function's contract.
        let elapsed = unsafe { timer.as_ref() }.ok_or_else(|| null("timer"))?.stop()?;
        // SAFETY: by this function's contract.
        unsafe { *milliseconds = elapsed };
        Ok(())
    })
}

/// Destroys a timer; null is nothing.
///
/// # Safety
/// `timer` is null or a live timer that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn oeq_timer_destroy(timer: *mut Timer) {
    if !timer.is_null() {
        // SAFETY: by this function's contract, it came from `oeq_timer_create`.
        let timer = unsafe { Box::from_raw(timer) };
        let _ = catch_unwind(AssertUnwindSafe(|| drop(timer)));
    }
}

/// Evicts the L2 cache.
#[unsafe(no_mangle)]
pub extern "C" fn oeq_clear_l2_cache() -> Status {
    boundary(|| cuda::clear_l2_cache(devices()))
}
