//! The ways into an unmodified PJRT plugin.
//!
//! A plugin hands out a `PJRT_Api`, not XLA's FFI api. Three ways lead in all the same; [`Plugin::register`] takes the first
//! that is there:
//!
//! | door | how | from |
//! | --- | --- | --- |
//! | [`Door::Api`] | learn the FFI api, then register through it | jaxlib 0.8.1 |
//! | [`Door::GpuExtension`] | extension 0 takes four stages | jaxlib 0.4.31, CUDA only |
//! | [`Door::ExecuteOnly`] | extension 5 takes one function; it runs without state | jaxlib 0.7 |
//!
//! The api is learned like this: XLA asks a new handler for its metadata with a frame that carries the api table. A
//! throw-away handler is offered, takes note of the table and answers version 0.0, which makes XLA drop it: nothing stays
//! registered. None of this needs the plugin to be initialised or a client to exist, and it may be done after that too.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;
use std::ptr;
use std::slice;
use std::sync::Mutex;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::api::Api;
use super::ffi;
use super::frame::metadata_of;
use super::register::{self, Door, Outcome, Platform, Report};
use crate::error::{Code, Error, Result};
use crate::registry::Descriptor;
use crate::sync::lock;

/// Head of `PJRT_Api`: what is the same in every version.
#[repr(C)]
#[derive(Debug)]
pub struct PjrtApi {
    /// Reported size.
    pub struct_size: usize,
    /// Chain of extensions.
    pub extension_start: *mut Extension,
    /// Version of the PJRT C API.
    pub version: PjrtVersion,
    /// Destroys an error.
    pub error_destroy: Option<unsafe extern "C" fn(*mut ErrorArgs)>,
    /// Text of an error.
    pub error_message: Option<unsafe extern "C" fn(*mut ErrorArgs)>,
    /// Code of an error.
    pub error_get_code: Option<unsafe extern "C" fn(*mut ErrorArgs) -> *mut c_void>,
}

/// `PJRT_Api_Version`.
#[repr(C)]
#[derive(Debug)]
pub struct PjrtVersion {
    /// Reported size.
    pub struct_size: usize,
    /// Unused.
    pub extension_start: *mut Extension,
    /// Major version.
    pub major: c_int,
    /// Minor version.
    pub minor: c_int,
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

/// Arguments of the three error functions, which differ only in what follows `error` and in the size.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorArgs {
    struct_size: usize,
    extension_start: *mut Extension,
    error: *mut c_void,
    /// Out: the text of `error_message`; in its low half the code of `error_get_code`.
    answer: usize,
    message_size: usize,
}

/// `PJRT_Extension_Type_Gpu_Custom_Call`.
const EXTENSION_GPU_CUSTOM_CALL: c_int = 0;
/// `PJRT_Extension_Type_FFI`.
const EXTENSION_FFI: c_int = 5;

/// An extension's function: null is success.
type Function<Args> = Option<unsafe extern "C" fn(*mut Args) -> *mut c_void>;

#[repr(C)]
struct FfiExtension {
    base: Extension,
    type_register: *const c_void,
    user_data_add: *const c_void,
    /// From jaxlib 0.7.
    register_handler: Function<RegisterHandlerArgs>,
}

#[repr(C)]
struct RegisterHandlerArgs {
    struct_size: usize,
    target_name: *const c_char,
    target_name_size: usize,
    handler: *mut c_void,
    platform_name: *const c_char,
    platform_name_size: usize,
    traits: u32,
}

#[repr(C)]
struct GpuExtension {
    base: Extension,
    custom_call: Function<CustomCallArgs>,
}

