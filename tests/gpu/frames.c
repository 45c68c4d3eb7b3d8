// A stand-in for XLA:GPU, small enough to see through: it calls the stages of FFI handlers with frames of its own on a
// real device, so that a test owns what XLA would own (result buffers, the stream, the state) and can time one call.
// It follows what XLA:GPU was seen to do: shapes without data in instantiate, ordinal -1 and no stream there.
//
// Works on any library that exports oeq_ffi_handler_table in layout 2 or 3. Needs no CUDA headers: the driver is found
// with dlopen. Functions answer 0 for success; frames_error() has the text otherwise.
//
// Build: cc -O2 -shared -fPIC -I"$(python3 -c 'import jax; print(jax.ffi.include_dir())')" frames.c -o libframes.so -ldl
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include "xla/ffi/api/c_api.h"

// ---- errors and time ---------------------------------------------------------------------------------------------

static __thread char g_text[1 << 16];
const char* frames_error(void) { return g_text; }

static int fail(int code, const char* format, ...) {
  va_list list;
  va_start(list, format);
  vsnprintf(g_text, sizeof g_text, format, list);
  va_end(list);
  return code;
}

static double now_ns(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1e9 + t.tv_nsec;
}

// ---- the CUDA driver -----------------------------------------------------------------------------------------------

typedef unsigned long long Pointer;
static struct {
  int (*Init)(unsigned);
  int (*DeviceGet)(int*, int);
  int (*DevicePrimaryCtxRetain)(void**, int);
  int (*CtxSetCurrent)(void*);
  int (*StreamCreate)(void**, unsigned);
  int (*StreamSynchronize)(void*);
  int (*MemAlloc_v2)(Pointer*, size_t);
  int (*MemFree_v2)(Pointer);
  int (*MemsetD8Async)(Pointer, unsigned char, size_t, void*);
  int (*MemcpyHtoD_v2)(Pointer, const void*, size_t);
  int (*MemcpyDtoH_v2)(void*, Pointer, size_t);
  int (*ModuleLoadData)(void**, const void*);
  int (*ModuleGetFunction)(void**, void*, const char*);
  int (*FuncSetAttribute)(void*, int, int);
  int (*LaunchKernel)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);
  int (*GetErrorName)(int, const char**);
  int (*StreamBeginCapture_v2)(void*, int);
  int (*StreamEndCapture)(void*, void**);
  int (*GraphInstantiateWithFlags)(void**, void*, unsigned long long);
  int (*GraphLaunch)(void*, void*);
  int (*CtxGetCurrent)(void**);
  int (*CtxCreate_v2)(void**, unsigned, int);
  int (*MemGetInfo_v2)(size_t*, size_t*);
} cu;
static void *g_context;
static void *g_main_stream;        // what threads use that made no stream of their own
static __thread void* t_stream;
#define g_stream (t_stream ? t_stream : g_main_stream)

static int cuda(int code, const char* what) {
  if (code == 0) return 0;
  const char* name = NULL;
  if (cu.GetErrorName) cu.GetErrorName(code, &name);
  return fail(code, "%s: %s (%d)", what, name ? name : "?", code);
}

