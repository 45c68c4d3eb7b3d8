//! Stand-ins for tests of what a machine without a GPU cannot do: an XLA of each FFI minor version that insists on that
//! version's layouts, a device that records what is enqueued, and a compiler that can be told to fail.
#![allow(
    dead_code,
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::missing_panics_doc,
    clippy::missing_errors_doc,
    clippy::missing_safety_doc,
    clippy::must_use_candidate,
    clippy::undocumented_unsafe_blocks,
    clippy::type_complexity,
    clippy::vec_box,
    clippy::needless_pass_by_value,
    reason = "test support: a broken expectation should panic, the stand-ins play XLA's side of the contract, and what frames point to must not move"
)]

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicI32, AtomicI64, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};

use oeq_native::compile::{Architecture, Compiler, Image, Program};
use oeq_native::config::Config;
use oeq_native::driver::{Driver, Function, FunctionSpec, Module, Stream, Work, Zero};
use oeq_native::xla::ffi::{self, StructSize};
use oeq_native::{Error, Result, Runtime};

// ---- XLA --------------------------------------------------------------------------------------------------------------

/// An XLA FFI api of one minor version.
pub struct FakeXla {
    pub api: Box<ffi::Api>,
    pub minor: c_int,
}

/// An error object, as our XLA makes them.
struct FakeError {
    code: c_int,
    message: CString,
}

/// One invocation's context: what `ctx` points to.
pub struct FakeContext {
    pub state: Option<(i64, *mut c_void, Option<ffi::Deleter>)>,
    pub stream: Option<u64>,
    pub ordinal: i32,
    pub refuse_state: bool,
    /// The threads that a CPU platform lends; a GPU platform has none.
    pub pool: Option<FakePool>,
}

/// A task that was given to a pool.
pub struct FakeTask(ffi::Task, *mut c_void);

unsafe impl Send for FakeTask {}

impl FakeTask {
    pub fn new(task: ffi::Task, data: *mut c_void) -> Self {
        Self(task, data)
    }

    pub fn run(self) {
        unsafe { (self.0)(self.1) }
    }
}

/// Threads of XLA's: how many it says there are, and what it does with a task; `Err` if it does not take it.
#[derive(Clone)]
pub struct FakePool {
    pub threads: i64,
    pub schedule: Arc<dyn Fn(FakeTask) -> std::result::Result<(), FakeTask> + Send + Sync>,
}

static NEXT_TYPE: AtomicI64 = AtomicI64::new(1);
static TYPES: Mutex<Option<HashMap<String, (i64, Option<ffi::Deleter>)>>> = Mutex::new(None);
pub static LIVE_ERRORS: AtomicI64 = AtomicI64::new(0);

fn fake_error(code: c_int, message: &str) -> *mut ffi::Error {
    LIVE_ERRORS.fetch_add(1, Ordering::SeqCst);
    Box::into_raw(Box::new(FakeError { code, message: CString::new(message).unwrap() })).cast()
}

unsafe extern "C" fn error_create(args: *mut ffi::ErrorCreateArgs) -> *mut ffi::Error {
    let args = unsafe { &*args };
    assert_eq!(args.struct_size, ffi::ErrorCreateArgs::STRUCT_SIZE);
    fake_error(args.errc, unsafe { CStr::from_ptr(args.message) }.to_str().unwrap())
}

unsafe extern "C" fn error_text<const MINOR: c_int>(args: *mut c_void) {
    if MINOR >= 4 {
        let args = unsafe { &mut *args.cast::<ffi::ErrorGetDetailsArgs4>() };
        assert_eq!(args.struct_size, 36);
        let error = unsafe { &*args.error.cast::<FakeError>() };
        (args.message, args.errc) = (error.message.as_ptr(), error.code);
    } else {
        let args = unsafe { &mut *args.cast::<ffi::ErrorGetMessageArgs1>() };
        assert_eq!(args.struct_size, 32);
        args.message = unsafe { &*args.error.cast::<FakeError>() }.message.as_ptr();
    }
}

unsafe extern "C" fn error_destroy(args: *mut ffi::ErrorDestroyArgs) {
    assert_eq!(unsafe { (*args).struct_size }, ffi::ErrorDestroyArgs::STRUCT_SIZE);
    LIVE_ERRORS.fetch_sub(1, Ordering::SeqCst);
    drop(unsafe { Box::from_raw((*args).error.cast::<FakeError>()) });
}

unsafe extern "C" fn stream_get(args: *mut ffi::StreamGetArgs) -> *mut ffi::Error {
    let args = unsafe { &mut *args };
    assert_eq!(args.struct_size, ffi::StreamGetArgs::STRUCT_SIZE);
    match unsafe { &*args.ctx.cast::<FakeContext>() }.stream {
        Some(stream) => args.stream = stream as *mut c_void,
        None => return fake_error(12, "XLA FFI GPU context is not available"),
    }
    ptr::null_mut()
}

