//! A safe handle on one XLA's api table, which hides what differs between its versions.
//!
//! The version is read from the table itself, never assumed: layouts newer than [`ffi::API_MINOR_NEWEST`] are addressed
//! as the newest known one, which is what XLA promises to keep working.

use std::ffi::{CStr, CString, c_int, c_void};
use std::ptr;

use super::ffi::{self, StructSize};
use crate::error::{Code, Error, Result};

/// One XLA instance, known by the address of its api table. A process can hold several.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Api {
    raw: *const ffi::Api,
    minor: c_int,
}

// SAFETY: the table is static and its functions may be called from any thread.
unsafe impl Send for Api {}
// SAFETY: as above; the handle itself never changes.
unsafe impl Sync for Api {}

/// The invocation that a call frame belongs to. Only valid during that call.
#[derive(Debug, Clone, Copy)]
pub struct Context(pub(super) *mut ffi::ExecutionContext);

fn span(text: &str) -> ffi::ByteSpan {
    ffi::ByteSpan { ptr: text.as_ptr().cast(), len: text.len() }
}

fn missing(slot: &str) -> Error {
    Error::new(Code::Unimplemented, format!("this XLA's FFI api has no {slot}"))
}

/// A NUL-terminated copy; a NUL inside would cut the text short, so it is replaced.
fn c_text(text: &str) -> CString {
    CString::new(text).unwrap_or_else(|_| CString::new(text.replace('\0', "\u{fffd}")).unwrap_or_default())
}

#[cold]
fn unknown_version(major: c_int, minor: c_int) -> Error {
    Error::new(
        Code::Unimplemented,
        format!(
            "this XLA speaks version {major}.{minor} of its FFI api; oeq-native knows 0.1 to {}.{}",
            ffi::API_MAJOR,
            ffi::API_MINOR_NEWEST
        ),
    )
}

impl Api {
    /// Wraps an api table. `None` for a null pointer.
    ///
    /// # Errors
    /// The table's major version is not the one whose layouts are known here.
    ///
    /// # Safety
    /// `raw` is null or points to an XLA FFI api table that outlives every use of the handle; XLA's are static.
    #[must_use]
    #[inline]
    pub unsafe fn from_raw(raw: *const ffi::Api) -> Option<Result<Self>> {
        if raw.is_null() {
            return None;
        }
        // SAFETY: not null, and the caller vouches for the table; the version fields are in every table (offset 36).
        let (major, minor) = unsafe { ((*raw).api_version.major_version, (*raw).api_version.minor_version) };
        if major != ffi::API_MAJOR || minor < 1 {
            return Some(Err(unknown_version(major, minor)));
        }
        Some(Ok(Self { raw, minor }))
    }

    /// The table's address, which identifies the XLA instance.
    #[must_use]
    pub fn address(self) -> *const ffi::Api {
        self.raw
    }

    /// The framework's minor version.
    #[must_use]
    pub fn minor(self) -> c_int {
        self.minor
    }

    /// Tells an error to an XLA whose version is not known here. Only the slot that makes errors is used, which has been in
    /// its place since the first version.
    ///
    /// # Safety
    /// `raw` points to an XLA FFI api table.
    #[cold]
    #[must_use]
    pub(super) unsafe fn error_in_unknown_version(raw: *const ffi::Api, error: &Error) -> *mut ffi::Error {
        Self { raw, minor: 1 }.error(error)
    }

    /// Turns an error into one that XLA owns. Null, which XLA would read as success, only if XLA itself cannot make one.
    #[must_use]
    pub fn error(self, error: &Error) -> *mut ffi::Error {
        let message = c_text(error.message());
        let mut args = ffi::ErrorCreateArgs {
            struct_size: ffi::ErrorCreateArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            message: message.as_ptr(),
            errc: error.code() as c_int,
        };
        // SAFETY: the slot is in every version and copies the text before it returns; `args` lives through the call.
        unsafe { (*self.raw).error_create.map_or(ptr::null_mut(), |create| create(&raw mut args)) }
    }

    /// Takes over an answer of the api: null is success, anything else becomes an [`Error`] and is destroyed.
    #[inline]
    fn consume(self, error: *mut ffi::Error) -> Result<()> {
        if error.is_null() { Ok(()) } else { Err(self.taken(error)) }
    }

