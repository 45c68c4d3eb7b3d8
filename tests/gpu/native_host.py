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
import turns

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


def step():
    global outputs
    del outputs  # before the next are made, as in the native hosts, which say why
    outputs = jax.block_until_ready(call(*inputs))


turns.take(began, step, count)

expected.mkdir(parents=True, exist_ok=True)
for index, output in enumerate(jax.tree.leaves(outputs)):
    np.save(expected / f"output_{index}.npy", np.asarray(output))
