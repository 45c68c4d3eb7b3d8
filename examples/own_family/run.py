"""Calls the target of this crate through jax, on the platform that jax has; prints the largest error.

usage: run.py PAYLOAD      (the payload's JSON; OEQ_NATIVE_LIBRARY names this crate's shared library)
"""

import hashlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import openequivariance_extjax as extension

payload = open(sys.argv[1]).read()
width = 7
if jax.default_backend() == "cpu":
    registrations, platform = extension.registrations(platform="Host"), "cpu"
else:
    registrations, platform = extension.registrations(), "CUDA"
assert "row_norms" in registrations and len(registrations) == 9, sorted(registrations)
for name, stages in registrations.items():
    jax.ffi.register_ffi_target(name, stages, platform=platform)

x = np.random.default_rng(0).standard_normal((1000, width)).astype(np.float32)
digest = int.from_bytes(hashlib.sha256(payload.encode()).digest()[:7], "big")
call = jax.ffi.ffi_call("row_norms", jax.ShapeDtypeStruct((1000, 1), jnp.float32))
norms = jax.jit(lambda x: call(x, kernel=payload, hash=np.int64(digest)))(x)
error = float(np.max(np.abs(np.asarray(norms)[:, 0] - np.sum(x.astype(np.float64) ** 2, axis=1))))
print(f"row_norms on {jax.default_backend()}: largest error {error:.1e}")
assert error < 1e-4
