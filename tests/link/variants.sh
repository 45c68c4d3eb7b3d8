#!/usr/bin/env bash
# Links beside run.sh's: the pre-linked object, a second Rust library, a crate that brings a target of its own, the
# installed files through pkg-config and CMake, and the plain names of the shared library.
#
# Takes the release build, with PROFILE=dev the debug build; BUILD=0 takes it as it is. pkg-config, CMake and clang are
# tested where they are installed.
set -euo pipefail
cd "$(dirname "$0")/../.."

cxx=${CXX:-c++}
profile=${PROFILE:-release}
target=${CARGO_TARGET_DIR:-$PWD/target}
case $target in /*) ;; *) target=$PWD/$target ;; esac
out=$target/link-variants
prefix=$out/prefix
rm -rf "$out"
mkdir -p "$out"
passed=0
ok() { passed=$((passed + 1)); echo "ok: $1"; }
fail() { echo "FAILED: $1" >&2; exit 1; }
skip() { echo "NOT TESTED: $1"; }
system="-lgcc_s -lutil -lrt -lpthread -lm -ldl -lc"
warnings=(-std=c++17 -Wall -Wextra -Wpedantic -Werror -Iffi-headers)
names=(conv_backward conv_double_backward conv_forward oeq_convolution oeq_tensor_product tp_backward tp_double_backward tp_forward)
printf '%s\n' "${names[@]}" >"$out/expected"

build_option=()
[ "${BUILD:-1}" = 1 ] || build_option=(--no-build)
./install.sh --prefix "$prefix" --profile "$profile" "${build_option[@]}" >/dev/null
archive=$prefix/lib/liboeq_native.a
object=$prefix/lib/oeq_native.o

check() { # DESCRIPTION PROGRAM [EXPECTED]
  "$2" >"$out/found" || fail "$1: exit status $?"
  diff "${3:-$out/expected}" "$out/found" || fail "$1: other targets than expected"
  ok "$1: all targets"
}

for compiler in "$cxx" clang++; do
  command -v "$compiler" >/dev/null || { skip "$compiler is not installed"; continue; }
  optimise=-flto
  [ "$compiler" = clang++ ] && optimise="-flto -fuse-ld=lld"
  for options in "" "-Wl,--gc-sections" "$optimise"; do
    # shellcheck disable=SC2086 # lists of options
    "$compiler" "${warnings[@]}" tests/link/table.cpp $options "$object" $system -o "$out/table" ||
      fail "$compiler $options"
    check "pre-linked object, $compiler ${options:-plain}" "$out/table"
  done
done
readelf --syms --wide "$object" | awk '$5 != "LOCAL" && $7 != "UND" && NR > 3 { print $8 }' |
  grep -vE '^(oeq_[a-z0-9_]+|RegisterFFi)$' | grep . && fail "the pre-linked object shows other symbols"
ok "the pre-linked object shows oeq_* and RegisterFFi only"
readelf --syms --wide "$archive" 2>/dev/null | awk '$5 == "GLOBAL" && $7 != "UND" { print $8 }' |
  grep -E '^(conv|tp)_' && fail "the archive has plain target names"
ok "the archive has no plain target names"

rustc --edition 2024 --crate-type staticlib -C opt-level=1 --out-dir "$out" tests/link/other.rs
[ "$profile" = dev ] || cargo build --quiet --lib
# shellcheck disable=SC2086
for libraries in "$target/debug/liboeq_native.a $out/libother.a" "$archive $out/libother.a" \
  "$out/libother.a $archive" "$object $out/libother.a" \
  "$object -Wl,--whole-archive $out/libother.a -Wl,--no-whole-archive"; do
  "$cxx" "${warnings[@]}" -DOTHER tests/link/beside.cpp $libraries $system -o "$out/beside"
  label=$(echo "$libraries" | sed "s,[^ ]*/\(debug/lib[^ ]*\),\1,g; s,/[^ ]*/,,g")
  check "beside a second Rust library ($label)" "$out/beside"
done

cp Cargo.lock tests/link/outside/Cargo.lock # the same dependencies; not kept
for build in debug release; do
  flag=
  [ $build = release ] && { [ "$profile" = release ] || continue; flag=--release; }
  # shellcheck disable=SC2086
  cargo build --quiet $flag --manifest-path tests/link/outside/Cargo.toml --target-dir "$out/outside"
  (cat "$out/expected"; echo outside_tensor_product) | sort >"$out/expected-outside"
  for options in "" "-Wl,--gc-sections" "-Wl,--whole-archive"; do
    tail_options=
    [ "$options" = "-Wl,--whole-archive" ] && tail_options=-Wl,--no-whole-archive
    # shellcheck disable=SC2086
    "$cxx" "${warnings[@]}" -DOUTSIDE tests/link/beside.cpp $options "$out/outside/$build/liboutside.a" $tail_options \
      $system -o "$out/beside"
    check "$build archive of a crate with a target of its own, ${options:-plain}" "$out/beside" "$out/expected-outside"
  done
done

library=$prefix/lib/liboeq_native.so
nm -D --defined-only "$library" | awk '{print $3}' | sort >"$out/visible"
for name in "${names[@]}"; do grep -qx "$name" "$out/visible" || fail "the shared library does not show $name"; done
grep -vE '^(oeq_[a-z0-9_]+|RegisterFFi|(conv|tp)_(forward|backward|double_backward))$' "$out/visible" && fail "other symbols are visible"
ok "the shared library shows oeq_*, RegisterFFi and the target names only"
readelf -d "$library" | grep -q 'SONAME.*\[liboeq_native.so\]' || fail "no soname"
ok "the shared library has its soname"

if command -v pkg-config >/dev/null; then
  export PKG_CONFIG_PATH=$prefix/lib/pkgconfig
  # shellcheck disable=SC2046
  "$cxx" -std=c++17 tests/install/main.cpp $(pkg-config --cflags --libs oeq_native) -Wl,-rpath,"$prefix/lib" -o "$out/sample"
  "$out/sample" >/dev/null || fail "pkg-config, shared"
  # shellcheck disable=SC2046
  "$cxx" -std=c++17 tests/install/main.cpp $(pkg-config --cflags oeq_native) "$archive" \
    $(pkg-config --static --libs-only-l oeq_native | sed 's/-loeq_native//') -o "$out/sample"
  "$out/sample" >/dev/null || fail "pkg-config, static"
  ok "pkg-config, shared and static"
else
  skip "pkg-config is not installed"
fi

if command -v cmake >/dev/null; then
  generator=()
  command -v ninja >/dev/null && generator=(-G Ninja)
  # Moved, to see that the installed files find each other.
  mv "$prefix" "$out/moved"
  cmake "${generator[@]}" -S tests/install -B "$out/cmake" -DCMAKE_PREFIX_PATH="$out/moved" >"$out/cmake.log" ||
    { cat "$out/cmake.log"; fail "cmake"; }
  cmake --build "$out/cmake" >"$out/cmake.log" || { cat "$out/cmake.log"; fail "cmake --build"; }
  for kind in shared static object; do "$out/cmake/sample_$kind" >/dev/null || fail "CMake sample, $kind"; done
  ok "a CMake project finds the package and runs with the shared library, the static one and the object"
else
  skip "cmake is not installed"
fi
echo "$passed passed, 0 failed"
