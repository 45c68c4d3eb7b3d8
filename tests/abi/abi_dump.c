/* Prints what a C compiler makes of one version of XLA's FFI header, one `name value` line a fact.
 *
 * Built with `-include` of the header in question; tests/abi.rs reads the lines. Names are ours, so that one program
 * serves every version: a structure or slot that was renamed keeps its first name here, and what a version has not is
 * left out by its minor number.
 */
#include <stddef.h>
#include <stdio.h>

#define MINOR XLA_FFI_API_MINOR

#if MINOR < 1 || MINOR > 5
#error "this version of the header was not looked at yet: see what changed, then raise the limit here and in ffi.rs"
#endif

#define VALUE(name, value) printf("%s %lld\n", name, (long long)(value))
#define SIZE(name, type) VALUE(name ".sizeof", sizeof(type))
/* A structure whose size is reported, and its first two fields, which all of these have. */
#define REPORTED(name, type)                  \
  SIZE(name, type);                           \
  VALUE(name ".STRUCT_SIZE", type##_STRUCT_SIZE); \
  FIELD(name, type, struct_size)
#define EXTENSIBLE(name, type) \
  REPORTED(name, type);        \
  FIELD(name, type, extension_start)
#define FIELD(name, type, field) VALUE(name "." #field, offsetof(type, field))
#define SLOT(name, slot) VALUE("Api." name, offsetof(XLA_FFI_Api, slot))

/* Names that changed in 0.4. */
#if MINOR >= 4
typedef XLA_FFI_InternalExtension Extension;
typedef XLA_FFI_InternalExtension_Type ExtensionType;
enum { Extension_STRUCT_SIZE = XLA_FFI_InternalExtension_STRUCT_SIZE };
#else
typedef XLA_FFI_Extension_Base Extension;
typedef XLA_FFI_Extension_Type ExtensionType;
enum { Extension_STRUCT_SIZE = XLA_FFI_Extension_Base_STRUCT_SIZE };
#endif

static void versions(void) {
  VALUE("API_MAJOR", XLA_FFI_API_MAJOR);
  VALUE("API_MINOR", XLA_FFI_API_MINOR);
  EXTENSIBLE("ApiVersion", XLA_FFI_Api_Version);
  FIELD("ApiVersion", XLA_FFI_Api_Version, major_version);
  FIELD("ApiVersion", XLA_FFI_Api_Version, minor_version);
}

static void enumerations(void) {
  VALUE("EXTENSION_METADATA", XLA_FFI_Extension_Metadata);
  VALUE("TRAIT_COMMAND_BUFFER_COMPATIBLE", XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE);
  VALUE("data_type.S32", XLA_FFI_DataType_S32);
  VALUE("data_type.S64", XLA_FFI_DataType_S64);
  VALUE("data_type.U8", XLA_FFI_DataType_U8);
  VALUE("data_type.F32", XLA_FFI_DataType_F32);
  VALUE("data_type.F64", XLA_FFI_DataType_F64);
  VALUE("arg_type.BUFFER", XLA_FFI_ArgType_BUFFER);
  VALUE("ret_type.BUFFER", XLA_FFI_RetType_BUFFER);
  VALUE("attr_type.ARRAY", XLA_FFI_AttrType_ARRAY);
  VALUE("attr_type.DICTIONARY", XLA_FFI_AttrType_DICTIONARY);
  VALUE("attr_type.SCALAR", XLA_FFI_AttrType_SCALAR);
  VALUE("attr_type.STRING", XLA_FFI_AttrType_STRING);
  VALUE("stage.INSTANTIATE", XLA_FFI_ExecutionStage_INSTANTIATE);
  VALUE("stage.PREPARE", XLA_FFI_ExecutionStage_PREPARE);
  VALUE("stage.INITIALIZE", XLA_FFI_ExecutionStage_INITIALIZE);
  VALUE("stage.EXECUTE", XLA_FFI_ExecutionStage_EXECUTE);
#if MINOR >= 4
  VALUE("stage.RECORD", XLA_FFI_ExecutionStage_RECORD);
#endif
  VALUE("code.INVALID_ARGUMENT", XLA_FFI_Error_Code_INVALID_ARGUMENT);
  VALUE("code.NOT_FOUND", XLA_FFI_Error_Code_NOT_FOUND);
  VALUE("code.ALREADY_EXISTS", XLA_FFI_Error_Code_ALREADY_EXISTS);
  VALUE("code.RESOURCE_EXHAUSTED", XLA_FFI_Error_Code_RESOURCE_EXHAUSTED);
  VALUE("code.FAILED_PRECONDITION", XLA_FFI_Error_Code_FAILED_PRECONDITION);
  VALUE("code.UNIMPLEMENTED", XLA_FFI_Error_Code_UNIMPLEMENTED);
  VALUE("code.INTERNAL", XLA_FFI_Error_Code_INTERNAL);
  VALUE("code.UNAVAILABLE", XLA_FFI_Error_Code_UNAVAILABLE);
  /* Enumerations are read as C ints. */
  SIZE("extension_type", ExtensionType);
  SIZE("data_type", XLA_FFI_DataType);
  SIZE("arg_type", XLA_FFI_ArgType);
  SIZE("ret_type", XLA_FFI_RetType);
  SIZE("attr_type", XLA_FFI_AttrType);
  SIZE("stage", XLA_FFI_ExecutionStage);
  SIZE("code", XLA_FFI_Error_Code);
  SIZE("traits", XLA_FFI_Handler_Traits);
}

static void errors(void) {
  EXTENSIBLE("ErrorCreateArgs", XLA_FFI_Error_Create_Args);
  FIELD("ErrorCreateArgs", XLA_FFI_Error_Create_Args, message);
  FIELD("ErrorCreateArgs", XLA_FFI_Error_Create_Args, errc);
#if MINOR >= 4
  EXTENSIBLE("ErrorGetMessageArgs", XLA_FFI_Error_GetDetails_Args);
  FIELD("ErrorGetMessageArgs", XLA_FFI_Error_GetDetails_Args, error);
  FIELD("ErrorGetMessageArgs", XLA_FFI_Error_GetDetails_Args, message);
  FIELD("ErrorGetMessageArgs", XLA_FFI_Error_GetDetails_Args, errc);
#else
  EXTENSIBLE("ErrorGetMessageArgs", XLA_FFI_Error_GetMessage_Args);
  FIELD("ErrorGetMessageArgs", XLA_FFI_Error_GetMessage_Args, error);
  FIELD("ErrorGetMessageArgs", XLA_FFI_Error_GetMessage_Args, message);
#endif
  EXTENSIBLE("ErrorDestroyArgs", XLA_FFI_Error_Destroy_Args);
  FIELD("ErrorDestroyArgs", XLA_FFI_Error_Destroy_Args, error);
}

static void values(void) {
  EXTENSIBLE("Buffer", XLA_FFI_Buffer);
  FIELD("Buffer", XLA_FFI_Buffer, dtype);
  FIELD("Buffer", XLA_FFI_Buffer, data);
  FIELD("Buffer", XLA_FFI_Buffer, rank);
  FIELD("Buffer", XLA_FFI_Buffer, dims);
  SIZE("ByteSpan", XLA_FFI_ByteSpan);
  FIELD("ByteSpan", XLA_FFI_ByteSpan, ptr);
  FIELD("ByteSpan", XLA_FFI_ByteSpan, len);
  SIZE("Scalar", XLA_FFI_Scalar);
  FIELD("Scalar", XLA_FFI_Scalar, dtype);
  FIELD("Scalar", XLA_FFI_Scalar, value);
  SIZE("Array", XLA_FFI_Array);
  FIELD("Array", XLA_FFI_Array, dtype);
  FIELD("Array", XLA_FFI_Array, size);
  FIELD("Array", XLA_FFI_Array, data);
}

static void call_frame(void) {
  /* Operands and results have one layout, which we define once. */
  EXTENSIBLE("Args", XLA_FFI_Args);
  FIELD("Args", XLA_FFI_Args, size);
  FIELD("Args", XLA_FFI_Args, types);
  VALUE("Args.items", offsetof(XLA_FFI_Args, args));
  EXTENSIBLE("Rets", XLA_FFI_Rets);
  FIELD("Rets", XLA_FFI_Rets, size);
  FIELD("Rets", XLA_FFI_Rets, types);
  VALUE("Rets.items", offsetof(XLA_FFI_Rets, rets));
  EXTENSIBLE("Attrs", XLA_FFI_Attrs);
  FIELD("Attrs", XLA_FFI_Attrs, size);
  FIELD("Attrs", XLA_FFI_Attrs, types);
  FIELD("Attrs", XLA_FFI_Attrs, names);
  FIELD("Attrs", XLA_FFI_Attrs, attrs);
  EXTENSIBLE("CallFrame", XLA_FFI_CallFrame);
  FIELD("CallFrame", XLA_FFI_CallFrame, api);
  FIELD("CallFrame", XLA_FFI_CallFrame, ctx);
  FIELD("CallFrame", XLA_FFI_CallFrame, stage);
  FIELD("CallFrame", XLA_FFI_CallFrame, args);
  FIELD("CallFrame", XLA_FFI_CallFrame, rets);
  FIELD("CallFrame", XLA_FFI_CallFrame, attrs);
  FIELD("CallFrame", XLA_FFI_CallFrame, future);
}

static void registration(void) {
  FIELD("HandlerBundle", XLA_FFI_Handler_Bundle, instantiate);
  FIELD("HandlerBundle", XLA_FFI_Handler_Bundle, prepare);
  FIELD("HandlerBundle", XLA_FFI_Handler_Bundle, initialize);
  FIELD("HandlerBundle", XLA_FFI_Handler_Bundle, execute);
  EXTENSIBLE("HandlerRegisterArgs", XLA_FFI_Handler_Register_Args);
  FIELD("HandlerRegisterArgs", XLA_FFI_Handler_Register_Args, name);
  FIELD("HandlerRegisterArgs", XLA_FFI_Handler_Register_Args, platform);
  FIELD("HandlerRegisterArgs", XLA_FFI_Handler_Register_Args, bundle);
  FIELD("HandlerRegisterArgs", XLA_FFI_Handler_Register_Args, traits);
#if MINOR >= 4
  /* The fifth stage is a field of the bundle there, and a field behind the bundle in ours. */
  VALUE("HandlerRegisterArgs.record", offsetof(XLA_FFI_Handler_Register_Args, bundle.record));
#else
  SIZE("HandlerBundle", XLA_FFI_Handler_Bundle);
#endif
#if MINOR >= 2
  EXTENSIBLE("TypeInfo", XLA_FFI_TypeInfo);
  FIELD("TypeInfo", XLA_FFI_TypeInfo, deleter);
  EXTENSIBLE("TypeRegisterArgs", XLA_FFI_Type_Register_Args);
  FIELD("TypeRegisterArgs", XLA_FFI_Type_Register_Args, name);
  FIELD("TypeRegisterArgs", XLA_FFI_Type_Register_Args, type_id);
  FIELD("TypeRegisterArgs", XLA_FFI_Type_Register_Args, type_info);
#else
  EXTENSIBLE("TypeRegisterArgs", XLA_FFI_TypeId_Register_Args);
  FIELD("TypeRegisterArgs", XLA_FFI_TypeId_Register_Args, name);
  FIELD("TypeRegisterArgs", XLA_FFI_TypeId_Register_Args, type_id);
#endif
  SIZE("TypeId", XLA_FFI_TypeId);
  FIELD("TypeId", XLA_FFI_TypeId, type_id);
  REPORTED("Metadata", XLA_FFI_Metadata);
  FIELD("Metadata", XLA_FFI_Metadata, api_version);
  FIELD("Metadata", XLA_FFI_Metadata, traits);
#if MINOR >= 2
  FIELD("Metadata", XLA_FFI_Metadata, state_type_id);
#endif
  SIZE("ExtensionBase", Extension);
  VALUE("ExtensionBase.STRUCT_SIZE", Extension_STRUCT_SIZE);
  FIELD("ExtensionBase", Extension, struct_size);
  VALUE("ExtensionBase.kind", offsetof(Extension, type));
  FIELD("ExtensionBase", Extension, next);
  SIZE("MetadataExtension", XLA_FFI_Metadata_Extension);
  VALUE("MetadataExtension.STRUCT_SIZE", XLA_FFI_Metadata_Extension_STRUCT_SIZE);
  FIELD("MetadataExtension", XLA_FFI_Metadata_Extension, extension_base);
  FIELD("MetadataExtension", XLA_FFI_Metadata_Extension, metadata);
}

static void context(void) {
  EXTENSIBLE("StateSetArgs", XLA_FFI_State_Set_Args);
  FIELD("StateSetArgs", XLA_FFI_State_Set_Args, ctx);
  FIELD("StateSetArgs", XLA_FFI_State_Set_Args, type_id);
  FIELD("StateSetArgs", XLA_FFI_State_Set_Args, state);
  EXTENSIBLE("StateGetArgs", XLA_FFI_State_Get_Args);
  FIELD("StateGetArgs", XLA_FFI_State_Get_Args, ctx);
  FIELD("StateGetArgs", XLA_FFI_State_Get_Args, type_id);
  FIELD("StateGetArgs", XLA_FFI_State_Get_Args, state);
#if MINOR >= 3
  FIELD("StateSetArgs", XLA_FFI_State_Set_Args, stage);
  FIELD("StateGetArgs", XLA_FFI_State_Get_Args, stage);
#endif
#if MINOR < 2
  FIELD("StateSetArgs", XLA_FFI_State_Set_Args, deleter);
#endif
  EXTENSIBLE("StreamGetArgs", XLA_FFI_Stream_Get_Args);
  FIELD("StreamGetArgs", XLA_FFI_Stream_Get_Args, ctx);
  FIELD("StreamGetArgs", XLA_FFI_Stream_Get_Args, stream);
  EXTENSIBLE("DeviceOrdinalGetArgs", XLA_FFI_DeviceOrdinal_Get_Args);
  FIELD("DeviceOrdinalGetArgs", XLA_FFI_DeviceOrdinal_Get_Args, ctx);
  FIELD("DeviceOrdinalGetArgs", XLA_FFI_DeviceOrdinal_Get_Args, device_ordinal);
  EXTENSIBLE("ThreadPoolScheduleArgs", XLA_FFI_ThreadPool_Schedule_Args);
  FIELD("ThreadPoolScheduleArgs", XLA_FFI_ThreadPool_Schedule_Args, ctx);
  FIELD("ThreadPoolScheduleArgs", XLA_FFI_ThreadPool_Schedule_Args, task);
  FIELD("ThreadPoolScheduleArgs", XLA_FFI_ThreadPool_Schedule_Args, data);
  EXTENSIBLE("ThreadPoolNumThreadsArgs", XLA_FFI_ThreadPool_NumThreads_Args);
  FIELD("ThreadPoolNumThreadsArgs", XLA_FFI_ThreadPool_NumThreads_Args, ctx);
  FIELD("ThreadPoolNumThreadsArgs", XLA_FFI_ThreadPool_NumThreads_Args, num_threads);
}

static void api(void) {
  EXTENSIBLE("Api", XLA_FFI_Api);
  FIELD("Api", XLA_FFI_Api, api_version);
  FIELD("Api", XLA_FFI_Api, internal_api);
  SLOT("error_create", XLA_FFI_Error_Create);
#if MINOR >= 4
  SLOT("error_get_message", XLA_FFI_Error_GetDetails);
#else
  SLOT("error_get_message", XLA_FFI_Error_GetMessage);
#endif
  SLOT("error_destroy", XLA_FFI_Error_Destroy);
  SLOT("handler_register", XLA_FFI_Handler_Register);
  SLOT("stream_get", XLA_FFI_Stream_Get);
#if MINOR >= 2
  SLOT("type_register", XLA_FFI_Type_Register);
#else
  SLOT("type_register", XLA_FFI_TypeId_Register);
#endif
#if MINOR >= 4
  SLOT("execution_context_get", XLA_FFI_InvokeContext_Get);
#else
  SLOT("execution_context_get", XLA_FFI_ExecutionContext_Get);
#endif
  SLOT("state_set", XLA_FFI_State_Set);
  SLOT("state_get", XLA_FFI_State_Get);
  SLOT("device_memory_allocate", XLA_FFI_DeviceMemory_Allocate);
  SLOT("device_memory_free", XLA_FFI_DeviceMemory_Free);
  SLOT("thread_pool_schedule", XLA_FFI_ThreadPool_Schedule);
  SLOT("thread_pool_num_threads", XLA_FFI_ThreadPool_NumThreads);
  SLOT("future_create", XLA_FFI_Future_Create);
  SLOT("future_set_available", XLA_FFI_Future_SetAvailable);
  SLOT("future_set_error", XLA_FFI_Future_SetError);
  SLOT("run_id_get", XLA_FFI_RunId_Get);
  SLOT("device_ordinal_get", XLA_FFI_DeviceOrdinal_Get);
#if MINOR >= 4
  SLOT("find_extension", XLA_FFI_InvokeContext_FindExtension);
#endif
#if MINOR >= 5
  SLOT("custom_options_get", XLA_FFI_CustomOptions_Get);
#endif
}

int main(void) {
  versions();
  enumerations();
  errors();
  values();
  call_frame();
  registration();
  context();
  api();
  return 0;
}
