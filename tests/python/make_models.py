"""Exports the models that the tests read, with the OpenEquivariance that is on PYTHONPATH, for CUDA, without a GPU.

usage: make_models.py FOLDER [all]

Every model is written in three containers: NAME.jaxexport (an artifact of jax.export), NAME.mlirbc (StableHLO bytecode)
and NAME.mlir (StableHLO text). FOLDER/models.json gets, for each NAME, what a reader must find in all three:
  calls     target: how often it is called
  kernels   how many different payloads the calls name
  form      "json" or "dictionaries", how the payload is written

Names: VERSION_FAMILY_ORDER calls one classic target. With `all` there are also variadic_FAMILY, which call a variadic
target for every order, and mace, mace_f64 and mace_deterministic, small variants of examples/export_model.py.
"""

import json
import os
import pathlib
import re
import sys

os.environ["OEQ_NOTORCH"] = "1"
sys.path[:0] = [
    str(pathlib.Path(__file__).resolve().parents[2] / "examples"),
    str(pathlib.Path(__file__).resolve().parent),
]

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import openequivariance as oeq
import openequivariance_extjax
from make_payloads import problem

NODES, EDGES, BATCH = 6, 10, 7
CHECKS = [jax.export.DisabledSafetyCheck.custom_call(name) for name in openequivariance_extjax.registrations()]


def export(function, *shapes):
    """A function of arrays of float32 or int32, given by shape and dtype, exported for CUDA."""
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.export.export(jax.jit(function), platforms=["cuda"], disabled_checks=CHECKS)(*arguments)


def write(folder, name, exported, kernels, form):
    """Writes one model in all containers, and returns its entry of models.json."""
    text = exported.mlir_module()
    (folder / f"{name}.jaxexport").write_bytes(exported.serialize())
    (folder / f"{name}.mlirbc").write_bytes(exported.mlir_module_serialized)
    (folder / f"{name}.mlir").write_text(text, encoding="utf-8")
    calls = {}
    for target in re.findall(r"stablehlo\.custom_call @(\w+)", text):
        if target in openequivariance_extjax.registrations():
            calls[target] = calls.get(target, 0) + 1
    assert calls, f"{name} calls none of our targets"
    return {"calls": calls, "kernels": kernels, "form": form}


def derivatives(function):
    """The function, its reverse-mode derivative, and that one's, each with the operands of the target of its order."""

    def backward(x, y, w, dz):
        return jax.vjp(function, x, y, w)[1](dz)

    def double_backward(x, y, w, dz, ddx, ddy, ddw):
        return jax.vjp(backward, x, y, w, dz)[1]((ddx, ddy, ddw))

    return {"forward": function, "backward": backward, "double_backward": double_backward}


def operands(order, x, y, w, z):
    """Shapes of the floating point operands of a target of some order."""
    shapes = {"forward": (x, y, w), "backward": (x, y, w, z), "double_backward": (x, y, w, z, x, y, w)}[order]
    return [(shape, np.float32) for shape in shapes]


def operators(folder, models):
    """One model for each classic target."""
    form = "dictionaries" if oeq.__version__ in ("0.5.1", "0.5.2", "0.5.3") else "json"
    about = problem("uvu", channels=4, nodes=1, edges=1, out=1)
    numbers = about.weight_numel
    x, y, z = about.irreps_in1.dim, about.irreps_in2.dim, about.irreps_out.dim
    tensor_product, convolution = oeq.jax.TensorProduct(about), oeq.jax.TensorProductConv(about)
    rows, cols = (
        jnp.asarray(np.sort(np.arange(EDGES) % NODES).astype(np.int32)),
        jnp.arange(EDGES, dtype=jnp.int32) % NODES,
    )
    families = {
        "tp": (tensor_product.forward, ((BATCH, x), (BATCH, y), (BATCH, numbers), (BATCH, z))),
        "conv": (
            lambda a, b, c: convolution.forward(a, b, c, rows, cols),
            ((NODES, x), (EDGES, y), (EDGES, numbers), (NODES, z)),
        ),
    }
    for family, (forward, shapes) in families.items():
        for order, function in derivatives(forward).items():
            name = f"{oeq.__version__}_{family}_{order}"
            models[name] = write(folder, name, export(function, *operands(order, *shapes)), 1, form)
    return about, tensor_product, convolution


def variadic(folder, models, about, tensor_product, convolution):
    """One model for each variadic target, which names the order by an attribute."""
    x, y, z = about.irreps_in1.dim, about.irreps_in2.dim, about.irreps_out.dim
    numbers = about.weight_numel
    cases = {
        "oeq_tensor_product": (tensor_product, ((BATCH, x), (BATCH, y), (BATCH, numbers), (BATCH, z)), []),
        "oeq_convolution": (
            convolution,
            ((NODES, x), (EDGES, y), (EDGES, numbers), (NODES, z)),
            [((EDGES,), np.int32), ((EDGES,), np.int32), ((1,), np.uint8), ((1,), np.int32)],
        ),
    }
    for target, (kernel, shapes, extra) in cases.items():
        first, second, weights, made = (jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes)
        results = {
            "forward": (made,),
            "backward": (first, second, weights),
            "double_backward": (first, second, weights, made),
        }
        floats = {order: operands(order, *shapes) for order in results}

        def every_order(*arguments):
            given, outcome = list(arguments), []
            rest = given[len(given) - len(extra) :]
            for derivative, order in enumerate(results):
                taken = [given.pop(0) for _ in floats[order]]
                call = jax.ffi.ffi_call(target, results[order])
                outcome += call(*taken, *rest, kernel=kernel.kernel, hash=kernel.hash, derivative=np.int64(derivative))
            return outcome

        exported = export(every_order, *sum(floats.values(), []), *extra)
        name = "variadic_" + ("tp" if target == "oeq_tensor_product" else "conv")
        models[name] = write(folder, name, exported, 1, "json")


def mace(folder, models):
    """Small variants of the model of the demonstration."""
    import export_model

    small = dict(channels=8, atoms=12)
    for name, options in {
        "mace": export_model.Options(**small),
        "mace_deterministic": export_model.Options(**small, deterministic=True, layers=2),
        "mace_f64": export_model.Options(**small, dtype="float64", layers=2),
    }.items():
        jax.config.update("jax_enable_x64", options.dtype == "float64")
        models[name] = write(folder, name, export_model.export(options)[0], options.layers, "json")


def main(folder, everything):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    listing = folder / "models.json"
    models = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else {}
    made = operators(folder, models)
    if everything:
        variadic(folder, models, *made)
        mace(folder, models)
    listing.write_text(json.dumps(models, indent=1, sort_keys=True) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[2:] not in ([], ["all"]):
        sys.exit(__doc__)
    main(sys.argv[1], everything=len(sys.argv) > 2)
