//! The C structures of XLA's FFI API, versions 0.1 to 0.5, as memory sees them.
//!
//! Nothing here acts. Layouts that are the same in every minor version have one definition; the few that differ have one
//! each, named after the first minor version that uses it (`StateSetArgs3` serves 0.3, 0.4 and 0.5). Which one to use is
//! decided from the version in the api table, at run time, in [`super::api`]. `tests/abi.rs` compares every size and
//! offset with the headers of real jaxlib wheels.
//!
//! XLA reports the size of a structure as the end of its last known field, not as `sizeof`, so tail padding never
//! counts: [`StructSize::STRUCT_SIZE`] follows that rule.

use std::ffi::{c_char, c_int, c_void};

/// The size that XLA's macros report for a structure: the end of its last field.
pub trait StructSize {
    /// Bytes up to the end of the last field.
    const STRUCT_SIZE: usize;
}

macro_rules! struct_size {
    ($type:ty, $last:ident: $last_type:ty) => {
        impl StructSize for $type {
            const STRUCT_SIZE: usize = std::mem::offset_of!($type, $last) + size_of::<$last_type>();
        }
    };
}

/// Every version of the API so far has this major number.
pub const API_MAJOR: c_int = 0;
/// The newest minor version whose layouts are known here.
pub const API_MINOR_NEWEST: c_int = 5;
/// `XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE`: the handler only enqueues and may be captured.
pub const TRAIT_COMMAND_BUFFER_COMPATIBLE: u32 = 1 << 0;

/// Head of a chain of extensions; `XLA_FFI_Extension_Base`, called `XLA_FFI_InternalExtension` since 0.4.
#[repr(C)]
#[derive(Debug)]
pub struct ExtensionBase {
    /// Size of the whole extension.
    pub struct_size: usize,
    /// One of the `EXTENSION_*` constants.
    pub kind: c_int,
    /// The next extension, or null.
    pub next: *mut ExtensionBase,
}
struct_size!(ExtensionBase, next: *mut ExtensionBase);

/// `XLA_FFI_Extension_Metadata`.
pub const EXTENSION_METADATA: c_int = 1;

/// `XLA_FFI_Api_Version`.
#[repr(C)]
#[derive(Debug)]
pub struct ApiVersion {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Major version.
    pub major_version: c_int,
    /// Minor version.
    pub minor_version: c_int,
}
struct_size!(ApiVersion, minor_version: c_int);

/// An error object that belongs to XLA; opaque.
#[repr(C)]
#[derive(Debug)]
pub struct Error {
    _opaque: [u8; 0],
}

/// What one invocation carries; opaque. Called `XLA_FFI_InvokeContext` since 0.4.
#[repr(C)]
#[derive(Debug)]
pub struct ExecutionContext {
    _opaque: [u8; 0],
}

/// `XLA_FFI_Error_Create_Args`.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorCreateArgs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// NUL-terminated text.
    pub message: *const c_char,
    /// An absl status code.
    pub errc: c_int,
}
struct_size!(ErrorCreateArgs, errc: c_int);

/// `XLA_FFI_Error_GetMessage_Args`, 0.1 to 0.3.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorGetMessageArgs1 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The error asked about.
    pub error: *mut Error,
    /// Out: its text.
    pub message: *const c_char,
}
struct_size!(ErrorGetMessageArgs1, message: *const c_char);

/// `XLA_FFI_Error_GetDetails_Args`, from 0.4: the same slot also answers the code.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorGetDetailsArgs4 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The error asked about.
    pub error: *mut Error,
    /// Out: its text.
    pub message: *const c_char,
    /// Out: its code.
    pub errc: c_int,
}
struct_size!(ErrorGetDetailsArgs4, errc: c_int);

/// `XLA_FFI_Error_Destroy_Args`.
#[repr(C)]
#[derive(Debug)]
pub struct ErrorDestroyArgs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The error to destroy.
    pub error: *mut Error,
}
struct_size!(ErrorDestroyArgs, error: *mut Error);