int gpu_open(void) {
  if (g_main_stream) return cuda(cu.CtxSetCurrent(g_context), "cuCtxSetCurrent");
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (!driver) return fail(1, "%s", dlerror());
#define FIND(name) \
  if (!(*(void**)&cu.name = dlsym(driver, "cu" #name))) return fail(1, "the driver has no cu" #name)
  FIND(Init); FIND(DeviceGet); FIND(DevicePrimaryCtxRetain); FIND(CtxSetCurrent); FIND(StreamCreate); FIND(StreamSynchronize);
  FIND(MemAlloc_v2); FIND(MemFree_v2); FIND(MemsetD8Async); FIND(MemcpyHtoD_v2); FIND(MemcpyDtoH_v2);
  FIND(ModuleLoadData); FIND(ModuleGetFunction); FIND(FuncSetAttribute); FIND(LaunchKernel); FIND(GetErrorName);
  FIND(StreamBeginCapture_v2); FIND(StreamEndCapture); FIND(GraphInstantiateWithFlags); FIND(GraphLaunch); FIND(CtxGetCurrent);
  FIND(CtxCreate_v2); FIND(MemGetInfo_v2);
#undef FIND
  int device, rc;
  if ((rc = cuda(cu.Init(0), "cuInit"))) return rc;
  if ((rc = cuda(cu.DeviceGet(&device, 0), "cuDeviceGet"))) return rc;
  if ((rc = cuda(cu.DevicePrimaryCtxRetain(&g_context, device), "cuDevicePrimaryCtxRetain"))) return rc;
  if ((rc = cuda(cu.CtxSetCurrent(g_context), "cuCtxSetCurrent"))) return rc;
  return cuda(cu.StreamCreate(&g_main_stream, 1 /* non-blocking, as XLA's streams are */), "cuStreamCreate");
}
// Bytes of device memory that nobody has taken, as the driver counts them.
int gpu_unused(size_t* bytes) { size_t all; return cuda(cu.MemGetInfo_v2(bytes, &all), "cuMemGetInfo"); }
int gpu_sync(void) { return cuda(cu.StreamSynchronize(g_stream), "cuStreamSynchronize"); }
int gpu_alloc(Pointer* p, size_t n) { return cuda(cu.MemAlloc_v2(p, n ? n : 1), "cuMemAlloc"); }
int gpu_free(Pointer p) { return cuda(cu.MemFree_v2(p), "cuMemFree"); }
int gpu_fill(Pointer p, int byte, size_t n) {
  if (n == 0) return 0;
  int rc = cuda(cu.MemsetD8Async(p, (unsigned char)byte, n, g_stream), "cuMemsetD8Async");
  return rc ? rc : gpu_sync();
}
int gpu_write(Pointer p, const void* host, size_t n) { return n ? cuda(cu.MemcpyHtoD_v2(p, host, n), "cuMemcpyHtoD") : 0; }
int gpu_read(void* host, Pointer p, size_t n) { return n ? cuda(cu.MemcpyDtoH_v2(host, p, n), "cuMemcpyDtoH") : 0; }

// A stream of this thread's own, for all it does from now on.
int gpu_own_stream(void) { return cuda(cu.StreamCreate(&t_stream, 1), "cuStreamCreate"); }

// Capture of this thread's stream: mode 0 is global, 1 thread-local, 2 relaxed. The end answers a graph that can be launched.
int gpu_capture_begin(int mode) { return cuda(cu.StreamBeginCapture_v2(g_stream, mode), "cuStreamBeginCapture"); }
int gpu_capture_end(void** executable) {
  void* graph = NULL;
  int rc = cuda(cu.StreamEndCapture(g_stream, &graph), "cuStreamEndCapture");
  return rc ? rc : cuda(cu.GraphInstantiateWithFlags(executable, graph, 0), "cuGraphInstantiate");
}
int gpu_graph_launch(void* executable) {
  int rc = cuda(cu.GraphLaunch(executable, g_stream), "cuGraphLaunch");
  return rc ? rc : gpu_sync();
}

// This thread's current context: set to none or to a new one, and looked at.
int gpu_context(void** current) { return cuda(cu.CtxGetCurrent(current), "cuCtxGetCurrent"); }
int gpu_context_none(void) { return cuda(cu.CtxSetCurrent(NULL), "cuCtxSetCurrent"); }
int gpu_context_other(void) { void* other; return cuda(cu.CtxCreate_v2(&other, 0, 0), "cuCtxCreate"); }

// ---- the handler table -----------------------------------------------------------------------------------------------

typedef struct { const char* name; void* stages[4]; uint32_t traits; } Handler;
typedef struct { const char* name; XLA_FFI_TypeId* id; const XLA_FFI_TypeInfo* info; } Type;
typedef struct { uint32_t abi, handler_count; const Handler* handlers; } Table2;
typedef struct { uint32_t abi, type_count; const Type* types; uint32_t handler_count; const Handler* handlers; } Table3;
typedef struct { void* handle; const Handler* handlers; uint32_t count, abi, types; } Library;

// ---- the XLA side of the api -------------------------------------------------------------------------------------------

typedef struct {
  XLA_FFI_CallFrame frame;
  XLA_FFI_Buffer* buffers;
  void **pointers, **data;
  int total;
  void* state;
  int64_t state_type;
  const Handler* handler;
} Site;

struct XLA_FFI_Error { int code; char text[1 << 14]; };
static XLA_FFI_Error* error(int code, const char* text) {
  XLA_FFI_Error* e = malloc(sizeof *e);
  e->code = code;
  snprintf(e->text, sizeof e->text, "%s", text ? text : "(null)");
  return e;
}
static XLA_FFI_Error* error_create(XLA_FFI_Error_Create_Args* a) { return error(a->errc, a->message); }
static void error_destroy(XLA_FFI_Error_Destroy_Args* a) { free(a->error); }
#if XLA_FFI_API_MINOR >= 4
static void error_details(XLA_FFI_Error_GetDetails_Args* a) {
  a->message = a->error->text;
  a->errc = (XLA_FFI_Error_Code)a->error->code;
}
#else
static void error_message(XLA_FFI_Error_GetMessage_Args* a) { a->message = a->error->text; }
#endif

static Site* site_of(void* ctx) { return (Site*)ctx; }
static XLA_FFI_Error* stream_get(XLA_FFI_Stream_Get_Args* a) {
  if (site_of(a->ctx)->frame.stage < XLA_FFI_ExecutionStage_INITIALIZE) return error(12, "the stream is not available");
  a->stream = g_stream;
  return NULL;
}
static XLA_FFI_Error* ordinal_get(XLA_FFI_DeviceOrdinal_Get_Args* a) {
  a->device_ordinal = site_of(a->ctx)->frame.stage == XLA_FFI_ExecutionStage_INSTANTIATE ? -1 : 0;
  return NULL;
}
static XLA_FFI_Error* run_id_get(XLA_FFI_RunId_Get_Args* a) { a->run_id = 1; return NULL; }

enum { TYPES = 64, FIRST_ID = 7 };
static struct { char name[128]; XLA_FFI_TypeInfo info; } g_types[TYPES];
static int g_type_count;
static pthread_mutex_t g_types_lock = PTHREAD_MUTEX_INITIALIZER;

static XLA_FFI_Error* type_register(XLA_FFI_Type_Register_Args* a) {
  XLA_FFI_Error* e = NULL;
  pthread_mutex_lock(&g_types_lock);
  int i = 0;
  for (; i < g_type_count; i++)
    if (strlen(g_types[i].name) == a->name.len && !memcmp(g_types[i].name, a->name.ptr, a->name.len)) break;
  if (i < g_type_count) {
    if (a->type_id->type_id != FIRST_ID + i) e = error(13, "the type name is already registered with another type id");
  } else if (i == TYPES || a->name.len >= sizeof g_types[i].name || !a->type_info) {
    e = error(13, "too many types, too long a name or no info");
  } else {
    memcpy(g_types[i].name, a->name.ptr, a->name.len);
    g_types[i].info = *a->type_info;
    a->type_id->type_id = FIRST_ID + i;
    g_type_count++;
  }
  pthread_mutex_unlock(&g_types_lock);
  return e;
}
static XLA_FFI_Error* state_set(XLA_FFI_State_Set_Args* a) {
  Site* s = site_of(a->ctx);
  if (s->state) return error(9, "the state is already set");
  int64_t id = a->type_id->type_id;
  if (id < FIRST_ID || id >= FIRST_ID + g_type_count) return error(13, "the state's type id is not registered");
  s->state = a->state;
  s->state_type = id;
  return NULL;
}
static XLA_FFI_Error* state_get(XLA_FFI_State_Get_Args* a) {
  Site* s = site_of(a->ctx);
  if (!s->state) return error(5, "the state is not set");
  if (a->type_id->type_id != s->state_type) return error(3, "the state has another type id");
  a->state = s->state;
  return NULL;
}

static const XLA_FFI_Api* api(void) {
  static XLA_FFI_Api table;
  table.struct_size = sizeof table;
  table.api_version.struct_size = sizeof table.api_version;
  table.api_version.major_version = XLA_FFI_API_MAJOR;
  table.api_version.minor_version = XLA_FFI_API_MINOR;
  table.XLA_FFI_Error_Create = error_create;
#if XLA_FFI_API_MINOR >= 4
  table.XLA_FFI_Error_GetDetails = error_details;
#else
  table.XLA_FFI_Error_GetMessage = error_message;
#endif
  table.XLA_FFI_Error_Destroy = error_destroy;
  table.XLA_FFI_Stream_Get = stream_get;
  table.XLA_FFI_Type_Register = type_register;
  table.XLA_FFI_State_Set = state_set;
  table.XLA_FFI_State_Get = state_get;
  table.XLA_FFI_DeviceOrdinal_Get = ordinal_get;
  table.XLA_FFI_RunId_Get = run_id_get;
  return &table;
}

// ---- libraries and call sites --------------------------------------------------------------------------------------------

// Opens a library and, if register_types, registers the types of its table; without, its handlers are on their own.
void* library_open(const char* path, int register_types) {
  Library* l = calloc(1, sizeof *l);
  if (!(l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL))) return fail(1, "%s", dlerror()), NULL;
  const void* (*get)(void) = (const void* (*)(void))dlsym(l->handle, "oeq_ffi_handler_table");
  if (!get) return fail(1, "%s exports no oeq_ffi_handler_table", path), NULL;
  const uint32_t* raw = get();
  if (!raw) {
    const char* (*why)(void) = (const char* (*)(void))dlsym(l->handle, "oeq_last_error");
    return fail(1, "oeq_ffi_handler_table answered NULL: %s", why ? why() : "?"), NULL;
  }
  l->abi = raw[0];
  if (raw[0] == 2) {
    const Table2* t = (const Table2*)raw;
    l->handlers = t->handlers;
    l->count = t->handler_count;
  } else if (raw[0] == 3) {
    const Table3* t = (const Table3*)raw;
    l->handlers = t->handlers;
    l->count = t->handler_count;
    l->types = t->type_count;
    for (uint32_t i = 0; register_types && i < t->type_count; i++) {
      XLA_FFI_Type_Register_Args a = {sizeof a, NULL, {t->types[i].name, strlen(t->types[i].name)}, t->types[i].id, t->types[i].info};
      XLA_FFI_Error* e = type_register(&a);
      if (e) return fail(1, "type %s: %s", t->types[i].name, e->text), NULL;
    }
  } else {
    return fail(1, "a handler table of layout %u", raw[0]), NULL;
  }
  return l;
}
uint32_t library_abi(void* l) { return ((Library*)l)->abi; }
uint32_t library_types(void* l) { return ((Library*)l)->types; }
uint32_t library_count(void* l) { return ((Library*)l)->count; }
const char* library_name(void* l, uint32_t i) { return ((Library*)l)->handlers[i].name; }
uint32_t library_traits(void* l, uint32_t i) { return ((Library*)l)->handlers[i].traits; }
int library_has_stage(void* l, uint32_t i, int stage) { return ((Library*)l)->handlers[i].stages[stage] != NULL; }

static int stage_call(Site* s, int stage) {
  void* function = s->handler->stages[stage];
  if (!function) return 0;
  s->frame.stage = (XLA_FFI_ExecutionStage)stage;
  XLA_FFI_Error* e = ((XLA_FFI_Handler*)function)(&s->frame);
  if (!e) return 0;
  int code = fail(e->code ? e->code : 2, "%s, stage %d: code %d: %s", s->handler->name, stage, e->code, e->text);
  free(e);
  return code;
}

void site_close(void* site) {
  Site* s = site;
  if (s->state) {
    XLA_FFI_TypeInfo* info = &g_types[s->state_type - FIRST_ID].info;
    if (info->deleter) info->deleter(s->state);
  }
  free(s->frame.args.types); free(s->frame.rets.types);
  for (int i = 0; i < 3; i++) {
    if (i < s->frame.attrs.size) { free(((void**)s->frame.attrs.names)[i]); free(s->frame.attrs.attrs[i]); }
  }
  free((void*)s->frame.attrs.names); free(s->frame.attrs.attrs); free(s->frame.attrs.types);
  free(s->pointers); free(s->buffers); free(s->data); free(s);
}

// One call site. derivative < 0 leaves that attribute out. payload and dims must outlive the site. Runs the stages from
// instantiate to initialize unless bare (then no stage but execute ever runs, as where symbols are resolved one by one)
// and writes their times to stage_ns[0..3).
int site_open(void** out, void* library, const char* target, const char* payload, size_t length, int64_t hash, int64_t derivative,
              int n_args, int n_rets, const int32_t* dtypes, void** data, const int64_t* ranks, int64_t** dims, int bare,
              double* stage_ns) {
  Library* l = library;
  const Handler* handler = NULL;
  for (uint32_t i = 0; i < l->count; i++)
    if (!strcmp(l->handlers[i].name, target)) handler = &l->handlers[i];
  if (!handler) return fail(5, "no target %s", target);
  Site* s = calloc(1, sizeof *s);
  s->handler = handler;
  s->total = n_args + n_rets;
  s->buffers = calloc(s->total + 1, sizeof *s->buffers);
  s->pointers = calloc(s->total + 1, sizeof *s->pointers);
  s->data = calloc(s->total + 1, sizeof *s->data);
  s->frame.args.types = calloc(n_args + 1, sizeof *s->frame.args.types);
  s->frame.rets.types = calloc(n_rets + 1, sizeof *s->frame.rets.types);
  for (int i = 0; i < s->total; i++) {
    XLA_FFI_Buffer* b = &s->buffers[i];
    b->struct_size = XLA_FFI_Buffer_STRUCT_SIZE;
    b->dtype = (XLA_FFI_DataType)dtypes[i];
    b->rank = ranks[i];
    b->dims = dims[i];
    s->data[i] = data[i];
    s->pointers[i] = b;
    if (i < n_args) s->frame.args.types[i] = XLA_FFI_ArgType_BUFFER;
    else s->frame.rets.types[i - n_args] = XLA_FFI_RetType_BUFFER;
  }
  int n = derivative < 0 ? 2 : 3, at = 0;
  XLA_FFI_ByteSpan** names = calloc(n, sizeof *names);
  void** values = calloc(n, sizeof *values);
  XLA_FFI_AttrType* types = calloc(n, sizeof *types);
#define ATTRIBUTE(text, kind, ctype, ...) do { \
    names[at] = malloc(sizeof **names); *names[at] = (XLA_FFI_ByteSpan){text, strlen(text)}; \
    ctype* v = malloc(sizeof(ctype) + sizeof(int64_t)); *v = (ctype)__VA_ARGS__; values[at] = v; types[at++] = kind; } while (0)
#define INTEGER(text, number) do { ATTRIBUTE(text, XLA_FFI_AttrType_SCALAR, XLA_FFI_Scalar, {XLA_FFI_DataType_S64, NULL}); \
    XLA_FFI_Scalar* v = values[at - 1]; v->value = v + 1; memcpy(v + 1, &(int64_t){number}, sizeof(int64_t)); } while (0)
  if (derivative >= 0) INTEGER("derivative", derivative);
  INTEGER("hash", hash);
  ATTRIBUTE("kernel", XLA_FFI_AttrType_STRING, XLA_FFI_ByteSpan, {payload, length});
  s->frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  s->frame.api = api();
  s->frame.ctx = (void*)s;
  s->frame.args.struct_size = XLA_FFI_Args_STRUCT_SIZE;
  s->frame.args.size = n_args;
  s->frame.args.args = s->pointers;
  s->frame.rets.struct_size = XLA_FFI_Rets_STRUCT_SIZE;
  s->frame.rets.size = n_rets;
  s->frame.rets.rets = s->pointers + n_args;
  s->frame.attrs.struct_size = XLA_FFI_Attrs_STRUCT_SIZE;
  s->frame.attrs.size = n;
  s->frame.attrs.types = types;
  s->frame.attrs.names = names;
  s->frame.attrs.attrs = values;

  for (int stage = 0; stage < 3 && !bare; stage++) {
    double t = now_ns();
    int rc = stage_call(s, stage);
    if (stage_ns) stage_ns[stage] = now_ns() - t;
    if (rc) { site_close(s); return rc; }
    for (int i = 0; i < s->total; i++) s->buffers[i].data = s->data[i];  // from prepare on
  }
  for (int i = 0; i < s->total; i++) s->buffers[i].data = s->data[i];
  *out = s;
  return 0;
}