    #[cold]
    fn taken(self, error: *mut ffi::Error) -> Error {
        let (text, code) = if self.minor >= 4 {
            let mut args = ffi::ErrorGetDetailsArgs4 {
                struct_size: ffi::ErrorGetDetailsArgs4::STRUCT_SIZE,
                extension_start: ptr::null_mut(),
                error,
                message: ptr::null(),
                errc: 0,
            };
            // SAFETY: from 0.4 the slot reads this layout; `error` came from this api.
            unsafe { (*self.raw).error_get_message.map(|get| get((&raw mut args).cast())) };
            (args.message, Some(args.errc))
        } else {
            let mut args = ffi::ErrorGetMessageArgs1 {
                struct_size: ffi::ErrorGetMessageArgs1::STRUCT_SIZE,
                extension_start: ptr::null_mut(),
                error,
                message: ptr::null(),
            };
            // SAFETY: up to 0.3 the slot reads this layout; `error` came from this api.
            unsafe { (*self.raw).error_get_message.map(|get| get((&raw mut args).cast())) };
            (args.message, None)
        };
        let message = if text.is_null() {
            "XLA gave no reason".to_owned()
        } else {
            // SAFETY: XLA answers a NUL-terminated text that lives as long as the error, which is destroyed below.
            unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
        };
        let mut destroy = ffi::ErrorDestroyArgs {
            struct_size: ffi::ErrorDestroyArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            error,
        };
        // SAFETY: `error` is ours to destroy and is not used afterwards.
        unsafe { (*self.raw).error_destroy.map(|f| f(&raw mut destroy)) };
        let code = code.map_or(Code::Internal, Code::from_number);
        Error::new(code, message)
    }

    /// The platform's stream of this invocation.
    ///
    /// # Errors
    /// XLA's own, where the platform or the stage has no stream.
    #[inline]
    pub fn stream(self, context: Context) -> Result<*mut c_void> {
        let mut args = ffi::StreamGetArgs {
            struct_size: ffi::StreamGetArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            ctx: context.0,
            stream: ptr::null_mut(),
        };
        // SAFETY: the slot is in every version; the context belongs to the running call.
        let error =
            unsafe { (*self.raw).stream_get.map(|get| get(&raw mut args)) }.ok_or_else(|| missing("Stream_Get"))?;
        self.consume(error)?;
        Ok(args.stream)
    }

    /// The ordinal of the invocation's device, `None` where this XLA cannot tell (before 0.1's end) or has no device yet.
    ///
    /// # Errors
    /// XLA's own.
    #[inline]
    pub fn device_ordinal(self, context: Context) -> Result<Option<u32>> {
        // jaxlib 0.5.0 ends its table before this slot and reports 88 bytes for a table of 176.
        // SAFETY: `struct_size` is the first field of every table.
        let size = unsafe { (*self.raw).struct_size };
        if size < std::mem::offset_of!(ffi::Api, device_ordinal_get) + size_of::<usize>() {
            return Ok(None);
        }
        let mut args = ffi::DeviceOrdinalGetArgs {
            struct_size: ffi::DeviceOrdinalGetArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            ctx: context.0,
            device_ordinal: -1,
        };
        // SAFETY: the size above covers the slot; the context belongs to the running call.
        let error = unsafe { (*self.raw).device_ordinal_get.map(|get| get(&raw mut args)) };
        match error {
            None => Ok(None),
            Some(error) => {
                self.consume(error)?;
                Ok(u32::try_from(args.device_ordinal).ok())
            }
        }
    }

    /// How many threads XLA lends to this invocation. Only its CPU platform has some.
    ///
    /// # Errors
    /// XLA's own: this platform has no threads to lend.
    pub fn pool_threads(self, context: Context) -> Result<usize> {
        let mut threads = 0;
        let mut args = ffi::ThreadPoolNumThreadsArgs {
            struct_size: ffi::ThreadPoolNumThreadsArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            ctx: context.0,
            num_threads: &raw mut threads,
        };
        // SAFETY: the slot is in every version; the context belongs to the running call.
        let error = unsafe { (*self.raw).thread_pool_num_threads.map(|number| number(&raw mut args)) }
            .ok_or_else(|| missing("ThreadPool_NumThreads"))?;
        self.consume(error)?;
        Ok(usize::try_from(threads).unwrap_or(0))
    }

    /// Gives a task to the threads that XLA lends to this invocation. It runs once: sooner or later, maybe before this
    /// returns and on the calling thread, maybe after the invocation has ended.
    ///
    /// # Errors
    /// XLA's own: it did not take the task, which will not run.
    ///
    /// # Safety
    /// `task` may be called with `data` once, from any thread, at any time from now on, and does not unwind.
    pub unsafe fn schedule(self, context: Context, task: ffi::Task, data: *mut c_void) -> Result<()> {
        let mut args = ffi::ThreadPoolScheduleArgs {
            struct_size: ffi::ThreadPoolScheduleArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            ctx: context.0,
            task: Some(task),
            data,
        };
        // SAFETY: the slot is in every version; the context belongs to the running call, and the task is as XLA needs it.
        let error = unsafe { (*self.raw).thread_pool_schedule.map(|schedule| schedule(&raw mut args)) }
            .ok_or_else(|| missing("ThreadPool_Schedule"))?;
        self.consume(error)
    }

