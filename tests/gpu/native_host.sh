#!/usr/bin/env bash
# A model with eight convolutions in native hosts on a GPU, against jax: outputs and time per step.
#
# Exports the model of examples/export_model.py with and without deterministic sums, runs it in jax, in
# examples/native_host (Rust) and in examples/native_host.cpp through the machine's own CUDA plugin, these with no
# Python in the process, with XLA's command buffers on and off, and in the Rust host with plain symbols and no state
# too. Outputs must agree to 1e-6 of their largest element, those of deterministic sums bit for bit. For the time per
# step the programs take turns (turns.py, which says what is allowed), each with what jax's own autotuner chose, so that
# all of them run the same kernels. A step is the call and the wait for its end; nothing is copied to the host. Takes 3
# minutes.
#
# PLATFORM=cpu does the same on the CPU, with a small model and a few steps: for trying out the script. Times are told,
# not judged there, and bits are not asked for, since jax's own XLA is another build than the plugin's.
#
# env (defaults: the folder .carry at the project's root, then the project's own build)
#   OEQ_NATIVE_LIBRARY  liboeq_native.so
#   NATIVE_HOST         the Rust host, a release build: cargo build --release --example native_host
#   OEQ_PACKAGE         folder that holds OpenEquivariance's package `openequivariance`
#   PLATFORM            cuda or cpu (cuda)
#   PLUGIN              the plugin; by default the CUDA one of PYTHON's jax
#   PYTHON              python3 with jax for the platform, and jinja2
#   STEPS, ROUNDS       steps in a round (200; cpu 20), rounds (5)
#   KINDS, BUFFERS      what to run ("atomic deterministic", "on off"; cpu "on")
#   MODEL               options of export_model.py (cpu "--channels 4 --atoms 16 --layers 2")
#   OUT                 folder for the logs
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
first() { for p in "$@"; do [[ -e $p ]] && { echo "$p"; return; }; done; echo "$1"; }
PYTHON=${PYTHON:-python3}
platform=${PLATFORM:-cuda}
rounds=${ROUNDS:-5}
built=${CARGO_TARGET_DIR:-$root/target}/release
export OEQ_NATIVE_LIBRARY=${OEQ_NATIVE_LIBRARY:-$(first "$root/.carry/liboeq_native.so" "$built/liboeq_native.so")}
host=${NATIVE_HOST:-$(first "$root/.carry/native_host" "$built/examples/native_host")}
package=${OEQ_PACKAGE:-$root/.carry/package}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
out=${OUT:-$work/logs} && mkdir -p "$out"
# The kernels are compiled once, by the first, and nothing goes to the user's store.
export OEQ_STORE_DIR=${OEQ_STORE_DIR:-$work/store}
export OEQ_NOTORCH=1 XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2
pythonpath=$root/ffi-headers/python:$package
failed=0
: >"$out/native_host.log"
tell() { echo "$*" | tee -a "$out/native_host.log"; }
# The last line of a log that tells of an error; else its last line.
reason() { { grep -iE 'error' "$1" || tail -n 1 "$1"; } | tail -n 1 | cut -c1-300; }
bad() { tell "RESULT FAILED: $1"; failed=$((failed + 1)); }

data= client=()
if [[ $platform == cpu ]]; then
  export JAX_PLATFORMS=cpu OEQ_DEVICE=${OEQ_DEVICE:-H200}
  steps=${STEPS:-20} buffers=${BUFFERS:-on} judge=()
  read -ra model_options <<<"${MODEL:---channels 4 --atoms 16 --layers 2}"
  plugin=${PLUGIN:?PLUGIN names a CPU plugin}
  tell "on the CPU; plugin $plugin"
