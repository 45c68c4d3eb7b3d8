//! As much of the PJRT C API as running a model takes.
//!
//! Every function gets a pointer to a structure of its own, which begins with the structure's size and a chain of
//! extensions, and answers null or an error. A size ends with the last field, tail padding does not count. Functions
//! are found by their place in the plugin's table; places and layouts have been the same since version 0.40 or so. A
//! plugin takes a structure that is larger than it knows, not one that is smaller: the two that grow have room at the
//! end.

use std::ffi::{c_char, c_int, c_void};
use std::mem::{ManuallyDrop, offset_of};
use std::path::Path;
use std::{ptr, slice};

use libloading::Library;

pub(crate) type Result<T> = std::result::Result<T, Box<dyn std::error::Error>>;

type Function = unsafe extern "C" fn(*mut c_void) -> *mut c_void;

/// `PJRT_Api`: five words, then the functions.
#[repr(C)]
struct Api {
    struct_size: usize,
    extensions: *const c_void,
    version: [usize; 3],
    functions: [Option<Function>; 71],
}

/// Places of functions in the table.
mod place {
    pub(super) const ERROR_DESTROY: usize = 0;
    pub(super) const ERROR_MESSAGE: usize = 1;
    pub(super) const PLUGIN_INITIALIZE: usize = 3;
    pub(super) const EVENT_DESTROY: usize = 5;
    pub(super) const EVENT_AWAIT: usize = 8;
    pub(super) const CLIENT_CREATE: usize = 10;
    pub(super) const CLIENT_DESTROY: usize = 11;
    pub(super) const CLIENT_PLATFORM_NAME: usize = 12;
    pub(super) const CLIENT_ADDRESSABLE_DEVICES: usize = 16;
    pub(super) const CLIENT_COMPILE: usize = 20;
    pub(super) const CLIENT_BUFFER_FROM_HOST_BUFFER: usize = 22;
    pub(super) const EXECUTABLE_DESTROY: usize = 40;
    pub(super) const EXECUTABLE_NUM_OUTPUTS: usize = 44;
    pub(super) const LOADED_EXECUTABLE_DESTROY: usize = 50;
    pub(super) const LOADED_EXECUTABLE_GET_EXECUTABLE: usize = 51;
    pub(super) const LOADED_EXECUTABLE_EXECUTE: usize = 55;
    pub(super) const BUFFER_DESTROY: usize = 58;
    pub(super) const BUFFER_ELEMENT_TYPE: usize = 59;
    pub(super) const BUFFER_DIMENSIONS: usize = 60;
    pub(super) const BUFFER_TO_HOST_BUFFER: usize = 70;
}

/// An argument structure, all zero but for its size.
trait Arguments: Sized {
    const SIZE: usize;
    fn new() -> Self;
}

