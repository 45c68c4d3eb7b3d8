//! The way into an unmodified PJRT plugin.
//!
//! A plugin hands out a `PJRT_Api`, not XLA's FFI api. But its FFI extension registers handlers, and from jaxlib 0.8.1 on
//! XLA asks a new handler for its metadata with a frame that carries the api table. So a throw-away handler is offered,
//! takes note of the table and answers version 0.0, which makes XLA drop it: nothing stays registered. The plugin does not
//! need to be initialised for this.

use std::ffi::{CString, c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::api::Api;
use super::ffi;
use super::frame::metadata_of;
use crate::error::{Code, Error, Result};
use crate::sync::lock;

/// Head of `PJRT_Api`: the part that is the same in every version.
#[repr(C)]
#[derive(Debug)]
pub struct PjrtApi {
    /// Reported size.
    pub struct_size: usize,
    /// Chain of extensions.
    pub extension_start: *mut Extension,
}

/// Head of every PJRT extension.
#[repr(C)]
#[derive(Debug)]
pub struct Extension {
    /// Reported size.
    pub struct_size: usize,
    /// `PJRT_Extension_Type`.
    pub kind: c_int,
    /// The next one, or null.
    pub next: *mut Extension,
}

/// `PJRT_Extension_Type_FFI`.
const EXTENSION_FFI: c_int = 5;

#[repr(C)]
struct FfiExtension {
    base: Extension,
    type_register: *const c_void,
    user_data_add: *const c_void,
    /// From jaxlib 0.7.
    register_handler: Option<unsafe extern "C" fn(*mut RegisterHandlerArgs) -> *mut c_void>,
}

#[repr(C)]
struct RegisterHandlerArgs {
    struct_size: usize,
    target_name: *const c_char,
    target_name_size: usize,
    handler: *mut c_void,
    platform_name: *const c_char,
    platform_name_size: usize,
    traits: c_int,
}

static SEEN: AtomicPtr<ffi::Api> = AtomicPtr::new(ptr::null_mut());

/// Takes note of the api that asks.
unsafe extern "C" fn listen(frame: *mut ffi::CallFrame) -> *mut ffi::Error {
    // SAFETY: XLA's frame.
    if let Some(frame) = unsafe { frame.as_ref() } {
        SEEN.store(frame.api.cast_mut(), Ordering::Release);
        // SAFETY: as above; the answer goes where the extension says.
        unsafe {
            if let Some(metadata) = metadata_of(frame) {
                (*metadata).api_version.major_version = 0;
                (*metadata).api_version.minor_version = 0;
            }
        }
    }
    ptr::null_mut()
}

/// The FFI api of the XLA inside a PJRT plugin.
///
/// # Errors
/// The plugin has no FFI extension, or is older than jaxlib 0.8.1 and does not show its api.
///
/// # Safety
/// `pjrt` is what the plugin's `GetPjrtApi` answered.
pub unsafe fn ffi_api(pjrt: *const PjrtApi) -> Result<Api> {
    // One listener serves one plugin at a time.
    static LISTENING: Mutex<()> = Mutex::new(());
    let _listening = lock(&LISTENING);

    if pjrt.is_null() {
        return Err(Error::invalid("the PJRT api is null; pass what the plugin's GetPjrtApi answered"));
    }
    // SAFETY: by the function's contract the head is there, and the chain of extensions is the plugin's static data.
    let extension = unsafe {
        let mut extension = (*pjrt).extension_start;
        while !extension.is_null() && (*extension).kind != EXTENSION_FFI {
            extension = (*extension).next;
        }
        extension
    };
    let missing = |what: &str| Error::new(Code::Unimplemented, format!("this PJRT plugin {what}"));
    if extension.is_null() {
        return Err(missing("has no FFI extension, so custom calls cannot be registered in it"));
    }
    let needed = offset_of!(FfiExtension, register_handler) + size_of::<usize>();
    // SAFETY: the extension is of this kind; its size says whether the slot is there.
    let register = unsafe {
        if (*extension).struct_size < needed { None } else { (*extension.cast::<FfiExtension>()).register_handler }
    };
    let register =
        register.ok_or_else(|| missing("is older than jaxlib 0.7 and registers no handlers through PJRT"))?;

    let name = CString::new("oeq_native.throw_away").unwrap_or_default();
    let platform = CString::new("CUDA").unwrap_or_default();
    let mut args = RegisterHandlerArgs {
        struct_size: offset_of!(RegisterHandlerArgs, traits) + size_of::<c_int>(),
        target_name: name.as_ptr(),
        target_name_size: name.as_bytes().len(),
        handler: listen as *mut c_void,
        platform_name: platform.as_ptr(),
        platform_name_size: platform.as_bytes().len(),
        traits: 0,
    };
    SEEN.store(ptr::null_mut(), Ordering::Release);
    // SAFETY: the plugin's own function with its own argument structure; it calls `listen` before it returns. Every
    // measured plugin answers no error here; one that did would leak a small object.
    unsafe { register(&raw mut args) };
    // SAFETY: the table is the plugin's static one.
    match unsafe { Api::from_raw(SEEN.load(Ordering::Acquire)) } {
        Some(api) => api,
        None => Err(missing("is older than jaxlib 0.8.1 and does not show its FFI api")),
    }
}
