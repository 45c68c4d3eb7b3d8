"""Makes real kernel payloads with the OpenEquivariance that is on PYTHONPATH, for an H200, without a GPU.

usage: make_payloads.py FOLDER

From 0.5.4 on a payload is the JSON text that a model's `kernel` attribute holds: FOLDER/FAMILY_NAME.json, byte for
byte. Earlier versions wrote the source and dictionaries of integers as attributes of their own; those become
FOLDER/dictionaries/FAMILY_NAME.json, one object with a member for each attribute. FOLDER/hashes.tsv has the `hash`
attribute of every file. FAMILY is tp or conv.
"""

import json
import os
import pathlib
import sys

os.environ["OEQ_NOTORCH"] = "1"

import numpy as np
from openequivariance.core import utils
from openequivariance.core.e3nn_lite import Irreps, TPProblem
from openequivariance.core.LoopUnrollConv import LoopUnrollConv
from openequivariance.core.LoopUnrollTP import LoopUnrollTP


class H200:
    """The device properties that the generator asks for."""

    warpsize = 32
    maxSharedMemPerBlock = 232448
    multiprocessorCount = 132


def irreps(channels, highest):
    """`channels` copies of each l up to `highest`, with the parity of spherical harmonics."""
    return Irreps("+".join(f"{channels}x{l}{'eo'[l % 2]}" for l in range(highest + 1)))


def problem(connection, channels, nodes, edges, out, shared=False, dtype=np.float32, channels_out=None):
    """All paths from l <= `nodes` and l <= `edges` to l <= `out`."""
    first, second = irreps(channels, nodes), irreps(1, edges)
    if connection == "uvw":
        result = irreps(channels_out, out)
        paths = [
            (i, j, k, "uvw", True)
            for i, (_, a) in enumerate(first)
            for j, (_, b) in enumerate(second)
            for k, (_, c) in enumerate(result)
            if c in a * b
        ]
    else:
        result, paths = [], []
        for i, (multiplicity, a) in enumerate(first):
            for j, (_, b) in enumerate(second):
                for c in a * b:
                    if c.l <= out:
                        paths.append((i, j, len(result), "uvu", True))
                        result.append((multiplicity, c))
        result = Irreps(result)
    return TPProblem(
        first,
        second,
        result,
        paths,
        shared_weights=shared,
        internal_weights=False,
        irrep_dtype=dtype,
        weight_dtype=dtype,
    )


