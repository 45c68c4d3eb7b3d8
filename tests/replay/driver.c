// A CUDA driver without a device: it writes down what it is told to run, in the order in which a stream would run it, be it
// launched by itself or as part of a graph. Loaded as libcuda.so.1 by tests/replay.rs before the library looks for one.
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 1, BUFFER_POINTER = 1, BUFFER_SIZE = 2, NODES = 16, TEXT = 1024 };

// What the test sets and reads.
int stand_in_capturing;
char stand_in_fails[64];  // the name of the function that fails
atomic_int stand_in_launches, stand_in_graph_launches, stand_in_parameters_set, stand_in_graphs, stand_in_overlaps;
int stand_in_quiet;       // write nothing down, allocate nothing

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static char log_text[1 << 20];
static size_t log_length;

size_t stand_in_take_log(char* out, size_t size) {
  pthread_mutex_lock(&mutex);
  size_t length = log_length < size ? log_length : size;
  memcpy(out, log_text, length);
  log_length = 0;
  pthread_mutex_unlock(&mutex);
  return length;
}

static void note(const char* text) {
  if (stand_in_quiet) return;
  pthread_mutex_lock(&mutex);
  size_t length = strlen(text);
  if (log_length + length < sizeof log_text) {
    memcpy(log_text + log_length, text, length);
    log_length += length;
  }
  pthread_mutex_unlock(&mutex);
}

static int fails(const char* name) { return strcmp(stand_in_fails, name) == 0; }
#define MAY_FAIL() \
  if (fails(__func__)) return 999

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuGetErrorName(int status, const char** text) { *text = "STAND_IN"; return status ? OK : INVALID; }
int cuGetErrorString(int status, const char** text) { *text = "the stand-in was told to fail"; return status ? OK : INVALID; }
int cuDeviceGetCount(int* count) { *count = 2; return OK; }
int cuDeviceGet(int* device, int ordinal) { *device = ordinal; return OK; }
int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  *value = attribute == 75 ? 9 : attribute == 76 ? 0 : attribute == 16 ? 4 : attribute == 97 ? 65536 : 32;
  return OK;
}
int cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)(intptr_t)(0x100 + device); return OK; }

static _Thread_local void* current[4];
static _Thread_local int depth;
int cuCtxGetCurrent(void** context) { *context = depth ? current[depth - 1] : NULL; return OK; }
int cuCtxPushCurrent_v2(void* context) { current[depth++] = context; return OK; }
int cuCtxPopCurrent_v2(void** context) { *context = current[--depth]; return OK; }
static _Thread_local int capture_mode;
int cuThreadExchangeStreamCaptureMode(int* mode) {
  int before = capture_mode;
  capture_mode = *mode;
  *mode = before;
  return OK;
}

// Of this thread: how many contexts are on its stack, and its capture mode.
void stand_in_thread(int* contexts, int* mode) {
  *contexts = depth;
  *mode = capture_mode;
}

// Where something runs: the stream, and the context that is current.
static int where(char* out, size_t size, const char* what, void* stream) {
  unsigned long long context = (uintptr_t)(depth ? current[depth - 1] : NULL);
  return snprintf(out, size, "%s @%llx in %llx\n", what, (unsigned long long)(uintptr_t)stream, context);
}

int cuModuleLoadData(void** module, const void* image) { *module = (void*)0x200; return image ? OK : INVALID; }
int cuModuleUnload(void* module) { return module ? OK : INVALID; }
int cuModuleGetFunction(void** function, void* module, const char* name) {
  (void)module;
  *function = strdup(name);
  return OK;
}
int cuFuncGetAttribute(int* value, int attribute, void* function) {
  (void)attribute;
  *value = 0;
  return function ? OK : INVALID;
}
int cuFuncSetAttribute(void* function, int attribute, int value) { return function && attribute && value ? OK : INVALID; }