unsafe extern "C" fn ordinal_get(args: *mut ffi::DeviceOrdinalGetArgs) -> *mut ffi::Error {
    let args = unsafe { &mut *args };
    assert_eq!(args.struct_size, ffi::DeviceOrdinalGetArgs::STRUCT_SIZE);
    args.device_ordinal = unsafe { &*args.ctx.cast::<FakeContext>() }.ordinal;
    ptr::null_mut()
}

const NO_POOL: &str = "XLA FFI CPU context is not available";

unsafe extern "C" fn pool_schedule(args: *mut ffi::ThreadPoolScheduleArgs) -> *mut ffi::Error {
    let args = unsafe { &*args };
    assert_eq!(args.struct_size, 40);
    // A copy: a task that runs at once may end the call's use of the context.
    let Some(pool) = unsafe { &*args.ctx.cast::<FakeContext>() }.pool.clone() else { return fake_error(12, NO_POOL) };
    match (pool.schedule)(FakeTask(args.task.expect("a task"), args.data)) {
        Ok(()) => ptr::null_mut(),
        Err(_) => fake_error(14, "the pool is closing"),
    }
}

unsafe extern "C" fn pool_threads(args: *mut ffi::ThreadPoolNumThreadsArgs) -> *mut ffi::Error {
    let args = unsafe { &*args };
    assert_eq!(args.struct_size, 32);
    let Some(pool) = &unsafe { &*args.ctx.cast::<FakeContext>() }.pool else { return fake_error(12, NO_POOL) };
    unsafe { *args.num_threads = pool.threads };
    ptr::null_mut()
}

unsafe extern "C" fn type_register<const MINOR: c_int>(args: *mut c_void) -> *mut ffi::Error {
    let (name, id, deleter) = if MINOR == 1 {
        let args = unsafe { &*args.cast::<ffi::TypeRegisterArgs1>() };
        assert_eq!(args.struct_size, 40);
        (args.name, args.type_id, None)
    } else {
        let args = unsafe { &*args.cast::<ffi::TypeRegisterArgs2>() };
        // XLA's own macro stops before the info; the whole structure is what a later one may ask for.
        assert!([40, size_of::<ffi::TypeRegisterArgs2>()].contains(&args.struct_size));
        (args.name, args.type_id, unsafe { args.type_info.as_ref() }.expect("XLA crashes without type info").deleter)
    };
    let name = format!("{MINOR}/{}", unsafe { text(&name) });
    let id = unsafe { &mut *id };
    let mut types = TYPES.lock().unwrap();
    let types = types.get_or_insert_with(HashMap::new);
    match types.get(&name) {
        Some((known, _)) if *known == id.type_id => {}
        Some(_) => return fake_error(13, "already registered with type id"),
        None => {
            if id.type_id == 0 {
                id.type_id = NEXT_TYPE.fetch_add(1, Ordering::SeqCst);
            }
            types.insert(name, (id.type_id, deleter));
        }
    }
    ptr::null_mut()
}

unsafe fn text(span: &ffi::ByteSpan) -> &str {
    std::str::from_utf8(unsafe { std::slice::from_raw_parts(span.ptr.cast(), span.len) }).unwrap()
}

unsafe extern "C" fn state_set<const MINOR: c_int>(args: *mut c_void) -> *mut ffi::Error {
    let (context, id, state, deleter) = match MINOR {
        1 => {
            let args = unsafe { &*args.cast::<ffi::StateSetArgs1>() };
            assert_eq!(args.struct_size, 48);
            (args.ctx, args.type_id, args.state, args.deleter)
        }
        2 => {
            let args = unsafe { &*args.cast::<ffi::StateSetArgs2>() };
            assert_eq!(args.struct_size, 40);
            (args.ctx, args.type_id, args.state, None)
        }
        _ => {
            let args = unsafe { &*args.cast::<ffi::StateSetArgs3>() };
            assert_eq!((args.struct_size, args.stage), (48, ffi::stage::INSTANTIATE));
            (args.ctx, args.type_id, args.state, None)
        }
    };
    let context = unsafe { &mut *context.cast::<FakeContext>() };
    let id = unsafe { *id }.type_id;
    if context.refuse_state {
        return fake_error(13, "state refused on purpose");
    }
    if context.state.is_some() {
        return fake_error(9, "State is already set");
    }
    let deleter = if MINOR == 1 {
        deleter
    } else {
        let types = TYPES.lock().unwrap();
        let known = types
            .as_ref()
            .unwrap()
            .iter()
            .find(|(name, (known, _))| *known == id && name.starts_with(&format!("{MINOR}/")));
        match known {
            Some((_, (_, deleter))) => *deleter,
            None => return fake_error(13, "Type id is not registered with a static registry"),
        }
    };
    context.state = Some((id, state, deleter));
    ptr::null_mut()
}