/// `XLA_FFI_DataType`, the values that OEQ's tensors use.
pub mod data_type {
    use std::ffi::c_int;
    /// 32-bit integer.
    pub const S32: c_int = 4;
    /// 64-bit integer.
    pub const S64: c_int = 5;
    /// Byte.
    pub const U8: c_int = 6;
    /// Single precision.
    pub const F32: c_int = 11;
    /// Double precision.
    pub const F64: c_int = 12;
}

/// `XLA_FFI_Buffer`.
#[repr(C)]
#[derive(Debug)]
pub struct Buffer {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// One of [`data_type`].
    pub dtype: c_int,
    /// Device address; null in instantiate and for empty buffers.
    pub data: *mut c_void,
    /// Number of dimensions.
    pub rank: i64,
    /// `rank` dimensions.
    pub dims: *mut i64,
}
struct_size!(Buffer, dims: *mut i64);

/// `XLA_FFI_ArgType_BUFFER` and `XLA_FFI_RetType_BUFFER`.
pub const TENSOR_BUFFER: c_int = 1;

/// `XLA_FFI_AttrType`.
pub mod attr_type {
    use std::ffi::c_int;
    /// [`super::Array`].
    pub const ARRAY: c_int = 1;
    /// [`super::Attrs`].
    pub const DICTIONARY: c_int = 2;
    /// [`super::Scalar`].
    pub const SCALAR: c_int = 3;
    /// [`super::ByteSpan`].
    pub const STRING: c_int = 4;
}

/// `XLA_FFI_ByteSpan`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct ByteSpan {
    /// First byte; not NUL-terminated.
    pub ptr: *const c_char,
    /// Number of bytes.
    pub len: usize,
}

/// `XLA_FFI_Scalar`.
#[repr(C)]
#[derive(Debug)]
pub struct Scalar {
    /// One of [`data_type`].
    pub dtype: c_int,
    /// The value.
    pub value: *mut c_void,
}

/// `XLA_FFI_Array`.
#[repr(C)]
#[derive(Debug)]
pub struct Array {
    /// One of [`data_type`].
    pub dtype: c_int,
    /// Number of elements.
    pub size: usize,
    /// The elements.
    pub data: *mut c_void,
}

/// `XLA_FFI_TypeId`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TypeId {
    /// 0 until XLA assigned one.
    pub type_id: i64,
}

/// Destroys a state object.
pub type Deleter = unsafe extern "C" fn(*mut c_void);

/// `XLA_FFI_TypeInfo`, from 0.2.
#[repr(C)]
#[derive(Debug)]
pub struct TypeInfo {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Destroys a state.
    pub deleter: Option<Deleter>,
}
struct_size!(TypeInfo, deleter: Option<Deleter>);

/// `XLA_FFI_ExecutionStage`.
pub mod stage {
    use std::ffi::c_int;
    /// Once per call site, at compile time.
    pub const INSTANTIATE: c_int = 0;
    /// Before every run.
    pub const PREPARE: c_int = 1;
    /// Before every run, with a stream.
    pub const INITIALIZE: c_int = 2;
    /// Every run that is not replayed.
    pub const EXECUTE: c_int = 3;
    /// Command buffer recording, from 0.4.
    pub const RECORD: c_int = 4;
}

/// `XLA_FFI_Args` and `XLA_FFI_Rets`, which have one layout.
#[repr(C)]
#[derive(Debug)]
pub struct Tensors {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Number of operands or results.
    pub size: i64,
    /// `size` kinds, see [`TENSOR_BUFFER`].
    pub types: *mut c_int,
    /// `size` pointers to [`Buffer`].
    pub items: *mut *mut c_void,
}
struct_size!(Tensors, items: *mut *mut c_void);

/// `XLA_FFI_Attrs`, also the layout of a dictionary attribute.
#[repr(C)]
#[derive(Debug)]
pub struct Attrs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Number of attributes.
    pub size: i64,
    /// `size` kinds, see [`attr_type`].
    pub types: *mut c_int,
    /// `size` names, sorted.
    pub names: *mut *mut ByteSpan,
    /// `size` pointers to the kind's structure.
    pub attrs: *mut *mut c_void,
}
struct_size!(Attrs, attrs: *mut *mut c_void);