    /// Gives the call site's state to XLA, which destroys it with `deleter` when the executable goes.
    ///
    /// # Errors
    /// XLA refused; the state still belongs to the caller.
    ///
    /// # Safety
    /// `state` is what `deleter` expects, and `type_id` was registered with the same deleter in this XLA.
    pub unsafe fn set_state(
        self,
        context: Context,
        mut type_id: ffi::TypeId,
        state: *mut c_void,
        deleter: ffi::Deleter,
    ) -> Result<()> {
        let type_id = &raw mut type_id;
        // SAFETY: the slot is in every version.
        let set = unsafe { (*self.raw).state_set }.ok_or_else(|| missing("State_Set"))?;
        let extension_start = ptr::null_mut();
        let error = match self.minor {
            1 => {
                let mut args = ffi::StateSetArgs1 {
                    struct_size: ffi::StateSetArgs1::STRUCT_SIZE,
                    extension_start,
                    ctx: context.0,
                    type_id,
                    state,
                    deleter: Some(deleter),
                };
                // SAFETY: 0.1 reads this layout.
                unsafe { set((&raw mut args).cast()) }
            }
            2 => {
                let mut args = ffi::StateSetArgs2 {
                    struct_size: ffi::StateSetArgs2::STRUCT_SIZE,
                    extension_start,
                    ctx: context.0,
                    type_id,
                    state,
                };
                // SAFETY: 0.2 reads this layout.
                unsafe { set((&raw mut args).cast()) }
            }
            _ => {
                let mut args = ffi::StateSetArgs3 {
                    struct_size: ffi::StateSetArgs3::STRUCT_SIZE,
                    extension_start,
                    ctx: context.0,
                    stage: ffi::stage::INSTANTIATE,
                    type_id,
                    state,
                };
                // SAFETY: 0.3 and later read this layout.
                unsafe { set((&raw mut args).cast()) }
            }
        };
        self.consume(error)
    }

    /// The call site's state, `None` where none was set (a handler that was registered without instantiate).
    ///
    /// # Errors
    /// XLA holds a state of another type.
    #[inline]
    pub fn state(self, context: Context, mut type_id: ffi::TypeId) -> Result<Option<*mut c_void>> {
        let type_id = &raw mut type_id;
        // SAFETY: the slot is in every version.
        let get = unsafe { (*self.raw).state_get }.ok_or_else(|| missing("State_Get"))?;
        let extension_start = ptr::null_mut();
        let (error, state) = if self.minor >= 3 {
            let mut args = ffi::StateGetArgs3 {
                struct_size: ffi::StateGetArgs3::STRUCT_SIZE,
                extension_start,
                ctx: context.0,
                stage: ffi::stage::INSTANTIATE,
                type_id,
                state: ptr::null_mut(),
            };
            // SAFETY: 0.3 and later read this layout.
            (unsafe { get((&raw mut args).cast()) }, args.state)
        } else {
            let mut args = ffi::StateGetArgs1 {
                struct_size: ffi::StateGetArgs1::STRUCT_SIZE,
                extension_start,
                ctx: context.0,
                type_id,
                state: ptr::null_mut(),
            };
            // SAFETY: 0.1 and 0.2 read this layout.
            (unsafe { get((&raw mut args).cast()) }, args.state)
        };
        if error.is_null() {
            return Ok((!state.is_null()).then_some(state));
        }
        match self.consume(error) {
            // Before 0.4 XLA tells no code, only the text.
            Err(error) if error.code() == Code::NotFound || error.message().contains("State is not set") => Ok(None),
            Err(error) => Err(error),
            Ok(()) => Ok(None),
        }
    }

    /// Registers a state type. `type_id` 0 asks for a new id; the id is answered in place.
    ///
    /// # Errors
    /// XLA's own: the name has another id already.
    pub fn register_type(self, name: &str, type_id: &mut ffi::TypeId, info: &'static ffi::TypeInfo) -> Result<()> {
        // SAFETY: the slot is in every version.
        let register = unsafe { (*self.raw).type_register }.ok_or_else(|| missing("Type_Register"))?;
        let extension_start = ptr::null_mut();
        let error = if self.minor == 1 {
            let mut args = ffi::TypeRegisterArgs1 {
                struct_size: ffi::TypeRegisterArgs1::STRUCT_SIZE,
                extension_start,
                name: span(name),
                type_id,
            };
            // SAFETY: 0.1 reads this layout; XLA copies the name.
            unsafe { register((&raw mut args).cast()) }
        } else {
            let mut args = ffi::TypeRegisterArgs2 {
                // XLA's own macro stops before `type_info` but reads it; a later XLA may count it.
                struct_size: size_of::<ffi::TypeRegisterArgs2>(),
                extension_start,
                name: span(name),
                type_id,
                type_info: info,
            };
            // SAFETY: 0.2 and later read this layout; XLA copies the name, and `info` is static.
            unsafe { register((&raw mut args).cast()) }
        };
        self.consume(error)
    }

    /// Registers one target with all its stages.
    ///
    /// # Errors
    /// XLA's own: a version it does not take, or the name is taken by other functions.
    pub fn register_handler(self, name: &str, platform: &str, bundle: ffi::HandlerBundle, traits: u32) -> Result<()> {
        let mut args = ffi::HandlerRegisterArgs {
            struct_size: ffi::HandlerRegisterArgs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            name: span(name),
            platform: span(platform),
            bundle,
            traits,
        };
        // SAFETY: every version reads the four-stage form when it is sent with its size; XLA copies the names.
        let error = unsafe { (*self.raw).handler_register.map(|register| register(&raw mut args)) }
            .ok_or_else(|| missing("Handler_Register"))?;
        self.consume(error)
    }
}