unsafe extern "C" fn state_get<const MINOR: c_int>(args: *mut c_void) -> *mut ffi::Error {
    let (context, id, out) = if MINOR >= 3 {
        let args = unsafe { &mut *args.cast::<ffi::StateGetArgs3>() };
        assert_eq!((args.struct_size, args.stage), (48, ffi::stage::INSTANTIATE));
        (args.ctx, args.type_id, &raw mut args.state)
    } else {
        let args = unsafe { &mut *args.cast::<ffi::StateGetArgs1>() };
        assert_eq!(args.struct_size, 40);
        (args.ctx, args.type_id, &raw mut args.state)
    };
    match unsafe { &*context.cast::<FakeContext>() }.state {
        None => fake_error(5, "State is not set"),
        Some((known, _, _)) if known != unsafe { *id }.type_id => fake_error(3, "state type id does not match"),
        Some((_, state, _)) => {
            unsafe { *out = state };
            ptr::null_mut()
        }
    }
}

/// What was registered: (minor, platform, name) to its bundle and traits.
pub static HANDLERS: Mutex<Vec<(c_int, String, String, ffi::HandlerBundle, u32)>> = Mutex::new(Vec::new());

/// The oldest handler version that the XLA of each minor version takes; all real ones so far take 0.1.
pub static OLDEST_TAKEN: [AtomicI32; 6] = [const { AtomicI32::new(1) }; 6];

/// The metadata call, as XLA makes it: no context, stage execute, version 0.0 on entry; no api before 0.2.
fn ask<const MINOR: c_int>(handler: ffi::Handler) -> ffi::Metadata {
    let xla = FakeXla::of(MINOR);
    let mut metadata = empty_metadata();
    let mut extension = ffi::MetadataExtension {
        extension_base: ffi::ExtensionBase {
            struct_size: ffi::MetadataExtension::STRUCT_SIZE,
            kind: ffi::EXTENSION_METADATA,
            next: ptr::null_mut(),
        },
        metadata: &raw mut metadata,
    };
    let mut frame = empty_frame(if MINOR >= 2 { &raw const *xla.api } else { ptr::null() }, ptr::null_mut());
    frame.extension_start = (&raw mut extension).cast();
    frame.stage = ffi::stage::EXECUTE;
    assert!(unsafe { handler(&raw mut frame) }.is_null());
    metadata
}

unsafe extern "C" fn handler_register<const MINOR: c_int>(args: *mut ffi::HandlerRegisterArgs) -> *mut ffi::Error {
    let args = unsafe { &*args };
    if MINOR >= 4 {
        assert!(args.struct_size == 84 || args.struct_size >= 92, "refused: expected 92, got {}", args.struct_size);
    } else {
        // More is read as 84 bytes, and what lies at 80 as traits.
        assert_eq!(args.struct_size, 84, "a fifth stage would be taken for traits");
    }
    assert!(args.extension_start.is_null());
    let (name, platform) = unsafe { (text(&args.name).to_owned(), text(&args.platform).to_owned()) };
    let Some(execute) = args.bundle.execute else { return fake_error(3, "must provide an execute implementation") };
    let metadata = ask::<MINOR>(execute);
    let version = (metadata.api_version.major_version, metadata.api_version.minor_version);
    let oldest = OLDEST_TAKEN[usize::try_from(MINOR).unwrap()].load(Ordering::SeqCst);
    if version.0 != 0 || !(oldest..=MINOR).contains(&version.1) {
        return fake_error(3, "handler's API version is incompatible with the framework's API version");
    }
    // From 0.2 on XLA then asks instantiate, whose state's type it must know by now.
    if let (Some(instantiate), true) = (args.bundle.instantiate, MINOR >= 2) {
        let id = ask::<MINOR>(instantiate).state_type_id.type_id;
        let types = TYPES.lock().unwrap();
        let known = types.iter().flatten().any(|(name, (known, deleter))| {
            *known == id && name.starts_with(&format!("{MINOR}/")) && deleter.is_some()
        });
        assert!(known, "state type {id} is not registered");
    }
    let mut handlers = HANDLERS.lock().unwrap();
    if let Some(known) = handlers.iter().find(|h| (h.0, &h.1, &h.2) == (MINOR, &platform, &name)) {
        let address = |bundle: &ffi::HandlerBundle| {
            [bundle.instantiate, bundle.prepare, bundle.initialize, bundle.execute].map(|s| s.map(|f| f as usize))
        };
        if address(&known.3) != address(&args.bundle) || known.4 != args.traits | metadata.traits {
            return fake_error(6, "Duplicate FFI handler registration with different bundle addresses");
        }
        return ptr::null_mut();
    }
    handlers.push((MINOR, platform, name, args.bundle, args.traits | metadata.traits));
    ptr::null_mut()
}

