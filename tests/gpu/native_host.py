"""What the native hosts do with an exported model, in jax: its outputs as .npy files, and its time per step.

usage: native_host.py FOLDER EXPECTED STEPS     FOLDER as examples/export_model.py writes it

Like the native hosts with --rounds: after the first step a round of STEPS steps is run for each line on standard input.
A step is what a user of jax does: the jitted function is called, and its outputs are waited for, on the device. With
JAX_PLATFORMS=cpu the model runs on the CPU, whatever it was exported for.
"""

import dataclasses
import json
import pathlib
import sys
import time

import jax
import jax.export
import numpy as np
import openequivariance  # noqa: F401  (registers the handlers)
import openequivariance_extjax

folder, expected, count = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
exported = jax.export.deserialize(bytearray((folder / "model.jaxexport").read_bytes()))
if jax.default_backend() == "cpu":
    openequivariance_extjax.enable_host()
    exported = dataclasses.replace(exported, platforms=("cpu",))
manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
inputs = [jax.device_put(np.load(folder / "inputs" / f"{entry['name']}.npy")) for entry in manifest["inputs"]]
call = jax.jit(exported.call)

began = time.perf_counter()
outputs = jax.block_until_ready(call(*inputs))
print(f"first step  {1e3 * (time.perf_counter() - began):.3f} ms", flush=True)
for index, _ in enumerate(sys.stdin, 1):
    times, last = [], time.perf_counter()
    for step in range(count // 10 + count):
        del outputs  # before the next are made, as in the native hosts, which say why
        outputs = jax.block_until_ready(call(*inputs))
        now = time.perf_counter()
        if step >= count // 10:
            times.append(now - last)
        last = now
    times.sort()
    least, tenth, median, nine = (f"{1e3 * times[tenths * (count - 1) // 10]:.3f} ms" for tenths in (0, 1, 5, 9))
    print(f"round {index:<5} {median} median, {least} least, {tenth} tenth, {nine} nine tenths of {count} steps")
    sys.stdout.flush()

expected.mkdir(parents=True, exist_ok=True)
for index, output in enumerate(jax.tree.leaves(outputs)):
    np.save(expected / f"output_{index}.npy", np.asarray(output))
