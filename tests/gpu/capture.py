"""A jitted step with several OpenEquivariance calls, run many times: with XLA's command buffers and without.

usage: capture.py record OUT.npz     on the module and with the XLA_FLAGS of this process
       capture.py compare ON.npz OFF.npz [UPSTREAM.npz]

Inputs change from run to run, so a replay that kept an old operand, or results that were not zeroed, would show. The
library's count of executed calls tells whether XLA replayed them: a replayed call does not execute.
"""

import os
import sys

os.environ["OEQ_NOTORCH"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import frames
import problems

RUNS, NODES, EDGES = 30, 100, 1400


def launches():
    """Executed calls so far, by our library's count; None on another module."""
    import openequivariance_extjax as extension

    return extension.stats()["launches"] if hasattr(extension, "stats") else None


def record(out):
    import jax
    import jax.numpy as jnp
    import openequivariance as oeq

    conv = oeq.jax.TensorProductConv(problems.problem(*problems.TABLE["conv_det_f64"][:5], np.float32, False, ""), deterministic=True)
    other = oeq.jax.TensorProductConv(problems.problem(*problems.TABLE["conv_uvu_f32"]), deterministic=True)
    product = oeq.jax.TensorProduct(problems.problem(*problems.TABLE["tp_uvu_f64"][:5], np.float32, False, ""))
    rng = np.random.default_rng(5)
    graph = {k: jnp.asarray(v.astype(np.int32)) for k, v in frames.random_graph(rng, NODES, EDGES).items()}
    graph = (graph["rows"], graph["cols"], graph["transpose_perm"])
    normal = lambda *shape: jnp.asarray(rng.standard_normal(shape), dtype=jnp.float32)
    tensors = []
    for operator, first in ((conv, NODES), (other, NODES), (product, EDGES)):
        tensors.append((normal(first, operator.config.irreps_in1.dim), normal(EDGES, operator.config.irreps_in2.dim), normal(EDGES, operator.weight_numel)))

    def energy(scale, tensors):
        (x1, y1, w1), (x2, y2, w2), (x3, y3, w3) = tensors
        total = jnp.sum(jnp.tanh(conv.forward(x1 * scale, y1, w1, *graph)))
        total += jnp.sum(jnp.tanh(other.forward(x2, y2 * scale, w2, *graph)))
        return total + jnp.sum(jnp.tanh(product.forward(x3, y3, w3 * scale)))

    def step(scale, tensors):
        value, forces = jax.value_and_grad(energy, argnums=1)(scale, tensors)
        force_loss = jax.grad(lambda s: sum(jnp.vdot(g, g) for g in jax.tree.leaves(jax.grad(energy, argnums=1)(s, tensors))))(scale)
        return value, force_loss, forces

    compiled = jax.jit(step).lower(jnp.float32(1), tensors).compile()
    calls = compiled.as_text().count("custom_call_target=\"conv_") + compiled.as_text().count("custom_call_target=\"tp_")
    before = launches()
    values, sums = [], []
    for i in range(RUNS):
        value, loss, forces = compiled(jnp.float32(1 + 0.01 * i), tensors)
        values.append([float(value), float(loss)])
        sums.append([float(jnp.sum(jnp.abs(g))) for g in jax.tree.leaves(forces)])
    after = launches()
    executed = -1 if before is None or after is None else after - before
    print(f"capture: XLA_FLAGS={os.environ.get('XLA_FLAGS', '')!r}: {calls} calls a step, {RUNS} steps, "
          f"{'executed ' + str(executed) if executed >= 0 else 'executions not counted'} (of {calls * RUNS} without replay)", flush=True)
    np.savez(out, values=np.array(values), sums=np.array(sums), executed=executed, possible=calls * RUNS)


def compare(paths):
    first, bad = np.load(paths[0]), []
    for path in paths[1:]:
        other = np.load(path)
        d = max(frames.difference(first["values"], other["values"]), frames.difference(first["sums"], other["sums"]))
        print(f"capture: {os.path.basename(paths[0])} against {os.path.basename(path)}: largest difference {d:.1e}")
        if not d <= 2e-4:
            bad.append(f"{os.path.basename(path)} differs by {d:.1e}")
    off = np.load(paths[1])
    if not 0 <= first["executed"] < first["possible"]:
        bad.append(f"with command buffers on, {first['executed']} of {first['possible']} calls executed: nothing was replayed, so nothing was tested")
    if off["executed"] != off["possible"]:
        bad.append(f"with command buffers off, {off['executed']} of {off['possible']} calls executed")
    print(f"RESULT capture {'FAILED: ' + '; '.join(bad) if bad else 'equal with and without command buffers, and calls were replayed'}")
    return bool(bad)


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        sys.exit(compare(sys.argv[2:]))