pub fn empty_metadata() -> ffi::Metadata {
    ffi::Metadata {
        struct_size: ffi::Metadata::STRUCT_SIZE,
        api_version: ffi::ApiVersion {
            struct_size: ffi::ApiVersion::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            major_version: 0,
            minor_version: 0,
        },
        traits: 0,
        state_type_id: ffi::TypeId { type_id: 0 },
    }
}

macro_rules! api_of {
    ($minor:literal) => {
        ffi::Api {
            struct_size: match $minor {
                1..=3 => 192,
                4 => 200,
                _ => 208,
            },
            extension_start: ptr::null_mut(),
            api_version: ffi::ApiVersion {
                struct_size: ffi::ApiVersion::STRUCT_SIZE,
                extension_start: ptr::null_mut(),
                major_version: 0,
                minor_version: $minor,
            },
            internal_api: ptr::null(),
            error_create: Some(error_create),
            error_get_message: Some(error_text::<$minor>),
            error_destroy: Some(error_destroy),
            handler_register: Some(handler_register::<$minor>),
            stream_get: Some(stream_get),
            type_register: Some(type_register::<$minor>),
            execution_context_get: None,
            state_set: Some(state_set::<$minor>),
            state_get: Some(state_get::<$minor>),
            device_memory_allocate: None,
            device_memory_free: None,
            thread_pool_schedule: Some(pool_schedule),
            thread_pool_num_threads: Some(pool_threads),
            future_create: None,
            future_set_available: None,
            future_set_error: None,
            run_id_get: None,
            device_ordinal_get: Some(ordinal_get),
            find_extension: None,
            custom_options_get: None,
        }
    };
}

impl FakeXla {
    /// The one XLA of a minor version in this process: its api table has one address.
    pub fn of(minor: c_int) -> &'static Self {
        static ALL: OnceLock<Vec<FakeXla>> = OnceLock::new();
        let all = ALL.get_or_init(|| {
            vec![api_of!(1), api_of!(2), api_of!(3), api_of!(4), api_of!(5)]
                .into_iter()
                .map(|api| FakeXla { minor: api.api_version.minor_version, api: Box::new(api) })
                .collect()
        });
        all.iter().find(|xla| xla.minor == minor).unwrap()
    }
}

unsafe impl Send for FakeXla {}
unsafe impl Sync for FakeXla {}

// ---- Frames -----------------------------------------------------------------------------------------------------------

/// A tensor of a call.
#[derive(Debug, Clone)]
pub struct Tensor {
    pub dtype: c_int,
    pub address: u64,
    pub dimensions: Vec<i64>,
}

pub fn f32s(address: u64, dimensions: &[i64]) -> Tensor {
    Tensor { dtype: ffi::data_type::F32, address, dimensions: dimensions.to_vec() }
}

pub fn i32s(address: u64, dimensions: &[i64]) -> Tensor {
    Tensor { dtype: ffi::data_type::S32, address, dimensions: dimensions.to_vec() }
}

pub fn bytes(address: u64, dimensions: &[i64]) -> Tensor {
    Tensor { dtype: ffi::data_type::U8, address, dimensions: dimensions.to_vec() }
}

/// An attribute of a call.
#[derive(Debug, Clone)]
pub enum Attr {
    Text(Vec<u8>),
    Int(i64),
    Dictionary(Vec<(String, i64)>),
}

/// One call site of a target in an XLA, as XLA would drive it.
pub struct Site {
    pub xla: &'static FakeXla,
    pub context: Box<FakeContext>,
    pub attributes: Vec<(String, Attr)>,
    pub operands: Vec<Tensor>,
    pub results: Vec<Tensor>,
}

pub fn empty_frame(api: *const ffi::Api, ctx: *mut ffi::ExecutionContext) -> ffi::CallFrame {
    let tensors = || ffi::Tensors {
        struct_size: ffi::Tensors::STRUCT_SIZE,
        extension_start: ptr::null_mut(),
        size: 0,
        types: ptr::null_mut(),
        items: ptr::null_mut(),
    };
    ffi::CallFrame {
        struct_size: ffi::CallFrame::STRUCT_SIZE,
        extension_start: ptr::null_mut(),
        api,
        ctx,
        stage: 0,
        args: tensors(),
        rets: tensors(),
        attrs: ffi::Attrs {
            struct_size: ffi::Attrs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            size: 0,
            types: ptr::null_mut(),
            names: ptr::null_mut(),
            attrs: ptr::null_mut(),
        },
        future: ptr::null_mut(),
    }
}