else
  steps=${STEPS:-200} buffers=${BUFFERS:-on off} judge=(--judge)
  # A client takes the memory that it needs: by default the first would leave none to the others.
  client=(--client preallocate=false)
  read -ra model_options <<<"${MODEL:-}"
  site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  plugin=${PLUGIN:-$(first "$site"/jax_plugins/xla_cuda1*/xla_cuda_plugin.so)}
  # What jax tells XLA and us in its own process, a native host says itself: where libdevice and NVRTC are.
  libdevice=$(find "$site/nvidia" /usr/local/cuda -name libdevice.10.bc 2>/dev/null | head -n 1)
  data=${libdevice:+--xla_gpu_cuda_data_dir=${libdevice%/nvvm/libdevice/*}}
  [[ -n ${OEQ_NVRTC:-} ]] || OEQ_NVRTC=$(find "$site/nvidia" /usr/local/cuda/lib64 -name 'libnvrtc.so.*' 2>/dev/null |
    grep -v builtins | head -n 1)
  export OEQ_NVRTC
  tell "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 | head -n 1)"
  tell "plugin $plugin; NVRTC $OEQ_NVRTC"
fi
for file in "$plugin" "$host" "$OEQ_NATIVE_LIBRARY"; do [[ -e $file ]] || { tell "there is no $file"; exit 1; }; done

"${CXX:-c++}" -std=c++17 -O2 -I"$root/ffi-headers" "$root/examples/native_host.cpp" "$OEQ_NATIVE_LIBRARY" \
  -Wl,-rpath,"$(dirname "$OEQ_NATIVE_LIBRARY")" -ldl -o "$work/native_host_cpp" || bad "native_host.cpp does not build"

# compare LABEL EXPECTED FOUND TOLERANCE
compare() {
  local what
  if what=$("$PYTHON" "$root/tests/hosts/compare.py" "$2" "$3" "$4" 2>&1 | tail -n 1) && [[ $what == *outputs,* ]]; then
    tell "RESULT ok: $1: $what"
  else
    bad "$1: $what"
  fi
}

export_model() { # KIND [OPTION ...]
  local kind=$1
  shift
  OEQ_DEVICE=${OEQ_DEVICE:-} JAX_PLATFORMS=cpu PYTHONPATH=$pythonpath timeout 200 "$PYTHON" \
    "$root/examples/export_model.py" "$work/$kind" "${model_options[@]}" "$@" >"$out/export_$kind.log" 2>&1
}

kinds=${KINDS:-atomic deterministic}
pids=()
for kind in $kinds; do
  options=()
  [[ $kind == deterministic ]] && options=(--deterministic)
  export_model "$kind" "${options[@]}" & pids+=($!)
done
for pid in "${pids[@]}"; do wait "$pid"; done

for kind in $kinds; do
  model=$work/$kind tolerance=1e-6 exact=
  if [[ ! -e $model/manifest.json ]]; then
    bad "$kind: not exported: $(reason "$out/export_$kind.log")"
    continue
  fi
  if [[ $kind == deterministic && $platform != cpu ]]; then
    # Bits are only equal if XLA's own scatters and its choice of matrix products are, too.
    tolerance=0 exact="--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0 "
  fi
  mapfile -t inputs < <("$PYTHON" -c 'import json, sys
for entry in json.load(open(sys.argv[1] + "/manifest.json"))["inputs"]: print(sys.argv[1] + "/inputs/" + entry["name"] + ".npy")' "$model")
  for state in $buffers; do
    label="$kind, command buffers $state" logs=$out/${kind}_$state found=$work/found_${kind}_$state
    mkdir -p "$logs" "$found"/{rust,plain,cpp} "$work/autotune_${kind}_$state"
    # jax comes first and writes down what it found fastest; the others read it.
    flags="$exact--xla_gpu_per_fusion_autotune_cache_dir=$work/autotune_${kind}_$state"
    [[ $state == off ]] && flags="$flags --xla_gpu_enable_command_buffer="
    arguments=("$plugin" "$model/model.jaxexport" "${inputs[@]}" --repeat "$steps" --rounds "${client[@]}")
    native=(env "XLA_FLAGS=$flags${data:+ $data}")
    tell "$label: $rounds rounds of $steps steps each"
    "$PYTHON" "$here/turns.py" --rounds "$rounds" --limit 150 --logs "$logs" "${judge[@]}" \
      --host jax env "XLA_FLAGS=$flags" "PYTHONPATH=$pythonpath" "$PYTHON" "$here/native_host.py" \
      "$model" "$found/jax" "$steps" \
      --host "Rust host" "${native[@]}" "$host" "${arguments[@]}" --out "$found/rust" \
      --host "C++ host" "${native[@]}" "$work/native_host_cpp" "${arguments[@]}" --out "$found/cpp" \
      --beside "Rust host, plain symbols" "${native[@]}" "$host" "${arguments[@]}" \
      --symbols "$OEQ_NATIVE_LIBRARY" --out "$found/plain" >"$logs/turns.log" 2>&1 || failed=$((failed + 1))
    tee -a "$out/native_host.log" <"$logs/turns.log"
    grep -hE '^(opened|registered|client|compiled|first step)' "$logs"/*ost*.log >>"$out/native_host.log"
    [[ -e $found/jax/output_0.npy ]] || continue
    compare "$label, Rust host" "$found/jax" "$found/rust" "$tolerance"
    compare "$label, C++ host" "$found/jax" "$found/cpp" "$tolerance"
    compare "$label, Rust host, plain symbols" "$found/jax" "$found/plain" "$tolerance"
  done
done
tell "native_host: $failed failed, $SECONDS s"
[[ $failed -eq 0 ]]