/// `XLA_FFI_CallFrame`.
#[repr(C)]
#[derive(Debug)]
pub struct CallFrame {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions: a metadata call has one of kind [`EXTENSION_METADATA`].
    pub extension_start: *mut ExtensionBase,
    /// The XLA that is calling. Null in metadata calls of 0.1.
    pub api: *const Api,
    /// The invocation. Null in metadata calls.
    pub ctx: *mut ExecutionContext,
    /// See [`stage`].
    pub stage: c_int,
    /// Operands.
    pub args: Tensors,
    /// Results.
    pub rets: Tensors,
    /// Attributes.
    pub attrs: Attrs,
    /// Out: a future for asynchronous handlers; unused here.
    pub future: *mut c_void,
}
struct_size!(CallFrame, attrs: Attrs);

/// `XLA_FFI_Handler`: one stage function.
pub type Handler = unsafe extern "C" fn(*mut CallFrame) -> *mut Error;

/// `XLA_FFI_Handler_Bundle`, 0.1 to 0.3.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HandlerBundle {
    /// Once per call site.
    pub instantiate: Option<Handler>,
    /// Before every run.
    pub prepare: Option<Handler>,
    /// Before every run, with a stream.
    pub initialize: Option<Handler>,
    /// Every run. Required.
    pub execute: Option<Handler>,
}

/// `XLA_FFI_Handler_Register_Args` with four stages. Every version reads this form when it is sent with its own size.
#[repr(C)]
#[derive(Debug)]
pub struct HandlerRegisterArgs {
    /// Reported size: 84 selects this form.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Target name.
    pub name: ByteSpan,
    /// Platform name.
    pub platform: ByteSpan,
    /// The stages.
    pub bundle: HandlerBundle,
    /// `TRAIT_*` bits.
    pub traits: u32,
}
struct_size!(HandlerRegisterArgs, traits: u32);

/// `XLA_FFI_Handler_Register_Args` of 0.4 and later, whose bundle has a fifth stage. Defined for the ABI test; we send
/// the four-stage form, which every version takes.
#[repr(C)]
#[derive(Debug)]
pub struct HandlerRegisterArgs4 {
    /// Reported size: 92.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Target name.
    pub name: ByteSpan,
    /// Platform name.
    pub platform: ByteSpan,
    /// The stages but `record`.
    pub bundle: HandlerBundle,
    /// Command buffer recording.
    pub record: Option<Handler>,
    /// `TRAIT_*` bits.
    pub traits: u32,
}
struct_size!(HandlerRegisterArgs4, traits: u32);

/// `XLA_FFI_TypeId_Register_Args`, 0.1.
#[repr(C)]
#[derive(Debug)]
pub struct TypeRegisterArgs1 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Type name.
    pub name: ByteSpan,
    /// In and out: 0 asks for a new id.
    pub type_id: *mut TypeId,
}
struct_size!(TypeRegisterArgs1, type_id: *mut TypeId);

/// `XLA_FFI_Type_Register_Args`, from 0.2. XLA's own size macro stops at `type_id`, but a null `type_info` crashes it.
#[repr(C)]
#[derive(Debug)]
pub struct TypeRegisterArgs2 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// Type name.
    pub name: ByteSpan,
    /// In and out: 0 asks for a new id.
    pub type_id: *mut TypeId,
    /// How to destroy a state.
    pub type_info: *const TypeInfo,
}
struct_size!(TypeRegisterArgs2, type_id: *mut TypeId);

/// `XLA_FFI_State_Set_Args`, 0.1: the deleter comes with every state.
#[repr(C)]
#[derive(Debug)]
pub struct StateSetArgs1 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Type of the state.
    pub type_id: *mut TypeId,
    /// The state.
    pub state: *mut c_void,
    /// Destroys it.
    pub deleter: Option<Deleter>,
}
struct_size!(StateSetArgs1, deleter: Option<Deleter>);

