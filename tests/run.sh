#!/usr/bin/env bash
# Every test that needs no GPU. Sets up what they need under target/ first.
#
# usage: tests/run.sh [STEP ...]      (all steps by default: rust python older link variants hosts host family cut ptx calls)
#   rust     cargo test with all features, against real payloads, models, NVRTC and jaxlib headers
#   python   pytest: unmodified OpenEquivariance and jax with our module
#   older    the module, the handlers' lives and what the CPU platform takes from XLA again, in older releases of jax
#   link     C and C++ programs linked against the static and the shared library
#   variants link-time optimisation, the pre-linked object, other Rust code beside ours, the installed files
#   hosts    real PJRT plugins and jaxlibs, and hosts without Python; some by default, all of
#            tests/requirements/matrix.txt with OEQ_MATRIX=all. Downloads are kept under target/.
#   host     kernels on the CPU: numbers of every kind of kernel, and a whole model in CPU plugins
#   family   a crate outside that brings a target family of its own: table, tool, and a call through jax on the CPU
#   cut      machine code of entry points compiled alone equals that of the whole program
#   ptx      the PTX in kernels/ is what its source gives
#   calls    instructions of warm calls, beside the recorded ones (where valgrind is installed)
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
all=(rust python older link variants hosts host family cut ptx calls)
steps=("$@")
[ $# -gt 0 ] || steps=("${all[@]}")
for name in "${steps[@]}"; do
  [[ " ${all[*]} " == *" $name "* ]] || { echo "error: there is no step $name; there are ${all[*]}" >&2; exit 2; }
done
need cargo "install Rust 1.85 or newer"
need cc "a C compiler builds the test programs"
cd "$ROOT"

setup_openequivariance
export OEQ_NOTORCH=1 OEQ_DEVICE=H200 JAX_PLATFORMS=cpu PYTHONDONTWRITEBYTECODE=1
OEQ_TEST_NVRTC=$(nvrtc_path)
export OEQ_TEST_NVRTC OEQ_TEST_ABI=$CACHE/abi OEQ_TEST_OPENEQUIVARIANCE=$CACHE
export OEQ_TEST_PAYLOADS=$CACHE/payloads OEQ_TEST_MODELS=$CACHE/models
# Tests that speak of a missing driver or compiler mean the machine, not what somebody has set.
unset OEQ_NVRTC OEQ_COMPILE_THREADS OEQ_CXX
# Nothing of the tests goes to the user's store; those that test it name a directory.
export OEQ_STORE=off

"$ROOT/tests/abi/fetch.sh"

say "building (debug)"
quietly cargo build --all-features
export OEQ_NATIVE_LIBRARY=$BUILD/debug/liboeq_native.so

# Made anew each time: whatever made them may have changed, and it takes seconds.
say "making payloads and models"
rm -rf "$OEQ_TEST_PAYLOADS" "$OEQ_TEST_MODELS"
oeq_environment
quietly "$PYTHON" tests/python/make_payloads.py "$OEQ_TEST_PAYLOADS"
quietly "$PYTHON" tests/python/make_models.py "$OEQ_TEST_MODELS" all
for version in $(requirements openequivariance.txt | sed '1d; s/.*==//'); do
  oeq_environment "$version"
  # The payloads of later versions than 0.5.3 differ in nothing that matters to a reader.
  case $version in 0.5.[0-3]) quietly "$PYTHON" tests/python/make_payloads.py "$OEQ_TEST_PAYLOADS" ;; esac
  quietly "$PYTHON" tests/python/make_models.py "$OEQ_TEST_MODELS"
done
unset PYTHONPATH
quietly "$PYTHON" tests/python/make_forms.py "$OEQ_TEST_MODELS"

summary=() failed=0
step() {
  local name=$1 began=$SECONDS outcome=passed
  shift
  [[ " ${steps[*]} " == *" $name "* ]] || return 0
  say "$name: $*"
  "$@" || { outcome=FAILED failed=1; }
  summary+=("$(printf '%-8s %s in %d s' "$name" "$outcome" $((SECONDS - began)))")
}

