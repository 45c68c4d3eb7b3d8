"""What jax makes of an exported model: its outputs as .npy files, and its time per step.

usage: native_host.py FOLDER EXPECTED [STEPS]     FOLDER as examples/export_model.py writes it
"""

import json
import pathlib
import sys
import time

import jax
import jax.export
import numpy as np
import openequivariance  # noqa: F401  (registers the handlers)

folder, expected = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
steps = int(sys.argv[3]) if len(sys.argv) > 3 else 200
manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
inputs = [jax.device_put(np.load(folder / "inputs" / f"{entry['name']}.npy")) for entry in manifest["inputs"]]
call = jax.jit(jax.export.deserialize(bytearray((folder / "model.jaxexport").read_bytes())).call)
outputs = jax.block_until_ready(call(*inputs))
expected.mkdir(parents=True, exist_ok=True)
times = []
for _ in range(steps):
    began = time.perf_counter()
    outputs = jax.block_until_ready(call(*inputs))
    times.append(time.perf_counter() - began)
for index, output in enumerate(jax.tree.leaves(outputs)):
    np.save(expected / f"output_{index}.npy", np.asarray(output))
times.sort()
print(f"per step    {1e3 * times[len(times) // 2]:.3f} ms median of {steps} ({1e3 * times[0]:.3f} to {1e3 * times[-1]:.3f} ms)")
