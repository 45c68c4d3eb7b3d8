// What native_host.cpp needs besides oeq.h: as much of PJRT's C API as it takes, models and .npy files, the options of a
// client. A connector that has XLA's pjrt_c_api.h uses that instead of the structures here.
#ifndef OEQ_EXAMPLES_NATIVE_HOST_H_
#define OEQ_EXAMPLES_NATIVE_HOST_H_

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// ---- As much of the PJRT C API as this takes. A size ends with the last field; tail padding does not count. ------------

using Function = void* (*)(void*);
struct Api {
  size_t struct_size;
  void* extensions;
  size_t version[3];
  Function functions[71];
};
enum Place {
  kErrorMessage = 1, kPluginInitialize = 3, kEventDestroy = 5, kEventAwait = 8, kClientCreate = 10,
  kClientPlatformName = 12, kClientAddressableDevices = 16, kClientCompile = 20, kBufferFromHostBuffer = 22,
  kNumOutputs = 44, kGetExecutable = 51, kExecute = 55, kBufferDestroy = 58, kElementType = 59, kDimensions = 60, kToHostBuffer = 70,
};
struct Head { size_t struct_size; void* extensions; };
struct ErrorMessage : Head { void* error; const char* message; size_t size; };
struct Initialize : Head {};
struct One : Head { void* object; };
struct Pointer : Head { void* object; void* answer; };
struct Array : Head { void* object; const void* items; size_t count; };
struct Type : Head { void* object; int32_t kind; };
struct NamedValue : Head { const char* name; size_t name_size; int32_t kind; uint64_t value; size_t value_size; };
struct Create : Head {
  const NamedValue* options; size_t option_count; void* callbacks[4]; void* client; void* later[8];
};
struct Program : Head { const char* code; size_t code_size; const char* format; size_t format_size; };
struct Compile : Head { void* client; const Program* program; const char* options; size_t options_size; void* executable; };
struct FromHost : Head {
  void* client; const void* data; int32_t kind; const int64_t* dimensions; size_t rank; void* strides[2];
  int32_t semantics; void* device; void* memory; void* layout; void* done; void* buffer;
};
struct ToHost : Head { void* buffer; void* layout; void* data; size_t size; void* done; };
struct ExecuteOptions : Head {
  void* callbacks[4]; int32_t launch_id; const int64_t* keep; size_t keep_count; void* later[9];
};
struct Execute : Head {
  void* executable; ExecuteOptions* options; void* const* const* arguments; size_t devices; size_t argument_count;
  void** const* outputs; void** done; void* device;
};

const Api* api = nullptr;

template <class Arguments>
void Call(Place place, Arguments& arguments, size_t size = sizeof(Arguments)) {
  arguments.struct_size = size;
  void* error = api->functions[place](&arguments);
  if (error == nullptr) return;
  ErrorMessage question{};
  question.struct_size = sizeof question;
  question.error = error;
  api->functions[kErrorMessage](&question);
  throw std::runtime_error(std::string(question.message, question.size));  // The program ends; the error goes with it.
}

void Wait(void* event) {
  One one{};
  one.object = event;
  Call(kEventAwait, one);
  Call(kEventDestroy, one);
}

// ---- Files -------------------------------------------------------------------------------------------------------------

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

template <class T>
T At(const std::string& bytes, size_t at) {
  T value;
  if (bytes.size() < sizeof value || at > bytes.size() - sizeof value) throw std::runtime_error("the file is cut short");
  std::memcpy(&value, bytes.data() + at, sizeof value);
  return value;
}

// The module of a jax.export artifact, and which arguments it has; other files are modules themselves. A flatbuffer:
// the root table lies where the first word says, its vtable a signed distance before it, field n's offset at vtable + 4
// + 2n.
std::string Module(const std::string& file, std::vector<size_t>* kept) {
  const std::string magic = "ML\xefR";
  const bool text = file.find('\0') == std::string::npos;
  if (text || file.compare(0, 4, magic) == 0) return file;
  const size_t table = At<uint32_t>(file, 0), vtable = table - At<int32_t>(file, table);
  const auto vector = [&](size_t field) {
    const size_t start = table + At<uint16_t>(file, vtable + 4 + 2 * field);
    return start + At<uint32_t>(file, start);
  };
  if (At<uint32_t>(file, vector(9)) != 1) throw std::runtime_error("export the model for one platform");
  const size_t indices = vector(15), module = vector(13);
  kept->clear();
  for (size_t i = 0; i < At<uint32_t>(file, indices); ++i) kept->push_back(At<uint16_t>(file, indices + 4 + 2 * i));
  std::string code = file.substr(module + 4, At<uint32_t>(file, module));
  if (code.compare(0, 4, magic) != 0) throw std::runtime_error("neither StableHLO nor an artifact of jax.export");
  return code;
}

