// Runs a model with OpenEquivariance kernels in a PJRT plugin, from C++: no Python in the process, no XLA linked in.
//
// usage: native_host PLUGIN.so MODEL [INPUT.npy ...] [--repeat N [--rounds]] [--out FOLDER] [--client NAME=VALUE ...]
//
// MODEL is an artifact of jax.export, StableHLO bytecode or StableHLO text. Outputs are written to output_0.npy and so
// on in FOLDER, which is there. --repeat times N steps after the first; with --rounds a round of N steps is run for
// each line on standard input, so that several hosts can take turns on one device. --client is an option of the
// plugin's clients: without preallocate=false or memory_fraction=0.2 a GPU's client takes three quarters of the memory.
// Build it with
//   c++ -std=c++17 native_host.cpp $(pkg-config --cflags --libs oeq_native) -ldl
// A connector that has XLA's pjrt_c_api.h uses that instead of the structures below.
#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "oeq.h"

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

const char* const kUsage =
    "usage: native_host PLUGIN.so MODEL [INPUT.npy ...] [--repeat N [--rounds]] [--out FOLDER] "
    "[--client NAME=VALUE ...]";

void Run(int argc, char** argv) {
  std::vector<std::string> paths;
  std::string out = ".";
  std::vector<NamedValue> client_options;
  size_t repeat = 0;
  bool rounds = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    const auto value = [&] { return ++i < argc ? argv[i] : throw std::runtime_error(argument + " takes a value"); };
    if (argument == "--repeat") repeat = std::stoul(value());
    else if (argument == "--rounds") rounds = true;
    else if (argument == "--out") out = value();
    else if (argument == "--client") client_options.push_back(ClientOption(value()));
    else if (argument.compare(0, 2, "--") == 0) throw std::runtime_error("unknown option " + argument + "\n" + kUsage);
    else paths.push_back(argument);
  }
  if (paths.size() < 2) throw std::runtime_error(kUsage);
  const std::string plugin = paths[0], model = paths[1];
  const std::vector<std::string> inputs(paths.begin() + 2, paths.end());
  std::setvbuf(stdout, nullptr, _IOLBF, 0);  // Whoever reads along, from a pipe too, sees every line at once.
  Lap();
  void* library = dlopen(plugin.c_str(), RTLD_NOW | RTLD_LOCAL);  // Never closed: handlers stay registered in it.
  if (library == nullptr) throw std::runtime_error(dlerror());
  const auto get = reinterpret_cast<const Api* (*)()>(dlsym(library, "GetPjrtApi"));
  if (get == nullptr || (api = get()) == nullptr) throw std::runtime_error("not a PJRT plugin");
  std::printf("opened      %s in %.3f ms\n", plugin.c_str(), Lap());

  Initialize initialize{};
  Call(kPluginInitialize, initialize);
  Create create{};
  create.options = client_options.data();
  create.option_count = client_options.size();
  Call(kClientCreate, create);
  Array devices{};
  devices.object = create.client;
  Call(kClientAddressableDevices, devices);
  if (devices.count == 0) throw std::runtime_error("the client has no device");
  void* const device = *static_cast<void* const*>(devices.items);
  Array name{};
  name.object = create.client;
  Call(kClientPlatformName, name);
  const std::string platform(static_cast<const char*>(name.items), name.count);
  std::printf("client      of platform %s in %.3f ms\n", platform.c_str(), Lap());

  // The one call that this example is about. It may as well come first: before a client exists,
  // "CUDA" is said instead of the client's platform.
  const OeqStatus status = oeq_register_pjrt(reinterpret_cast<const PJRT_Api*>(api), platform.c_str());
  OeqRegistration registration{};
  registration.struct_size = sizeof registration;
  if (oeq_registration_results(&registration) == OEQ_OK) {
    for (uint64_t i = 0; i < registration.target_count; ++i) {
      const OeqTargetResult& target = registration.targets[i];
      if (target.outcome == OEQ_TARGET_REFUSED) std::fprintf(stderr, "%s: %s\n", target.name, target.reason);
    }
  }
  if (status != OEQ_OK) throw std::runtime_error(oeq_last_error());
  std::printf("registered  %zu targets through the %s in %.3f ms\n", static_cast<size_t>(registration.target_count),
              registration.door_name, Lap());

  std::vector<size_t> kept(inputs.size());
  for (size_t i = 0; i < kept.size(); ++i) kept[i] = i;
  const std::string code = Module(Read(model), &kept);
  // A CompileOptionsProto: executable_build_options {device_ordinal: -1, num_replicas: 1, num_partitions: 1}.
  const std::string options("\x1a\x0f\x08\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01\x20\x01\x28\x01");
  Program program{};
  program.struct_size = sizeof program;
  program.code = code.data();
  program.code_size = code.size();
  program.format = "mlir";
  program.format_size = 4;
  Compile compile{};
  compile.client = create.client;
  compile.program = &program;
  compile.options = options.data();
  compile.options_size = options.size();
  Call(kClientCompile, compile);
  Pointer executable{}, outputs{};
  executable.object = compile.executable;
  Call(kGetExecutable, executable);
  outputs.object = executable.answer;
  Call(kNumOutputs, outputs);
  std::printf("compiled    %s in %.3f ms\n", model.c_str(), Lap());

  std::vector<void*> arguments;
  for (size_t index : kept) {
    if (index >= inputs.size()) throw std::runtime_error("the model takes more inputs");
    const Npy array = ReadNpy(inputs[index]);
    FromHost upload{};
    upload.client = create.client;
    upload.data = array.data.data();
    upload.kind = array.kind;
    upload.dimensions = array.dimensions.data();
    upload.rank = array.dimensions.size();
    upload.semantics = 1;  // The data must not change until `done`.
    upload.device = device;
    Call(kBufferFromHostBuffer, upload);
    Wait(upload.done);
    arguments.push_back(upload.buffer);
  }
  std::printf("uploaded    %zu inputs in %.3f ms\n", arguments.size(), Lap());

  // All of this is made once; a step only runs it.
  std::vector<int64_t> keep(arguments.size());  // Inputs are used again, so none is donated.
  for (size_t i = 0; i < keep.size(); ++i) keep[i] = static_cast<int64_t>(i);
  std::vector<void*> results(reinterpret_cast<size_t>(outputs.answer));
  ExecuteOptions how{};
  how.struct_size = sizeof how;
  how.keep = keep.data();
  how.keep_count = keep.size();
  void* done = nullptr;
  void* const* argument_list = arguments.data();
  void** result_list = results.data();
  Execute execute{};
  execute.executable = compile.executable;
  execute.options = &how;
  execute.arguments = &argument_list;
  execute.devices = 1;
  execute.argument_count = arguments.size();
  execute.outputs = &result_list;
  execute.done = &done;
  // The one event of the whole execution is waited for: the outputs are there then, and an error in any of them is
  // told. Waiting for each output instead costs an event and a callback of the device each. Outputs go before the next
  // ones are made: XLA then finds the same memory again, and what it has recorded in command buffers for these
  // addresses stays good.
  const auto step = [&] {
    for (void*& result : results) {
      One one{};
      one.object = result;
      if (result != nullptr) Call(kBufferDestroy, one);
      result = nullptr;
    }
    Call(kExecute, execute);
    Wait(done);
  };
  // Some steps come first that are not timed: caches and clocks have to wake up.
  const auto steps = [&](const std::string& label) {
    std::vector<double> times;
    for (size_t i = 0; i < repeat / 10; ++i) step();
    Lap();
    for (size_t i = 0; i < repeat; ++i) {
      step();
      times.push_back(Lap());
    }
    if (times.empty()) times.push_back(0);
    std::sort(times.begin(), times.end());
    const auto at = [&](size_t tenths) { return times[tenths * (times.size() - 1) / 10]; };
    std::printf("%-11s %.3f ms median, %.3f ms least, %.3f ms tenth, %.3f ms nine tenths of %zu steps\n", label.c_str(),
                at(5), at(0), at(1), at(9), repeat);
  };
  step();
  std::printf("first step  %.3f ms\n", Lap());
  if (rounds) {
    int round = 0;
    for (std::string line; std::getline(std::cin, line);) steps("round " + std::to_string(++round));
  } else if (repeat > 0) {
    steps("per step");
  }

  for (size_t i = 0; i < results.size(); ++i) {
    Type type{};
    type.object = results[i];
    Call(kElementType, type, sizeof(Head) + sizeof type.object + sizeof type.kind);
    Array shape{};
    shape.object = results[i];
    Call(kDimensions, shape);
    ToHost copy{};
    copy.buffer = results[i];
    Call(kToHostBuffer, copy);  // Without a place to copy to it answers the size.
    Npy array;
    array.kind = type.kind;
    const auto* dimensions = static_cast<const int64_t*>(shape.items);
    array.dimensions.assign(dimensions, dimensions + shape.count);
    array.data.resize(copy.size);
    copy.data = &array.data[0];
    Call(kToHostBuffer, copy);
    Wait(copy.done);
    WriteNpy(out + "/output_" + std::to_string(i) + ".npy", array);
  }
}

}  // namespace

int main(int argc, char** argv) {
  try {
    Run(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}
