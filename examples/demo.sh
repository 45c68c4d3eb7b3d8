#!/usr/bin/env bash
# From a model in JAX to kernels for a GPU, on any Linux machine with Rust and Python 3.11 or newer.
#
# usage: examples/demo.sh [ARCHITECTURE]      (sm_90 by default)
#
# Makes its own Python environment under target/, exports a MACE-like model with eight OpenEquivariance convolutions for
# CUDA, looks into the file, registers the handlers in a real CUDA PJRT plugin, and compiles the model's kernels side by
# side. Where a GPU is present it also runs the model and checks energy and forces; elsewhere it runs two smaller models on
# the CPU, in a plugin and without Python. Doing it again is quick.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../tests/setup.sh"
architecture=${1:-sm_90}
model=$ROOT/target/demo/model.jaxexport

need cargo "install Rust 1.85 or newer"
need cc "cargo links with it"
setup_plugin
setup_openequivariance "$(oeq_version)"

say "building oeq-native and its tool (release)"
cd "$ROOT"
quietly cargo build --release --features cli --lib --bins --example register_plugin
export OEQ_NATIVE_LIBRARY=$BUILD/release/liboeq_native.so OEQ_NVRTC
OEQ_NVRTC=$(nvrtc_path)
oeq_environment

say "exporting a model for CUDA, for a ${OEQ_DEVICE:-H200}"
OEQ_DEVICE=${OEQ_DEVICE:-H200} JAX_PLATFORMS=cpu "$PYTHON" "$ROOT/examples/export_model.py" "$(dirname "$model")"

say "what is in it"
"$BUILD/release/oeq" inspect "$model"

say "registering the handlers in $(basename "$PLUGIN") of $(requirements plugin.txt)"
"$BUILD/release/examples/register_plugin" "$PLUGIN"

say "compiling its kernels for $architecture"
"$BUILD/release/oeq" compile "$model" --arch "$architecture"

if have_gpu; then
  say "running the model on the GPU"
  runner=$(gpu_python)
  export XLA_PYTHON_CLIENT_PREALLOCATE=false JAX_PLATFORMS=cuda
  "$runner" "$ROOT/examples/export_model.py" "$(dirname "$model")" --run
else
  say "no GPU here: models like it on the CPU, in a plugin without Python, against their definition in double precision"
  quietly cargo build --release --example native_host
  cpu_plugin=$(OEQ_PYTHON=$PYTHON "$ROOT/tests/hosts/plugins.sh" lammps-jax-pjrt-cpu==0.11.2 2>/dev/null | awk '{ print $3 }')
  OEQ_DEVICE=${OEQ_DEVICE:-H200} JAX_PLATFORMS=cpu "$PYTHON" "$ROOT/tests/host/model.py" "$ROOT/target/demo/cpu" \
    "$BUILD/release/examples/native_host" "$cpu_plugin"
fi
