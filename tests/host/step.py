"""Time of one step of a MACE-like model on the host platform: energy and forces of 100 atoms with 40 neighbours each.

usage: step.py [THREADS ...]

Only the convolutions, which is where such a model spends its time here: two layers of 128 channels with spherical harmonics
up to l = 3, each forward and backward, in single precision, as atomic kernels. For each number of threads, in a process of
its own: seconds to compile, and milliseconds for each call.
"""

import os
import subprocess
import sys
import time

ATOMS, NEIGHBOURS, TURNS = 100, 40, 5
LAYERS = {"layer 1": ((128, 1, 0), (0, 3, 3)), "layer 2": ((128, 1, 0), (1, 3, 2))}


def measure():
    import jax
    import numpy as np
    import numerics
    import openequivariance_extjax as module
    import reference

    module.enable_host()
    total, compiling = 0.0, 0.0
    for name, (mul, top) in LAYERS.items():
        case = reference.Case(name, "conv", mode="uvu", mul=mul, top=top)
        inputs, graph = case.inputs(nodes=ATOMS, edges=ATOMS * NEIGHBOURS)
        for order, suffix in enumerate(numerics.SUFFIXES):
            operands, results = case.operands(order, inputs, graph)
            call = jax.ffi.ffi_call(f"conv_{suffix}", [jax.ShapeDtypeStruct(s, case.dtype) for s in results.values()])
            program = jax.jit(lambda *a: call(*a, kernel=case.payload, hash=np.int64(case.hash)))
            operands = [jax.device_put(operand) for operand in operands]
            times, spent = [], []
            for _ in range(TURNS + 1):
                start, cpu = time.perf_counter(), time.process_time()
                jax.block_until_ready(program(*operands))
                times.append(time.perf_counter() - start)
                spent.append(time.process_time() - cpu)
            best = min(times[1:])
            print(f"  {name} {suffix:16} first {times[0]:6.2f} s   then {best * 1e3:8.1f} ms ({min(spent[1:]) * 1e3:.0f} ms of CPU)")
            if order < 2:
                total += best
                compiling += times[0] - best
    print(f"  step (forward and backward of both layers): {total * 1e3:.0f} ms; compiling {compiling:.1f} s")


if __name__ == "__main__":
    if sys.argv[1:] == ["measure"]:
        measure()
    else:
        for threads in sys.argv[1:] or ["1", "2"]:
            print(f"{threads} threads", flush=True)
            subprocess.run([sys.executable, __file__, "measure"], env={**os.environ, "OEQ_HOST_THREADS": threads}, check=True)
