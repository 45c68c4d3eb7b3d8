//! The doors of PJRT plugins, in stand-ins that hide what real plugins hide, and the reports about them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::undocumented_unsafe_blocks,
    reason = "a failed test should panic, and the stand-ins play a plugin's side of the contract"
)]

mod common;

use std::cell::Cell;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI64, Ordering};

use common::*;
use oeq_native::capi;
use oeq_native::xla::ffi::{self, StructSize};
use oeq_native::xla::pjrt::{ErrorArgs, Extension, PjrtApi, PjrtVersion};
use oeq_native::xla::register::{Door, Outcome};
use oeq_native::{Code, Platform, Plugin};

// ---- A plugin ---------------------------------------------------------------------------------------------------------

/// What the error functions get, as `pjrt_c_api.h` lays it out.
#[repr(C)]
struct ErrorView {
    struct_size: usize,
    extension_start: *mut c_void,
    error: *mut PluginError,
    answer: usize,
    size: usize,
}

struct PluginError {
    code: c_int,
    text: CString,
}

thread_local! {
    /// Errors are made and destroyed on the thread that registers.
    static LIVE_PLUGIN_ERRORS: Cell<i64> = const { Cell::new(0) };
}

fn plugin_error(code: c_int, text: &str) -> *mut c_void {
    LIVE_PLUGIN_ERRORS.set(LIVE_PLUGIN_ERRORS.get() + 1);
    Box::into_raw(Box::new(PluginError { code, text: CString::new(text).unwrap() })).cast()
}

unsafe extern "C" fn error_destroy(args: *mut ErrorArgs) {
    let args = unsafe { &*args.cast::<ErrorView>() };
    assert_eq!(args.struct_size, 24);
    LIVE_PLUGIN_ERRORS.set(LIVE_PLUGIN_ERRORS.get() - 1);
    drop(unsafe { Box::from_raw(args.error) });
}

unsafe extern "C" fn error_message(args: *mut ErrorArgs) {
    let args = unsafe { &mut *args.cast::<ErrorView>() };
    assert_eq!(args.struct_size, 40);
    let text = unsafe { &(*args.error).text };
    (args.answer, args.size) = (text.as_ptr() as usize, text.as_bytes().len());
}

unsafe extern "C" fn error_code(args: *mut ErrorArgs) -> *mut c_void {
    let args = args.cast::<ErrorView>();
    unsafe {
        assert_eq!((*args).struct_size, 28);
        (&raw mut (*args).answer).cast::<c_int>().write((*(*args).error).code);
    }
    ptr::null_mut()
}

#[repr(C)]
struct HandlerArgs {
    struct_size: usize,
    name: *const c_char,
    name_size: usize,
    handler: *mut c_void,
    platform: *const c_char,
    platform_size: usize,
    traits: u32,
}

#[repr(C)]
struct TypeArgs {
    struct_size: usize,
    extension_start: *mut c_void,
    name: *const c_char,
    name_size: usize,
    id: i64,
}

#[repr(C)]
struct CallArgs {
    struct_size: usize,
    name: *const c_char,
    name_size: usize,
    version: c_int,
    instantiate: *mut c_void,
    prepare: *mut c_void,
    initialize: *mut c_void,
    execute: *mut c_void,
}

fn stage(address: *mut c_void) -> Option<ffi::Handler> {
    unsafe { std::mem::transmute::<*mut c_void, Option<ffi::Handler>>(address) }
}

/// Registers in the XLA of a minor version, and answers its error's code and text.
fn register_in(
    minor: c_int,
    name: ffi::ByteSpan,
    platform: ffi::ByteSpan,
    bundle: ffi::HandlerBundle,
    traits: u32,
) -> Result<(), (c_int, String)> {
    let mut args = ffi::HandlerRegisterArgs {
        struct_size: ffi::HandlerRegisterArgs::STRUCT_SIZE,
        extension_start: ptr::null_mut(),
        name,
        platform,
        bundle,
        traits,
    };
    answer(unsafe { FakeXla::of(minor).api.handler_register.unwrap()(&raw mut args) })
}

unsafe extern "C" fn register_handler<const MINOR: c_int>(args: *mut HandlerArgs) -> *mut c_void {
    let args = unsafe { &*args };
    if args.struct_size < 52 {
        return plugin_error(3, "unexpected size");
    }
    let bundle =
        ffi::HandlerBundle { instantiate: None, prepare: None, initialize: None, execute: stage(args.handler) };
    // As measured: no error comes out of this door.
    let _ = register_in(
        MINOR,
        ffi::ByteSpan { ptr: args.name, len: args.name_size },
        ffi::ByteSpan { ptr: args.platform, len: args.platform_size },
        bundle,
        args.traits,
    );
    ptr::null_mut()
}