macro_rules! arguments {
    ($($(#[$about:meta])* $name:ident { $($field:ident: $type:ty,)* => $last:ident: $last_type:ty })+) => {$(
        $(#[$about])*
        #[repr(C)]
        struct $name {
            struct_size: usize,
            extensions: *const c_void,
            $($field: $type,)*
            $last: $last_type,
        }
        impl Arguments for $name {
            const SIZE: usize = offset_of!($name, $last) + size_of::<$last_type>();
            fn new() -> Self {
                // SAFETY: integers and pointers only, for which zero is a value.
                let mut zeroed: Self = unsafe { std::mem::zeroed() };
                zeroed.struct_size = Self::SIZE;
                zeroed
            }
        }
    )+};
}

type Object = *mut c_void;

arguments! {
    ErrorMessage { error: Object, message: *const c_char, => message_size: usize }
    Initialize { => none: [u8; 0] }
    /// `PJRT_*_Destroy`, `PJRT_Event_Await`.
    One { => object: Object }
    /// A question about an object that is answered by a pointer.
    Pointer { object: Object, => answer: Object }
    /// A question about an object that is answered by an array.
    Array { object: Object, items: *const c_void, => count: usize }
    Type { object: Object, => kind: c_int }
    Create {
        options: *const NamedValue, option_count: usize, get: Object, get_argument: Object, put: Object,
        put_argument: Object, client: Object, => later: [usize; 8]
    }
    NamedValue { name: *const u8, name_size: usize, kind: c_int, value: usize, => value_size: usize }
    Program { code: *const u8, code_size: usize, format: *const u8, => format_size: usize }
    Compile { client: Object, program: *const Program, options: *const u8, options_size: usize, => executable: Object }
    FromHost {
        client: Object, data: *const u8, kind: c_int, dimensions: *const i64, rank: usize, strides: *const i64,
        stride_count: usize, semantics: c_int, device: Object, memory: Object, layout: Object, done: Object,
        => buffer: Object
    }
    ToHost { buffer: Object, layout: Object, data: *mut u8, size: usize, => done: Object }
    ExecuteOptions {
        send: Object, receive: Object, sends: usize, receives: usize, launch_id: c_int, keep: *const i64,
        keep_count: usize, context: Object, => later: [usize; 8]
    }
    Execute {
        executable: Object, options: *mut ExecuteOptions, arguments: *const *const Object, devices: usize,
        argument_count: usize, outputs: *const *mut Object, done: *mut Object, => device: Object
    }
}

/// A loaded plugin. It is never unloaded: its threads and what is registered in it would not survive that.
#[derive(Clone, Copy)]
pub(crate) struct Plugin(&'static Api);

impl Plugin {
    /// Opens a plugin's library and initialises it.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        // SAFETY: loading a plugin runs its initialisers, which is what we came for.
        let library = ManuallyDrop::new(unsafe { Library::new(path)? });
        // SAFETY: what every plugin exports; it answers a static table.
        let api = unsafe { library.get::<unsafe extern "C" fn() -> *const Api>(b"GetPjrtApi")?().as_ref() };
        let plugin = Self(api.ok_or("GetPjrtApi answered null")?);
        if plugin.0.struct_size < size_of::<Api>() {
            return Err("the plugin's PJRT C API is too old".into());
        }
        Ok(plugin)
    }

    /// The table, for those who register handlers.
    pub(crate) fn api(self) -> *const c_void {
        ptr::from_ref(self.0).cast()
    }

    /// One-time setup. Handlers may be registered before or after.
    pub(crate) fn initialize(self) -> Result<()> {
        self.call(place::PLUGIN_INITIALIZE, &mut Initialize::new())
    }

    fn call<A: Arguments>(self, place: usize, arguments: &mut A) -> Result<()> {
        let function = self.0.functions[place].ok_or_else(|| format!("the plugin has no function {place}"))?;
        // SAFETY: the arguments are those of the function at this place.
        let error = unsafe { function(ptr::from_mut(arguments).cast()) };
        if error.is_null() { Ok(()) } else { Err(self.text(error).into()) }
    }

    /// An error's text; the error is destroyed.
    fn text(self, error: Object) -> String {
        let mut question = ErrorMessage { error, ..ErrorMessage::new() };
        let mut end = One { object: error, ..One::new() };
        // SAFETY: the error is the plugin's; its text is copied before it is destroyed. These two answer nothing.
        unsafe {
            if let Some(message) = self.0.functions[place::ERROR_MESSAGE] {
                message((&raw mut question).cast());
            }
            let bytes = slice::from_raw_parts(question.message.cast(), question.message_size);
            let text = String::from_utf8_lossy(bytes).into_owned();
            if let Some(destroy) = self.0.functions[place::ERROR_DESTROY] {
                destroy((&raw mut end).cast());
            }
            text
        }
    }

    fn destroy(self, place: usize, object: Object) {
        // There is nobody to tell.
        let _ = self.call(place, &mut One { object, ..One::new() });
    }

    /// Waits for an event and destroys it.
    fn wait(self, event: Object) -> Result<()> {
        let outcome = self.call(place::EVENT_AWAIT, &mut One { object: event, ..One::new() });
        self.destroy(place::EVENT_DESTROY, event);
        outcome
    }
}

/// The value of a client's option.
pub(crate) enum Setting {
    Text(String),
    Integer(i64),
    Real(f32),
    Truth(bool),
}

impl Setting {
    /// Plugins insist on the type, which is told by the look: `true`, `3`, `0.5`, anything else.
    pub(crate) fn parse(text: &str) -> Self {
        let integer = || text.parse().map(Self::Integer).ok();
        let real = || text.parse().map(Self::Real).ok();
        let truth = text.parse().map(Self::Truth).ok();
        truth.or_else(integer).or_else(real).unwrap_or_else(|| Self::Text(text.to_owned()))
    }

    /// The structure for it, which points to the name and the text.
    fn named(&self, name: &str) -> NamedValue {
        // A `PJRT_NamedValue_Type`, and the value as the first bytes of a word.
        let (kind, value, value_size) = match self {
            Self::Text(text) => (0, text.as_ptr() as usize, text.len()),
            Self::Integer(number) => (1, usize::from_ne_bytes(number.to_ne_bytes()), 1),
            Self::Real(number) => (3, number.to_bits() as usize, 1),
            Self::Truth(truth) => (4, usize::from(*truth), 1),
        };
        NamedValue { name: name.as_ptr(), name_size: name.len(), kind, value, value_size, ..NamedValue::new() }
    }
}

/// A client of a plugin and its first device.
pub(crate) struct Client {
    plugin: Plugin,
    raw: Object,
    device: Object,
    pub(crate) platform: String,
}

impl Client {
    /// A client with these options; which there are is the plugin's affair.
    pub(crate) fn new(plugin: Plugin, options: &[(String, Setting)]) -> Result<Self> {
        let options: Vec<NamedValue> = options.iter().map(|(name, setting)| setting.named(name)).collect();
        let mut create = Create { options: options.as_ptr(), option_count: options.len(), ..Create::new() };
        plugin.call(place::CLIENT_CREATE, &mut create)?;
        let client = create.client;
        let mut devices = Array { object: client, ..Array::new() };
        plugin.call(place::CLIENT_ADDRESSABLE_DEVICES, &mut devices)?;
        if devices.count == 0 {
            return Err("the client has no device".into());
        }
        let mut name = Array { object: client, ..Array::new() };
        plugin.call(place::CLIENT_PLATFORM_NAME, &mut name)?;
        // SAFETY: arrays of the client, which lives.
        let (device, name) =
            unsafe { (*devices.items.cast::<Object>(), slice::from_raw_parts(name.items.cast::<u8>(), name.count)) };
        Ok(Self { plugin, raw: client, device, platform: String::from_utf8_lossy(name).into_owned() })
    }

    /// Compiles a `StableHLO` module, as text or as bytecode.
    pub(crate) fn compile(&self, code: &[u8]) -> Result<Executable> {
        // A CompileOptionsProto with executable_build_options {device_ordinal: -1, num_replicas: 1, num_partitions: 1}.
        const OPTIONS: &[u8] = b"\x1a\x0f\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x20\x01\x28\x01";
        let format = b"mlir";
        let program = Program {
            code: code.as_ptr(),
            code_size: code.len(),
            format: format.as_ptr(),
            format_size: format.len(),
            ..Program::new()
        };
        let mut compile = Compile {
            client: self.raw,
            program: &raw const program,
            options: OPTIONS.as_ptr(),
            options_size: OPTIONS.len(),
            ..Compile::new()
        };
        self.plugin.call(place::CLIENT_COMPILE, &mut compile)?;
        let loaded = compile.executable;
        let mut executable = Pointer { object: loaded, ..Pointer::new() };
        self.plugin.call(place::LOADED_EXECUTABLE_GET_EXECUTABLE, &mut executable)?;
        let mut outputs = Pointer { object: executable.answer, ..Pointer::new() };
        self.plugin.call(place::EXECUTABLE_NUM_OUTPUTS, &mut outputs)?;
        self.plugin.destroy(place::EXECUTABLE_DESTROY, executable.answer);
        Ok(Executable { plugin: self.plugin, loaded, outputs: outputs.answer as usize })
    }

    /// Copies an array to the device. `kind` is a `PJRT_Buffer_Type`.
    pub(crate) fn upload(&self, kind: c_int, dimensions: &[i64], data: &[u8]) -> Result<Buffer> {
        let mut upload = FromHost {
            client: self.raw,
            data: data.as_ptr(),
            kind,
            dimensions: dimensions.as_ptr(),
            rank: dimensions.len(),
            // kImmutableUntilTransferCompletes; the event below says when that is.
            semantics: 1,
            device: self.device,
            ..FromHost::new()
        };
        self.plugin.call(place::CLIENT_BUFFER_FROM_HOST_BUFFER, &mut upload)?;
        let buffer = Buffer { plugin: self.plugin, buffer: upload.buffer };
        self.plugin.wait(upload.done)?;
        Ok(buffer)
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        self.plugin.destroy(place::CLIENT_DESTROY, self.raw);
    }
}

/// A compiled module.
pub(crate) struct Executable {
    plugin: Plugin,
    loaded: Object,
    outputs: usize,
}

/// What a module is called with: made once, used in every step.
pub(crate) struct Inputs {
    /// They live as long as the list of them.
    _buffers: Vec<Buffer>,
    list: Vec<Object>,
    /// All of them are used again in the next step, so none may be donated.
    keep: Vec<i64>,
}

impl Inputs {
    pub(crate) fn new(buffers: Vec<Buffer>) -> Self {
        let list = buffers.iter().map(|argument| argument.buffer).collect();
        let keep = (0..).take(buffers.len()).collect();
        Self { _buffers: buffers, list, keep }
    }
}

impl Executable {
    /// Runs the module once and waits for its end.
    ///
    /// The one event of the whole execution is waited for: the outputs are there then, and an error in any of them is
    /// told. Waiting for each output instead costs an event and a callback of the device each.
    pub(crate) fn run(&self, inputs: &Inputs) -> Result<Vec<Buffer>> {
        let (keep, keep_count) = (inputs.keep.as_ptr(), inputs.keep.len());
        let mut options = ExecuteOptions { keep, keep_count, ..ExecuteOptions::new() };
        let mut outputs: Vec<Object> = vec![ptr::null_mut(); self.outputs];
        let (argument_list, output_list) = (inputs.list.as_ptr(), outputs.as_mut_ptr());
        let mut done: Object = ptr::null_mut();
        let mut execute = Execute {
            executable: self.loaded,
            options: &raw mut options,
            arguments: &raw const argument_list,
            devices: 1,
            argument_count: inputs.list.len(),
            outputs: &raw const output_list,
            done: &raw mut done,
            ..Execute::new()
        };
        self.plugin.call(place::LOADED_EXECUTABLE_EXECUTE, &mut execute)?;
        let outputs = outputs.into_iter().map(|buffer| Buffer { plugin: self.plugin, buffer }).collect();
        self.plugin.wait(done)?;
        Ok(outputs)
    }
}

impl Drop for Executable {
    fn drop(&mut self) {
        self.plugin.destroy(place::LOADED_EXECUTABLE_DESTROY, self.loaded);
    }
}

/// An array on the device.
pub(crate) struct Buffer {
    plugin: Plugin,
    buffer: Object,
}

impl Buffer {
    /// Copies the array here: `PJRT_Buffer_Type`, dimensions and elements, row by row.
    pub(crate) fn download(&self) -> Result<(c_int, Vec<i64>, Vec<u8>)> {
        let mut kind = Type { object: self.buffer, ..Type::new() };
        self.plugin.call(place::BUFFER_ELEMENT_TYPE, &mut kind)?;
        let mut shape = Array { object: self.buffer, ..Array::new() };
        self.plugin.call(place::BUFFER_DIMENSIONS, &mut shape)?;
        let dimensions = match shape.count {
            0 => Vec::new(),
            // SAFETY: an array of the buffer, which lives.
            count => unsafe { slice::from_raw_parts(shape.items.cast::<i64>(), count) }.to_vec(),
        };
        let mut copy = ToHost { buffer: self.buffer, ..ToHost::new() };
        // Without a place to copy to, the size is answered.
        self.plugin.call(place::BUFFER_TO_HOST_BUFFER, &mut copy)?;
        let mut data = vec![0; copy.size];
        copy.data = data.as_mut_ptr();
        self.plugin.call(place::BUFFER_TO_HOST_BUFFER, &mut copy)?;
        self.plugin.wait(copy.done)?;
        Ok((kind.kind, dimensions, data))
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.plugin.destroy(place::BUFFER_DESTROY, self.buffer);
    }
}