// A kernel with its parameters, in words, without an end of the line.
static void tell(char* out, const char* function, unsigned grid, unsigned block, unsigned shared, void** parameters, void** extra) {
  int at = snprintf(out, TEXT, "%s<%u,%u,%u>", function, grid, block, shared);
  if (extra) {
    const uint64_t* words = NULL;
    size_t bytes = 0;
    for (; *extra; extra += 2) {
      if ((uintptr_t)extra[0] == BUFFER_POINTER) words = extra[1];
      if ((uintptr_t)extra[0] == BUFFER_SIZE) bytes = *(size_t*)extra[1];
    }
    for (size_t i = 0; i < bytes / 8; i++) at += snprintf(out + at, TEXT - at, " %llx", (unsigned long long)words[i]);
  } else {  // the zeroing kernel: four addresses, four sizes, how many
    const uint64_t* regions = parameters[0];
    for (uint64_t i = 0; i < regions[8]; i++)
      at += snprintf(out + at, TEXT - at, " %llx:%llu", (unsigned long long)regions[i], (unsigned long long)regions[4 + i]);
  }
}

int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  char text[TEXT], line[TEXT + 64];
  snprintf(text, sizeof text, "memset %llx:%zu=%d", (unsigned long long)address, bytes, value);
  where(line, sizeof line, text, stream);
  note(line);
  return OK;
}

int cuLaunchKernel(void* function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                   void* stream, void** parameters, void** extra) {
  MAY_FAIL();
  if (gy * gz * by * bz != 1) return INVALID;
  stand_in_launches++;
  char text[TEXT], line[TEXT + 64];
  tell(text, function, gx, bx, shared, parameters, extra);
  where(line, sizeof line, text, stream);
  note(line);
  return OK;
}

int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  MAY_FAIL();
  *status = stand_in_capturing;
  return OK;
}

struct node_parameters {
  void* function;
  unsigned grid[3], block[3], shared;
  void **parameters, **extra;
};
struct node {
  char text[TEXT];
};
struct graph {
  struct node nodes[NODES];
  int count;
  atomic_int users;
};

int cuGraphCreate(void** graph, unsigned flags) {
  MAY_FAIL();
  *graph = calloc(1, sizeof(struct graph));
  stand_in_graphs++;
  return flags ? INVALID : OK;
}
int cuGraphDestroy(void* graph) {
  free(graph);
  stand_in_graphs--;
  return OK;
}
int cuGraphExecDestroy(void* exec) {
  free(exec);
  stand_in_graphs--;
  return OK;
}
int cuGraphAddKernelNode(void** node, void* graph, void* const* dependencies, size_t count, const struct node_parameters* p) {
  MAY_FAIL();
  struct graph* g = graph;
  // One after another, as on a stream.
  if (g->count == NODES || count != (g->count > 0) || (count && dependencies[0] != (void*)(intptr_t)g->count)) return INVALID;
  tell(g->nodes[g->count].text, p->function, p->grid[0], p->block[0], p->shared, p->parameters, p->extra);
  *node = (void*)(intptr_t)++g->count;
  return OK;
}
int cuGraphInstantiateWithFlags(void** exec, void* graph, unsigned long long flags) {
  MAY_FAIL();
  struct graph* copy = malloc(sizeof *copy);
  memcpy(copy, graph, sizeof *copy);
  *exec = copy;
  stand_in_graphs++;
  return flags ? INVALID : OK;
}
int cuGraphExecKernelNodeSetParams(void* exec, void* node, const struct node_parameters* p) {
  MAY_FAIL();
  struct graph* g = exec;
  int index = (int)(intptr_t)node - 1;
  if (index < 0 || index >= g->count) return INVALID;
  if (g->users++) stand_in_overlaps++;
  tell(g->nodes[index].text, p->function, p->grid[0], p->block[0], p->shared, p->parameters, p->extra);
  g->users--;
  stand_in_parameters_set++;
  return OK;
}
int cuGraphLaunch(void* exec, void* stream) {
  MAY_FAIL();
  struct graph* g = exec;
  if (g->users++) stand_in_overlaps++;
  static _Thread_local char all[NODES * (TEXT + 64)];
  size_t at = 0;
  all[0] = 0;
  if (!stand_in_quiet)
    for (int i = 0; i < g->count; i++) at += (size_t)where(all + at, sizeof all - at, g->nodes[i].text, stream);
  note(all);
  g->users--;
  stand_in_graph_launches++;
  return OK;
}