static TYPES_BY_EXTENSION: AtomicI64 = AtomicI64::new(0);

unsafe extern "C" fn type_register<const MINOR: c_int>(args: *mut TypeArgs) -> *mut c_void {
    let args = unsafe { &mut *args };
    assert_eq!(args.struct_size, 40);
    assert_eq!(MINOR, 1, "later plugins want type info");
    let mut id = ffi::TypeId { type_id: args.id };
    let mut inner = ffi::TypeRegisterArgs1 {
        struct_size: ffi::TypeRegisterArgs1::STRUCT_SIZE,
        extension_start: ptr::null_mut(),
        name: ffi::ByteSpan { ptr: args.name, len: args.name_size },
        type_id: &raw mut id,
    };
    if let Err((code, text)) = answer(unsafe { FakeXla::of(1).api.type_register.unwrap()((&raw mut inner).cast()) }) {
        return plugin_error(code, &text);
    }
    args.id = id.type_id;
    TYPES_BY_EXTENSION.fetch_add(1, Ordering::SeqCst);
    ptr::null_mut()
}

unsafe extern "C" fn custom_call<const MINOR: c_int, const TELLS: bool>(args: *mut CallArgs) -> *mut c_void {
    let args = unsafe { &*args };
    assert_eq!((args.struct_size, args.version), (64, 1));
    let bundle = ffi::HandlerBundle {
        instantiate: stage(args.instantiate),
        prepare: stage(args.prepare),
        initialize: stage(args.initialize),
        execute: stage(args.execute),
    };
    let cuda = ffi::ByteSpan { ptr: c"CUDA".as_ptr(), len: 4 };
    match register_in(MINOR, ffi::ByteSpan { ptr: args.name, len: args.name_size }, cuda, bundle, 0) {
        Err((code, text)) if TELLS => plugin_error(code, &text),
        _ => ptr::null_mut(),
    }
}

/// Answers success and does nothing.
unsafe extern "C" fn ignore(_: *mut CallArgs) -> *mut c_void {
    ptr::null_mut()
}

#[repr(C)]
struct FfiExtension {
    base: Extension,
    type_register: Option<unsafe extern "C" fn(*mut TypeArgs) -> *mut c_void>,
    user_data_add: *const c_void,
    register_handler: Option<unsafe extern "C" fn(*mut HandlerArgs) -> *mut c_void>,
}

#[repr(C)]
struct GpuExtension {
    base: Extension,
    custom_call: Option<unsafe extern "C" fn(*mut CallArgs) -> *mut c_void>,
}

type CustomCall = unsafe extern "C" fn(*mut CallArgs) -> *mut c_void;

fn plugin(extensions: *mut Extension) -> *const PjrtApi {
    Box::leak(Box::new(PjrtApi {
        struct_size: size_of::<PjrtApi>(),
        extension_start: extensions,
        version: PjrtVersion { struct_size: 24, extension_start: ptr::null_mut(), major: 0, minor: 90 },
        error_destroy: Some(error_destroy),
        error_message: Some(error_message),
        error_get_code: Some(error_code),
    }))
}

/// A plugin around the XLA of a minor version; `ffi_size` 40 is the FFI extension from before `register_handler`.
fn plugin_of<const MINOR: c_int>(ffi_size: usize, gpu: Option<CustomCall>) -> *const PjrtApi {
    let gpu = Box::leak(Box::new(GpuExtension {
        base: Extension { struct_size: 32, kind: if gpu.is_some() { 0 } else { 7 }, next: ptr::null_mut() },
        custom_call: gpu,
    }));
    let ffi = Box::leak(Box::new(FfiExtension {
        base: Extension { struct_size: ffi_size, kind: 5, next: &raw mut gpu.base },
        type_register: Some(type_register::<MINOR>),
        user_data_add: ptr::null(),
        register_handler: Some(register_handler::<MINOR>),
    }));
    plugin(&raw mut ffi.base)
}

fn wrap(raw: *const PjrtApi) -> Plugin {
    unsafe { Plugin::from_raw(raw) }.unwrap()
}

