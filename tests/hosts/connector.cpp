// Does what chemtrain-deploy's connector does in a LAMMPS process: learns the FFI api of a PJRT plugin, opens the
// handler library with RTLD_LOCAL, calls its RegisterFFi, expects 0 and keeps it open. A plugin from before jaxlib
// 0.8.1 does not show its api, and is passed itself to oeq_register_pjrt.
//
// usage: connector PLUGIN.so LIBRARY.so
#include <dlfcn.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

namespace {

struct Extension { size_t struct_size; int32_t kind; Extension* next; };
struct Api { size_t struct_size; Extension* extensions; };
struct HandlerArgs {
  size_t struct_size; const char* name; size_t name_size; void* handler; const char* platform; size_t platform_size;
  uint32_t traits;
};
struct FfiExtension : Extension { void* type_register; void* user_data_add; void* (*register_handler)(HandlerArgs*); };
struct Metadata { size_t struct_size; size_t version_size; void* extensions; int32_t major; int32_t minor; };
struct MetadataExtension : Extension { Metadata* metadata; };
struct Frame { size_t struct_size; MetadataExtension* extensions; void* api; };

void* ffi_api = nullptr;

// XLA asks every new handler for its metadata, in a frame that carries the api. Version 0.0 makes XLA drop this one.
void* Listen(Frame* frame) {
  ffi_api = frame->api;
  frame->extensions->metadata->major = frame->extensions->metadata->minor = 0;
  return nullptr;
}

int Fail(const char* what) {
  std::fprintf(stderr, "connector: %s\n", what);
  return 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return Fail("usage: connector PLUGIN.so LIBRARY.so");
  void* plugin = dlopen(argv[1], RTLD_NOW | RTLD_LOCAL);
  if (plugin == nullptr) return Fail(dlerror());
  auto* api = reinterpret_cast<const Api* (*)()>(dlsym(plugin, "GetPjrtApi"))();
  Extension* extension = api->extensions;
  while (extension != nullptr && extension->kind != 5) extension = extension->next;
  if (extension == nullptr) return Fail("the plugin has no FFI extension");
  const bool shows = extension->struct_size >= sizeof(FfiExtension);
  HandlerArgs args{offsetof(HandlerArgs, traits) + sizeof(uint32_t), "connector", 9, reinterpret_cast<void*>(Listen), "CUDA", 4, 0};
  if (shows) static_cast<FfiExtension*>(extension)->register_handler(&args);

  const auto begun = std::chrono::steady_clock::now();
  void* library = dlopen(argv[2], RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return Fail(dlerror());
  using Register = int (*)(const void*, const char*);
  const char* const name = ffi_api != nullptr ? "RegisterFFi" : "oeq_register_pjrt";
  const auto register_ffi = reinterpret_cast<Register>(dlsym(library, name));
  if (register_ffi == nullptr) return Fail(dlerror());
  const void* const target = ffi_api != nullptr ? ffi_api : static_cast<const void*>(api);
  const auto last_error = reinterpret_cast<const char* (*)()>(dlsym(library, "oeq_last_error"));
  if (register_ffi(target, "CUDA") != 0) return Fail(last_error());
  const std::chrono::duration<double, std::milli> time = std::chrono::steady_clock::now() - begun;
  std::printf("%.2f ms from dlopen to registered, by %s\n", time.count(), name);
  if (register_ffi(target, "CUDA") != 0) return Fail("the second registration failed");
  if (register_ffi(target, "CUDDA") == 0) return Fail("a platform that does not exist was taken");
  // What was opened locally does not leak into the program's symbols.
  if (dlsym(RTLD_DEFAULT, "conv_forward") != nullptr) return Fail("symbols of the library are visible to the program");
  // Even a connector that closes its handle does not take the handlers away from XLA.
  dlclose(library);
  if (dlopen(argv[2], RTLD_NOW | RTLD_NOLOAD) == nullptr) return Fail("the library was unloaded");
  return 0;
}
