#!/usr/bin/env bash
# A model with eight convolutions in native hosts on a GPU, against jax: outputs and time per step.
#
# Exports the model of examples/export_model.py with and without deterministic sums, runs it in jax, then in
# examples/native_host (Rust) and examples/native_host.cpp through the machine's own CUDA plugin, with no Python in the
# process: through the best door, with plain symbols and no state, and with XLA's command buffers on and off. Outputs must
# agree to 1e-6 of their largest element, those of deterministic sums bit for bit. Takes about 5 minutes.
#
# env (defaults: the folder .carry at the project's root, then the project's own build)
#   OEQ_NATIVE_LIBRARY  liboeq_native.so
#   NATIVE_HOST         the Rust host, a release build: cargo build --release --example native_host
#   OEQ_PACKAGE         folder that holds OpenEquivariance's package `openequivariance`
#   PLUGIN              the CUDA plugin; by default the one of PYTHON's jax
#   PYTHON              python3 with jax for CUDA and jinja2
#   STEPS               steps to time (200)
#   KINDS, BUFFERS      what to run ("atomic deterministic", "on off")
#   OUT                 folder for the logs
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
first() { for p in "$@"; do [[ -e $p ]] && { echo "$p"; return; }; done; echo "$1"; }
PYTHON=${PYTHON:-python3}
steps=${STEPS:-200}
built=${CARGO_TARGET_DIR:-$root/target}/release
export OEQ_NATIVE_LIBRARY=${OEQ_NATIVE_LIBRARY:-$(first "$root/.carry/liboeq_native.so" "$built/liboeq_native.so")}
host=${NATIVE_HOST:-$(first "$root/.carry/native_host" "$built/examples/native_host")}
package=${OEQ_PACKAGE:-$root/.carry/package}
work=$(mktemp -d)
out=${OUT:-$work} && mkdir -p "$out"
export OEQ_NOTORCH=1 XLA_PYTHON_CLIENT_PREALLOCATE=false TF_CPP_MIN_LOG_LEVEL=2
pythonpath=$root/ffi-headers/python:$package
failed=0
tell() { echo "$*" | tee -a "$out/native_host.log"; }
# The last line of a log that tells of an error; else its last line.
reason() { { grep -iE 'error' "$1" || tail -n 1 "$1"; } | tail -n 1 | cut -c1-300; }
bad() { tell "RESULT FAILED: $1"; failed=$((failed + 1)); }

site=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
plugin=${PLUGIN:-$(first "$site"/jax_plugins/xla_cuda1*/xla_cuda_plugin.so)}
# What jax tells XLA and us in its own process, a native host says itself: where libdevice and NVRTC are.
libdevice=$(find "$site/nvidia" /usr/local/cuda -name libdevice.10.bc 2>/dev/null | head -n 1)
data=${libdevice:+--xla_gpu_cuda_data_dir=${libdevice%/nvvm/libdevice/*}}
[[ -n ${OEQ_NVRTC:-} ]] || OEQ_NVRTC=$(find "$site/nvidia" /usr/local/cuda/lib64 -name 'libnvrtc.so.*' 2>/dev/null | grep -v builtins | head -n 1)
export OEQ_NVRTC
tell "$(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 | head -n 1); plugin $plugin; NVRTC $OEQ_NVRTC"
for file in "$plugin" "$host" "$OEQ_NATIVE_LIBRARY"; do [[ -e $file ]] || { tell "there is no $file"; exit 1; }; done

"${CXX:-c++}" -std=c++17 -O2 -I"$root/ffi-headers" "$root/examples/native_host.cpp" "$OEQ_NATIVE_LIBRARY" \
  -Wl,-rpath,"$(dirname "$OEQ_NATIVE_LIBRARY")" -ldl -o "$work/native_host_cpp" || bad "native_host.cpp does not build"

# compare LABEL EXPECTED FOUND TOLERANCE LOG
compare() {
  local what
  if what=$("$PYTHON" "$root/tests/hosts/compare.py" "$2" "$3" "$4" 2>&1 | tail -n 1) && [[ $what == *outputs,* ]]; then
    tell "RESULT $1: $what; $(sed -n 's/^per step *//p' "$5")"
  else
    bad "$1: $what"
  fi
}

# in_host LABEL EXPECTED TOLERANCE FLAGS COMMAND...: runs COMMAND in an empty folder and compares what it writes there
in_host() {
  local label=$1 expected=$2 tolerance=$3 flags=$4
  shift 4
  local found=$work/found log=$out/${label//[^a-z0-9]/_}.log
  rm -rf "$found" && mkdir "$found"
  if ! (cd "$found" && XLA_FLAGS="$flags${data:+ $data}" timeout 150 "$@") >"$log" 2>&1; then
    bad "$label: $(reason "$log")"
    return
  fi
  grep -E '^(opened|registered|client|compiled|first step)' "$log" >>"$out/native_host.log"
  compare "$label" "$expected" "$found" "$tolerance" "$log"
}

for kind in ${KINDS:-atomic deterministic}; do
  model=$work/$kind tolerance=1e-6 options=() exact=
  if [[ $kind == deterministic ]]; then
    # Bits are only equal if XLA's own scatters and its choice of matrix products are, too.
    tolerance=0 options=(--deterministic) exact="--xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
  fi
  if ! OEQ_DEVICE=${OEQ_DEVICE:-} JAX_PLATFORMS=cpu PYTHONPATH=$pythonpath timeout 200 "$PYTHON" "$root/examples/export_model.py" "$model" \
    "${options[@]}" >"$out/export_$kind.log" 2>&1; then
    bad "$kind: not exported: $(reason "$out/export_$kind.log")"
    continue
  fi
  mapfile -t inputs < <("$PYTHON" -c 'import json, sys
for entry in json.load(open(sys.argv[1] + "/manifest.json"))["inputs"]: print(sys.argv[1] + "/inputs/" + entry["name"] + ".npy")' "$model")
  for buffers in ${BUFFERS:-on off}; do
    flags=$exact
    [[ $buffers == off ]] && flags="$exact${exact:+ }--xla_gpu_enable_command_buffer="
    expected=$work/expected_${kind}_$buffers log=$out/jax_${kind}_$buffers.log
    if ! XLA_FLAGS=$flags PYTHONPATH=$pythonpath timeout 200 "$PYTHON" "$here/native_host.py" "$model" "$expected" "$steps" >"$log" 2>&1; then
      bad "$kind, command buffers $buffers, jax: $(reason "$log")"
      continue
    fi
    tell "RESULT $kind, command buffers $buffers, jax: $(sed -n 's/^per step *//p' "$log")"
    file=$model/model.jaxexport
    args=("$plugin" "$file" "${inputs[@]}" --repeat "$steps" --out .)
    in_host "$kind, command buffers $buffers, Rust host" "$expected" "$tolerance" "$flags" "$host" "${args[@]}"
    in_host "$kind, command buffers $buffers, Rust host, plain symbols" "$expected" "$tolerance" "$flags" \
      "$host" "${args[@]}" --symbols "$OEQ_NATIVE_LIBRARY"
    in_host "$kind, command buffers $buffers, C++ host" "$expected" "$tolerance" "$flags" \
      "$work/native_host_cpp" "$plugin" "$file" "$steps" "${inputs[@]}"
  done
done
tell "native_host: $failed failed"
[[ $failed -eq 0 ]]
