"""The same calls on the host platform and on a GPU, in one process: how far the results are apart.

usage: gpu.py [PATTERN [PLATFORM]]      PLATFORM: what to compare the host with (cuda). env: LIMIT (seconds, none)

Needs a GPU and jax for CUDA beside what numerics.py needs. Prints, for each target and precision, the largest relative error
of either against the definition, and of one against the other.
"""

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numerics
import numpy as np
import openequivariance_extjax as module
import reference


def main(pattern="", other="cuda"):
    module.enable_host()
    for name, stages in module.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="CUDA")
    devices = {"host": jax.devices("cpu")[0], "GPU": jax.devices(other)[0]}
    table = {name: description for name, description in reference.cases().items() if re.search(pattern, name)}

    begin, limit = time.time(), float(os.environ.get("LIMIT", "inf"))

    def one(item):
        if time.time() - begin > limit:
            return None
        case = reference.Case(item[0], **item[1])
        inputs, graph = case.inputs()
        found = []
        for order, suffix in enumerate(numerics.SUFFIXES):
            operands, results = case.operands(order, inputs, graph)
            expected = case.expected(order, inputs, graph)
            values = {}
            for place, device in devices.items():
                with jax.default_device(device):
                    values[place] = numerics.run(case, f"{case.family}_{suffix}", operands, results)
            for name in results:
                host, gpu = values["host"][name], values["GPU"][name]
                errors = [case.error(name, host, expected[name]), case.error(name, gpu, expected[name]),
                          case.error(name, host, gpu.astype(np.float64))]  # fmt: skip
                found.append(((f"{case.family}_{suffix}", np.dtype(case.dtype).name), errors, item[0]))
        return found

    worst, wrong, done = {}, [], 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for found in pool.map(one, table.items()):
            if found is None:
                continue
            done += 1
            print(".", end="", flush=True)  # It takes a few minutes.
            for key, errors, name in found:
                worst[key] = np.maximum(worst.get(key, np.zeros(3)), errors)
                if not max(errors) <= 4 * numerics.TOLERANCE[np.dtype(key[1]).type]:
                    wrong.append(f"{name}: {key}: {errors}")
    print(f"\n{'target':24} {'precision':10} {'host':>10} {'GPU':>10} {'apart':>10}")
    for (target, precision), errors in sorted(worst.items()):
        print(f"{target:24} {precision:10} " + " ".join(f"{error:10.2e}" for error in errors))
    for line in wrong[:20]:
        print("WRONG", line)
    print(f"{done} of {len(table)} problems on {devices['GPU']} and the host, {len(wrong)} wrong; {module.stats()}")
    return bool(wrong) or not done


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