#[repr(C)]
struct CustomCallArgs {
    struct_size: usize,
    function_name: *const c_char,
    function_name_size: usize,
    /// 1 for handlers of the FFI.
    api_version: c_int,
    instantiate: *mut c_void,
    prepare: *mut c_void,
    initialize: *mut c_void,
    execute: *mut c_void,
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

fn missing(what: &str) -> Error {
    Error::new(Code::Unimplemented, format!("this PJRT plugin {what}"))
}

fn address(stage: Option<ffi::Handler>) -> *mut c_void {
    stage.map_or(ptr::null_mut(), |stage| stage as *mut c_void)
}

/// A PJRT plugin that is loaded.
#[derive(Debug, Clone, Copy)]
pub struct Plugin {
    raw: *const PjrtApi,
}

// SAFETY: the table is static and its functions may be called from any thread.
unsafe impl Send for Plugin {}
// SAFETY: as above; the handle itself never changes.
unsafe impl Sync for Plugin {}

impl Plugin {
    /// Wraps what a plugin's `GetPjrtApi` answered.
    ///
    /// # Errors
    /// It is null, or of a major version that is not known here.
    ///
    /// # Safety
    /// `raw` is null or what `GetPjrtApi` answered; the plugin stays loaded for the life of the process.
    pub unsafe fn from_raw(raw: *const PjrtApi) -> Result<Self> {
        if raw.is_null() {
            return Err(Error::invalid("the PJRT api is null; pass what the plugin's GetPjrtApi answered"));
        }
        let plugin = Self { raw };
        match plugin.version() {
            (0, _) => Ok(plugin),
            (major, minor) => {
                Err(missing(&format!("speaks version {major}.{minor} of the PJRT C API; oeq-native knows 0.x")))
            }
        }
    }

    /// Version of the PJRT C API.
    #[must_use]
    pub fn version(self) -> (c_int, c_int) {
        // SAFETY: the head is in every version, and the table is static.
        unsafe { ((*self.raw).version.major, (*self.raw).version.minor) }
    }

    /// The extension of this kind, if it reaches up to `needed` bytes.
    fn extension(self, kind: c_int, needed: usize) -> Option<*mut Extension> {
        // SAFETY: the chain is the plugin's static data.
        unsafe {
            let mut extension = (*self.raw).extension_start;
            while !extension.is_null() {
                if (*extension).kind == kind {
                    return ((*extension).struct_size >= needed).then_some(extension);
                }
                extension = (*extension).next;
            }
        }
        None
    }

    fn register_handler_function(self) -> Function<RegisterHandlerArgs> {
        let needed = offset_of!(FfiExtension, register_handler) + size_of::<usize>();
        // SAFETY: the extension is of this kind and its size covers the slot.
        self.extension(EXTENSION_FFI, needed).and_then(|e| unsafe { (*e.cast::<FfiExtension>()).register_handler })
    }

    fn custom_call_function(self) -> Function<CustomCallArgs> {
        let needed = offset_of!(GpuExtension, custom_call) + size_of::<usize>();
        // SAFETY: the extension is of this kind and its size covers the slot.
        self.extension(EXTENSION_GPU_CUSTOM_CALL, needed)
            .and_then(|e| unsafe { (*e.cast::<GpuExtension>()).custom_call })
    }

    /// Takes over an answer of the plugin: null is success, anything else becomes an [`Error`] and is destroyed.
    fn consume(self, error: *mut c_void) -> Result<()> {
        if error.is_null() {
            return Ok(());
        }
        let args = |struct_size| ErrorArgs {
            struct_size,
            extension_start: ptr::null_mut(),
            error,
            answer: 0,
            message_size: 0,
        };
        // SAFETY: the three slots are in every version and read these layouts; `error` came from this plugin and is
        // destroyed once, after its text was copied.
        unsafe {
            let mut code = args(offset_of!(ErrorArgs, answer) + size_of::<c_int>());
            let told = (*self.raw).error_get_code.map(|get| get(&raw mut code));
            let mut text = args(size_of::<ErrorArgs>());
            if let Some(get) = (*self.raw).error_message {
                get(&raw mut text);
            }
            let message = if text.answer == 0 {
                "the plugin gave no reason".to_owned()
            } else {
                let bytes = slice::from_raw_parts(text.answer as *const u8, text.message_size);
                String::from_utf8_lossy(bytes).into_owned()
            };
            let mut destroy = args(offset_of!(ErrorArgs, answer));
            if let Some(destroy_error) = (*self.raw).error_destroy {
                destroy_error(&raw mut destroy);
            }
            let number = told.and_then(|_| i32::try_from(code.answer & 0xffff_ffff).ok());
            let code = number.map_or(Code::Internal, Code::from_number);
            Err(Error::new(code, message))
        }
    }