/// Keeps what a frame points to.
#[derive(Default)]
struct Keep {
    buffers: Vec<Box<ffi::Buffer>>,
    dims: Vec<Box<[i64]>>,
    spans: Vec<Box<ffi::ByteSpan>>,
    scalars: Vec<Box<ffi::Scalar>>,
    values: Vec<Box<i64>>,
    dictionaries: Vec<Box<ffi::Attrs>>,
    kinds: Vec<Box<[c_int]>>,
    pointers: Vec<Box<[*mut c_void]>>,
    names: Vec<Box<[*mut ffi::ByteSpan]>>,
}

impl Keep {
    fn tensors(&mut self, list: &[Tensor]) -> ffi::Tensors {
        let mut pointers = Vec::new();
        for tensor in list {
            self.dims.push(tensor.dimensions.clone().into());
            let dims = self.dims.last_mut().unwrap().as_mut_ptr();
            self.buffers.push(Box::new(ffi::Buffer {
                struct_size: ffi::Buffer::STRUCT_SIZE,
                extension_start: ptr::null_mut(),
                dtype: tensor.dtype,
                data: tensor.address as *mut c_void,
                rank: i64::try_from(tensor.dimensions.len()).unwrap(),
                dims,
            }));
            pointers.push((&raw mut **self.buffers.last_mut().unwrap()).cast::<c_void>());
        }
        self.kinds.push(vec![ffi::TENSOR_BUFFER; list.len()].into());
        self.pointers.push(pointers.into());
        ffi::Tensors {
            struct_size: ffi::Tensors::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            size: i64::try_from(list.len()).unwrap(),
            types: self.kinds.last_mut().unwrap().as_mut_ptr(),
            items: self.pointers.last_mut().unwrap().as_mut_ptr(),
        }
    }

    fn span(&mut self, text: &[u8]) -> *mut ffi::ByteSpan {
        self.spans.push(Box::new(ffi::ByteSpan { ptr: text.as_ptr().cast::<c_char>(), len: text.len() }));
        &raw mut **self.spans.last_mut().unwrap()
    }

    fn integer(&mut self, value: i64) -> *mut c_void {
        self.values.push(Box::new(value));
        let value = (&raw mut **self.values.last_mut().unwrap()).cast();
        self.scalars.push(Box::new(ffi::Scalar { dtype: ffi::data_type::S64, value }));
        (&raw mut **self.scalars.last_mut().unwrap()).cast()
    }

    fn table(&mut self, entries: Vec<(&str, c_int, *mut c_void)>) -> ffi::Attrs {
        let names: Vec<_> = entries.iter().map(|(name, _, _)| self.span(name.as_bytes())).collect();
        let size = i64::try_from(entries.len()).unwrap();
        self.kinds.push(entries.iter().map(|(_, kind, _)| *kind).collect());
        self.pointers.push(entries.iter().map(|(_, _, value)| *value).collect());
        self.names.push(names.into());
        ffi::Attrs {
            struct_size: ffi::Attrs::STRUCT_SIZE,
            extension_start: ptr::null_mut(),
            size,
            types: self.kinds.last_mut().unwrap().as_mut_ptr(),
            names: self.names.last_mut().unwrap().as_mut_ptr(),
            attrs: self.pointers.last_mut().unwrap().as_mut_ptr(),
        }
    }

    fn attributes(&mut self, list: &[(String, Attr)]) -> ffi::Attrs {
        let mut sorted: Vec<_> = list.iter().collect();
        sorted.sort_by(|a, b| a.0.cmp(&b.0));
        let mut entries = Vec::new();
        for (name, attribute) in sorted {
            entries.push(match attribute {
                Attr::Text(text) => (name.as_str(), ffi::attr_type::STRING, self.span(text).cast::<c_void>()),
                Attr::Int(value) => (name.as_str(), ffi::attr_type::SCALAR, self.integer(*value)),
                Attr::Dictionary(members) => {
                    let members: Vec<_> = members
                        .iter()
                        .map(|(member, value)| (member.as_str(), ffi::attr_type::SCALAR, self.integer(*value)))
                        .collect();
                    let table = self.table(members);
                    self.dictionaries.push(Box::new(table));
                    let pointer = (&raw mut **self.dictionaries.last_mut().unwrap()).cast();
                    (name.as_str(), ffi::attr_type::DICTIONARY, pointer)
                }
            });
        }
        self.table(entries)
    }
}

