#!/usr/bin/env bash
# Takes XLA's FFI header out of real jaxlib wheels and writes down what a C compiler makes of each.
#
# usage: tests/abi/fetch.sh
#
# For every release in tests/requirements/abi.txt, under target/test-cache/abi: VERSION/c_api.h, and VERSION.txt, the
# output of abi_dump.c built against it. tests/abi.rs compares the latter with ours (OEQ_TEST_ABI names the folder).
# A wheel is about 80 MB and is thrown away once its header is out.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
need cc "a C compiler builds the test programs"
setup_venv
abi=$CACHE/abi
mkdir -p "$abi"

fetch_header() {
  local requirement=$1 python=$2 version=${1##*==} wheel
  [ -f "$abi/$version/c_api.h" ] && return
  say "downloading $requirement for its header"
  wheel=$(mktemp -d)
  quietly "$PYTHON" -m pip download --quiet --no-deps --no-cache-dir --only-binary=:all: --python-version "$python" \
    --dest "$wheel" "$requirement"
  mkdir -p "$abi/$version"
  "$PYTHON" - "$wheel"/*.whl "$abi/$version/c_api.h.part" <<'PY'
import sys, zipfile
with zipfile.ZipFile(sys.argv[1]) as wheel, open(sys.argv[2], "wb") as header:
    header.write(wheel.read("jaxlib/include/xla/ffi/api/c_api.h"))
PY
  rm -rf "$wheel"
  mv "$abi/$version/c_api.h.part" "$abi/$version/c_api.h"
}

# Two at a time: the registry, not this machine, sets the pace.
running=()
while read -r requirement python; do
  fetch_header "$requirement" "$python" &
  running+=($!)
  if [ ${#running[@]} -ge 2 ]; then
    wait "${running[0]}"
    running=("${running[@]:1}")
  fi
done < <(requirements abi.txt)
for job in "${running[@]}"; do wait "$job"; done

rm -f "$abi"/*.txt
while read -r requirement _; do
  version=${requirement##*==}
  cc -std=c11 -Wall -Wextra -Werror -include "$abi/$version/c_api.h" \
    -o "$abi/$version/abi_dump" "$ROOT/tests/abi/abi_dump.c"
  "$abi/$version/abi_dump" >"$abi/$version.txt"
done < <(requirements abi.txt)
