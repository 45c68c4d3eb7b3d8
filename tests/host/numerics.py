"""Every kind of kernel on the host platform, through jax's CPU runtime, against the definition in double precision.

usage: numerics.py [PATTERN]

For each problem and each order of derivative: the classic target and the variadic one; for convolutions also the form with
the workspace as a result. Prints the largest relative error for each target and precision. Environment: see test_host.py.
"""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np

jax.config.update("jax_enable_x64", True)

import openequivariance_extjax as module
import reference

SUFFIXES = ("forward", "backward", "double_backward")
# Relative to the largest value of the same instruction or irreps.
TOLERANCE = {np.float32: 4e-6, np.float64: 8e-15}


def run(case, target, operands, results, workspace=False, **attributes):
    """Calls a target in a program of its own, with results that lie where NaNs were; the results by name."""
    shapes = [jax.ShapeDtypeStruct(shape, case.dtype) for shape in results.values()]
    if workspace:
        shapes.append(jax.ShapeDtypeStruct((case.properties["workspace_size"],), np.uint8))
    call = jax.ffi.ffi_call(target, shapes)
    # XLA puts a result into an argument that was given away for it.
    poison = [jnp.full(s.shape, np.nan if s.dtype != np.uint8 else 0xA5, s.dtype) for s in shapes]
    where = [each.unsafe_buffer_pointer() for each in poison]
    program = jax.jit(lambda poison, *a: call(*a, kernel=case.payload, hash=np.int64(case.hash), **attributes),
                      donate_argnums=0, keep_unused=True)  # fmt: skip
    values = program(poison, *operands)
    assert [each.unsafe_buffer_pointer() for each in values] == where, "the results are not where the poison was"
    return {name: np.asarray(value) for name, value in zip(results, values)}


def judge(name, description):
    """A list of (target, precision, error) for one problem, and what was wrong."""
    case = reference.Case(name, **description)
    inputs, graph = case.inputs()
    found, wrong = [], []
    for order, suffix in enumerate(SUFFIXES):
        operands, results = case.operands(order, inputs, graph)
        expected = case.expected(order, inputs, graph)
        target = f"{case.family}_{suffix}"
        variadic = {"tp": "oeq_tensor_product", "conv": "oeq_convolution"}[case.family]
        forms = {target: run(case, target, operands, results), variadic: run(case, variadic, operands, results, derivative=np.int64(order))}
        if case.family == "conv":
            forms[f"{target} with workspace"] = run(case, target, operands, results, workspace=True)
        for form, values in forms.items():
            for result, value in values.items():
                error = case.error(result, value, expected[result])
                found.append((target, case.dtype, error))
                if not error <= TOLERANCE[case.dtype]:
                    wrong.append(f"{name}: {form}, order {order}, {result}: relative error {error:.2e}")
                # Only sums by atomics depend on the order of threads.
                exact = case.family == "tp" and not case.properties["shared_weights"] or case.variant != ""
                if exact and not np.array_equal(value, forms[target][result]):
                    wrong.append(f"{name}: {form} and {target} differ in {result}")
    return found, wrong


def main(pattern=""):
    module.enable_host()
    table = {name: description for name, description in reference.cases().items() if re.search(pattern, name)}
    worst, wrong, start = {}, [], time.time()
    with ThreadPoolExecutor(2) as pool:
        for found, bad in pool.map(lambda item: judge(*item), table.items()):
            wrong += bad
            for target, dtype, error in found:
                key = (target, np.dtype(dtype).name)
                worst[key] = max(worst.get(key, 0.0), error)
    print(f"{'target':24} {'precision':10} largest relative error")
    for (target, precision), error in sorted(worst.items()):
        print(f"{target:24} {precision:10} {error:.2e}")
    for line in wrong[:40]:
        print("WRONG", line)
    print(f"{len(table)} problems, {len(wrong)} wrong results, {time.time() - start:.0f} s, {module.stats()}")
    return bool(wrong) or not table


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
