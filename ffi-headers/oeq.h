/* oeq.h: the C surface of oeq-native.
 *
 * Every function may be called from any thread, catches its own failures and never ends the process. A function that
 * can fail returns an OeqStatus, 0 for success, and leaves a text for the calling thread in oeq_last_error(). Outputs
 * are written only on success. Pointers that are required are checked for NULL.
 */
#ifndef OEQ_H_
#define OEQ_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define OEQ_EXPORT
#elif defined(__GNUC__) || defined(__clang__)
#define OEQ_EXPORT __attribute__((visibility("default")))
#else
#define OEQ_EXPORT
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The XLA FFI api table, as in xla/ffi/api/c_api.h. Opaque here: this header needs no XLA. */
struct XLA_FFI_Api;

/* ---- Status ------------------------------------------------------------------------------------------------- */

/* The numbers of absl::StatusCode. */
typedef int32_t OeqStatus;
#define OEQ_OK 0
#define OEQ_INVALID_ARGUMENT 3
#define OEQ_NOT_FOUND 5
#define OEQ_ALREADY_EXISTS 6
#define OEQ_RESOURCE_EXHAUSTED 8
#define OEQ_FAILED_PRECONDITION 9
#define OEQ_UNIMPLEMENTED 12
#define OEQ_INTERNAL 13
#define OEQ_UNAVAILABLE 14

/* The text of this thread's last failed call, NUL-terminated UTF-8, "" if none failed yet. Valid until this thread's
 * next failing call into the library. Never NULL. */
OEQ_EXPORT const char* oeq_last_error(void);

/* The library's version, "MAJOR.MINOR.PATCH". */
OEQ_EXPORT const char* oeq_version(void);

/* ---- The handler table ---------------------------------------------------------------------------------------- */

/* The newest table layout. Layout 3 has types, layout 2 has not. */
#define OEQ_FFI_ABI_VERSION 3

#define OEQ_FFI_TRAIT_COMMAND_BUFFER_COMPATIBLE (1u << 0)

/* One target: its stage functions are XLA_FFI_Handler pointers; NULL stages do not exist. */
typedef struct OeqFfiHandler {
  const char* name;
  void* instantiate;
  void* prepare;
  void* initialize;
  void* execute;
  uint32_t traits;
} OeqFfiHandler;

/* One state type. type_id points to an XLA_FFI_TypeId {int64_t} that the registering host fills in; type_info points
 * to an XLA_FFI_TypeInfo whose deleter destroys a state. */
typedef struct OeqFfiType {
  const char* name;
  void* type_id;
  const void* type_info;
} OeqFfiType;

/* Layout 2. */
typedef struct OeqFfiHandlerTableV2 {
  uint32_t abi_version;
  uint32_t handler_count;
  const OeqFfiHandler* handlers;
} OeqFfiHandlerTableV2;

/* Layout 3. Handlers are sorted by name, names are unique, every pointer stays valid for the life of the process. */
typedef struct OeqFfiHandlerTable {
  uint32_t abi_version;
  uint32_t type_count;
  const OeqFfiType* types;
  uint32_t handler_count;
  const OeqFfiHandler* handlers;
} OeqFfiHandlerTable;

/* The table in its newest layout, or NULL (see oeq_last_error) when the linked set of targets is broken: two targets
 * of one name, or targets that the linker dropped. */
OEQ_EXPORT const OeqFfiHandlerTable* oeq_ffi_handler_table(void);

/* The table in the layout asked for: 2 (an OeqFfiHandlerTableV2) or 3 (an OeqFfiHandlerTable); NULL for others. */
OEQ_EXPORT const void* oeq_ffi_handler_table_for(uint32_t abi_version);

/* The same for a platform, "CUDA" or "Host" (in the spellings of oeq_register_ffi): stage functions differ between
 * platforms. The functions above answer the table for CUDA. */
OEQ_EXPORT const void* oeq_ffi_handler_table_on(uint32_t abi_version, const char* platform);

/* ---- Registration ----------------------------------------------------------------------------------------------- */

/* Registers every target, with its state type, in the XLA that api belongs to. platform is "CUDA" (also "cuda",
 * "gpu") or "Host" (also "host", "cpu"), where kernels are compiled with the system's C++ compiler and run on the CPU;
 * UNIMPLEMENTED for "Host" when the library was built without it. Doing it again is not an error. RegisterFFi is the name that existing connectors look up; it returns 0 on
 * success and the status otherwise. */
OEQ_EXPORT OeqStatus oeq_register_ffi(const struct XLA_FFI_Api* api, const char* platform);
OEQ_EXPORT int RegisterFFi(const struct XLA_FFI_Api* api, const char* platform);

