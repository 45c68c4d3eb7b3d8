//! Registration in a stand-in XLA of each FFI minor version that refuses what real ones refuse, and in several at once.
#![allow(
    clippy::unwrap_used,
    clippy::undocumented_unsafe_blocks,
    reason = "a failed test should panic; the C surface is called here as C would, with static tables"
)]

mod common;

use std::ffi::{CStr, c_int};

use common::*;
use oeq_native::capi;
use oeq_native::xla::ffi;

fn register(minor: c_int, platform: &CStr) -> Result<(), String> {
    let status = unsafe { capi::RegisterFFi(&raw const *FakeXla::of(minor).api, platform.as_ptr()) };
    if status == 0 {
        return Ok(());
    }
    Err(unsafe { CStr::from_ptr(capi::oeq_last_error()) }.to_str().unwrap().to_owned())
}

#[test]
fn all_targets_are_registered_as_whole_bundles_in_every_version_and_again() {
    for minor in 1..=5 {
        std::thread::scope(|scope| {
            for spelling in [c"CUDA", c"cuda", c"gpu", c"GPU"] {
                scope.spawn(move || register(minor, spelling).unwrap());
            }
        });
        let handlers = HANDLERS.lock().unwrap();
        let mine: Vec<_> = handlers.iter().filter(|h| h.0 == minor && h.1 == "CUDA").collect();
        assert_eq!(mine.len(), 8, "minor {minor}");
        for (_, _, name, bundle, traits) in mine {
            assert!(bundle.instantiate.is_some() && bundle.initialize.is_some() && bundle.execute.is_some(), "{name}");
            assert_eq!(*traits, ffi::TRAIT_COMMAND_BUFFER_COMPATIBLE);
        }
    }
}

#[test]
fn what_cannot_be_is_an_error_that_says_what_can() {
    let error = register(3, c"CUDDA").unwrap_err();
    for spelling in ["`CUDDA`", "CUDA", "cuda", "gpu", "Host", "cpu"] {
        assert!(error.contains(spelling), "{spelling} is not in: {error}");
    }
    assert_eq!(unsafe { capi::RegisterFFi(std::ptr::null(), c"CUDA".as_ptr()) }, 3);
    assert_eq!(unsafe { capi::RegisterFFi(&raw const *FakeXla::of(3).api, std::ptr::null()) }, 3);
    let mut future = unsafe { std::ptr::read(&raw const *FakeXla::of(3).api) };
    future.api_version.major_version = 1;
    assert_eq!(unsafe { capi::RegisterFFi(&raw const future, c"CUDA".as_ptr()) }, 12);
    let text = unsafe { CStr::from_ptr(capi::oeq_last_error()) }.to_str().unwrap();
    assert!(text.contains("1.3") && text.contains("0.1 to 0.5"), "{text}");
}

#[test]
fn a_stage_called_by_an_unknown_version_answers_an_error() {
    let mut future = unsafe { std::ptr::read(&raw const *FakeXla::of(3).api) };
    future.api_version.major_version = 7;
    let mut frame = empty_frame(&raw const future, std::ptr::null_mut());
    let execute = bundle("tp_forward").execute.unwrap();
    let (code, text) = answer(unsafe { execute(&raw mut frame) }).unwrap_err();
    assert_eq!(code, 12);
    assert!(text.contains("7.3"), "{text}");
    // And nothing at all is nothing.
    assert!(answer(unsafe { execute(std::ptr::null_mut()) }).is_ok());
}

#[test]
fn both_table_layouts_hold_the_same_handlers() {
    let three = unsafe { &*capi::oeq_ffi_handler_table() };
    assert_eq!((three.abi_version, three.type_count, three.handler_count), (3, 1, 8));
    let two = unsafe { &*capi::oeq_ffi_handler_table_for(2).cast::<capi::FfiHandlerTable2>() };
    assert_eq!((two.abi_version, two.handler_count, two.handlers), (2, 8, three.handlers));
    assert!(std::ptr::eq(capi::oeq_ffi_handler_table_for(3).cast(), three));
    assert!(capi::oeq_ffi_handler_table_for(4).is_null());
    let text = unsafe { CStr::from_ptr(capi::oeq_last_error()) }.to_str().unwrap();
    assert!(text.contains("layout 4"), "{text}");
    let info = unsafe { &*(*three.types).type_info.cast::<ffi::TypeInfo>() };
    assert!(info.deleter.is_some());
}

#[cfg(not(feature = "host"))]
#[test]
fn a_library_without_the_host_platform_says_so() {
    let error = register(3, c"Host").unwrap_err();
    assert!(error.contains("UNIMPLEMENTED") && error.contains("feature `host`"), "{error}");
    assert!(unsafe { capi::oeq_ffi_handler_table_on(3, c"Host".as_ptr()) }.is_null());
}
