"""Cold start of a model with K independent convolutions, through JAX on one GPU, on the module that PYTHONPATH picks.

usage: coldstart.py K MODE         MODE: energy | forces | second
       coldstart.py compare FILE   ratios from the lines that earlier runs wrote to FILE

Cold: from the start of XLA's compilation to the first result on the host's side, with NVRTC's disk cache off.
Prints one JSON line; with COLDSTART_FILE it is appended there too. env: NODES, EDGES,
STEPS (60). With STEP_TURNS=1 the steps are taken in rounds of STEPS, one for each line on standard input (turns.py).
For cold.py: COLDSTART_EXPORT names a file for a bundle of what was compiled, COLDSTART_MODEL one for the exported model,
COLDSTART_GATE makes the process wait, just before it compiles, until that file is there.
"""

import ctypes
import json
import os
import statistics
import sys
import time

import turns

os.environ["OEQ_NOTORCH"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("CUDA_CACHE_DISABLE", "1")
if "OEQ_STORE_DIR" not in os.environ:  # A cold start is one without a store, unless one is asked for.
    os.environ.setdefault("OEQ_STORE", "off")


STATS = ("struct_size kernels_interned kernels_shared compiled failed loaded launches store_hits store_misses store_writes "
         "store_write_failures store_damaged store_evictions store_waits bundle_hits").split()


class Stats(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in STATS]


def native():
    """Our library, which the module has opened; None beside upstream's module."""
    path = os.environ.get("OEQ_NATIVE_LIBRARY")
    return ctypes.CDLL(path) if path and os.path.realpath(path) in open("/proc/self/maps").read() else None


def stats(library):
    now = Stats(struct_size=ctypes.sizeof(Stats))
    assert library.oeq_get_stats(ctypes.byref(now)) == 0
    return {name: getattr(now, name) for name in STATS[1:]}


def nvrtc():
    return {line.split()[-1] for line in open("/proc/self/maps") if "libnvrtc" in line}


def export(library, path):
    data, size = ctypes.POINTER(ctypes.c_uint8)(), ctypes.c_size_t()
    assert library.oeq_export_compiled(ctypes.byref(data), ctypes.byref(size)) == 0
    with open(path, "wb") as out:
        out.write(ctypes.string_at(data, size.value))
    library.oeq_free_bytes(data, size)


def compare(path):
    best = {}
    for line in open(path):
        run = json.loads(line)
        best.setdefault((run["K"], run["mode"]), {}).setdefault(run["module"], []).append(run)
    bad = []
    for (count, mode), runs in best.items():
        ours = runs.get("ours", [])
        theirs = runs.get("upstream", [])
        if not ours or not theirs:
            bad.append(f"{count} {mode}: only {list(runs)}")
            continue
        cold = [statistics.median(r["cold_s"] for r in side) for side in (ours, theirs)]
        steps = [statistics.median(r["step_ms"] for r in side) for side in (ours, theirs)]
        off = abs(ours[0]["check"] - theirs[0]["check"]) / abs(theirs[0]["check"])
        print(f"coldstart: {count:2d} convolutions, {mode:7s} ours {cold[0]:6.2f} s, upstream {cold[1]:6.2f} s, {cold[1] / cold[0]:5.2f} times; "
              f"xla alone {ours[0]['xla_compile_s']:.2f} / {theirs[0]['xla_compile_s']:.2f} s; step {steps[0]:.3f} / {steps[1]:.3f} ms; results differ by {off:.1e}; "
              f"ours each {[r['cold_s'] for r in ours]}; NVRTC {ours[0]['nvrtc']} / {theirs[0]['nvrtc']}")
        if off > 1e-4:
            bad.append(f"{count} {mode}: results differ by {off:.1e}")
        if cold[1] < 4 * cold[0]:
            bad.append(f"{count} {mode}: only {cold[1] / cold[0]:.2f} times faster")
    print(f"RESULT coldstart {'; '.join(bad) or 'every case at least 4 times faster'}")
    return bool(bad)


def measure(count, mode):
    import jax
    import jax.numpy as jnp
    import numpy as np
    import openequivariance as oeq
    import openequivariance_extjax as extension
    from openequivariance.jax import TensorProductConv

    nodes, edges = int(os.environ.get("NODES", 256)), int(os.environ.get("EDGES", 4096))

    def problem(i):  # payloads that differ in multiplicity and degrees
        multiplicity = 32 + 16 * (i % 6)
        top1, top2 = 1 + (i // 12) % 2, 2 + (i // 6) % 2
        irreps = lambda mul, top: oeq.Irreps("+".join(f"{mul}x{l}{'eo'[l % 2]}" for l in range(top + 1)))
        a, b = irreps(multiplicity, top1), irreps(1, top2)
        out, instructions = [], []
        for x, (m, ir) in enumerate(a):
            for y, (_, jr) in enumerate(b):
                for kr in ir * jr:
                    if kr.l <= 2:
                        instructions.append((x, y, len(out), "uvu", True))
                        out.append((m, kr))
        return oeq.TPProblem(a, b, oeq.Irreps(out), instructions, shared_weights=False, internal_weights=False)

    convolutions = [TensorProductConv(problem(i)) for i in range(count)]
    rng = np.random.default_rng(0)
    rows = jnp.asarray(np.sort(rng.integers(0, nodes, edges)).astype(np.int32))
    cols = jnp.asarray(rng.integers(0, nodes, edges).astype(np.int32))
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype=jnp.float32)
    xs = [normal(nodes, c.config.irreps_in1.dim) for c in convolutions]
    ys = [normal(edges, c.config.irreps_in2.dim) for c in convolutions]
    ws = [normal(edges, c.weight_numel) for c in convolutions]

    def energy(ys, xs, ws, rows, cols):
        return sum(jnp.sum(jnp.tanh(c.forward(x, y, w, rows, cols))) for c, x, y, w in zip(convolutions, xs, ys, ws))

    second = lambda ys, *rest: jax.grad(lambda q: sum(jnp.vdot(g, g) for g in jax.grad(energy)(q, *rest)))(ys)
    function = {"energy": energy, "forces": jax.value_and_grad(energy), "second": second}[mode]
    arguments = (ys, xs, ws, rows, cols)
    jax.block_until_ready(arguments)
    library = native()
    if path := os.environ.get("COLDSTART_MODEL"):
        names = [f"conv_{order}" for order in ("forward", "backward", "double_backward")]
        unchecked = [jax.export.DisabledSafetyCheck.custom_call(name) for name in names]
        exported = jax.export.export(jax.jit(function), disabled_checks=unchecked)(*arguments)
        with open(path, "wb") as out:
            out.write(exported.serialize())
        jax.clear_caches()
    if gate := os.environ.get("COLDSTART_GATE"):
        jax.block_until_ready(jax.jit(lambda x: x + 1)(rows))  # What a process compiles first is slower.
        open(f"{gate}.{os.getpid()}", "w").close()
        while not os.path.exists(gate):
            time.sleep(0.01)
    before = nvrtc()  # jax opens the one of its own wheels.
    begin = time.perf_counter()
    compiled = jax.jit(function).lower(*arguments).compile()
    xla = time.perf_counter() - begin
    result = jax.block_until_ready(compiled(*arguments))
    cold = time.perf_counter() - begin
    steps, number = [], int(os.environ.get("STEPS", 60))
    step = lambda: jax.block_until_ready(compiled(*arguments))
    if "STEP_TURNS" in os.environ:
        return turns.take(begin, step, number)
    for _ in range(number):
        t = time.perf_counter()
        step()
        steps.append(time.perf_counter() - t)
    check = float(sum(np.abs(np.asarray(v, np.float64)).sum() for v in jax.tree.leaves(result)))
    after = nvrtc()
    line = json.dumps({
        "module": "upstream" if extension.__file__.endswith(".so") else "ours", "K": count, "mode": mode,
        "xla_compile_s": round(xla, 3), "cold_s": round(cold, 3), "step_ms": round(1e3 * float(np.median(steps)), 4),
        "check": check, "nvrtc": sorted(after), "nvrtc_opened": sorted(after - before), "disk_cache": os.environ.get("CUDA_CACHE_DISABLE") != "1", "cores": len(os.sched_getaffinity(0)),
        "stats": stats(library) if library else None,
    })
    if library and "COLDSTART_EXPORT" in os.environ:
        export(library, os.environ["COLDSTART_EXPORT"])
    print(line, flush=True)
    if "COLDSTART_FILE" in os.environ:
        with open(os.environ["COLDSTART_FILE"], "a") as out:
            out.write(line + "\n")


if __name__ == "__main__":
    if sys.argv[1] == "compare":
        sys.exit(compare(sys.argv[2]))
    measure(int(sys.argv[1]), sys.argv[2])