/* The api of a PJRT plugin, as in xla/pjrt/c/pjrt_c_api.h: what the plugin's GetPjrtApi() answers. */
struct PJRT_Api;

/* Registers every target in the XLA inside a PJRT plugin, through the best of the doors below that the plugin has. The
 * plugin needs to be neither initialised nor without clients; it must stay loaded. UNIMPLEMENTED when there is no door
 * for the platform. Doing it again, from any thread, is not an error. */
OEQ_EXPORT OeqStatus oeq_register_pjrt(const struct PJRT_Api* api, const char* platform);

/* How handlers came into the XLA. */
#define OEQ_DOOR_API 1           /* the FFI api: all stages, errors are told */
#define OEQ_DOOR_GPU_EXTENSION 2 /* a PJRT extension: all stages, errors only from newer plugins */
#define OEQ_DOOR_EXECUTE_ONLY 3  /* a PJRT extension: without state, so every call finds its kernel anew */

#define OEQ_TARGET_REGISTERED 1
#define OEQ_TARGET_ALREADY_THERE 2 /* this library had registered it in this XLA before */
#define OEQ_TARGET_REFUSED 3

typedef struct OeqTargetResult {
  const char* name;
  uint32_t outcome;   /* OEQ_TARGET_* */
  OeqStatus status;   /* OEQ_OK, or why it was refused */
  const char* reason; /* "", or why it was refused */
} OeqTargetResult;

typedef struct OeqRegistration {
  uint64_t struct_size; /* in: sizeof(OeqRegistration) of the caller; out: how much of it was filled */
  uint32_t door;        /* OEQ_DOOR_* */
  int32_t api_minor;    /* the XLA's FFI api is version 0.api_minor; 0 where the door does not show it */
  const char* platform; /* "CUDA" or "Host" */
  const char* door_name;
  uint64_t target_count;
  const OeqTargetResult* targets; /* in the handler table's order */
} OeqRegistration;

/* What the last oeq_register_pjrt, oeq_register_ffi or RegisterFFi of this thread did with each target. The pointers
 * are good until the thread registers again or ends. FAILED_PRECONDITION if it did not come as far as an XLA. */
OEQ_EXPORT OeqStatus oeq_registration_results(OeqRegistration* registration);

/* Execute functions (XLA_FFI_Handler) for hosts that register one function per target and nothing else. They keep no
 * state, so every call compares its payload with the kernels that are known: microseconds more than a call with state.
 * One function serves every platform: a call that has a GPU stream runs there, and one that XLA lends threads to, as its CPU
 * platform does, runs on the CPU.
 * The shared library shows them under the targets' plain names too (conv_forward, ...), the static one does not. */
