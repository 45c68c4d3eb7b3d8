"""A whole model, exported for CUDA, in a real CPU PJRT plugin without Python: energy and forces against plain jax.numpy.

usage: model.py FOLDER NATIVE_HOST PLUGIN.so [PLUGIN.so ...]      env OEQ_NATIVE_LIBRARY

FOLDER gets the models, of 100 atoms and two convolutions each: single precision with atomics, double precision with sums in
a fixed order. NATIVE_HOST is examples/native_host, built. Each model runs twice in each plugin: registered by the library, and
by the library's plain symbols alone.
"""

import itertools
import os
import pathlib
import subprocess
import sys
import time

import jax
import numpy as np

jax.config.update("jax_enable_x64", True)
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "examples"))

import export_model

MODELS = {
    "float32": (export_model.Options(atoms=100, layers=2), 3e-6),
    "float64": (export_model.Options(atoms=100, layers=2, dtype="float64", deterministic=True), 1e-13),
}


def main(folder, host, *plugins):
    wrong = 0
    for name, (options, tolerance) in MODELS.items():
        place = pathlib.Path(folder) / name
        exported, inputs = export_model.export(options)
        manifest = export_model.write(place, options, exported, inputs, False, False)
        double = {key: value.astype(np.float64) if value.dtype == np.float32 else value for key, value in inputs.items()}
        plain = export_model.make_model(
            export_model.dataclasses.replace(options, dtype="float64"), export_model.PlainConvolution
        )
        expected = jax.jit(plain)(*double.values())
        arguments = [place / "inputs" / f"{entry['name']}.npy" for entry in manifest["inputs"]]
        ways = {"registered": [], "plain symbols": ["--symbols", os.environ["OEQ_NATIVE_LIBRARY"]]}
        for plugin, (way, options_of) in itertools.product(plugins, ways.items()):
            out = place / "out"
            start = time.perf_counter()
            command = [host, plugin, place / "model.jaxexport", *arguments, "--out", out, "--repeat", "3", *options_of]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            took = time.perf_counter() - start
            found = [np.load(out / f"output_{index}.npy") for index in range(2)]
            errors = [float(np.abs(f - e).max() / np.abs(e).max()) for f, e in zip(found, expected)]
            good = max(errors) <= tolerance
            wrong += not good
            print(f"{'ok' if good else 'WRONG'}: {name}, {manifest['edges']} edges, {pathlib.Path(plugin).parent.name}, {way}: energy "
                  f"{float(found[0]):.6f}, expected {float(expected[0]):.6f}; relative errors: energy {errors[0]:.1e}, forces "
                  f"{errors[1]:.1e}; the process took {took:.1f} s", flush=True)  # fmt: skip
    return wrong


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
