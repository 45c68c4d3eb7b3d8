#!/usr/bin/env bash
# Collects what run.sh needs into the folder .carry at the project's root (git ignores it), to be copied together with
# the project to a machine that has a GPU but no network and no Rust. x86-64 Linux, Python 3.12 there.
#
# usage: pack.sh OEQ EXTJAX TESTS
#   OEQ      the unpacked sdist of openequivariance
#   EXTJAX   the unpacked sdist of openequivariance_extjax, of the same version
#   TESTS    the folder tests/ of OpenEquivariance's repository
# env: OEQ_NATIVE_LIBRARY (target/release/liboeq_native.so)
#      and beside it, in examples/, native_host and operator
#      PYTHON (a Python of the version over there, with jax, nanobind and pytest_check), and with it CUDA_INCLUDE and
#      CUDA_LIBS (see build_upstream.sh) to build upstream's module here; without them it is built over there
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
[[ $# -eq 3 ]] || { sed -n '2,/^set/p' "$0" | grep '^#'; exit 2; }
oeq=$1 extjax=$2 tests=$3 carry=$root/.carry
lib=${OEQ_NATIVE_LIBRARY:-$root/target/release/liboeq_native.so}
mkdir -p "$carry"/{package,upstream-sdist,tests,site}
if [[ -e $lib ]]; then
  cp "$lib" "$carry/liboeq_native.so"
  strip --strip-debug "$carry/liboeq_native.so"
else
  echo "pack.sh: no $lib yet; run again when it is built" >&2
fi
# For cold.py, which tells the floor and makes bundles with it: cargo build --release --features cli.
if [[ -e $(dirname "$lib")/oeq ]]; then
  cp "$(dirname "$lib")/oeq" "$carry/oeq"
  strip --strip-debug "$carry/oeq"
fi
# The examples that run there: native_host.sh's, and run.sh's Rust program without XLA.
for example in native_host operator; do
  [[ -e $(dirname "$lib")/examples/$example ]] || continue
  cp "$(dirname "$lib")/examples/$example" "$carry/$example"
  strip --strip-debug "$carry/$example"
done
rm -rf "$carry"/package/* "$carry"/upstream-sdist/* "$carry"/tests/*
cp -r "$oeq/openequivariance" "$carry/package/"
rm -rf "$carry/package/openequivariance/extension"
cp -r "$extjax/src" "$carry/upstream-sdist/"
cp "$tests"/{conftest,batch_test,conv_test,vmap_test}.py "$carry/tests/"
if [[ -n ${PYTHON:-} ]]; then
  cp -r "$("$PYTHON" -c 'import pytest_check, os; print(os.path.dirname(pytest_check.__file__))')" "$carry/site/"
  cp -r "$("$PYTHON" -c 'import importlib.metadata as m; print(m.distribution("pytest-check")._path)')" "$carry/site/"
  if [[ -n ${CUDA_INCLUDE:-} ]]; then
    rm -rf "$carry/upstream"
    CUDA_RPATH=/usr/local/cuda/lib64 "$here/build_upstream.sh" "$extjax" "$carry/upstream"
  fi
fi
find "$carry" -name __pycache__ -prune -exec rm -rf {} +
du -sh "$carry"
