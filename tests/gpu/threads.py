"""Eight threads, each with an executable of its own, compile and run at once; results equal those of one thread.

Half of the threads share kernels with another thread, the other half do not: both the shared and the separate path run.
"""

import os
import sys
import threading

os.environ["OEQ_NOTORCH"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import frames
import problems

THREADS, RUNS, NODES, EDGES = 8, 40, 100, 1400

import jax
import jax.numpy as jnp
import openequivariance_extjax as extension

# The other parts leave the state type to the handlers; here it is registered before them, as a host may do.
for name, kind in extension.type_registrations().items() if hasattr(extension, "type_registrations") else ():
    jax.ffi.register_ffi_type(name, kind, platform="CUDA")

import openequivariance as oeq


def make(i):
    kind = i // 2 if i < 4 else i  # 0, 0, 1, 1, 4, 5, 6, 7
    entry = (16 + 8 * kind, 1, 1 + kind % 2, 2, "uvu", np.float32, False, "")
    operator = oeq.jax.TensorProductConv(problems.problem(*entry), deterministic=True)
    rng = np.random.default_rng(i)
    graph = {k: jnp.asarray(v.astype(np.int32)) for k, v in frames.random_graph(rng, NODES, EDGES).items()}
    graph = (graph["rows"], graph["cols"], graph["transpose_perm"])
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype=jnp.float32)
    x, y, w = normal(NODES, operator.config.irreps_in1.dim), normal(EDGES, operator.config.irreps_in2.dim), normal(EDGES, operator.weight_numel)
    step = jax.jit(jax.value_and_grad(lambda y, s: jnp.sum(jnp.tanh(s * operator.forward(x, y, w, *graph)))))
    return step, y


work = [make(i) for i in range(THREADS)]
results, errors, gate = [None] * THREADS, [], threading.Barrier(THREADS)


def run(i):
    try:
        step, y = work[i]
        gate.wait()
        results[i] = [jax.tree.map(np.asarray, step(y, jnp.float32(1 + 0.1 * k))) for k in range(RUNS)]
    except Exception as error:
        errors.append(f"thread {i}: {type(error).__name__}: {str(error)[:800]}")


threads = [threading.Thread(target=run, args=(i,)) for i in range(THREADS)]
for t in threads:
    t.start()
for t in threads:
    t.join()
worst = 0.0
for i, (step, y) in enumerate(work):
    for k in range(RUNS):
        if results[i] is None:
            break
        alone = jax.tree.map(np.asarray, step(y, jnp.float32(1 + 0.1 * k)))
        worst = max(worst, frames.difference(results[i][k][0], alone[0]), frames.difference(results[i][k][1], alone[1]))
for text in errors:
    print(f"threads: FAILED {text}")
bad = bool(errors) or not worst <= 1e-5
print(f"RESULT threads {THREADS} threads, {RUNS} runs each: {len(errors)} errors, largest difference from one thread alone {worst:.1e}")
sys.exit(bad)