    /// The FFI api of the XLA inside the plugin.
    ///
    /// # Errors
    /// The plugin has no FFI extension, or is older than jaxlib 0.8.1 and does not show its api.
    pub fn ffi_api(self) -> Result<Api> {
        // One listener serves one plugin at a time.
        static LISTENING: Mutex<()> = Mutex::new(());
        let _listening = lock(&LISTENING);

        let name = "oeq_native.throw_away";
        SEEN.store(ptr::null_mut(), Ordering::Release);
        self.offer(name, Platform::Cuda, listen, 0)?;
        // SAFETY: the table is the plugin's static one.
        match unsafe { Api::from_raw(SEEN.load(Ordering::Acquire)) } {
            Some(api) => api,
            None => Err(missing("is older than jaxlib 0.8.1 and does not show its FFI api")),
        }
    }

    /// Offers one execute function through the FFI extension.
    fn offer(self, name: &str, platform: Platform, handler: ffi::Handler, traits: u32) -> Result<()> {
        let register = self.register_handler_function().ok_or_else(|| {
            missing("has no FFI extension that registers handlers (those before jaxlib 0.7 have not)")
        })?;
        let platform = platform.name();
        let mut args = RegisterHandlerArgs {
            struct_size: offset_of!(RegisterHandlerArgs, traits) + size_of::<u32>(),
            target_name: name.as_ptr().cast(),
            target_name_size: name.len(),
            handler: handler as *mut c_void,
            platform_name: platform.as_ptr().cast(),
            platform_name_size: platform.len(),
            traits,
        };
        // SAFETY: the plugin's own function with its own argument structure; it copies the names, and asks the handler
        // for its metadata before it returns.
        self.consume(unsafe { register(&raw mut args) })
    }

    /// Registers every target through the first door that the plugin has. Doing it again, from any thread, before or
    /// after a client exists, changes nothing.
    ///
    /// # Errors
    /// The table of targets is broken, or the plugin has no door for the platform. What XLA says about a target is in the
    /// report.
    pub fn register(self, platform: Platform) -> Result<Report> {
        let mut reasons = Vec::new();
        for door in [Door::Api, Door::GpuExtension, Door::ExecuteOnly] {
            match self.register_by(door, platform) {
                Err(error) if error.code() == Code::Unimplemented => {
                    log::debug!("oeq-native: no way in by the {}: {error}", door.name());
                    reasons.push(format!("{}: {}", door.name(), error.message()));
                }
                outcome => return outcome,
            }
        }
        Err(Error::new(
            Code::Unimplemented,
            format!("no way to register handlers for {} in this PJRT plugin: {}", platform.name(), reasons.join("; ")),
        ))
    }

    /// [`Self::register`] through one door only.
    ///
    /// # Errors
    /// As there; [`Code::Unimplemented`] where the plugin does not have this door.
    pub fn register_by(self, door: Door, platform: Platform) -> Result<Report> {
        match door {
            Door::Api => register::register(self.ffi_api()?, platform),
            Door::GpuExtension => self.register_by_gpu_extension(platform),
            Door::ExecuteOnly => self.register_execute_only(platform),
        }
    }

