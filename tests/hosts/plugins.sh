#!/usr/bin/env bash
# Downloads real PJRT plugins from PyPI and keeps only their shared library.
#
# usage: tests/hosts/plugins.sh [PACKAGE==VERSION ...]
#
# Without arguments: those of tests/requirements/matrix.txt, see there. Prints one line for each:
#   PACKAGE==VERSION cpu|cuda PATH
# The libraries are kept in target/test-cache/plugins.
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/../setup.sh"
cache=$CACHE/plugins
python=${OEQ_PYTHON:-python3}
mkdir -p "$cache"

wanted=("$@")
[ $# -gt 0 ] || mapfile -t wanted < <(matrix | awk '$2 == "plugin" { print $1 }')

for requirement in "${wanted[@]}"; do
  folder=$cache/${requirement/==/-}
  library=$folder/plugin.so
  if [ ! -f "$library" ]; then
    echo "downloading $requirement" >&2
    rm -rf "$folder.part"
    mkdir -p "$folder.part"
    # The wheels hold no Python extension modules, so any interpreter will do; old ones name old platforms.
    "$python" -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 --implementation cp \
      --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
      --platform manylinux2014_x86_64 --platform manylinux_2_34_x86_64 --platform manylinux_2_35_x86_64 \
      --platform any --dest "$folder.part" "$requirement" >&2
    "$python" - "$folder.part" <<'PYTHON'
import pathlib, shutil, sys, zipfile
folder = pathlib.Path(sys.argv[1])
(wheel,) = folder.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    # The plugin is by far the largest library of its wheel.
    largest = max((i for i in archive.infolist() if ".so" in i.filename), key=lambda i: i.file_size)
    with archive.open(largest) as source, open(folder / "plugin.so", "wb") as target:
        shutil.copyfileobj(source, target, 1 << 20)
wheel.unlink()
PYTHON
    rm -rf "$folder"
    mv "$folder.part" "$folder"
  fi
  case $requirement in *cuda*) platform=cuda ;; *) platform=cpu ;; esac
  echo "$requirement $platform $library"
done
