#!/usr/bin/env bash
# Builds OpenEquivariance's own JAX extension from its unpacked sdist with one compiler call, without its build system:
# faster, and it also works where there is a compiler but no GPU, driver or CUDA toolkit.
#
# usage: build_upstream.sh SDIST OUTDIR
# env:   PYTHON (python3), CUDA_INCLUDE (folder of cuda.h and nvrtc.h), CUDA_LIBS (folder of libcudart, libnvrtc)
set -euo pipefail
sdist=$1 out=$2 python=${PYTHON:-python3}
mkdir -p "$out"
out=$(cd "$out" && pwd)

cuda_dir() { # the first folder of a CUDA installation, or of NVIDIA's wheels, that holds the file $2
  local root
  for root in "${CUDA_HOME:-/usr/local/cuda}" /usr/local/cuda "$("$python" - <<'P'
import os, sysconfig
print(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "cu13"))
P
  )"; do
    for d in "$root/$1" "$root/targets/x86_64-linux/$1" "$root/lib64"; do
      [[ -e $d/$2 ]] && { echo "$d"; return; }
    done
  done
  echo "build_upstream.sh: no $2 found" >&2
  return 1
}
include=${CUDA_INCLUDE:-$(cuda_dir include cuda.h)}
nvrtc=$(ls "${CUDA_LIBS:-$(cuda_dir lib libnvrtc.so.13 || cuda_dir lib libnvrtc.so.12)}"/libnvrtc.so.1[0-9] | head -1)
libs=$(dirname "$nvrtc")
cudart=$(ls "$libs"/libcudart.so.1[0-9] | head -1)

# Linking needs a libcuda by name only; an empty stand-in with the right soname gives that without a driver.
echo | gcc -shared -x c - -Wl,-soname,libcuda.so.1 -o "$out/stand-in.so"

mapfile -t nanobind < <("$python" -c 'import nanobind, os; r = nanobind.source_dir(); print(r); print(nanobind.include_dir()); print(os.path.join(os.path.dirname(r), "ext", "robin_map", "include"))')
flags=(-std=c++17 -O2 -DNDEBUG -fPIC -fvisibility=hidden -fno-strict-aliasing -w -DCUDA_BACKEND=1
  -I"$("$python" -c 'from jax import ffi; print(ffi.include_dir())')"
  -I"$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')"
  -I"${nanobind[1]}" -I"${nanobind[2]}" -I"$include" -I"$sdist/src" -I"$sdist/src/extension")

pids=()
compile() { g++ "${flags[@]}" -c "$1" -o "$out/$2.o" & pids+=($!); }
compile "$sdist/src/ffi_handlers.cpp" handlers
compile "$sdist/src/jax_ffi_registration.cpp" module
compile "$sdist/src/extension/json11/json11.cpp" json
compile "${nanobind[0]}/nb_combined.cpp" nanobind
for p in "${pids[@]}"; do wait "$p"; done

module=$out/openequivariance_extjax$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("EXT_SUFFIX"))')
g++ -shared -s "$out"/{handlers,module,json,nanobind}.o -o "$module" \
  -Wl,--unresolved-symbols=ignore-all -Wl,--no-as-needed \
  "$cudart" "$nvrtc" "$out/stand-in.so" -Wl,-rpath,"${CUDA_RPATH:-$libs}"
rm -f "$out"/*.o "$out/stand-in.so"
echo "$module"