/// `XLA_FFI_State_Set_Args`, 0.2.
#[repr(C)]
#[derive(Debug)]
pub struct StateSetArgs2 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Type of the state.
    pub type_id: *mut TypeId,
    /// The state.
    pub state: *mut c_void,
}
struct_size!(StateSetArgs2, state: *mut c_void);

/// `XLA_FFI_State_Set_Args`, from 0.3: every stage has a state of its own.
#[repr(C)]
#[derive(Debug)]
pub struct StateSetArgs3 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Whose state, see [`stage`].
    pub stage: c_int,
    /// Type of the state.
    pub type_id: *mut TypeId,
    /// The state.
    pub state: *mut c_void,
}
struct_size!(StateSetArgs3, state: *mut c_void);

/// `XLA_FFI_State_Get_Args`, 0.1 and 0.2.
#[repr(C)]
#[derive(Debug)]
pub struct StateGetArgs1 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Type of the state.
    pub type_id: *mut TypeId,
    /// Out: the state.
    pub state: *mut c_void,
}
struct_size!(StateGetArgs1, state: *mut c_void);

/// `XLA_FFI_State_Get_Args`, from 0.3.
#[repr(C)]
#[derive(Debug)]
pub struct StateGetArgs3 {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Whose state, see [`stage`].
    pub stage: c_int,
    /// Type of the state.
    pub type_id: *mut TypeId,
    /// Out: the state.
    pub state: *mut c_void,
}
struct_size!(StateGetArgs3, state: *mut c_void);

/// `XLA_FFI_Stream_Get_Args`.
#[repr(C)]
#[derive(Debug)]
pub struct StreamGetArgs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Out: the platform's stream handle.
    pub stream: *mut c_void,
}
struct_size!(StreamGetArgs, stream: *mut c_void);

/// `XLA_FFI_DeviceOrdinal_Get_Args`.
#[repr(C)]
#[derive(Debug)]
pub struct DeviceOrdinalGetArgs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Out: the ordinal, -1 where there is no device yet.
    pub device_ordinal: i32,
}
struct_size!(DeviceOrdinalGetArgs, device_ordinal: i32);

/// `XLA_FFI_Task`: what a thread of XLA's runs.
pub type Task = unsafe extern "C" fn(*mut c_void);

/// `XLA_FFI_ThreadPool_Schedule_Args`.
#[repr(C)]
#[derive(Debug)]
pub struct ThreadPoolScheduleArgs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// What to run, once.
    pub task: Option<Task>,
    /// What to run it with.
    pub data: *mut c_void,
}
struct_size!(ThreadPoolScheduleArgs, data: *mut c_void);

/// `XLA_FFI_ThreadPool_NumThreads_Args`.
#[repr(C)]
#[derive(Debug)]
pub struct ThreadPoolNumThreadsArgs {
    /// Reported size.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The invocation.
    pub ctx: *mut ExecutionContext,
    /// Where the number goes.
    pub num_threads: *mut i64,
}
struct_size!(ThreadPoolNumThreadsArgs, num_threads: *mut i64);

/// `XLA_FFI_Metadata`. `state_type_id` exists from 0.2 on, but the reported size never grew: go by the version.
#[repr(C)]
#[derive(Debug)]
pub struct Metadata {
    /// Reported size: 36 in every version.
    pub struct_size: usize,
    /// Out: the version that the handler was made for.
    pub api_version: ApiVersion,
    /// Out: `TRAIT_*` bits.
    pub traits: u32,
    /// Out, from 0.2: type of the instantiate state.
    pub state_type_id: TypeId,
}
struct_size!(Metadata, traits: u32);

/// `XLA_FFI_Metadata_Extension`.
#[repr(C)]
#[derive(Debug)]
pub struct MetadataExtension {
    /// Kind [`EXTENSION_METADATA`].
    pub extension_base: ExtensionBase,
    /// Where to answer.
    pub metadata: *mut Metadata,
}
struct_size!(MetadataExtension, metadata: *mut Metadata);

/// An api function that can fail: null is success.
pub type Fallible<Args> = Option<unsafe extern "C" fn(*mut Args) -> *mut Error>;
/// An api function that cannot fail.
pub type Infallible<Args> = Option<unsafe extern "C" fn(*mut Args)>;
/// An api slot that is not used here.
pub type Unused = Option<unsafe extern "C" fn(*mut c_void) -> *mut Error>;