/// A status that a stage answered.
pub type Answer = std::result::Result<(), (c_int, String)>;

impl Site {
    pub fn new(minor: c_int, payload: &str, hash: i64) -> Self {
        let attributes =
            vec![("kernel".into(), Attr::Text(payload.as_bytes().to_vec())), ("hash".into(), Attr::Int(hash))];
        let context =
            FakeContext { state: None, stream: Some(0x5712_ea11), ordinal: 0, refuse_state: false, pool: None };
        Self {
            xla: FakeXla::of(minor),
            context: Box::new(context),
            attributes,
            operands: Vec::new(),
            results: Vec::new(),
        }
    }

    pub fn with(mut self, operands: Vec<Tensor>, results: Vec<Tensor>) -> Self {
        (self.operands, self.results) = (operands, results);
        self
    }

    /// Builds a frame once and hands it to `body`, which may call stages with it as often as it likes.
    pub fn frame<R>(&mut self, show_tensors: bool, body: impl FnOnce(&mut ffi::CallFrame) -> R) -> R {
        let mut keep = Keep::default();
        let mut frame = empty_frame(&raw const *self.xla.api, (&raw mut *self.context).cast());
        if show_tensors {
            frame.args = keep.tensors(&self.operands);
            frame.rets = keep.tensors(&self.results);
        }
        frame.attrs = keep.attributes(&self.attributes);
        body(&mut frame)
    }

    fn stage(&mut self, stage: c_int, handler: Option<ffi::Handler>, show_tensors: bool) -> Answer {
        let handler = handler.expect("the stage exists");
        self.frame(show_tensors, |frame| {
            frame.stage = stage;
            answer(unsafe { handler(frame) })
        })
    }

    /// Calls a stage function, whichever it is.
    pub fn call(&mut self, handler: Option<ffi::Handler>, show_tensors: bool) -> Answer {
        self.stage(0, handler, show_tensors)
    }

    pub fn instantiate(&mut self, target: &str, show_tensors: bool) -> Answer {
        self.stage(ffi::stage::INSTANTIATE, bundle(target).instantiate, show_tensors)
    }

    pub fn initialize(&mut self, target: &str) -> Answer {
        self.stage(ffi::stage::INITIALIZE, bundle(target).initialize, true)
    }

    pub fn execute(&mut self, target: &str) -> Answer {
        self.stage(ffi::stage::EXECUTE, bundle(target).execute, true)
    }

    /// All stages, tensors visible from the start, as on a GPU.
    pub fn run(&mut self, target: &str) -> Answer {
        self.instantiate(target, true)?;
        self.initialize(target)?;
        self.execute(target)
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        if let Some((_, state, deleter)) = self.context.state.take() {
            unsafe { deleter.expect("a state has a deleter")(state) };
        }
    }
}

/// Takes an error from a stage apart and destroys it.
pub fn answer(error: *mut ffi::Error) -> Answer {
    if error.is_null() {
        return Ok(());
    }
    LIVE_ERRORS.fetch_sub(1, Ordering::SeqCst);
    let error = unsafe { Box::from_raw(error.cast::<FakeError>()) };
    Err((error.code, error.message.into_string().unwrap()))
}

pub fn bundle(target: &str) -> ffi::HandlerBundle {
    oeq_native::registry::table().unwrap().find(target).expect("the target exists").bundle
}

// ---- Device and compiler ----------------------------------------------------------------------------------------------

/// One launch, as the device saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Launched {
    pub entry: String,
    /// Which loaded image the function came from.
    pub image: u64,
    pub blocks: u32,
    pub threads: u32,
    pub shared_bytes: u32,
    /// The parameters' first words; four words where the parameter is the graph.
    pub parameters: Vec<Vec<u64>>,
}

/// One enqueue, as the device saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Enqueued {
    pub ordinal: u32,
    pub stream: u64,
    pub zeros: Vec<Zero>,
    pub launches: Vec<Launched>,
}

/// What a test can see and set.
#[derive(Default)]
pub struct World {
    /// By stream, what was enqueued.
    pub enqueued: Mutex<HashMap<u64, Vec<Enqueued>>>,
    /// Every program compiled: source, architecture, entry points.
    pub compiled: Mutex<Vec<(String, Architecture, Vec<String>)>>,
    /// Sources that contain this text fail to compile, while it is set.
    pub failing: Mutex<Vec<String>>,
    /// Sources that contain this text make the compiler panic.
    pub panicking: Mutex<Vec<String>>,
    /// Whether enqueue keeps notes (notes allocate).
    pub silent: std::sync::atomic::AtomicBool,
    /// Whether streams are being captured.
    pub capturing: std::sync::atomic::AtomicBool,
    pub loads: AtomicU64,
    pub unloads: AtomicU64,
    /// Function handle to (entry, image).
    functions: Mutex<HashMap<usize, (String, u64)>>,
    next_function: AtomicU64,
    next_image: AtomicU64,
}

