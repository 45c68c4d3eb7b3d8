#!/usr/bin/env bash
# The handlers in jaxlibs of several versions, on the CPU, each in an environment of its own under OEQ_TEST_CACHE.
#
# Two versions by default, with OEQ_TEST_ALL_PLUGINS=1 all of them; those that need a Python that is not here are skipped.
# OEQ_NATIVE_LIBRARY is the library (default: the debug build).
set -euo pipefail
cd "$(dirname "$0")/../.."
cache=${OEQ_TEST_CACHE:-$PWD/target/test-cache}/jaxlibs
export OEQ_NATIVE_LIBRARY=${OEQ_NATIVE_LIBRARY:-${CARGO_TARGET_DIR:-$PWD/target}/debug/liboeq_native.so}
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1
mkdir -p "$cache"
passed=0

python_of() { # VERSION: an interpreter of this version
  local candidate
  for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python /usr/bin/"python$1"; do
    "$candidate" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null && { echo "$candidate"; return; }
  done
  return 1
}

versions="0.6.2:3.11 0.10.2:3.11"
[ "${OEQ_TEST_ALL_PLUGINS:-0}" = 1 ] &&
  versions="0.6.2:3.11 0.7.2:3.11 0.8.3:3.11 0.9.2:3.11 0.10.2:3.11 0.11.2:3.12 0.12.0:3.12"
for entry in $versions; do
  version=${entry%:*}
  if [ ! -f "$cache/$version/complete" ]; then
    python=$(python_of "${entry#*:}") || { echo "skipped: jaxlib $version needs Python ${entry#*:}"; continue; }
    rm -rf "${cache:?}/$version"
    "$python" -m venv "$cache/$version"
    "$cache/$version/bin/python" -m pip install --quiet "jax==$version" "jaxlib==$version" numpy
    touch "$cache/$version/complete"
  fi
  line=$(JAX_PLATFORMS=cpu "$cache/$version/bin/python" tests/hosts/jaxlib_call.py "$PWD/ffi-headers/python" 2>"$cache/errors") ||
    { cat "$cache/errors" >&2; echo "FAILED: jaxlib $version" >&2; exit 1; }
  echo "ok: $line"
  passed=$((passed + 1))
done
echo "$passed passed, 0 failed"
