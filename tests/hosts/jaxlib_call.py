"""One OpenEquivariance call in the jaxlib at hand, on the CPU, registered as whole bundles: instantiated for real, run up to
the CUDA driver, twice and from two threads.

usage: jaxlib_call.py MODULE_FOLDER      env OEQ_NATIVE_LIBRARY, JAX_PLATFORMS=cpu
"""

import json
import re
import sys
import threading

sys.path.insert(0, sys.argv[1])

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import openequivariance_extjax as native

try:
    from jax import ffi
except ImportError:
    from jax.extend import ffi

for _ in range(2):
    for name, stages in native.registrations().items():
        ffi.register_ffi_target(name, stages, platform="cpu")

kernels = ("forward", "backward", "double_backward_A", "double_backward_B")
launch = {"num_blocks": 8, "num_threads": 64, "warp_size": 32, "smem": 0}
payload = {
    "kernel": "".join(f"__global__ void {name}(float* a) {{ a[0] = 1.0f; }}\n" for name in kernels),
    "forward_config": launch,
    "backward_config": launch,
    "double_backward_config": launch,
    "kernel_prop": {
        "L1_dim": 6, "L2_dim": 4, "L3_dim": 10, "weight_numel": 8, "shared_weights": 0, "opt_level": 3,
        "irrep_dtype": 1, "weight_dtype": 1, "workspace_size": 0, "deterministic": 1, "idx_dtype": 0,
    },
}  # fmt: skip
call = ffi.ffi_call("tp_forward", jax.ShapeDtypeStruct((5, 10), jnp.float32))
tensors = [jnp.ones((5, size), jnp.float32) for size in (6, 4, 8)]


def product(text):
    return jax.jit(lambda x, y, w: call(x, y, w, kernel=text, hash=np.int64(7)))


def failure(function):
    try:
        jax.block_until_ready(function(*tensors))
    except Exception as error:  # XlaRuntimeError or JaxRuntimeError, by version
        return str(error)
    return ""


found = []
compiled = product(json.dumps(payload)).lower(*tensors).compile()
threads = [threading.Thread(target=lambda: found.append(failure(compiled))) for _ in range(2)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
found.append(failure(compiled))
assert native.stats()["kernels_interned"] == 1, native.stats()
# The whole text, with nothing cut off: there is no driver here, or there is one and the call came without a stream.
whole = re.compile(
    r"\w+: oeq-native: tp_forward, execute: "
    r"(no CUDA driver on this machine: .+ \(the driver is installed with the GPU; a CUDA toolkit is not needed\)"
    r"|this target runs on CUDA, and XLA has no GPU stream for this call \(.+\))"
)
assert len(found) == 3
for text in found:
    assert whole.fullmatch(text), text

# A payload that cannot be is told when the model is compiled, whole.
broken = failure(product(json.dumps({"kernel": "no program"})))
assert "oeq-native: tp_forward, instantiate" in broken, broken
print(f"jaxlib {jaxlib.__version__}: instantiated, run three times: {found[0]}")
