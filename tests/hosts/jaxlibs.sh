#!/usr/bin/env bash
# The handlers in jaxlibs of several versions, on the CPU, each in an environment of its own under target/.
#
# Those of tests/requirements/matrix.txt, see there. OEQ_NATIVE_LIBRARY is the library (default: the debug build).
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
cd "$ROOT"
export OEQ_NATIVE_LIBRARY=${OEQ_NATIVE_LIBRARY:-$BUILD/debug/liboeq_native.so}
setup_venv
passed=0 absent=0

while read -r requirement version _; do
  jaxlib=${requirement#jaxlib==}
  if grep -qx "$requirement" "$REQUIREMENTS/venv.txt"; then
    python=$PYTHON
  elif base=$(python_of "$version"); then
    setup_other_jax "$jaxlib" "$base"
    python=$(other_python "$jaxlib")
  else
    echo "NOT TESTED: jaxlib $jaxlib needs Python $version, which is not installed"
    absent=$((absent + 1))
    continue
  fi
  line=$(JAX_PLATFORMS=cpu "$python" tests/hosts/jaxlib_call.py "$ROOT/ffi-headers/python" 2>"$BUILD/jaxlib-errors") ||
    { cat "$BUILD/jaxlib-errors" >&2; fail "jaxlib $jaxlib"; }
  echo "ok: $line"
  passed=$((passed + 1))
done < <(matrix | grep '^jaxlib==')
echo "$passed jaxlibs passed, 0 failed, $absent without their Python"
[ $passed -gt 0 ]