# Name: problem, and for a convolution its options. The last ones make, with conv_uvu_f32, eight convolutions such as one
# deep model holds.
PAYLOADS = {
    "tp_small": dict(connection="uvu", channels=1, nodes=0, edges=0, out=0),
    "tp_uvu_f32": dict(connection="uvu", channels=32, nodes=1, edges=3, out=2),
    "tp_uvu_f64": dict(connection="uvu", channels=32, nodes=1, edges=2, out=2, dtype=np.float64),
    "tp_uvu_shared": dict(connection="uvu", channels=32, nodes=1, edges=1, out=2, shared=True),
    "tp_uvw_f32": dict(connection="uvw", channels=16, nodes=1, edges=1, out=1, channels_out=16),
    "tp_uvw_f64": dict(connection="uvw", channels=8, nodes=1, edges=1, out=1, channels_out=8, dtype=np.float64),
    "tp_uvw_shared": dict(connection="uvw", channels=16, nodes=1, edges=1, out=1, channels_out=16, shared=True),
    "tp_large": dict(connection="uvu", channels=128, nodes=2, edges=3, out=3),
    "conv_small": dict(connection="uvu", channels=1, nodes=0, edges=0, out=0),
    "conv_uvu_f32": dict(connection="uvu", channels=64, nodes=1, edges=3, out=2),
    "conv_uvu_f64": dict(connection="uvu", channels=32, nodes=1, edges=2, out=2, dtype=np.float64),
    "conv_uvu_shared": dict(connection="uvu", channels=32, nodes=1, edges=1, out=2, shared=True),
    "conv_uvu_i64": dict(connection="uvu", channels=32, nodes=1, edges=1, out=1, index=np.int64),
    "conv_uvw_f32": dict(connection="uvw", channels=16, nodes=1, edges=1, out=1, channels_out=16),
    "conv_uvw_f64": dict(connection="uvw", channels=8, nodes=1, edges=1, out=1, channels_out=8, dtype=np.float64),
    "conv_det_f32": dict(connection="uvu", channels=32, nodes=1, edges=1, out=2, deterministic=True),
    "conv_det_f64": dict(connection="uvu", channels=32, nodes=1, edges=1, out=1, deterministic=True, dtype=np.float64),
    "conv_det_uvw": dict(connection="uvw", channels=8, nodes=1, edges=1, out=1, channels_out=8, deterministic=True),
    "conv_kahan": dict(connection="uvu", channels=32, nodes=1, edges=1, out=2, deterministic=True, kahan=True),
    "conv_large": dict(connection="uvu", channels=128, nodes=2, edges=3, out=3),
    "conv_like_1": dict(connection="uvu", channels=32, nodes=1, edges=3, out=2),
    "conv_like_2": dict(connection="uvu", channels=48, nodes=1, edges=3, out=2),
    "conv_like_3": dict(connection="uvu", channels=80, nodes=1, edges=3, out=2),
    "conv_like_4": dict(connection="uvu", channels=96, nodes=1, edges=3, out=2),
    "conv_like_5": dict(connection="uvu", channels=112, nodes=1, edges=3, out=2),
    "conv_like_6": dict(connection="uvu", channels=32, nodes=1, edges=3, out=3),
    "conv_like_7": dict(connection="uvu", channels=64, nodes=1, edges=3, out=3),
}


def generate(name, index=np.int32, deterministic=False, kahan=False, **description):
    """The generator's object for one payload."""
    # The third argument became a flag for HIP in 0.7.0; it was a function over the source before.
    third = False if hasattr(utils, "hash_str_64") and "is_hip" in LoopUnrollTP.__init__.__code__.co_varnames else str
    if name.startswith("tp"):
        return LoopUnrollTP(problem(**description), H200(), third, torch_op=False)
    return LoopUnrollConv(
        problem(**description), H200(), third, idx_dtype=index, torch_op=False, deterministic=deterministic, kahan=kahan
    )


def dictionaries(made):
    """The attributes of versions before 0.5.4, as those versions made them."""
    attributes = {
        "kernel": made.jit_kernel,
        "forward_config": vars(made.forward_schedule.launch_config),
        "backward_config": vars(made.backward_schedule.launch_config),
        "double_backward_config": vars(made.double_backward_schedule.launch_config),
        "kernel_prop": getattr(made, "kernel_prop", None) or made.kernelProp,
    }
    utils.hash_attributes(attributes)
    return {name: ints(value) if isinstance(value, dict) else value for name, value in attributes.items()}


def ints(dictionary):
    """Plain integers in place of numpy's."""
    return {name: int(value) for name, value in dictionary.items()}


def main(folder):
    folder = pathlib.Path(folder)
    (folder / "dictionaries").mkdir(parents=True, exist_ok=True)
    hashes = []
    for name, description in PAYLOADS.items():
        made = generate(name, **description)
        if hasattr(made, "kernel_string"):
            path, text, value = folder / f"{name}.json", made.kernel_string, made.hash
        else:
            attributes = dictionaries(made)
            path, text, value = folder / "dictionaries" / f"{name}.json", json.dumps(attributes), attributes["hash"]
        path.write_bytes(text.encode())
        hashes.append(f"{path.relative_to(folder)}\t{value}\n")
    with open(folder / "hashes.tsv", "a", encoding="utf-8") as file:
        file.writelines(hashes)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
