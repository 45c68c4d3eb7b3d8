"""Tensor product problems of real models' shapes, and their kernel payloads, made by OpenEquivariance itself.

usage: problems.py FOLDER [PATTERN]     writes NAME.json for every payload whose name matches; needs no GPU

The source in a payload is OpenEquivariance's own: make payloads where they are used, never commit them.
"""

import os
import re
import sys

os.environ["OEQ_NOTORCH"] = "1"

import numpy as np


class H200:
    """The device that payloads are made for when there is none to ask."""

    name, warpsize, major, minor = "NVIDIA H200", 32, 9, 0
    maxSharedMemPerBlock, multiprocessorCount = 232448, 132


# name: (multiplicity, highest degree of input 1, of input 2, of the output, connection, dtype, shared weights, variant)
# Names begin with their family: tp or conv. variant: "" atomic, "deterministic" or "kahan".
TABLE = {
    # one of each kind, small
    "tp_uvu_f32": (32, 1, 2, 2, "uvu", np.float32, False, ""),
    "tp_uvu_f64": (32, 1, 1, 2, "uvu", np.float64, False, ""),
    "tp_uvu_f32_shared": (16, 1, 1, 2, "uvu", np.float32, True, ""),
    "tp_uvw_f32": (16, 1, 1, 1, "uvw", np.float32, False, ""),
    "tp_uvw_f64_shared": (16, 1, 1, 1, "uvw", np.float64, True, ""),
    "conv_uvu_f32": (32, 1, 2, 2, "uvu", np.float32, False, ""),
    "conv_uvu_f64": (32, 1, 1, 2, "uvu", np.float64, False, ""),
    "conv_uvu_f32_shared": (16, 1, 1, 2, "uvu", np.float32, True, ""),
    "conv_uvw_f32": (16, 1, 1, 1, "uvw", np.float32, False, ""),
    "conv_det_f32": (32, 1, 2, 2, "uvu", np.float32, False, "deterministic"),
    "conv_det_f64": (16, 1, 1, 2, "uvu", np.float64, False, "deterministic"),
    "conv_kahan_f32": (32, 1, 1, 2, "uvu", np.float32, False, "kahan"),
    # the sizes of models in use
    "tp_real64": (64, 1, 3, 2, "uvu", np.float32, False, ""),
    "conv_real64": (64, 1, 3, 2, "uvu", np.float32, False, ""),
    "conv_real128": (128, 1, 3, 2, "uvu", np.float32, False, ""),
    "conv_realdet128": (128, 1, 3, 2, "uvu", np.float32, False, "deterministic"),
}


def problem(mul, l1, l2, l3, connection, dtype, shared, _variant):
    import openequivariance as oeq

    irreps = lambda mul, top: oeq.Irreps("+".join(f"{mul}x{l}{'eo'[l % 2]}" for l in range(top + 1)))
    a, b = irreps(mul, l1), irreps(1, l2)
    out, instructions = [], []
    for x, (m, ir) in enumerate(a):
        for y, (_, jr) in enumerate(b):
            for kr in ir * jr:
                if kr.l <= l3:
                    instructions.append((x, y, len(out), connection, True))
                    out.append((m, kr))
    return oeq.TPProblem(a, b, oeq.Irreps(out), instructions, shared_weights=shared, internal_weights=False,
                         irrep_dtype=dtype, weight_dtype=dtype)


def options(name):
    """The keyword arguments of TensorProductConv for a table entry."""
    variant = TABLE[name][-1]
    return {"deterministic": variant != "", "kahan": variant == "kahan"}


def payload_text(name, device=H200):
    from openequivariance.core.LoopUnrollConv import LoopUnrollConv
    from openequivariance.core.LoopUnrollTP import LoopUnrollTP

    made = problem(*TABLE[name])
    if name.startswith("tp"):
        return LoopUnrollTP(made, device, is_hip=False, torch_op=False).kernel_string
    return LoopUnrollConv(made, device, False, idx_dtype=np.int32, torch_op=False, **options(name)).kernel_string


if __name__ == "__main__":
    folder, pattern = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    os.makedirs(folder, exist_ok=True)
    for name in TABLE:
        if re.search(pattern, name):
            with open(os.path.join(folder, f"{name}.json"), "w") as out:
                print(name, out.write(payload_text(name)))