struct XLA_FFI_CallFrame;
struct XLA_FFI_Error;
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_conv_backward(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_conv_double_backward(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_conv_forward(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_oeq_convolution(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_oeq_tensor_product(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_tp_backward(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_tp_double_backward(struct XLA_FFI_CallFrame* frame);
OEQ_EXPORT struct XLA_FFI_Error* oeq_execute_tp_forward(struct XLA_FFI_CallFrame* frame);

/* ---- Configuration and statistics --------------------------------------------------------------------------------- */

/* Sets one option before the library's first use of it. Keys are those of the OEQ_* environment variables, lower case
 * and without the prefix ("compile_threads", "nvrtc", "cxx"), but for OEQ_LOG and OEQ_DEVICE, which are variables only; a
 * value set here wins over the environment. FAILED_PRECONDITION once the option is in use. */
OEQ_EXPORT OeqStatus oeq_configure(const char* key, const char* value);

/* Counters since the process began. */
typedef struct OeqStats {
  uint64_t struct_size;      /* in: sizeof(OeqStats) of the caller; out: how much of it was filled */
  uint64_t kernels_interned; /* distinct (family, payload) records made */
  uint64_t kernels_shared;   /* call sites that found their record already there */
  uint64_t compiled;         /* programs compiled */
  uint64_t failed;           /* units that could not be had */
  uint64_t loaded;           /* images loaded onto a device */
  uint64_t launches;         /* calls executed */
  uint64_t store_hits;           /* units found in the store */
  uint64_t store_misses;         /* units looked for in the store in vain */
  uint64_t store_writes;         /* images written to the store */
  uint64_t store_write_failures; /* images that could not be written to the store */
  uint64_t store_damaged;        /* entries of the store that were damaged and moved aside */
  uint64_t store_evictions;      /* entries removed because the store was full */
  uint64_t store_waits;          /* units for which another process was waited for */
  uint64_t bundle_hits;          /* units found in a bundle */
} OeqStats;
OEQ_EXPORT OeqStatus oeq_get_stats(OeqStats* stats);

/* ---- Compiled kernels ------------------------------------------------------------------------------------------------
 * What follows is for both platforms, whenever it is called: before or after either is first used. */

/* Uses a bundle of compiled kernels (made by `oeq compile --out`, or by oeq_export_compiled) before the store and the
 * compiler: with every kernel in it, neither NVRTC nor a writable disk is needed. Several add up; those of OEQ_BUNDLE come
 * first. The bytes are copied. */
OEQ_EXPORT OeqStatus oeq_load_bundle(const char* path);
OEQ_EXPORT OeqStatus oeq_load_bundle_bytes(const uint8_t* bytes, size_t size);

/* Every kernel that this process has compiled or loaded so far, as a bundle, for example to send it to other ranks. Waits
 * for what is being compiled. Give the bytes back with oeq_free_bytes. */
OEQ_EXPORT OeqStatus oeq_export_compiled(uint8_t** bytes, size_t* size);
OEQ_EXPORT void oeq_free_bytes(uint8_t* bytes, size_t size);

/* What happens to a unit (the part of a kernel that is compiled by itself). */
#define OEQ_STEP_QUEUED 0      /* it waits for a thread */
#define OEQ_STEP_COMPILING 1   /* the compiler has it */
#define OEQ_STEP_ELSEWHERE 2   /* another process compiles it, and this one waits */
#define OEQ_STEP_COMPILED 3    /* the compiler is done with it */
#define OEQ_STEP_FROM_STORE 4  /* it was in the store */
#define OEQ_STEP_FROM_BUNDLE 5 /* it was in a bundle */
#define OEQ_STEP_FAILED 6      /* it could not be had */
#define OEQ_STEP_AWAITED 7     /* a call still waits for it; told every ten seconds */

typedef struct OeqProgress {
  uint64_t struct_size; /* sizeof(OeqProgress) of the library */
  const char* unit;     /* for example "convolution/forward for sm_90"; valid during the call */
  int32_t step;         /* one of OEQ_STEP_* */
  double seconds;       /* since the unit was queued */
  uint64_t done;        /* units that are done, of those queued so far */
  uint64_t total;
} OeqProgress;

/* Calls back for each step of each unit, from any thread and from several at once. The callback must be quick and must
 * not call into this library. NULL ends it; calls that have begun may still run when this returns, so `user` must outlive
 * them. */
typedef void (*OeqProgressCallback)(const OeqProgress* progress, void* user);
OEQ_EXPORT OeqStatus oeq_set_progress(OeqProgressCallback callback, void* user);

/* Sends the library's log lines to the host: level 1 is an error, 2 a warning, 3 information, 4 and 5 are for debugging.
 * OEQ_LOG (off, error, warn, info, debug, trace; default warn) says how many. From any thread, also from within calls of
 * this library: the callback must not call into it. NULL ends it; calls that have begun may still run when this returns, so
 * `user` must outlive them. Without a logger nothing is written anywhere. ALREADY_EXISTS in a Rust program with a logger of its own, which gets the lines. */
typedef void (*OeqLogCallback)(int32_t level, const char* line, void* user);
OEQ_EXPORT OeqStatus oeq_set_logger(OeqLogCallback callback, void* user);

/* ---- Devices (what the Python module needs) ------------------------------------------------------------------------- */

typedef struct OeqDeviceProperties {
  uint64_t struct_size; /* in: sizeof(OeqDeviceProperties) of the caller; out: how much of it was filled */
  char name[256];
  int32_t compute_major;
  int32_t compute_minor;
  int32_t multiprocessor_count;
  int32_t warp_size;
  int32_t shared_memory_per_block; /* bytes, the opt-in maximum */
} OeqDeviceProperties;

/* Properties of device `ordinal`. With OEQ_DEVICE set (a known name such as "H200", or
 * "sm_90,MULTIPROCESSORS,SHARED_BYTES") the answer is that device's and no driver is needed. */
OEQ_EXPORT OeqStatus oeq_device_properties(int32_t ordinal, OeqDeviceProperties* properties);

/* A pair of events on the current context's default stream (the primary context of device 0 when none is current). */
typedef struct OeqTimer OeqTimer;
OEQ_EXPORT OeqStatus oeq_timer_create(OeqTimer** timer);
OEQ_EXPORT OeqStatus oeq_timer_start(OeqTimer* timer);
/* Records the end, waits for it and writes the time since start in milliseconds. */
OEQ_EXPORT OeqStatus oeq_timer_stop(OeqTimer* timer, float* milliseconds);
OEQ_EXPORT void oeq_timer_destroy(OeqTimer* timer);
/* Overwrites enough device memory to evict the L2 cache, and waits. */
OEQ_EXPORT OeqStatus oeq_clear_l2_cache(void);

#ifdef __cplusplus
}
#endif

#endif /* OEQ_H_ */
