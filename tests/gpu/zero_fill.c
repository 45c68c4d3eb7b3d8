/* The zeroing kernel on a real device: bit-exact zeros and untouched neighbours for many sizes and alignments, and what it
 * costs beside memsets, on the host and on the device.
 * usage: zero_fill zero_fill.ptx      (cc -O2 zero_fill.c -ldl) */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef unsigned long long Address;
typedef struct { Address address[4], bytes[4], count; } Regions;

static int (*Init)(unsigned), (*DeviceGet)(int*, int), (*Retain)(void**, int), (*SetCurrent)(void*);
static int (*Attribute)(int*, int, int), (*Load)(void**, const void*), (*Function)(void**, void*, const char*);
static int (*Alloc)(Address*, size_t), (*Memset)(Address, unsigned char, size_t, void*), (*StreamCreate)(void**, unsigned);
static int (*Sync)(void*), (*Download)(void*, Address, size_t), (*EventCreate)(void**, unsigned), (*EventRecord)(void*, void*);
static int (*Elapsed)(float*, void*, void*);
static int (*Launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void*, void**, void**);

static void check(int status, const char* what) {
  if (status) { fprintf(stderr, "%s: CUDA status %d\n", what, status); exit(1); }
}
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec * 1e9 + t.tv_nsec; }
static int by_value(const void* a, const void* b) { double x = *(double*)a, y = *(double*)b; return (x > y) - (x < y); }

static void* function;
static void* stream;
static int multiprocessors;

static int fill(const Regions* regions) {
  unsigned long long most = 0;
  for (unsigned i = 0; i < regions->count; i++) if (regions->bytes[i] > most) most = regions->bytes[i];
  unsigned long long blocks = (most / 16 + 255) / 256;
  if (blocks < 1) blocks = 1;
  if (blocks > 8ull * multiprocessors) blocks = 8ull * multiprocessors;
  void* parameters[1] = {(void*)regions};
  return Launch(function, (unsigned)blocks, 1, 1, 256, 1, 1, 0, stream, parameters, NULL);
}

#define SAMPLES 60
static double host(int memsets, const Regions* regions, int repeats, double* device_us) {
  double ns[SAMPLES];
  void *start, *stop;
  check(EventCreate(&start, 0) | EventCreate(&stop, 0), "events");
  for (int s = 0; s < SAMPLES; s++) {
    double t = now();
    for (int i = 0; i < repeats; i++) {
      if (memsets) for (unsigned r = 0; r < regions->count; r++) check(Memset(regions->address[r], 0, regions->bytes[r], stream), "memset");
      else check(fill(regions), "launch");
    }
    ns[s] = (now() - t) / repeats;
    check(Sync(stream), "sync");
  }
  qsort(ns, SAMPLES, sizeof *ns, by_value);
  check(EventRecord(start, stream), "event");
  for (int i = 0; i < 20; i++) {
    if (memsets) for (unsigned r = 0; r < regions->count; r++) Memset(regions->address[r], 0, regions->bytes[r], stream);
    else fill(regions);
  }
  check(EventRecord(stop, stream) | Sync(stream), "event");
  float ms;
  check(Elapsed(&ms, start, stop), "elapsed");
  *device_us = ms * 1e3 / 20;
  return ns[SAMPLES / 2];
}

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  void* cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) { fprintf(stderr, "%s\n", dlerror()); return 1; }
#define FIND(variable, name) if (!(*(void**)&variable = dlsym(cuda, name))) { fprintf(stderr, "no %s\n", name); return 1; }
  FIND(Init, "cuInit") FIND(DeviceGet, "cuDeviceGet") FIND(Retain, "cuDevicePrimaryCtxRetain") FIND(SetCurrent, "cuCtxSetCurrent")
  FIND(Attribute, "cuDeviceGetAttribute") FIND(Load, "cuModuleLoadData") FIND(Function, "cuModuleGetFunction")
  FIND(Alloc, "cuMemAlloc_v2") FIND(Memset, "cuMemsetD8Async") FIND(StreamCreate, "cuStreamCreate") FIND(Sync, "cuStreamSynchronize")
  FIND(Download, "cuMemcpyDtoH_v2") FIND(EventCreate, "cuEventCreate") FIND(EventRecord, "cuEventRecord")
  FIND(Elapsed, "cuEventElapsedTime") FIND(Launch, "cuLaunchKernel")
  int device; void *context, *module;
  check(Init(0) | DeviceGet(&device, 0) | Retain(&context, device) | SetCurrent(context), "device");
  check(Attribute(&multiprocessors, 16, device), "multiprocessors");
  FILE* file = fopen(argv[1], "rb");
  if (!file) { perror(argv[1]); return 1; }
  static char ptx[1 << 20];
  ptx[fread(ptx, 1, sizeof ptx - 1, file)] = 0;
  check(Load(&module, ptx), "load PTX");
  check(Function(&function, module, "oeq_zero_fill"), "function");
  check(StreamCreate(&stream, 1), "stream");

  const size_t room = 1ull << 30;
  Address memory;
  check(Alloc(&memory, room), "allocate");

  /* Exactness: four regions with guards around each, odd sizes and alignments. */
  const size_t sizes[] = {0, 1, 3, 15, 16, 17, 31, 33, 255, 4096, 4099, 65537, 1000003, 3 << 20};
  const int n_sizes = sizeof sizes / sizeof *sizes;
  const size_t window = 4 << 20;
  unsigned char* back = malloc(4 * window);
  int cases = 0;
  for (int a = 0; a < n_sizes; a++)
    for (int align = 0; align < 16; align += (a < 10 ? 1 : 5)) {
      Regions regions = {.count = 1 + (a + align) % 4};
      check(Memset(memory, 0xa5, 4 * window, stream), "poison");
      for (unsigned r = 0; r < regions.count; r++) {
        regions.address[r] = memory + r * window + 64 + (align + 3 * r) % 16;
        regions.bytes[r] = sizes[(a + 5 * r) % n_sizes];
      }
      check(fill(&regions) | Sync(stream) | Download(back, memory, 4 * window), "fill");
      for (unsigned r = 0; r < 4; r++) {
        const size_t first = r < regions.count ? regions.address[r] - memory - r * window : 0;
        const size_t bytes = r < regions.count ? regions.bytes[r] : 0;
        for (size_t i = 0; i < window; i++) {
          const unsigned char want = r < regions.count && i >= first && i < first + bytes ? 0 : 0xa5;
          if (back[r * window + i] != want) {
            printf("region %u of %zu bytes at offset %zu: byte %zu is %02x, expected %02x\n", r, bytes, first, i, back[r * window + i], want);
            return 1;
          }
        }
      }
      cases++;
    }
  printf("zero_fill: %d cases of up to four regions: exact, neighbours untouched\n", cases);

  printf("%10s %2s | %21s | %21s\n", "bytes each", "n", "host ns memset kernel", "device us memset kernel");
  for (size_t bytes = 256; bytes <= 128u << 20; bytes *= 4)
    for (unsigned n = 1; n <= 4; n++) {
      Regions regions = {.count = n};
      for (unsigned r = 0; r < n; r++) { regions.address[r] = memory + r * (room / 4); regions.bytes[r] = bytes; }
      double dm, dk, hm = host(1, &regions, 20, &dm), hk = host(0, &regions, 20, &dk);
      printf("%10zu %2u | %10.0f %10.0f | %10.2f %10.2f\n", bytes, n, hm, hk, dm, dk);
    }
  puts("RESULT zero_fill ok");
  return 0;
}