machine_code() {
  cargo build --quiet --example cut_source &&
    "$PYTHON" tests/machine_code.py --nvrtc "$OEQ_TEST_NVRTC" --cut "$BUILD/debug/examples/cut_source" \
      "$OEQ_TEST_PAYLOADS"/{conv_det_f32,conv_uvu_i64,tp_uvw_f64}.json
}

older() {
  local version
  for version in $(requirements older-jax.txt | sed 's/.*==//'); do
    setup_other_jax "$version"
    "$(other_python "$version")" -m pytest -q -p no:cacheprovider \
      tests/python/test_lifecycle.py tests/python/test_module.py || return
    # What the CPU platform takes from XLA: its threads, and where a plain symbol is.
    OEQ_TEST_PYTHON=$(other_python "$version") "$PYTHON" -m pytest -q -p no:cacheprovider tests/host \
      -k "xlas or other_stages or enable_host_is_all" || return
  done
}

host_platform() {
  local plugins host=$BUILD/debug/examples/native_host
  "$PYTHON" -m pytest -q -p no:cacheprovider tests/host || return
  # A whole model without Python, in every CPU plugin.
  OEQ_PYTHON=$PYTHON tests/hosts/plugins.sh >"$BUILD/host-plugins" || return
  mapfile -t plugins < <(awk '$2 == "cpu" { print $3 }' "$BUILD/host-plugins")
  cargo build --quiet --example native_host || return
  PYTHONPATH=$ROOT/ffi-headers/python:$CACHE/openequivariance-$(oeq_version) \
    "$PYTHON" tests/host/model.py "$BUILD/host-models" "$host" "${plugins[@]}" || return
  say "where the time of a step goes, in a debug build of the library"
  PYTHONPATH=$ROOT/ffi-headers/python:$CACHE/openequivariance-$(oeq_version):$ROOT/tests/host "$PYTHON" tests/host/step.py 2
}

variants() {
  command -v cmake >/dev/null || { install_requirements link.txt; PATH=$PATH:$VENV/bin; }
  tests/link/variants.sh
}

hosts() {
  OEQ_TEST_PYTHON=$PYTHON tests/hosts/run.sh && tests/hosts/jaxlibs.sh || return
  # The script that measures steps on a GPU, on the CPU: that it works, not how fast.
  cargo build --quiet --example native_host || return
  PLATFORM=cpu STEPS=5 ROUNDS=2 PYTHON=$PYTHON OEQ_PACKAGE=$(oeq_path) NATIVE_HOST=$BUILD/debug/examples/native_host \
    PLUGIN=$(tests/hosts/plugins.sh lammps-jax-pjrt-cpu==0.11.2 | awk '{ print $3 }') tests/gpu/native_host.sh
}

family() {
  local folder=examples/own_family out=$BUILD/own-family
  CARGO_TARGET_DIR=$out cargo test --quiet --manifest-path $folder/Cargo.toml --lib || return
  CARGO_TARGET_DIR=$out cargo build --quiet --manifest-path $folder/Cargo.toml || return
  "$out/debug/oeq" targets --json | grep -q '"row_norms"' || { echo "oeq targets does not list row_norms"; return 1; }
  "$out/debug/payload" >"$out/payload.json" || return
  OEQ_NATIVE_LIBRARY=$out/debug/libown_family.so PYTHONPATH=$ROOT/ffi-headers/python \
    "$PYTHON" $folder/run.py "$out/payload.json"
}

ptx() {
  install_requirements ptx.txt --no-deps --upgrade --target "$CACHE/nvrtc12"
  "$PYTHON" kernels/make_ptx.py "$CACHE/nvrtc12/nvidia/cuda_nvrtc/lib/libnvrtc.so.12" --check
}

calls() {
  command -v valgrind >/dev/null || { echo "valgrind is not installed: instructions are not counted"; return 0; }
  benches/instructions.sh
}

step rust cargo test --all-features --no-fail-fast
step python "$PYTHON" -m pytest -q -p no:cacheprovider tests/python
step older older
step link tests/link/run.sh
step variants variants
step hosts hosts
step host host_platform
step family family
step cut machine_code
step ptx ptx
step calls calls

say summary
printf '%s\n' "${summary[@]}"
exit $failed
