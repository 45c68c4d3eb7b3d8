#!/usr/bin/env bash
# Everything that needs a GPU, in one script: checks and measurements of oeq-native, beside OpenEquivariance's own JAX
# extension where that is there. Takes 8 minutes on 16 cores; every part has a time limit of its own, and a part that
# fails does not stop the others. A summary comes last.
#
# usage: run.sh [PART ...]
#   smoke      the library loads, its table is whole, each target runs once       (always first)
#   cold       cold start of 12 convolutions, forces and energy, ours and upstream (quiet machine)
#   cold24     the same with 24 convolutions                                       (not in the default list)
#   dispatch   host time of one call per target, ours, upstream, bare driver       (quiet machine)
#   launches   the same without graphs of the driver (OEQ_REPLAY=off)              (quiet machine; not in the default list)
#   steps      time per step of 12 convolutions with forces, command buffers on and off, ours, upstream, ours by launches, taking turns
#   poison     results do not depend on what result buffers held                   (these four run side by side)
#   numerics   the targets through jax.ffi and second derivatives, ours against upstream
#   capture    many calls with and without XLA's command buffers
#   graphs     first calls inside captures in every mode, captures beside loading, threads without a context
#   rate       calls per second of 1 to 16 threads, ours and upstream
#   threads    eight threads with executables of their own
#   sanitizer  compute-sanitizer on a tiny run of each target, where it is installed
#   suite      OpenEquivariance's own JAX tests on both modules
#   repeat     (only when named) one of them many times on both
#   replay     call sites that are called again and again; a soak of SOAK seconds (20)
#   operator   the Rust program without XLA (examples/operator.rs), with graphs of the driver and by launches
#   zero       the zeroing kernel: exactness, and its cost beside memsets
#
# env (defaults: the folder .carry at the project's root, as pack.sh fills it, then the project's own build)
#   OEQ_NATIVE_LIBRARY  liboeq_native.so
#   OEQ_OPERATOR        the example `operator`
#   OEQ_NATIVE_PYTHON   folder of our Python module openequivariance_extjax
#   OEQ_PACKAGE         folder that holds OpenEquivariance's package `openequivariance`
#   OEQ_UPSTREAM        folder of upstream's compiled openequivariance_extjax; built from OEQ_UPSTREAM_SDIST if it does not load
#   OEQ_TESTS           OpenEquivariance's folder tests/
#   OEQ_SITE            extra Python packages (pytest_check)
#   PAYLOADS            kernel payloads; made on the spot when unset
#   OUT                 folder for the full log
#   PYTHON              python3 with jax for CUDA, jinja2, and for `suite` torch, e3nn and pytest
#   LIMIT               seconds for everything (520): `suite` gets what the others leave
#   SOAK                seconds of `replay`'s soak (20)
#   STEPS, STEP_ROUNDS, STEP_BUFFERS           steps in a round of `steps` (300), rounds (7), with which command buffers ("on off")
#   SUITE_SHARDS, SUITE_SAMPLES, SUITE_EXTRA   processes for each module (8); see suite.py
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd) root=$(cd "$(dirname "$0")/../.." && pwd)
export PYTHON=${PYTHON:-python3} LIMIT=${LIMIT:-520}
begin=$SECONDS work=$(mktemp -d) failed=()
out=${OUT:-$work} && mkdir -p "$out"
full=$out/gpu-run.log && : >"$full"
parts=("$@")
[[ $# -gt 0 ]] || parts=(smoke cold dispatch steps poison numerics capture graphs replay operator threads rate sanitizer zero suite)
wants() { [[ " ${parts[*]} " == *" $1 "* ]]; }
first() { for p in "$@"; do [[ -e $p ]] && { echo "$p"; return; }; done; echo "$1"; }

export OEQ_NATIVE_LIBRARY=${OEQ_NATIVE_LIBRARY:-$(first "$root/.carry/liboeq_native.so" "$root/target/release/liboeq_native.so")}
OEQ_OPERATOR=${OEQ_OPERATOR:-$(first "$root/.carry/operator" "$root/target/release/examples/operator")}
OEQ_NATIVE_PYTHON=${OEQ_NATIVE_PYTHON:-$root/ffi-headers/python}
OEQ_PACKAGE=${OEQ_PACKAGE:-$root/.carry/package}
OEQ_UPSTREAM=${OEQ_UPSTREAM:-$root/.carry/upstream}
OEQ_UPSTREAM_SDIST=${OEQ_UPSTREAM_SDIST:-$root/.carry/upstream-sdist}
OEQ_TESTS=${OEQ_TESTS:-$root/.carry/tests}
OEQ_SITE=${OEQ_SITE:-$root/.carry/site}
export OEQ_NOTORCH=1 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 XLA_PYTHON_CLIENT_PREALLOCATE=false
export TF_CPP_MIN_LOG_LEVEL=2
# A store of this run's own: neither what an earlier run left nor the user's own decides what is compiled.
export OEQ_STORE_DIR=$work/store
ours=$OEQ_NATIVE_PYTHON:$OEQ_PACKAGE:$here:$OEQ_SITE

# part NAME SECONDS COMMAND...: runs it under a limit, into a log of its own.
part() {
  local name=$1 limit=$2 t=$SECONDS rc
  shift 2
  timeout -k 5 "$limit" "$@" >"$work/$name.log" 2>&1
  rc=$?
  echo "$rc $((SECONDS - t))" >"$work/$name.rc"
}
# report NAME...: the telling lines of the logs; everything when a part failed without saying why.
report() {
  local name rc seconds
  for name in "$@"; do
    [[ -e $work/$name.rc ]] || continue
    read -r rc seconds <"$work/$name.rc"
    { echo "===== $name (exit $rc, $seconds s)"; cat "$work/$name.log"; } >>"$full"
    echo "===== $name: exit $rc, $seconds s"
    if [[ $rc -eq 0 ]] || grep -q '^RESULT' "$work/$name.log"; then
      grep -E '^(smoke|poison|numerics|capture|threads|coldstart|suite|payload|dispatch|replay|steps|tp_|conv_|RESULT|========= ERROR)' "$work/$name.log" | grep -vE ' done$' | cut -c1-1200
    else
      grep -v '^Warning' "$work/$name.log" | tail -n 25 | cut -c1-600
      failed+=("$name")
      continue
    fi
    [[ $rc -eq 0 ]] || { failed+=("$name"); grep -hE '(Error|Fatal).*| failed$' "$work/$name.log" | grep -v '^smoke: ' | sort | uniq -c | tail -n 6 | cut -c1-800; }
  done
}

# ---- what is here --------------------------------------------------------------------------------------------------
{
  nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>&1 | head -1
  echo "$(nproc) cores, $("$PYTHON" -c 'import sys, jax; print("Python", sys.version.split()[0], "jax", jax.__version__)' 2>&1 | tail -1)"
  ls -l "$OEQ_NATIVE_LIBRARY" 2>&1
} | tee -a "$full"

# frames.c, once for all parts
"$PYTHON" -c "
import sys; sys.path.insert(0, '$here')
import frames; print(frames._build())" >"$work/frames.path" 2>"$work/frames.err" && export OEQ_FRAMES=$(tail -1 "$work/frames.path")
[[ -n ${OEQ_FRAMES:-} ]] || { echo "frames.c was not built:"; tail -5 "$work/frames.err"; }

if [[ -z ${PAYLOADS:-} ]]; then
  export PAYLOADS=$work/payloads
  PYTHONPATH=$OEQ_PACKAGE "$PYTHON" "$here/problems.py" "$PAYLOADS" >"$work/payloads.log" 2>&1 || { echo "no payloads:"; tail -5 "$work/payloads.log"; }
fi

# upstream's module: as it came, with NVIDIA's wheels on the library path, or built here
loads() { PYTHONPATH=$OEQ_UPSTREAM "$PYTHON" -c 'import openequivariance_extjax as e; assert e.__file__.endswith(".so"); e.DeviceProp(0)' >"$work/upstream.err" 2>&1; }
have_upstream=1
if ! loads; then
  before=${LD_LIBRARY_PATH:-}
  wheels=$("$PYTHON" -c 'import glob, os, sysconfig; print(":".join(glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "cu*", "lib")) + glob.glob(os.path.join(sysconfig.get_paths()["purelib"], "nvidia", "cuda_*", "lib"))))')
  export LD_LIBRARY_PATH=$wheels${before:+:$before}
  if ! loads; then
    export LD_LIBRARY_PATH=$before
    echo "upstream's module in $OEQ_UPSTREAM does not load ($(tail -1 "$work/upstream.err")); building it"
    OEQ_UPSTREAM=$work/upstream
    timeout 120 "$here/build_upstream.sh" "$OEQ_UPSTREAM_SDIST" "$OEQ_UPSTREAM" >"$work/build.log" 2>&1 || tail -5 "$work/build.log"
    loads || { echo "no upstream module: $(tail -1 "$work/upstream.err")"; have_upstream=; }
  fi
fi
if [[ $have_upstream ]]; then export OEQ_UPSTREAM; else unset OEQ_UPSTREAM; fi
theirs=${OEQ_UPSTREAM:-/nonexistent}:$OEQ_PACKAGE:$here:$OEQ_SITE
echo "prepared after $((SECONDS - begin)) s; upstream: ${OEQ_UPSTREAM:-none}"

# ---- one after the other -------------------------------------------------------------------------------------------
part smoke 90 env PYTHONPATH="$ours" "$PYTHON" "$here/smoke.py"
report smoke

cold() { # cold NAME K MODE...: ours, upstream, ours again for each mode
  local name=$1 count=$2 mode
  shift 2
  export COLDSTART_FILE=$work/$name.jsonl
  : >"$work/$name.log"
  local t=$SECONDS
  for mode in "$@"; do
    for side in ours theirs ours; do
      [[ $side == theirs && ! $have_upstream ]] && continue
      OEQ_STORE=off CUDA_CACHE_DISABLE=1 PYTHONPATH=${!side} timeout -k 5 150 "$PYTHON" "$here/coldstart.py" "$count" "$mode" >>"$work/$name.log" 2>&1 || echo "$side $count $mode failed" >>"$work/$name.log"
    done
  done
  "$PYTHON" "$here/coldstart.py" compare "$COLDSTART_FILE" >>"$work/$name.log" 2>&1
  echo "$? $((SECONDS - t))" >"$work/$name.rc"
  report "$name"
}
wants cold && cold cold 12 forces energy
wants cold24 && cold cold24 24 forces
if wants dispatch; then
  part dispatch 150 env PYTHONPATH="$here" "$PYTHON" "$here/dispatch.py"
  report dispatch
fi

if wants launches; then
  part launches 150 env OEQ_REPLAY=off PYTHONPATH="$here" "$PYTHON" "$here/dispatch.py"
  report launches
fi

# steps BUFFERS: upstream, ours and ours without graphs of the driver take turns, with XLA's command buffers on or off.
steps() {
  local flags=--xla_gpu_per_fusion_autotune_cache_dir=$work/autotune-$1 hosts=()
  mkdir -p "$work/autotune-$1"
  [[ $1 == on ]] || flags="$flags --xla_gpu_enable_command_buffer="
  host() { # host NAME SIDE MORE...
    local name=$1 side=$2
    shift 2
    hosts+=(--host "$name" env "XLA_FLAGS=$flags" "PYTHONPATH=${!side}" STEPS="${STEPS:-300}" STEP_TURNS=1 "$@" "$PYTHON" "$here/coldstart.py" 12 forces)
  }
  [[ $have_upstream ]] && host upstream theirs CUDA_CACHE_DISABLE=0
  host ours ours
  host "ours, by launches" ours OEQ_REPLAY=off
  mkdir -p "$out/steps-$1"
  echo "steps: command buffers $1"
  timeout -k 5 150 "$PYTHON" "$here/turns.py" --rounds "${STEP_ROUNDS:-7}" --limit 140 --logs "$out/steps-$1" "${hosts[@]}"
}
if wants steps; then
  t=$SECONDS rc=0
  for buffers in ${STEP_BUFFERS:-on off}; do
    steps "$buffers" || rc=1
  done >"$work/steps.log" 2>&1
  echo "RESULT steps taken in turns" >>"$work/steps.log"
  echo "$rc $((SECONDS - t))" >"$work/steps.rc"
  tail -n 30 "$work/steps.log"
fi

# ---- side by side --------------------------------------------------------------------------------------------------
numerics() {
  PYTHONPATH=$ours "$PYTHON" "$here/numerics.py" record "$work/ours.npz" &
  local p=$!
  PYTHONPATH=$theirs "$PYTHON" "$here/numerics.py" record "$work/theirs.npz"
  wait $p
  "$PYTHON" "$here/numerics.py" compare "$work/ours.npz" "$work/theirs.npz"
}
capture() {
  PYTHONPATH=$ours "$PYTHON" "$here/capture.py" record "$work/on.npz" &
  local p=$! others=()
  XLA_FLAGS=--xla_gpu_enable_command_buffer= PYTHONPATH=$ours "$PYTHON" "$here/capture.py" record "$work/off.npz" &
  local q=$!
  [[ $have_upstream ]] && PYTHONPATH=$theirs "$PYTHON" "$here/capture.py" record "$work/upstream.npz" && others=("$work/upstream.npz")
  wait $p
  wait $q
  "$PYTHON" "$here/capture.py" compare "$work/on.npz" "$work/off.npz" "${others[@]}"
}
export -f numerics capture
export ours theirs here work have_upstream
side=()
wants poison && { part poison 120 env PYTHONPATH="$here" "$PYTHON" "$here/poison.py" & side+=($!); }
wants numerics && { part numerics 120 bash -c numerics & side+=($!); }
wants capture && { part capture 120 bash -c capture & side+=($!); }
wants threads && { part threads 120 env PYTHONPATH="$ours" "$PYTHON" "$here/threads.py" & side+=($!); }
if wants sanitizer; then
  if sanitizer=$(command -v compute-sanitizer || ls /usr/local/cuda/bin/compute-sanitizer 2>/dev/null); then
    part sanitizer 120 env -u OEQ_UPSTREAM PYTHONPATH="$here" NODES=20 EDGES=60 POISON_PATTERN='^(tp_uvu_f32_shared|tp_uvw_f32|conv_uvu_f64|conv_det_f64)[.]' \
      "$sanitizer" --tool memcheck --error-exitcode 9 "$PYTHON" "$here/poison.py" &
    side+=($!)
  else
    echo "sanitizer: compute-sanitizer is not installed"
  fi
fi
for p in "${side[@]:-}"; do [[ -n $p ]] && wait "$p"; done
report poison numerics capture threads sanitizer

# ---- captures made by the test itself ----------------------------------------------------------------------------
if wants graphs; then
  t=$SECONDS
  timeout -k 5 150 "$PYTHON" "$here/graphs.py" "$OEQ_NATIVE_LIBRARY" "$PAYLOADS" >"$work/graphs.log" 2>&1
  rc=$?
  timeout -k 5 150 "$PYTHON" "$here/graphs.py" "$OEQ_NATIVE_LIBRARY" "$PAYLOADS" unload >>"$work/graphs.log" 2>&1
  echo "$((rc + $?)) $((SECONDS - t))" >"$work/graphs.rc"
  tail -n 20 "$work/graphs.log"
fi

# ---- call sites that come again ------------------------------------------------------------------------------------
if wants replay; then
  part replay "$((120 + ${SOAK:-20}))" env PYTHONPATH="$here" "$PYTHON" "$here/replay.py" "$OEQ_NATIVE_LIBRARY" "$PAYLOADS"
  report replay
fi

# ---- Rust without XLA ----------------------------------------------------------------------------------------------
if wants operator; then
  t=$SECONDS rc=0
  for payload in tp_uvu_f32 tp_uvu_f64 tp_uvw_f64_shared tp_real64 conv_uvu_f32 conv_uvw_f32 conv_det_f64 conv_real64 conv_realdet128; do
    "$OEQ_OPERATOR" "$PAYLOADS/$payload.json" 2000 100 || rc=1
  done >"$work/operator.log" 2>&1
  for payload in tp_real64 conv_real64 conv_realdet128; do
    echo "by launches:"
    OEQ_REPLAY=off "$OEQ_OPERATOR" "$PAYLOADS/$payload.json" 2000 100 || rc=1
  done >>"$work/operator.log" 2>&1
  echo "RESULT operator: $(grep -c ': ok$' "$work/operator.log") of 12 runs ok" >>"$work/operator.log"
  [[ $(grep -c ': ok$' "$work/operator.log") -eq 12 ]] || rc=1
  echo "$rc $((SECONDS - t))" >"$work/operator.rc"
  tail -n 70 "$work/operator.log"
fi

# ---- threads ---------------------------------------------------------------------------------------------------------
if wants rate; then
  t=$SECONDS
  timeout -k 5 100 "$PYTHON" "$here/thread_rate.py" "$OEQ_NATIVE_LIBRARY" "$PAYLOADS" $([[ $have_upstream ]] && ls "$OEQ_UPSTREAM"/*.so) >"$work/rate.log" 2>&1
  echo "$? $((SECONDS - t))" >"$work/rate.rc"
  tail -n 8 "$work/rate.log"
fi

# ---- the zeroing kernel ------------------------------------------------------------------------------------------
if wants zero; then
  t=$SECONDS
  cc -O2 "$here/zero_fill.c" -o "$work/zero_fill" -ldl && "$work/zero_fill" "$here/../../kernels/zero_fill.ptx" >"$work/zero.log" 2>&1
  echo "$? $((SECONDS - t))" >"$work/zero.rc"
  tail -n 45 "$work/zero.log"
fi

# ---- OpenEquivariance's own tests --------------------------------------------------------------------------------
if wants suite; then
  left=$((LIMIT - (SECONDS - begin) - 10)) shards=${SUITE_SHARDS:-8} t=$SECONDS pids=()
  if [[ $left -lt 30 ]]; then
    echo "suite: only $left s are left, not run"
    failed+=(suite)
  else
    for module in ours upstream; do
      [[ $module == upstream && ! $have_upstream ]] && continue
      path=$ours
      [[ $module == ours ]] || path=$theirs
      for ((i = 0; i < shards; i++)); do
        (cd "$OEQ_TESTS" && OMP_NUM_THREADS=1 SUITE_FILE=$work/suite-$module.jsonl SUITE_SHARD=$i/$shards PYTHONPATH=$path JAX_ENABLE_X64=True \
          timeout -k 5 "$left" "$PYTHON" -m pytest -q -p suite -p no:cacheprovider --import-mode=importlib --jax \
          batch_test.py conv_test.py vmap_test.py >"$work/suite-$module-$i.log" 2>&1) &
        pids+=($!)
      done
    done
    wait "${pids[@]}"
    PYTHONPATH=$here "$PYTHON" "$here/suite.py" compare "$work/suite-ours.jsonl" "$work/suite-upstream.jsonl" >"$work/suite.log" 2>&1
    echo "$? $((SECONDS - t))" >"$work/suite.rc"
    for f in "$work"/suite-*-*.log; do { echo "===== $(basename "$f")"; tail -n 60 "$f"; } >>"$full"; done
    report suite
    [[ -s $work/suite-ours.jsonl ]] || tail -n 15 "$work/suite-ours-0.log"
  fi
fi

# ---- one test of it, many times: sums by atomics differ from run to run --------------------------------------------
if wants repeat; then
  expression=${REPEAT_TEST:-AtomicSharedWeights and test_tp_fwd and F32 and e3tools} times=${REPEAT_TIMES:-24} t=$SECONDS
  for module in ours upstream; do
    [[ $module == upstream && ! $have_upstream ]] && continue
    path=$ours pids=()
    [[ $module == ours ]] || path=$theirs
    for ((i = 0; i < times; i++)); do
      (cd "$OEQ_TESTS" && OMP_NUM_THREADS=1 PYTHONPATH=$path JAX_ENABLE_X64=True XLA_PYTHON_CLIENT_MEM_FRACTION=.02 timeout -k 5 150 "$PYTHON" -m pytest \
        -q -p suite -p no:cacheprovider --import-mode=importlib --jax conv_test.py -k "$expression" >"$work/repeat-$module-$i.log" 2>&1) &
      pids+=($!)
      [[ $(((i + 1) % 12)) -eq 0 ]] && wait "${pids[@]}"
    done
    wait "${pids[@]}"
    echo "repeat: $module: $(grep -lE '^[0-9]+ passed' "$work"/repeat-$module-*.log | wc -l) of $times passed; $(grep -hoE 'observed error=[0-9.e-]+' "$work"/repeat-$module-*.log | sort | uniq -c | tr '\n' ' ')"
  done >"$work/repeat.log" 2>&1
  echo "RESULT repeat '$expression' done" >>"$work/repeat.log"
  echo "0 $((SECONDS - t))" >"$work/repeat.rc"
  cat "$work/repeat.log"
fi

# ---- summary -------------------------------------------------------------------------------------------------------
cat "$work"/*.jsonl >"$out/gpu-runs.jsonl" 2>/dev/null
echo "===== summary ($((SECONDS - begin)) s)"
for f in "$work"/*.rc; do
  name=$(basename "$f" .rc)
  read -r rc seconds <"$f"
  [[ $rc -eq 0 || " ${failed[*]} " == *" $name "* ]] || failed+=("$name")
  printf '%-10s %-8s %4s s  %s\n' "$name" "$([[ $rc -eq 0 ]] && echo ok || echo "exit $rc")" "$seconds" "$(grep -h '^RESULT' "$work/$name.log" | tail -1 | cut -c8-500)"
done > >(tee -a "$full")
wait $!
[[ ${#failed[@]} -eq 0 ]] && echo "all parts passed" || { echo "failed: ${failed[*]}"; exit 1; }