struct FakeDriver(Arc<World>);
struct FakeCompiler(Arc<World>);
struct FakeModule(Vec<Function>, Arc<World>);

impl Drop for FakeModule {
    fn drop(&mut self) {
        let mut functions = self.1.functions.lock().unwrap();
        self.0.iter().for_each(|function| assert!(functions.remove(&function.0).is_some()));
        self.1.unloads.fetch_add(1, Ordering::SeqCst);
    }
}

impl Module for FakeModule {
    fn function(&self, index: usize) -> Option<Function> {
        self.0.get(index).copied()
    }
}

pub const ARCHITECTURES: &[Architecture] = &[Architecture { major: 9, minor: 0 }, Architecture { major: 8, minor: 0 }];

/// The most shared memory that a block of the stand-in device gets, bytes.
pub const DEVICE_SHARED: u32 = 200_000;

impl Driver for FakeDriver {
    fn architectures(&self) -> Result<&[Architecture]> {
        Ok(ARCHITECTURES)
    }

    fn load(&self, ordinal: u32, image: &Image, functions: &[FunctionSpec<'_>]) -> Result<Box<dyn Module>> {
        let architecture = ARCHITECTURES[ordinal as usize].to_string();
        let text = String::from_utf8(image.code.clone()).unwrap();
        assert!(text.ends_with(&architecture), "an image for {text} was loaded on {architecture}");
        let number: u64 = text.split(' ').next().unwrap().parse().unwrap();
        self.0.loads.fetch_add(1, Ordering::SeqCst);
        let mut handles = Vec::new();
        for spec in functions {
            if spec.shared_bytes > DEVICE_SHARED {
                return Err(Error::precondition(format!(
                    "entry point `{}` needs {} bytes; the device allows {DEVICE_SHARED}",
                    spec.entry, spec.shared_bytes
                )));
            }
            assert_eq!(spec.symbol, format!("_Z{}", spec.entry));
            let handle = usize::try_from(self.0.next_function.fetch_add(1, Ordering::SeqCst)).unwrap() + 1;
            self.0.functions.lock().unwrap().insert(handle, (spec.entry.to_owned(), number));
            handles.push(Function(handle));
        }
        Ok(Box::new(FakeModule(handles, Arc::clone(&self.0))))
    }

    unsafe fn is_capturing(&self, _ordinal: u32, _stream: Stream) -> bool {
        self.0.capturing.load(Ordering::Relaxed)
    }

    unsafe fn enqueue(&self, ordinal: u32, stream: Stream, work: &Work<'_>) -> Result<()> {
        if self.0.silent.load(Ordering::Relaxed) {
            return Ok(());
        }
        let functions = self.0.functions.lock().unwrap();
        let launches = work
            .launches
            .iter()
            .zip(work.functions)
            .map(|(launch, function)| {
                let (entry, image) = functions[&function.0].clone();
                assert_eq!(entry, launch.entry);
                let words = &work.words[launch.words.clone()];
                let starts: Vec<usize> = launch.parameters.iter().map(|start| usize::from(*start)).collect();
                let ends = starts.iter().skip(1).copied().chain([words.len()]);
                let parameters = starts.iter().zip(ends).map(|(start, end)| words[*start..end].to_vec()).collect();
                let (blocks, threads, shared_bytes) = (launch.blocks, launch.threads, launch.shared_bytes);
                Launched { entry, image, blocks, threads, shared_bytes, parameters }
            })
            .collect();
        let stream = stream.0 as u64;
        let enqueued = Enqueued { ordinal, stream, zeros: work.zeros.to_vec(), launches };
        self.0.enqueued.lock().unwrap().entry(stream).or_default().push(enqueued);
        Ok(())
    }
}

impl Compiler for FakeCompiler {
    fn compile(&self, program: &Program<'_>) -> Result<Image> {
        let entries: Vec<String> = program.entry_points.iter().map(|entry| (*entry).to_owned()).collect();
        self.0.compiled.lock().unwrap().push((program.source.to_owned(), program.architecture, entries.clone()));
        if self.0.failing.lock().unwrap().iter().any(|mark| program.source.contains(mark)) {
            return Err(Error::invalid("kernel.cu(7): error: identifier \"nonsense\" is undefined"));
        }
        assert!(
            !self.0.panicking.lock().unwrap().iter().any(|mark| program.source.contains(mark)),
            "the stand-in compiler was told to panic"
        );
        let number = self.0.next_image.fetch_add(1, Ordering::SeqCst);
        Ok(Image {
            code: format!("{number} {}", program.architecture).into_bytes(),
            symbols: entries.iter().map(|entry| (entry.clone(), format!("_Z{entry}"))).collect(),
            log: String::new(),
        })
    }
}

/// The process's runtime, on the stand-ins.
pub fn world() -> &'static World {
    // Nothing of the stand-ins goes to the user's store; a test that wants a store names a directory.
    let store = std::env::var_os("OEQ_STORE_DIR").is_some();
    world_with(Config { compile_threads: 4, store, ..Config::from_environment().unwrap() })
}