fn bundles(minor: c_int, platform: &str) -> Vec<(String, ffi::HandlerBundle)> {
    let handlers = HANDLERS.lock().unwrap();
    handlers.iter().filter(|h| h.0 == minor && h.1 == platform).map(|h| (h.2.clone(), h.3)).collect()
}

// ---- Tests: each has an XLA version of its own, since handlers stay registered ------------------------------------------

#[test]
fn a_plugin_of_the_first_version_takes_whole_bundles_through_its_gpu_extension_and_parts_without() {
    let raw = plugin_of::<1>(40, Some(custom_call::<1, false>));
    let report = wrap(raw).register(Platform::Cuda).unwrap();
    assert_eq!((report.door, report.api_minor, report.targets.len()), (Door::GpuExtension, None, 8));
    assert!(report.targets.iter().all(|(_, outcome)| *outcome == Outcome::Registered), "{report:?}");
    let found = bundles(1, "CUDA");
    assert_eq!(found.len(), 8, "and no throw-away");
    assert!(found.iter().all(|(_, b)| b.instantiate.is_some() && b.initialize.is_some() && b.execute.is_some()));
    // This version asks for no type with a handler; the type waits for the first stage, which brings the api.
    assert_eq!(TYPES_BY_EXTENSION.load(Ordering::SeqCst), 0);
    let id = oeq_native::xla::types::id_in(
        unsafe { oeq_native::xla::api::Api::from_raw(&raw const *FakeXla::of(1).api) }.unwrap().unwrap(),
    );
    assert!(id.unwrap().type_id > 0);

    let again = wrap(raw).register(Platform::Cuda).unwrap();
    assert!(again.targets.iter().all(|(_, outcome)| *outcome == Outcome::AlreadyThere), "{again:?}");

    // The extension is for CUDA only, and this plugin has nothing else.
    let error = wrap(raw).register(Platform::Host).unwrap_err();
    assert_eq!(error.code(), Code::Unimplemented);
    assert!(error.message().contains("Host") && error.message().contains("jaxlib 0.7"), "{error}");

    let later = plugin_of::<1>(48, None);
    let report = wrap(later).register(Platform::Host).unwrap();
    assert_eq!(report.door, Door::ExecuteOnly);
    report.check().unwrap();
    let found = bundles(1, "Host");
    assert_eq!(found.len(), 8);
    assert!(found.iter().all(|(_, b)| b.instantiate.is_none() && b.execute.is_some()));
}

#[test]
fn a_plugin_that_shows_its_api_is_entered_through_it_from_any_thread() {
    let raw = plugin_of::<4>(48, Some(custom_call::<4, false>)) as usize;
    let mut registered = 0;
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..8)
            .map(|index| {
                scope.spawn(move || {
                    let platform = if index % 2 == 0 { c"CUDA" } else { c"gpu" };
                    assert_eq!(unsafe { capi::oeq_register_pjrt(raw as *const PjrtApi, platform.as_ptr()) }, 0);
                    let results = results();
                    assert_eq!((results.door, results.api_minor, results.target_count), (1, 4, 8));
                    let targets = unsafe { std::slice::from_raw_parts(results.targets, 8) };
                    assert!(targets.iter().all(|t| (1..=2).contains(&t.outcome) && t.status == 0));
                    targets.iter().filter(|t| t.outcome == 1).count()
                })
            })
            .collect();
        registered += threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>();
    });
    assert_eq!(registered, 8, "each target was registered once, and found there seven times");
    assert_eq!(bundles(4, "CUDA").len(), 8);
}

fn results() -> capi::FfiRegistration {
    let mut results = unsafe { std::mem::zeroed::<capi::FfiRegistration>() };
    results.struct_size = size_of::<capi::FfiRegistration>() as u64;
    assert_eq!(unsafe { capi::oeq_registration_results(&raw mut results) }, 0);
    results
}

#[test]
fn an_xla_that_no_longer_takes_the_first_version_is_told_its_own() {
    OLDEST_TAKEN[5].store(3, Ordering::SeqCst);
    // The hidden door first: it tells no error, so only the missing question gives the refusal away.
    let raw = plugin_of::<5>(48, Some(custom_call::<5, false>));
    let report = wrap(raw).register_by(Door::GpuExtension, Platform::Cuda).unwrap();
    report.check().unwrap();
    assert_eq!(report.api_minor, Some(5));
    assert_eq!(bundles(5, "CUDA").len(), 8);
    wrap(raw).register(Platform::Cuda).unwrap().check().unwrap();
    assert_eq!(bundles(5, "CUDA").len(), 8);
}