/// `XLA_FFI_Api`. Slots whose argument structure differs between versions take `c_void`.
#[repr(C)]
#[derive(Debug)]
pub struct Api {
    /// Reported size. 88 in jaxlib 0.5.0, although the slots up to `future_set_error` exist there.
    pub struct_size: usize,
    /// Extensions, or null.
    pub extension_start: *mut ExtensionBase,
    /// The framework's version.
    pub api_version: ApiVersion,
    /// XLA's own.
    pub internal_api: *const c_void,
    /// Makes an error.
    pub error_create: Fallible<ErrorCreateArgs>,
    /// Text of an error: [`ErrorGetMessageArgs1`] or [`ErrorGetDetailsArgs4`].
    pub error_get_message: Infallible<c_void>,
    /// Destroys an error.
    pub error_destroy: Infallible<ErrorDestroyArgs>,
    /// Registers a target.
    pub handler_register: Fallible<HandlerRegisterArgs>,
    /// The stream of an invocation.
    pub stream_get: Fallible<StreamGetArgs>,
    /// Registers a state type: [`TypeRegisterArgs1`] or [`TypeRegisterArgs2`].
    pub type_register: Fallible<c_void>,
    /// User data of an execution.
    pub execution_context_get: Unused,
    /// Gives a state to XLA: [`StateSetArgs1`], [`StateSetArgs2`] or [`StateSetArgs3`].
    pub state_set: Fallible<c_void>,
    /// Looks a state up: [`StateGetArgs1`] or [`StateGetArgs3`].
    pub state_get: Fallible<c_void>,
    /// Scratch memory.
    pub device_memory_allocate: Unused,
    /// Scratch memory.
    pub device_memory_free: Unused,
    /// Gives a task to the platform's host threads.
    pub thread_pool_schedule: Fallible<ThreadPoolScheduleArgs>,
    /// How many host threads the platform has.
    pub thread_pool_num_threads: Fallible<ThreadPoolNumThreadsArgs>,
    /// Asynchronous results.
    pub future_create: Unused,
    /// Asynchronous results.
    pub future_set_available: Unused,
    /// Asynchronous results.
    pub future_set_error: Unused,
    /// Run id. Absent in jaxlib 0.5.0.
    pub run_id_get: Unused,
    /// Device ordinal. Absent in jaxlib 0.5.0.
    pub device_ordinal_get: Fallible<DeviceOrdinalGetArgs>,
    /// Backend extensions, from 0.4.
    pub find_extension: Unused,
    /// Per-execution options, from 0.5.
    pub custom_options_get: Unused,
}
struct_size!(Api, custom_options_get: Unused);

#[cfg(test)]
mod tests {
    use super::*;
    use std::mem::offset_of;

    #[test]
    fn sizes_follow_the_end_of_the_last_field_not_sizeof() {
        assert_eq!(HandlerRegisterArgs::STRUCT_SIZE, 84);
        assert_eq!(HandlerRegisterArgs4::STRUCT_SIZE, 92);
        assert_eq!(CallFrame::STRUCT_SIZE, 168);
        assert_eq!(Metadata::STRUCT_SIZE, 36);
        assert_eq!(TypeRegisterArgs2::STRUCT_SIZE, 40);
        assert_eq!(Api::STRUCT_SIZE, 208);
    }

    #[test]
    fn slots_lie_where_every_version_has_them() {
        assert_eq!(offset_of!(Api, api_version) + offset_of!(ApiVersion, minor_version), 36);
        assert_eq!(offset_of!(Api, error_create), 48);
        assert_eq!(offset_of!(Api, handler_register), 72);
        assert_eq!(offset_of!(Api, type_register), 88);
        assert_eq!(offset_of!(Api, state_set), 104);
        assert_eq!(offset_of!(Api, device_ordinal_get), 184);
        assert_eq!(offset_of!(Api, custom_options_get), 200);
    }
}
