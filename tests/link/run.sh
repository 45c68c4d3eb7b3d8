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
  for compiler in "$cxx" clang++; do
    command -v "$compiler" >/dev/null || { echo "NOT TESTED: $compiler is not installed"; continue; }
    optimise=-flto
    [ "$compiler" = clang++ ] && optimise="-flto -fuse-ld=lld"
    for options in "" "-Wl,--gc-sections" "$optimise -O2" "$optimise -O2 -Wl,--gc-sections" "-Wl,--whole-archive"; do
      tail_options=
      [ "$options" = "-Wl,--whole-archive" ] && tail_options=-Wl,--no-whole-archive
      # shellcheck disable=SC2086 # lists of options
      "$compiler" -std=c++17 "${warnings[@]}" tests/link/table.cpp $options "$archive" $tail_options $system \
        -o "$out/table"
      label="$profile archive, $compiler ${options:-plain}"
      "$out/table" >"$out/found" || fail "$label: exit status $?"
      diff "$out/expected" "$out/found" || fail "$label: other targets than expected"
      ok "$label: all eight targets"
    done
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

# Exactly what the header declares, with the getter of each target's handler, and the target names.
{
  grep -oE '\b(oeq_[a-z0-9_]+|RegisterFFi) ?\(' ffi-headers/oeq.h | tr -d ' ('
  cat "$out/expected"
} | sort -u >"$out/declared"
nm -D --defined-only "$library" | awk '{print $3}' | sort -u >"$out/visible"
diff "$out/declared" "$out/visible" || fail "other symbols are visible (>) or missing (<)"
ok "the shared library shows the functions of oeq.h and the target names, and nothing else"
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
