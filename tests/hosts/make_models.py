"""Writes small models for the native hosts' tests, with what jax itself makes of them.

usage: make_models.py FOLDER

  plain.jaxexport, plain.mlir, plain.mlirbc   a function of three arguments, one of them unused; for the CPU
  both.jaxexport                              the same, for CPU and CUDA in one artifact
  oeq.jaxexport                               a tensor product's custom call, lowered for the CPU
  inputs/*.npy, expected/*.npy                inputs and jax's outputs of plain
  expected-oeq/*.npy                          what the kernel of oeq computes
"""

import json
import pathlib
import sys

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

folder = pathlib.Path(sys.argv[1])
(folder / "inputs").mkdir(parents=True, exist_ok=True)
(folder / "expected").mkdir(exist_ok=True)


def plain(a, unused, b):
    del unused
    return jnp.sin(a) @ b.astype(jnp.float32), (b * 2, a.sum())


random = np.random.default_rng(3)
arguments = (
    random.standard_normal((5, 300), dtype=np.float32),
    np.zeros((2,), np.float64),
    random.integers(-9, 9, (300, 7), dtype=np.int32),
)
for index, argument in enumerate(arguments):
    np.save(folder / "inputs" / f"{index}.npy", argument)
for index, output in enumerate(jax.tree.leaves(jax.jit(plain)(*arguments))):
    np.save(folder / "expected" / f"output_{index}.npy", output)
shapes = [jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype)) for a in arguments]
exported = jax.export.export(jax.jit(plain), platforms=["cpu"])(*shapes)
(folder / "plain.jaxexport").write_bytes(exported.serialize())
(folder / "plain.mlirbc").write_bytes(exported.mlir_module_serialized)
(folder / "plain.mlir").write_text(str(jax.jit(plain).lower(*shapes).compiler_ir("stablehlo")))
both = jax.export.export(jax.jit(plain), platforms=["cuda", "cpu"])(*shapes)
(folder / "both.jaxexport").write_bytes(both.serialize())

# A payload of our own, in OpenEquivariance's form. What it computes is easily told: no tensor product.
source = """
__global__ void forward(
    size_t products, const float* L1_in, const float* L2_in, float* L3_out, const float* weights) {
  const size_t stride = (size_t)gridDim.x * blockDim.x;
  for (size_t row = (size_t)blockIdx.x * blockDim.x + threadIdx.x; row < products; row += stride)
    for (int j = 0; j < 10; ++j)
      L3_out[row * 10 + j] = L1_in[row * 6 + j % 6] + 2 * L2_in[row * 4 + j % 4] + 4 * weights[row * 8 + j % 8];
}
""" + "".join(
    f"__global__ void {name}(float* a) {{ a[0] = 1.0f; }}\n"
    for name in ("backward", "double_backward_A", "double_backward_B")
)
launch = {"num_blocks": 8, "num_threads": 64, "warp_size": 32, "smem": 0}
payload = {
    "kernel": source,
    "forward_config": launch,
    "backward_config": launch,
    "double_backward_config": launch,
    "kernel_prop": {
        "L1_dim": 6, "L2_dim": 4, "L3_dim": 10, "weight_numel": 8, "shared_weights": 0, "opt_level": 3,
        "irrep_dtype": 1, "weight_dtype": 1, "workspace_size": 0, "deterministic": 1, "idx_dtype": 0,
    },
}


def product(x, y, w):
    call = jax.ffi.ffi_call("tp_forward", jax.ShapeDtypeStruct((5, 10), jnp.float32))
    return call(x, y, w, kernel=json.dumps(payload), hash=np.int64(7))


shapes = [jax.ShapeDtypeStruct((5, size), jnp.float32) for size in (6, 4, 8)]
checks = [jax.export.DisabledSafetyCheck.custom_call("tp_forward")]
oeq = jax.export.export(jax.jit(product), platforms=["cpu"], disabled_checks=checks)(*shapes)
(folder / "oeq.jaxexport").write_bytes(oeq.serialize())
tensors = [random.standard_normal(shape.shape, dtype=np.float32) for shape in shapes]
for tensor, name in zip(tensors, "xyw"):
    np.save(folder / "inputs" / f"{name}.npy", tensor)
x, y, w = (tensor[:, np.arange(10) % tensor.shape[1]] for tensor in tensors)
(folder / "expected-oeq").mkdir(exist_ok=True)
np.save(folder / "expected-oeq" / "output_0.npy", x + 2 * y + 4 * w)