// The call site's tensor (operands first, then results) lies somewhere else from now on, as XLA's do from run to run.
void site_move(void* site, int index, void* data) {
  Site* s = site;
  s->data[index] = s->buffers[index].data = data;
}
int site_initialize(void* site) { return stage_call(site, 2); }
int site_enqueue(void* site) { return stage_call(site, 3); }
int site_execute(void* site) {
  int rc = stage_call(site, 3);
  return rc ? rc : gpu_sync();
}

// host_ns[i]: mean host time of one call in sample i; total_ns[i]: the same with the wait for the device at the end.
int site_time(void* site, int samples, int per_sample, int with_initialize, double* host_ns, double* total_ns) {
  int rc;
  for (int i = 0; i < samples; i++) {
    double t = now_ns();
    for (int k = 0; k < per_sample; k++) {
      if (with_initialize && (rc = stage_call(site, 2))) return rc;
      if ((rc = stage_call(site, 3))) return rc;
    }
    host_ns[i] = (now_ns() - t) / per_sample;
    if ((rc = gpu_sync())) return rc;
    total_ns[i] = (now_ns() - t) / per_sample;
  }
  return 0;
}

// ---- the floor: the same memsets and launches, straight from C ---------------------------------------------------------------

typedef struct { Pointer at; size_t bytes; } Zero;
typedef struct { void* function; uint32_t blocks, threads, shared; void** parameters; } Launch;

