#!/usr/bin/env bash
# Native hosts: registration in real PJRT plugins through every door, models run from Rust and from C++ in the CPU
# plugins, and the way of LAMMPS' connector in several processes at once.
#
# Downloads plugins once (see plugins.sh; OEQ_MATRIX=all takes all of tests/requirements/matrix.txt). Needs a Python
# with jax and numpy for making models: OEQ_TEST_PYTHON (default: python3). The library is the debug build;
# PROFILE=release takes the other.
set -euo pipefail
cd "$(dirname "$0")/../.."

cxx=${CXX:-c++}
python=${OEQ_TEST_PYTHON:-python3}
profile=${PROFILE:-dev}
target=${CARGO_TARGET_DIR:-$PWD/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
folder=$profile
[ "$profile" = dev ] && folder=debug
out=$target/host-tests
rm -rf "$out"
mkdir -p "$out"
passed=0
ok() { passed=$((passed + 1)); echo "ok: $1"; }
fail() { echo "FAILED: $1" >&2; exit 1; }

OEQ_PYTHON=${OEQ_PYTHON:-$python} tests/hosts/plugins.sh >"$out/plugins"
cargo build --quiet --profile "$profile" --lib --example native_host --example register_plugin
cargo test --quiet --test plugins --no-run

echo "== every plugin through every door"
OEQ_TEST_PLUGINS=$out/plugins cargo test --quiet --test plugins -- --ignored --nocapture --test-threads 1 2>"$out/errors" |
  tee "$out/table" | grep -vE '^$|^running|^test result' || true
grep -q '^test result: ok. 4 passed' "$out/table" || { cat "$out/errors" >&2; fail "registration in real plugins"; }
ok "all targets through every door of $(wc -l <"$out/plugins") plugins, twice, from threads, and in two runtimes at once"

library=$target/$folder/liboeq_native.so
host=$target/$folder/examples/native_host
"$cxx" -std=c++17 -O1 -Wall -Wextra -Wpedantic -Werror -Iffi-headers examples/native_host.cpp "$library" \
  -Wl,-rpath,"$target/$folder" -ldl -o "$out/native_host_cpp"
"$cxx" -std=c++17 -O1 -Wall -Wextra -Wno-invalid-offsetof -Wno-cast-function-type -Werror tests/hosts/connector.cpp -ldl -o "$out/connector"
ln -s "$library" "$out/libjcn_ffi_openequivariance.so"
JAX_PLATFORMS=cpu "$python" tests/hosts/make_models.py "$out/models"
inputs=$out/models/inputs
times=()

while read -r name platform plugin; do
  echo "== $name"
  "$target/$folder/examples/register_plugin" "$plugin" "$platform" 2>"$out/errors" | sed -n 's/^time *//p' ||
    { cat "$out/errors" >&2; fail "register_plugin in $name"; }
  pids=()
  : >"$out/connectors"
  for _ in 1 2 3 4 5 6 7 8; do
    "$out/connector" "$plugin" "$out/libjcn_ffi_openequivariance.so" >>"$out/connectors" 2>"$out/errors" & pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || { cat "$out/errors" >&2; fail "$name: a connector"; }; done
  best=$(sort -n "$out/connectors" | head -n 1)
  ok "$name: eight processes open the library locally and register at once: $best, at best"
  times+=("$(printf '%-36s %s' "$name" "$best")")
  if [ "$platform" = cuda ]; then
    # Without a GPU there is no client; the host says what the plugin says.
    if [ ! -e /dev/nvidiactl ]; then
      "$host" "$plugin" "$out/models/oeq.jaxexport" "$inputs"/{x,y,w}.npy >"$out/log" 2>&1 && fail "$name made a client without a GPU"
      grep -q '^error: ' "$out/log" || { cat "$out/log"; fail "$name: the plugin's error is not told"; }
      ok "$name: no client without a GPU: $(sed -n 's/^error: //p' "$out/log" | head -c 90)"
    fi
    continue
  fi
  for model in plain.jaxexport both.jaxexport plain.mlirbc plain.mlir; do
    case $model in
      *.jaxexport) arguments=("$inputs/0.npy" "$inputs/1.npy" "$inputs/2.npy") ;;
      plain.mlirbc | plain.mlir) arguments=("$inputs/0.npy" "$inputs/2.npy") ;;
    esac
    rm -rf "$out/found"
    "$host" "$plugin" "$out/models/$model" "${arguments[@]}" --repeat 20 --out "$out/found" >"$out/log" 2>&1 ||
      { cat "$out/log"; fail "$name, $model, Rust"; }
    ok "$name, $model, Rust: $("$python" tests/hosts/compare.py "$out/models/expected" "$out/found" 1e-6)"
    [ $model = both.jaxexport ] && continue
    rm -rf "$out/found" && mkdir "$out/found"
    "$out/native_host_cpp" "$plugin" "$out/models/$model" "${arguments[@]}" --repeat 20 --out "$out/found" \
      >"$out/log" 2>&1 ||
      { cat "$out/log"; fail "$name, $model, C++"; }
    ok "$name, $model, C++: $("$python" tests/hosts/compare.py "$out/models/expected" "$out/found" 1e-6)"
  done
  # An OpenEquivariance call. Registered for the host it runs, and the plain symbols find out where they are.
  for run in "$host --door api" "$host --door execute-only" "$host --symbols $library" "$out/native_host_cpp"; do
    label=${run##*--} label=${label/"$target/$folder/"/} label=${label##*/}
    rm -rf "$out/found" && mkdir "$out/found"
    status=0
    # shellcheck disable=SC2086 # a program and its options
    $run "$plugin" "$out/models/oeq.jaxexport" "$inputs"/{x,y,w}.npy --out "$out/found" >"$out/log" 2>&1 || status=$?
    grep -q '^compiled' "$out/log" || { cat "$out/log"; fail "$name: the call was not compiled"; }
    [ $status -eq 0 ] || { cat "$out/log"; fail "$name, an OpenEquivariance call, $label"; }
    ok "$name, an OpenEquivariance call, $label: $("$python" tests/hosts/compare.py "$out/models/expected-oeq" "$out/found" 1e-6)"
  done
done <"$out/plugins"
echo "== the library in every plugin ($profile build)"
grep -E '^\.*plugin +FFI api| best: ' "$out/table" | sed 's/^\.*//'
echo
printf '%s\n' "${times[@]}"
echo "$passed passed, 0 failed"
