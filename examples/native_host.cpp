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
// native_host.h holds what is no news to a connector: PJRT's structures, files and the options' values.
#include <dlfcn.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <iostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "native_host.h"
#include "oeq.h"

namespace {

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