/// The same with options; the first call decides.
pub fn world_with(config: Config) -> &'static World {
    static WORLD: OnceLock<Arc<World>> = OnceLock::new();
    WORLD.get_or_init(|| {
        let world = Arc::new(World::default());
        let driver = Box::new(FakeDriver(Arc::clone(&world)));
        Runtime::install(Runtime::new(config, driver, Arc::new(FakeCompiler(Arc::clone(&world))))).unwrap();
        world
    })
}

impl World {
    /// What was enqueued on a stream so far, taken away.
    pub fn take(&self, stream: u64) -> Vec<Enqueued> {
        self.enqueued.lock().unwrap().remove(&stream).unwrap_or_default()
    }

    /// How many programs with this text in their source were compiled for an architecture.
    pub fn compilations(&self, mark: &str, architecture: Architecture) -> usize {
        let compiled = self.compiled.lock().unwrap();
        compiled.iter().filter(|(source, a, _)| source.contains(mark) && *a == architecture).count()
    }
}

// ---- Payloads ---------------------------------------------------------------------------------------------------------

/// What a test payload is like; the source is a few empty kernels of ours.
#[derive(Debug, Clone)]
pub struct PayloadSpec<'a> {
    pub mark: &'a str,
    pub convolution: bool,
    pub deterministic: bool,
    pub shared_weights: bool,
    pub smem: u32,
}

impl Default for PayloadSpec<'_> {
    fn default() -> Self {
        Self { mark: "plain", convolution: false, deterministic: false, shared_weights: false, smem: 1000 }
    }
}

pub const L1: i64 = 6;
pub const L2: i64 = 4;
pub const L3: i64 = 10;
pub const W: i64 = 8;
pub const WORKSPACE: i64 = 4096;

impl PayloadSpec<'_> {
    pub fn source(&self) -> String {
        use std::fmt::Write as _;
        let mut names = vec!["forward", "backward", "double_backward_A", "double_backward_B"];
        if self.convolution {
            names.extend(["fixup_forward", "fixup_backward", "fixup_double_backwardB"]);
        }
        let mut source = format!("// {}\n", self.mark);
        for name in names {
            writeln!(source, "__global__ void __launch_bounds__(64)\n{name}(float* a) {{ a[0] = 1.0f; }}").unwrap();
        }
        source
    }

    pub fn members(&self) -> Vec<(&'static str, Vec<(String, i64)>)> {
        let launch = |blocks: i64, threads: i64, smem: i64| {
            vec![
                ("num_blocks".to_owned(), blocks),
                ("num_threads".to_owned(), threads),
                ("warp_size".to_owned(), 32),
                ("smem".to_owned(), smem),
            ]
        };
        let smem = i64::from(self.smem);
        let deterministic = self.convolution && self.deterministic;
        let workspace = match (self.convolution, deterministic) {
            (false, _) => 0,
            (true, false) => 1,
            (true, true) => WORKSPACE,
        };
        let properties = [
            ("L1_dim", L1),
            ("L2_dim", L2),
            ("L3_dim", L3),
            ("weight_numel", W),
            ("shared_weights", self.shared_weights.into()),
            ("opt_level", 3),
            ("irrep_dtype", 1),
            ("weight_dtype", 1),
            ("workspace_size", workspace),
            ("deterministic", if self.convolution { deterministic.into() } else { 1 }),
            ("idx_dtype", if self.convolution { 3 } else { 0 }),
        ];
        vec![
            ("forward_config", launch(11, 64, smem)),
            ("backward_config", launch(22, 96, smem + 1)),
            ("double_backward_config", launch(33, 128, smem + 2)),
            ("kernel_prop", properties.into_iter().map(|(name, value)| (name.to_owned(), value)).collect()),
        ]
    }

    pub fn json(&self) -> String {
        let mut object = serde_json::Map::new();
        object.insert("kernel".into(), self.source().into());
        for (name, members) in self.members() {
            let members = members.into_iter().map(|(member, value)| (member, value.into()));
            object.insert(name.into(), serde_json::Value::Object(members.collect()));
        }
        serde_json::Value::Object(object).to_string()
    }
}
