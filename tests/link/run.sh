#!/usr/bin/env bash
# The library as C and C++ programs get it: the header in both languages, the archive without whole-archive from a debug
# and a release build, the shared library, and what it shows and needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

cc=${CC:-cc}
cxx=${CXX:-c++}
target=${CARGO_TARGET_DIR:-target}
out=$target/link-tests
mkdir -p "$out"
passed=0
ok() { passed=$((passed + 1)); echo "ok: $1"; }
fail() { echo "FAILED: $1" >&2; exit 1; }

cargo build --quiet --lib
cargo build --quiet --lib --release
system=$(cargo rustc --quiet --lib --crate-type staticlib -- --print native-static-libs 2>&1 |
  sed -n 's/^note: native-static-libs: //p' | tail -n 1)
# The driver's functions are in the archive (src/driver/symbols.rs), whatever the bindings ask the linker for.
system=${system//-lcuda/}
# `cargo rustc` says nothing when nothing had to be built.
[ -n "$system" ] || system="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"

cat >"$out/expected" <<'TARGETS'
conv_backward
conv_double_backward
conv_forward
oeq_convolution
oeq_tensor_product
tp_backward
tp_double_backward
tp_forward
TARGETS

warnings=(-Wall -Wextra -Wpedantic -Werror -Iffi-headers)
printf '#include "oeq.h"\n#include "oeq.h"\nint main(void) { return 0; }\n' >"$out/alone.c"
"$cc" -std=c11 "${warnings[@]}" "$out/alone.c" -o "$out/alone"
"$cxx" -std=c++17 -x c++ "${warnings[@]}" "$out/alone.c" -o "$out/alone"
ok "oeq.h compiles alone and twice, as C11 and as C++17"

for profile in debug release; do
  archive=$target/$profile/liboeq_native.a
  for options in "" "-Wl,--gc-sections" "-Wl,--whole-archive"; do
    tail_options=
    [ "$options" = "-Wl,--whole-archive" ] && tail_options=-Wl,--no-whole-archive
    # shellcheck disable=SC2086 # lists of options
    "$cxx" -std=c++17 "${warnings[@]}" tests/link/table.cpp $options "$archive" $tail_options $system -o "$out/table"
    "$out/table" >"$out/found" || fail "$profile archive ${options:-plain}: exit status $?"
    diff "$out/expected" "$out/found" || fail "$profile archive ${options:-plain}: other targets than expected"
    ok "$profile archive, ${options:-plain g++}: all eight targets"
  done
  # shellcheck disable=SC2086
  "$cc" -std=c11 "${warnings[@]}" tests/link/surface.c "$archive" $system -o "$out/surface"
  env -u OEQ_COMPILE_THREADS OEQ_DEVICE=H200 "$out/surface" >"$out/layout-$profile" || fail "$profile: the C surface"
  ok "$profile archive: the C surface from C"
done

library=$target/release/liboeq_native.so
"$cxx" -std=c++17 "${warnings[@]}" tests/link/table.cpp "$library" "-Wl,-rpath,$PWD/$target/release" -o "$out/table"
[ "${target#/}" = "$target" ] || "$cxx" -std=c++17 "${warnings[@]}" tests/link/table.cpp "$library" "-Wl,-rpath,$target/release" -o "$out/table"
"$out/table" | diff "$out/expected" - || fail "shared library: other targets than expected"
ok "shared library: all eight targets"

nm -D --defined-only "$library" | awk '{print $3}' | grep -vE '^(oeq_[a-z0-9_]+|RegisterFFi|(conv|tp)_(forward|backward|double_backward))$' && fail "other symbols are visible"
ok "the shared library shows oeq_*, RegisterFFi and the target names only"
needed=$(readelf -d "$library" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort | tr '\n' ' ')
case $needed in *cuda* | *nvrtc*) fail "the shared library needs $needed" ;; esac
ok "the shared library needs no CUDA: $needed"
readelf -d "$library" | grep -q NODELETE || fail "the shared library can be unloaded under its own threads"
ok "the shared library stays loaded once loaded"

diff "$out/layout-debug" "$out/layout-release"
OEQ_TEST_C_LAYOUT=$PWD/$out/layout-debug
[ "${target#/}" = "$target" ] || OEQ_TEST_C_LAYOUT=$out/layout-debug
export OEQ_TEST_C_LAYOUT
cargo test --quiet --test c_layout -- --include-ignored
ok "sizes and offsets of oeq.h are those of the library"

echo "$passed passed, 0 failed"