    fn register_by_gpu_extension(self, platform: Platform) -> Result<Report> {
        if platform != Platform::Cuda {
            return Err(missing("takes handlers for CUDA only through its GPU custom call extension"));
        }
        let custom_call = self
            .custom_call_function()
            .ok_or_else(|| missing("has no GPU custom call extension (it is not for GPUs)"))?;
        let mut api = self.ffi_api().ok();
        let mut known = register::registering();
        let targets = register::all_targets(&mut known, self.identity(api), platform, |target| {
            verified(target, &mut api, || {
                let mut args = CustomCallArgs {
                    struct_size: size_of::<CustomCallArgs>(),
                    function_name: target.name.as_ptr().cast(),
                    function_name_size: target.name.len(),
                    api_version: 1,
                    instantiate: address(target.bundle.instantiate),
                    prepare: address(target.bundle.prepare),
                    initialize: address(target.bundle.initialize),
                    execute: address(target.bundle.execute),
                };
                // SAFETY: the plugin's own function with its own argument structure; it copies the name.
                self.consume(unsafe { custom_call(&raw mut args) })
            })
        })?;
        Ok(self.report(Door::GpuExtension, platform, api, targets))
    }

    fn register_execute_only(self, platform: Platform) -> Result<Report> {
        if self.register_handler_function().is_none() {
            return Err(missing("has no FFI extension that registers handlers (those before jaxlib 0.7 have not)"));
        }
        let mut api = self.ffi_api().ok();
        let mut known = register::registering();
        let targets = register::all_targets(&mut known, self.identity(api), platform, |target| {
            let handler = target.stateless_on(platform)?;
            let offer = || self.offer(target.name, platform, handler, target.traits);
            let (outcome, noted) = register::noted(target.name, offer);
            api = api.or(noted.api);
            outcome?;
            if noted.execute { Ok(()) } else { Err(register::unasked()) }
        })?;
        Ok(self.report(Door::ExecuteOnly, platform, api, targets))
    }

    fn report(self, door: Door, platform: Platform, api: Option<Api>, targets: Vec<(&'static str, Outcome)>) -> Report {
        let (major, minor) = self.version();
        log::debug!("oeq-native: {} targets tried in a PJRT {major}.{minor} plugin, {}", targets.len(), door.name());
        Report { door, platform, api_minor: api.map(Api::minor), targets }
    }

    /// What an XLA is known by, through whatever door: its api table where the plugin shows it.
    fn identity(self, api: Option<Api>) -> usize {
        api.map_or(self.raw as usize, |api| api.address() as usize)
    }
}

/// Registers a bundle through a door that may hide errors, and makes sure that XLA took it.
///
/// XLA asks execute first. From 0.2 on it goes on to ask instantiate, but only once it is content with the version; up to
/// 0.1 it asks execute only.
fn verified(target: &'static Descriptor, api: &mut Option<Api>, registration: impl Fn() -> Result<()>) -> Result<()> {
    let (mut outcome, mut noted) = register::noted(target.name, &registration);
    *api = api.or(noted.api);
    let dropped =
        |noted: &register::Noted| noted.api.is_some() && !noted.instantiate && target.bundle.instantiate.is_some();
    if let Some(api) = noted.api.filter(|_| noted.execute && dropped(&noted)) {
        if register::report_own_version(api) {
            (outcome, noted) = register::noted(target.name, &registration);
        }
    }
    outcome?;
    if !noted.execute {
        return Err(register::unasked());
    }
    if dropped(&noted) {
        return Err(Error::new(
            Code::Unimplemented,
            "XLA answered success but dropped the handler once it knew its version",
        ));
    }
    Ok(())
}

/// The FFI api of the XLA inside a PJRT plugin.
///
/// # Errors
/// See [`Plugin::ffi_api`].
///
/// # Safety
/// As for [`Plugin::from_raw`].
pub unsafe fn ffi_api(pjrt: *const PjrtApi) -> Result<Api> {
    // SAFETY: by the function's contract.
    unsafe { Plugin::from_raw(pjrt) }?.ffi_api()
}
