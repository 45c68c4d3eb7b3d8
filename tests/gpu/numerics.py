"""The targets through jax.ffi, on the module that is on PYTHONPATH, and the comparison of two modules.

usage: numerics.py record OUT.npz          every kind of payload: the targets of each order called directly, and the
                                           second derivative through jax.grad(grad)
       numerics.py compare OURS.npz UPSTREAM.npz

Two modules register the same names, so each records in a process of its own on the same random inputs.
"""

import os
import sys

os.environ["OEQ_NOTORCH"] = "1"
os.environ["JAX_ENABLE_X64"] = "1"
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import numpy as np

import frames
import problems

NODES, EDGES, SEED = 150, 2400, 3
# Whole models of f32 tensor products, differentiated twice: each step rounds.
SECOND_TOLERANCE = {False: 2e-4, True: 1e-11}


def record(out):
    import jax
    import jax.numpy as jnp
    import openequivariance as oeq
    import openequivariance_extjax as extension
    from concurrent.futures import ThreadPoolExecutor

    targets = set(extension.registrations())
    saved = {"module": np.array(os.path.basename(extension.__file__)), "targets": np.array(sorted(targets))}
    names = [n for n in problems.TABLE if "real" not in n]

    def make(name):
        kind = oeq.jax.TensorProduct if name.startswith("tp") else oeq.jax.TensorProductConv
        return kind(problems.problem(*problems.TABLE[name]), **(problems.options(name) if name.startswith("conv") else {}))

    def one(name):
        operator = make(name)
        payload = frames.Payload(name=name, raw=operator.kernel.encode())
        assert payload.hash == operator.hash, "the hash of a payload is not what OpenEquivariance writes"
        result = {f"exact/{name}": np.array(payload.exact), f"double/{name}": np.array(payload.double)}
        for target, order, derivative in payload.targets():
            if target not in targets:
                continue
            _, rets = payload.shapes(order, NODES, EDGES)
            shapes = [jax.ShapeDtypeStruct(s, frames.DTYPES[c][1]) for _, s, c in rets]
            attributes = {"kernel": operator.kernel, "hash": operator.hash} | ({} if derivative < 0 else {"derivative": derivative})
            call = jax.jit(lambda *a, t=target, s=shapes, k=attributes: jax.ffi.ffi_call(t, s)(*a, **k))
            values = call(*map(jnp.asarray, payload.inputs(order, NODES, EDGES, SEED)))
            for (tensor, _, _), v in zip(rets, values):
                result[f"{'classic' if derivative < 0 else 'variadic'}/{name}/{order}/{tensor}"] = np.asarray(v)
        # The second derivative as a model's training takes it: forces, then the gradient of a loss of the forces.
        values = dict(zip((n for n, _, _ in payload.shapes(0, NODES, EDGES)[0]), map(jnp.asarray, payload.inputs(0, NODES, EDGES, SEED))))
        graph = [values["rows"], values["cols"]] + ([values["transpose_perm"]] if payload.prop["deterministic"] else []) if payload.family == "conv" else []
        energy = lambda y, x, w: jnp.sum(jnp.tanh(0.1 * operator.forward(x, y, w, *graph)))
        forces = jax.grad(energy)
        loss = lambda y, x, w: jnp.sum(jnp.sin(forces(y, x, w)))
        for tensor, v in zip(("L2", "L1", "W"), jax.jit(jax.grad(loss, argnums=(0, 1, 2)))(values["L2"], values["L1"], values["W"])):
            result[f"second/{name}/{tensor}"] = np.asarray(v)
        print(f"numerics: {name} done", flush=True)
        return result

    def guarded(name):
        try:
            return one(name)
        except Exception as error:
            return {f"failed/{name}": np.array(f"{type(error).__name__}: {str(error)[:1000]}")}

    with ThreadPoolExecutor(4) as pool:
        for result in pool.map(guarded, names):
            saved.update(result)
    np.savez(out, **saved)


def compare(ours_path, upstream_path):
    ours, theirs = np.load(ours_path), np.load(upstream_path)
    print(f"numerics: {ours['module']} with {len(ours['targets'])} targets; {theirs['module']} with {len(theirs['targets'])}")
    failures, worst, compared = [], {}, 0
    for side, file in (("ours", ours), ("upstream", theirs)):
        failures += [f"{side}: {key}: {file[key]}" for key in file.files if key.startswith("failed/")]
    for key in ours.files:
        kind, _, rest = key.partition("/")
        if kind not in ("classic", "variadic", "second"):
            continue
        name = rest.split("/")[0]
        exact, double = bool(ours[f"exact/{name}"]), bool(ours[f"double/{name}"])
        other = key.replace("variadic/", "classic/")
        if other not in theirs.files:
            failures.append(f"{other} is missing in the other file")
            continue
        d = frames.difference(ours[key], theirs[other])
        # XLA's own sums around the second derivative may run in another order, the kernels' may not.
        limit = SECOND_TOLERANCE[double] if kind == "second" else 0.0 if exact else frames.TOLERANCE[double]
        compared += 1
        slot = (kind, "bit for bit" if limit == 0.0 else f"within {limit:.0e}")
        worst[slot] = max(worst.get(slot, 0.0), d)
        if np.abs(ours[key]).max() == 0:
            failures.append(f"{key} is all zero")
        if not d <= limit:
            failures.append(f"{key} differs by {d:.2e}, allowed {limit:.0e}")
    kinds = {k.split("/")[0] for k in ours.files}
    for wanted in ("classic", "variadic", "second"):
        if wanted not in kinds:
            failures.append(f"no {wanted} results were recorded")
    for (kind, rule), d in sorted(worst.items()):
        print(f"numerics: {kind:9s} {rule:14s} largest difference {d:.1e}")
    for text in failures[:20]:
        print(f"numerics: FAILED {text}")
    print(f"RESULT numerics {compared} tensors compared, {len(failures)} failures")
    return bool(failures)


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(sys.argv[2])
    else:
        sys.exit(compare(sys.argv[2], sys.argv[3]))
