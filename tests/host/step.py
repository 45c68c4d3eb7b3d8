"""Time of one step of a MACE-like model on the host platform: energy and forces of 100 atoms with 40 neighbours each.

usage: step.py [THREADS ...]      (1 and 2 by default)

Two layers of 128 channels with spherical harmonics up to l = 3, in single precision, as atomic kernels. For each number of
threads, in a process of its own that may use as many cores:
  the convolutions alone   of each, milliseconds of a call, forward, backward, and twice backward
  a whole model            how its first step and a warm step are divided: in OpenEquivariance's kernels, in compiling them,
                           and in XLA and everything else
What is printed is the best of several; nothing comes from a store.
"""

import ctypes
import os
import pathlib
import subprocess
import sys
import time

ATOMS, NEIGHBOURS, CHANNELS, TURNS = 100, 40, 128, 15
LAYERS = {"layer 1": ((CHANNELS, 1, 0), (0, 3, 3)), "layer 2": ((CHANNELS, 1, 0), (1, 3, 2))}


def convolutions():
    import jax
    import numerics
    import numpy as np
    import openequivariance_extjax as module
    import reference

    module.enable_host()
    total = 0.0
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
    print(f"  the convolutions of a step, forward and backward: {total * 1e3:.0f} ms")


class Watch:
    """Stands between XLA and the execute functions of the library, and notes when they begin and end."""

    def __init__(self, module):
        self.calls, self.kept = [], []
        self.table, self.capsule, self.stages = module._table("cpu"), module._capsule, module.registrations("cpu")

    def registrations(self, _platform="cpu"):
        """What the module of that name answers, with execute functions that are watched."""
        stages = dict(self.stages)
        for entry in self.table.handlers[: self.table.handler_count]:
            name, watched = entry.name.decode(), self.watch(entry.execute)
            stages[name] = {**stages[name], "execute": self.capsule(watched)}
        return stages

    def watch(self, address):
        handler = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)
        stage = handler(address)

        def execute(frame):
            start = time.perf_counter()
            answer = stage(frame)
            self.calls.append((start, time.perf_counter()))
            return answer

        self.kept.append(handler(execute))
        return ctypes.cast(self.kept[-1], ctypes.c_void_p).value

    def within(self, start, end):
        """Seconds between two times in which some call ran, and how many calls there were."""
        total, last, calls = 0.0, start, [call for call in self.calls if start <= call[0] and call[1] <= end]
        for begin, done in sorted(calls):
            total += max(0.0, done - max(begin, last))
            last = max(last, done)
        return total, len(calls)


def model():
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))
    import export_model
    import jax
    import numpy as np
    import openequivariance_extjax as module

    watch = Watch(module)
    module.registrations = watch.registrations
    module.enable_host()

    options = export_model.Options(channels=CHANNELS, atoms=ATOMS, layers=len(LAYERS))
    inputs = export_model.make_inputs(options)
    between = inputs["positions"][:, None] - inputs["positions"][None]
    nearest = np.argsort(np.linalg.norm(between, axis=-1), axis=1)[:, 1 : NEIGHBOURS + 1]
    inputs["receivers"] = np.repeat(np.arange(ATOMS, dtype=np.int32), NEIGHBOURS)
    inputs["senders"] = nearest.astype(np.int32).reshape(-1)
    operands = [jax.device_put(each) for each in inputs.values()]
    lowered = jax.jit(export_model.make_model(options)).lower(*operands)
    begin = time.perf_counter()
    program = lowered.compile()
    compiled = time.perf_counter()
    jax.block_until_ready(program(*operands))
    first = time.perf_counter()
    turns = []
    for _ in range(TURNS):
        start = time.perf_counter()
        jax.block_until_ready(program(*operands))
        end = time.perf_counter()
        turns.append((end - start, *watch.within(start, end)))
    step, kernels, calls = min(turns)
    in_calls, compilations = watch.within(compiled, first)[0], module.stats()["compiled"]
    assert (calls, compilations) == (2 * len(LAYERS), 2 * len(LAYERS)) and 0 < kernels < step, turns
    waited, milliseconds = max(0.0, in_calls - kernels), lambda seconds: f"{seconds * 1e3:.0f} ms"
    print(f"  a whole model, {ATOMS} atoms, {len(inputs['senders'])} edges: a step takes {milliseconds(step)}: kernels "
          f"{milliseconds(kernels)}, XLA and the rest {milliseconds(step - kernels)}, nothing to compile")  # fmt: skip
    print(f"  the first, nothing stored, {first - begin:.1f} s: XLA's compiler {compiled - begin:.1f} s, the {compilations} kernels' "
          f"compiler, which began meanwhile, {waited:.1f} s more, the step {first - compiled - waited:.1f} s")  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1:2] == ["measure"]:
        {"convolutions": convolutions, "model": model}[sys.argv[2]]()
    else:
        for threads in sys.argv[1:] or ["1", "2"]:
            print(f"{threads} threads", flush=True)
            cores = sorted(os.sched_getaffinity(0))[: int(threads)]
            settings = {**os.environ, "OEQ_HOST_THREADS": threads, "OEQ_STORE": "off"}
            for what in ("convolutions", "model"):
                subprocess.run([sys.executable, __file__, "measure", what], env=settings, check=True,
                               preexec_fn=lambda: os.sched_setaffinity(0, cores))  # fmt: skip
