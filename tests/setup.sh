# shellcheck shell=bash
# Sets up what the demonstration and the tests need, under target/. Sourced by examples/demo.sh and tests/run.sh.
#
# Every setup_* function may be called again: it does nothing when its work is there already. Versions are pinned in
# tests/requirements/. Sets:
#   ROOT         the repository
#   BUILD        cargo's target directory
#   CACHE        downloads that are unpacked, not installed
#   VENV         the virtual environment; PYTHON its interpreter
#   SO           the ending of a shared library's name

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
BUILD=${CARGO_TARGET_DIR:-$ROOT/target}
CACHE=$ROOT/target/test-cache
VENV=$ROOT/target/venv
PYTHON=$VENV/bin/python
REQUIREMENTS=$ROOT/tests/requirements
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INPUT=1 PIP_ROOT_USER_ACTION=ignore
mkdir -p "$CACHE"

say() { printf '== %s\n' "$*"; }
fail() { printf 'error: %s\n' "$*" >&2; exit 1; }
need() { command -v "$1" >/dev/null || fail "$1 is not on PATH; $2"; }

# The lines of a requirements file that are no comments.
requirements() { grep -vE '^[[:space:]]*(#|$)' "$REQUIREMENTS/$1"; }

# Runs a command quietly; shows what it printed only when it fails.
quietly() {
  local log status=0
  log=$(mktemp)
  "$@" >"$log" 2>&1 || status=$?
  [ $status -eq 0 ] || { cat "$log" >&2; rm -f "$log"; fail "failed ($status): $*"; }
  rm -f "$log"
}

# Installs a requirements file into the environment, once for each content of that file.
install_requirements() {
  local file=$REQUIREMENTS/$1 stamp=$VENV/installed-$1
  shift
  cmp -s "$file" "$stamp" && return
  say "installing $(requirements "${file##*/}" | tr '\n' ' ')"
  quietly "$PYTHON" -m pip install --quiet "$@" -r "$file"
  cp "$file" "$stamp"
}

# The virtual environment. OEQ_PYTHON names the interpreter to make it from; else the first that is new enough for jax.
setup_venv() {
  if ! "$PYTHON" -c 'pass' 2>/dev/null; then
    local candidate base=
    for candidate in ${OEQ_PYTHON:-python3.11 python3.12 python3.13 python3 /usr/bin/python3}; do
      # One of a version manager may be on PATH and still not run; one without ensurepip makes no environment.
      if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        base=$candidate
        break
      fi
    done
    [ -n "$base" ] || fail "no Python 3.11 or newer with venv was found; set OEQ_PYTHON to one"
    say "making $VENV with $base"
    rm -rf "$VENV"
    quietly "$base" -m venv "$VENV"
  fi
  install_requirements venv.txt
}

# The lines of matrix.txt that are to be tested: some, or with OEQ_MATRIX=all all of them.
matrix() {
  case ${OEQ_MATRIX:-some} in
    all) requirements matrix.txt ;;
    some) requirements matrix.txt | grep ' some$' ;;
    *) fail "OEQ_MATRIX is $OEQ_MATRIX; expected some or all" ;;
  esac
}

# An interpreter of a version, such as 3.12, that can make environments.
python_of() {
  local candidate
  for candidate in "python$1" "$HOME"/.pyenv/versions/"$1".*/bin/python /usr/bin/"python$1"; do
    "$candidate" -c "import sys, venv, ensurepip; sys.exit('%d.%d' % sys.version_info[:2] != '$1')" 2>/dev/null &&
      { echo "$candidate"; return; }
  done
  return 1
}

# An environment with another jaxlib, and the jax for it, by the version; the interpreter is that of venv.txt or BASE.
# Nothing else is pinned there but what venv.txt pins for all.
other_python() { printf '%s/target/venv-jax-%s/bin/python' "$ROOT" "$1"; }
setup_other_jax() {
  setup_venv
  local version=$1 base=${2:-$PYTHON} python
  python=$(other_python "$version")
  "$python" -c 'import jax, pytest' 2>/dev/null && return
  say "installing jaxlib $version"
  rm -rf "$ROOT/target/venv-jax-$version"
  quietly "$base" -m venv "$ROOT/target/venv-jax-$version"
  local pinned=$CACHE/other-$version.txt
  requirements venv.txt | grep -iE '^(jinja2|markupsafe|flatbuffers|ml_dtypes|opt_einsum|pytest)==' >"$pinned"
  quietly "$python" -m pip install --quiet -r "$pinned" "jax==$version" "jaxlib==$version"
}

# The CUDA plugin; its path is in PLUGIN. It lies outside the environment, where jax would find it and look for a GPU.
setup_plugin() {
  setup_venv
  install_requirements plugin.txt --no-deps --upgrade --target "$CACHE/plugin"
  PLUGIN=$(echo "$CACHE"/plugin/jax_plugins/*/xla_cuda_plugin.so)
  [ -f "$PLUGIN" ] || fail "the wheel of $REQUIREMENTS/plugin.txt holds no xla_cuda_plugin.so"
}

# The version of OpenEquivariance that models are exported with.
oeq_version() { requirements openequivariance.txt | sed -n '1s/.*==//p'; }

# Where setup_openequivariance puts a version (the first by default).
oeq_path() { printf '%s/openequivariance-%s' "$CACHE" "${1:-$(oeq_version)}"; }

# Downloads and unpacks every version of OpenEquivariance that is asked for (all by default). Building the distribution
# would fetch libtorch; its Python code needs no build.
setup_openequivariance() {
  setup_venv
  local version path
  for version in ${*:-$(requirements openequivariance.txt | sed 's/.*==//')}; do
    path=$(oeq_path "$version")
    [ -f "$path/complete" ] && continue
    say "downloading openequivariance $version"
    rm -rf "$path" "$CACHE/sdist"
    quietly "$PYTHON" -m pip download --quiet --no-deps --no-binary openequivariance --dest "$CACHE/sdist" \
      "openequivariance==$version"
    tar -xzf "$CACHE"/sdist/*.tar.gz -C "$CACHE"
    rm -rf "$CACHE/sdist"
    # What importlib.metadata finds a version by; the package asks for its own.
    mkdir -p "$path/openequivariance-$version.dist-info"
    cp "$path/PKG-INFO" "$path/openequivariance-$version.dist-info/METADATA"
    touch "$path/complete"
  done
}

# The path of the NVRTC library in the environment.
nvrtc_path() {
  "$PYTHON" -c 'import pathlib, sysconfig
print(*pathlib.Path(sysconfig.get_path("purelib"), "nvidia").rglob("libnvrtc.so.[0-9]*"))'
}

# Sets what Python needs to find our module and one version of OpenEquivariance (the first by default).
oeq_environment() {
  export OEQ_NOTORCH=1 PYTHONPATH
  PYTHONPATH=$ROOT/ffi-headers/python:$(oeq_path "${1:-}")
}

# An interpreter whose jax sees the GPU: the machine's own, else the environment with jax's CUDA wheels added to it.
gpu_python() {
  if JAX_PLATFORMS=cuda python3 -c 'import jax, jinja2; jax.devices()' >/dev/null 2>&1; then
    printf python3
  else
    install_requirements gpu.txt >&2
    printf %s "$PYTHON"
  fi
}

# Whether a CUDA device can be used here.
have_gpu() { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