struct Element { const char* name; size_t bytes; int32_t kind; };
constexpr Element kElements[] = {{"|b1", 1, 1}, {"|i1", 1, 2}, {"<i4", 4, 4}, {"<i8", 8, 5}, {"|u1", 1, 6},
                                 {"<u4", 4, 8}, {"<u8", 8, 9}, {"<f4", 4, 11}, {"<f8", 8, 12}};

struct Npy {
  int32_t kind = 0;
  std::vector<int64_t> dimensions;
  std::string data;
};

Npy ReadNpy(const std::string& path) {
  const std::string file = Read(path);
  if (file.compare(0, 7, "\x93NUMPY\x01") != 0) throw std::runtime_error(path + " is not an .npy file of version 1");
  const size_t size = At<uint16_t>(file, 8);
  const std::string header = file.substr(10, size);
  Npy array;
  size_t count = 1;
  for (const Element& element : kElements) {
    if (header.find(std::string("'") + element.name + "'") == std::string::npos) continue;
    array.kind = element.kind;
    count = element.bytes;
  }
  if (array.kind == 0 || header.find("'fortran_order': False") == std::string::npos) {
    throw std::runtime_error(path + ": elements of another type, or columns first: " + header);
  }
  const char* at = header.c_str() + header.find('(') + 1;
  for (char* end = nullptr; *at != ')' && *at != 0; at = end + (*end == ',' || *end == ' ')) {
    array.dimensions.push_back(std::strtoll(at, &end, 10));
    if (end == at) { array.dimensions.pop_back(); ++end; } else { count *= static_cast<size_t>(array.dimensions.back()); }
  }
  array.data = file.substr(10 + size, count);
  if (array.data.size() != count) throw std::runtime_error(path + " is cut short");
  return array;
}

void WriteNpy(const std::string& path, const Npy& array) {
  std::string header;
  for (const Element& element : kElements) {
    if (element.kind == array.kind) header = std::string("{'descr': '") + element.name + "', 'fortran_order': False, 'shape': (";
  }
  if (header.empty()) throw std::runtime_error("no NumPy type for PJRT's element type " + std::to_string(array.kind));
  for (int64_t dimension : array.dimensions) header += std::to_string(dimension) + ",";
  header += ")}";
  header.resize((10 + header.size() + 64) / 64 * 64 - 11, ' ');
  header += '\n';
  const auto size = static_cast<uint16_t>(header.size());
  std::ofstream file(path, std::ios::binary);
  file.write("\x93NUMPY\x01\x00", 8).write(reinterpret_cast<const char*>(&size), 2) << header << array.data;
  if (!file) throw std::runtime_error("cannot write " + path);
}

double Lap() {
  static auto last = std::chrono::steady_clock::now();
  const auto now = std::chrono::steady_clock::now();
  const double passed = std::chrono::duration<double, std::milli>(now - last).count();
  last = now;
  return passed;
}

// An option of a client. Plugins insist on its type, which is told by the look: true, 3, 0.5, anything else.
NamedValue ClientOption(const char* text) {
  const char* value = std::strchr(text, '=');
  if (value == nullptr) throw std::runtime_error("--client takes NAME=VALUE");
  NamedValue option{};
  option.struct_size = sizeof option;
  option.name = text;
  option.name_size = static_cast<size_t>(value++ - text);
  option.value_size = 1;
  char *integer_end = nullptr, *real_end = nullptr;
  const int64_t integer = std::strtoll(value, &integer_end, 10);
  const float real = std::strtof(value, &real_end);
  if (std::strcmp(value, "true") == 0 || std::strcmp(value, "false") == 0) {
    option.kind = 4;
    option.value = *value == 't';
  } else if (*value != 0 && *integer_end == 0) {
    option.kind = 1;
    option.value = static_cast<uint64_t>(integer);
  } else if (*value != 0 && *real_end == 0) {
    option.kind = 3;
    std::memcpy(&option.value, &real, sizeof real);
  } else {
    option.kind = 0;
    option.value = reinterpret_cast<uintptr_t>(value);
    option.value_size = std::strlen(value);
  }
  return option;
}

}  // namespace

#endif  // OEQ_EXAMPLES_NATIVE_HOST_H_