int floor_function(void** function, const void* image, const char* symbol, int shared_bytes) {
  void* module;
  int rc;
  if ((rc = cuda(cu.ModuleLoadData(&module, image), "cuModuleLoadData"))) return rc;
  if ((rc = cuda(cu.ModuleGetFunction(function, module, symbol), symbol))) return rc;
  return shared_bytes ? cuda(cu.FuncSetAttribute(*function, 8 /* dynamic shared memory */, shared_bytes), "cuFuncSetAttribute") : 0;
}

static int floor_once(const Zero* zeros, int n_zeros, const Launch* launches, int n_launches) {
  int rc;
  for (int i = 0; i < n_zeros; i++)
    if (zeros[i].bytes && (rc = cu.MemsetD8Async(zeros[i].at, 0, zeros[i].bytes, g_stream))) return cuda(rc, "cuMemsetD8Async");
  for (int i = 0; i < n_launches; i++) {
    const Launch* l = &launches[i];
    if ((rc = cu.LaunchKernel(l->function, l->blocks, 1, 1, l->threads, 1, 1, l->shared, g_stream, l->parameters, NULL)))
      return cuda(rc, "cuLaunchKernel");
  }
  return 0;
}
int floor_run(const Zero* zeros, int n_zeros, const Launch* launches, int n_launches) {
  int rc = floor_once(zeros, n_zeros, launches, n_launches);
  return rc ? rc : gpu_sync();
}
// The same as one graph: what our library's calls of a site that comes again and again consist of, straight from C.
int floor_graph(void** executable, const Zero* zeros, int n_zeros, const Launch* launches, int n_launches) {
  int rc = gpu_capture_begin(1);
  if (rc) return rc;
  int within = floor_once(zeros, n_zeros, launches, n_launches);
  rc = gpu_capture_end(executable);
  return within ? within : rc;
}
int floor_graph_time(void* executable, int samples, int per_sample, double* host_ns, double* total_ns) {
  int rc;
  for (int i = 0; i < samples; i++) {
    double t = now_ns();
    for (int k = 0; k < per_sample; k++)
      if ((rc = cuda(cu.GraphLaunch(executable, g_stream), "cuGraphLaunch"))) return rc;
    host_ns[i] = (now_ns() - t) / per_sample;
    if ((rc = gpu_sync())) return rc;
    total_ns[i] = (now_ns() - t) / per_sample;
  }
  return 0;
}
int floor_time(const Zero* zeros, int n_zeros, const Launch* launches, int n_launches, int samples, int per_sample,
               double* host_ns, double* total_ns) {
  int rc;
  for (int i = 0; i < samples; i++) {
    double t = now_ns();
    for (int k = 0; k < per_sample; k++)
      if ((rc = floor_once(zeros, n_zeros, launches, n_launches))) return rc;
    host_ns[i] = (now_ns() - t) / per_sample;
    if ((rc = gpu_sync())) return rc;
    total_ns[i] = (now_ns() - t) / per_sample;
  }
  return 0;
}
