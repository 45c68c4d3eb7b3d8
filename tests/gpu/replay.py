"""Call sites that are called again and again, which the library runs by graphs of the driver.

- Every target, with tensors that move from call to call as XLA's may: results as those of the first call, bit for bit where
  there are no atomics.
- Calls that follow each other without waiting, on other buffers every time: each fills its own.
- A site that goes with calls in flight.
- Soak: sites are made, called ten times and destroyed, over many kernels, for SOAK seconds; memory of the host and the
  device, open files and threads stay as they are.
- What 200 sites with graphs take of the device at a time.

usage: replay.py LIBRARY PAYLOADS          env: SOAK (20), PATTERN
"""

import json
import os
import sys
import time

import numpy as np

import frames

NODES, EDGES, NAN = 60, 500, 0xFF
library_path, folder = sys.argv[1:3]
frames.open_gpu()
library = frames.Library(library_path)
rng = np.random.default_rng(0)
failures, sites, moved, worst = [], 0, 0, 0.0


def tensors(payload, order):
    args, rets = payload.shapes(order, NODES, EDGES)
    values = payload.inputs(order, NODES, EDGES)
    return [frames.Buffer(s, c, v) for (_, s, c), v in zip(args, values)], [frames.Buffer(s, c) for _, s, c in rets], values


def judge(what, payload, got, expected):
    global worst
    limit = 0.0 if payload.exact else frames.TOLERANCE[payload.double]
    off = max(frames.difference(a, b) for a, b in zip(got, expected))
    worst = max(worst, off if np.isfinite(off) else 0)
    if not off <= limit:
        failures.append(f"{what}: differs by {off:.1e}, allowed {limit:.0e}")


for payload in frames.payloads(folder, os.environ.get("PATTERN", "_(f32|f64)")):
    for target, order, derivative in payload.targets():
        operands, results, values = tensors(payload, order)
        label = f"{payload.name} {target}{'' if derivative < 0 else f'({derivative})'}"
        try:
            site = frames.Site(library, target, payload, operands, results, derivative)
            site.execute()
            expected = [r.read() for r in site.rets]
            for call in range(20):
                if call > 6:  # Some of the tensors, now and then all, now and then none.
                    for index in np.flatnonzero(rng.random(len(operands) + len(results)) < (call % 4) / 3):
                        old = (site.args + site.rets)[index]
                        value = values[index] if index < len(values) else None
                        site.move(int(index), frames.Buffer(old.shape, old.code, value))
                        moved += 1
                for r in site.rets:
                    r.fill(NAN)
                site.execute()
                judge(f"{label}, call {call}", payload, [r.read() for r in site.rets], expected)
            # Without waiting: two sets of results in turns, the graph's parameters change while it runs.
            sets = [site.rets[:], [frames.Buffer(r.shape, r.code) for r in site.rets]]
            for buffers in sets:
                for r in buffers:
                    r.fill(NAN)
            for call in range(40):
                for index, buffer in enumerate(sets[call % 2]):
                    site.move(len(site.args) + index, buffer)
                site.enqueue()
            site.close()  # With calls in flight.
            frames.check(frames._lib.gpu_sync())
            for buffers in sets:
                judge(f"{label}, without waiting", payload, [r.read() for r in buffers], expected)
            sites += 1
        except frames.Failure as error:
            failures.append(f"{label}: {error}")
print(f"replay: {sites} call sites, 60 calls each, {moved} moved tensors; worst {worst:.1e}", flush=True)


def usage():
    status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
    return {"rss_mb": int(status["VmRSS"].split()[0]) >> 10, "device_mb": -(frames.unused_bytes() >> 20),
            "files": len(os.listdir("/proc/self/fd")), "threads": int(status["Threads"])}


def soak(seconds):
    """Cycles through 21 kernels. Answers what the process used, now and then."""
    raw = {kind: json.loads(open(os.path.join(folder, f"{kind}.json"), "rb").read()) for kind in ("tp_uvu_f32", "conv_uvu_f32", "conv_det_f32")}
    kernels = []
    for serial in range(7):
        for kind, payload in raw.items():
            text = json.dumps(payload | {"soak": serial}).encode()
            kernels.append(frames.Payload(name=kind, raw=text))
    made = [(kernel, *tensors(kernel, 1)[:2]) for kernel in kernels]
    cycles, rows, begin, next_row = 0, [], None, 0
    while True:
        for kernel, operands, results in made:
            site = frames.Site(library, f"{kernel.family}_backward", kernel, operands, results)
            for _ in range(10):
                site.enqueue()
            site.close()
            cycles += 1
        now = time.time()
        if begin is None:  # The first round compiled.
            begin = now
        if now - begin >= next_row:
            frames.check(frames._lib.gpu_sync())
            rows.append({"cycles": cycles, **usage()})
            next_row += seconds / 8
        if now - begin >= seconds:
            return rows


def many(count):
    """Device memory in KB that each of many live sites takes beyond its tensors, which all share."""
    payload = frames.payloads(folder, "conv_det_f32[.]")[0]
    operands, results, _ = tensors(payload, 2)
    call = lambda: frames.Site(library, "conv_double_backward", payload, operands, results)
    first = call()
    for _ in range(10):
        first.execute()
    before, sites = frames.unused_bytes(), [call() for _ in range(count)]
    for site in sites:
        for _ in range(10):
            site.execute()
    return (before - frames.unused_bytes()) / count / 1024


print(f"replay: each of 200 live sites takes {many(200):.0f} KB of the device", flush=True)
rows = soak(float(os.environ.get("SOAK", 20)))
first, last = rows[1], rows[-1]
for row in rows:
    print("replay: soak " + ", ".join(f"{name} {abs(value)}" + (" unused" if name == "device_mb" else "") for name, value in row.items()), flush=True)
for name, allowed in (("rss_mb", 8), ("device_mb", 4), ("files", 0), ("threads", 1)):
    if last[name] - first[name] > allowed:
        failures.append(f"soak: {name} grew from {first[name]} to {last[name]}")
for text in failures[:20]:
    print(f"replay: FAILED {text}")
print(f"RESULT replay {sites} sites, soak of {last['cycles']} cycles: {len(failures)} failures")
sys.exit(bool(failures))