#[test]
fn a_name_that_another_library_took_is_reported_and_the_others_work() {
    unsafe extern "C" fn foreign(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
        let metadata = unsafe { (*(*frame).extension_start.cast::<ffi::MetadataExtension>()).metadata };
        unsafe { (*metadata).api_version.minor_version = 3 };
        ptr::null_mut()
    }
    let bundle = ffi::HandlerBundle { instantiate: None, prepare: None, initialize: None, execute: Some(foreign) };
    let span = |text: &'static CStr| ffi::ByteSpan { ptr: text.as_ptr(), len: text.to_bytes().len() };
    register_in(3, span(c"tp_forward"), span(c"CUDA"), bundle, 0).unwrap();

    let raw = plugin_of::<3>(48, Some(custom_call::<3, true>));
    assert_eq!(unsafe { capi::oeq_register_pjrt(raw, c"CUDA".as_ptr()) }, Code::Internal as i32);
    let text = unsafe { CStr::from_ptr(capi::oeq_last_error()) }.to_str().unwrap();
    assert!(text.contains("1 of 8") && text.contains("`tp_forward`") && text.contains("different bundle"), "{text}");
    let results = results();
    let targets = unsafe { std::slice::from_raw_parts(results.targets, 8) };
    for target in targets {
        let name = unsafe { CStr::from_ptr(target.name) };
        let reason = unsafe { CStr::from_ptr(target.reason) }.to_str().unwrap();
        if name == c"tp_forward" {
            assert_eq!(target.outcome, 3);
            assert!(target.status != 0 && reason.contains("Duplicate"), "{reason}");
        } else {
            assert_eq!((target.outcome, target.status, reason), (1, 0, ""));
        }
    }
    // The same through a plugin that tells its errors itself.
    let report = wrap(raw).register_by(Door::GpuExtension, Platform::Cuda).unwrap();
    let error = report.check().unwrap_err();
    assert!(error.code() == Code::AlreadyExists && error.message().contains("Duplicate"), "{error}");
    assert_eq!(LIVE_PLUGIN_ERRORS.get(), 0, "every error was destroyed");
}

#[test]
fn success_without_a_question_is_not_believed() {
    let report = wrap(plugin_of::<2>(48, Some(ignore))).register_by(Door::GpuExtension, Platform::Cuda).unwrap();
    for (target, outcome) in &report.targets {
        let Outcome::Refused(error) = outcome else { panic!("{target}: {outcome}") };
        assert!(error.message().contains("never asked"), "{error}");
    }
}

#[test]
fn what_cannot_be_is_an_error_that_says_why() {
    std::thread::spawn(|| {
        let last = || unsafe { CStr::from_ptr(capi::oeq_last_error()) }.to_str().unwrap().to_owned();
        let nothing = plugin(ptr::null_mut());
        assert_eq!(unsafe { capi::oeq_register_pjrt(nothing, c"CUDA".as_ptr()) }, Code::Unimplemented as i32);
        let text = last();
        for door in [Door::Api, Door::GpuExtension, Door::ExecuteOnly] {
            assert!(text.contains(door.name()), "{text}");
        }
        assert_eq!(unsafe { capi::oeq_register_pjrt(nothing, c"ROCM".as_ptr()) }, 3);
        assert!(last().contains("expected CUDA, cuda or gpu for NVIDIA GPUs, Host or cpu for the host"), "{}", last());
        assert_eq!(unsafe { capi::oeq_register_pjrt(ptr::null(), c"CUDA".as_ptr()) }, 3);
        assert_eq!(unsafe { capi::oeq_register_pjrt(nothing, ptr::null()) }, 3);
        let mut results = unsafe { std::mem::zeroed::<capi::FfiRegistration>() };
        assert_eq!(unsafe { capi::oeq_registration_results(&raw mut results) }, 3, "no size");
        results.struct_size = 16;
        assert_eq!(unsafe { capi::oeq_registration_results(&raw mut results) }, 9, "nothing reached an XLA");
        let mut future = unsafe { ptr::read(nothing) };
        future.version.major = 1;
        assert_eq!(unsafe { capi::oeq_register_pjrt(&raw const future, c"CUDA".as_ptr()) }, 12);
        assert!(last().contains("1.90"), "{}", last());
    })
    .join()
    .unwrap();
}
