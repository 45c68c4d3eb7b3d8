"""Results do not depend on what the result buffers held: each target runs on zero-filled buffers, on buffers full of
NaN, on the same buffers again as it left them, and on NaN once more. Where upstream's module is there, its results of
the six classic targets are compared too.

env: OEQ_NATIVE_LIBRARY, PAYLOADS, POISON_PATTERN (which payloads); OEQ_UPSTREAM (folder of upstream's module)
"""

import os
import sys

import numpy as np

import frames

NODES, EDGES = int(os.environ.get("NODES", 100)), int(os.environ.get("EDGES", 1400))
NAN = 0xFF  # every float of these bytes is a NaN, and an index of them is -1

frames.open_gpu()
ours = frames.Library(os.environ["OEQ_NATIVE_LIBRARY"])
upstream = None
if "OEQ_UPSTREAM" in os.environ:
    frames.preload("libcudart.so.13", "libnvrtc.so.13")
    upstream = frames.Library(frames.upstream_module(os.environ["OEQ_UPSTREAM"]))

# More than it takes for a call site to be run by a graph of its own.
REFILLS = (("NaN", NAN), ("used", None), ("used again", None), ("NaN again", NAN)) * 2
checks, failures, worst_all, worst_upstream = 0, [], 0.0, 0.0
pattern = os.environ.get("POISON_PATTERN", "_(f32|f64)")
for payload in frames.payloads(os.environ["PAYLOADS"], pattern):
    limit = 0.0 if payload.exact else frames.TOLERANCE[payload.double]
    line = []
    for target, order, derivative in payload.targets():
        args, rets = payload.shapes(order, NODES, EDGES)
        values = payload.inputs(order, NODES, EDGES)
        names = [n for n, _, _ in args]
        # Convolutions of later versions have the workspace as one more result.
        for form in ("plain", "workspace result") if payload.family == "conv" else ("plain",):
            for bare in (False, True):
                label = f"{payload.name} {target}{'' if derivative < 0 else f'({derivative})'} {form}{' bare' if bare else ''}"
                operands = [frames.Buffer(s, c, v) for (_, s, c), v in zip(args, values)]
                results = [frames.Buffer(s, c) for _, s, c in rets]
                extra = [frames.Buffer(*args[names.index("workspace")][1:])] if form != "plain" else []
                checks += 1
                try:
                    site = frames.Site(ours, target, payload, operands, results + extra, derivative, bare)

                    def run(fill):
                        if fill is not None:
                            for r in results + extra:
                                r.fill(fill)
                        site.execute()
                        return [r.read() for r in results]

                    zero = run(0)
                    if any(not np.isfinite(v).all() or not np.abs(v).max() > 0 for v in zero):
                        failures.append(f"{label}: the zero-filled run itself gave NaN or nothing")
                        continue
                    for what, fill in REFILLS:
                        for (name, _, _), a, b in zip(rets, run(fill), zero):
                            d = frames.difference(a, b)
                            worst_all = max(worst_all, d if np.isfinite(d) else 0)
                            if not d <= limit:
                                failures.append(f"{label}: {name} on {what} buffers differs by {d:.2e}, allowed {limit:.0e}")
                    if form == "plain" and not all(np.array_equal(b.read(), v) for b, v, n in zip(operands, values, names) if n != "workspace"):
                        failures.append(f"{label}: an operand was written to")
                    if upstream and form == "plain" and not bare:
                        classic = f"{payload.family}_{frames.ORDERS[order]}"
                        for r in results:
                            r.fill(0)
                        frames.Site(upstream, classic, payload, operands, results).execute()
                        d = max(frames.difference(a, r.read()) for a, r in zip(zero, results))
                        worst_upstream = max(worst_upstream, d if np.isfinite(d) else 0)
                        line.append(f"{target.replace(payload.family + '_', '')}{'' if derivative < 0 else derivative}={d:.0e}")
                        if not d <= limit:
                            failures.append(f"{label}: differs from upstream by {d:.2e}, allowed {limit:.0e}")
                except frames.Failure as error:
                    failures.append(f"{label}: {error}")
    print(f"poison: {payload.name:22s} {'bit for bit' if payload.exact else f'within {limit:.0e}'}; from upstream: {' '.join(line) or 'not compared'}", flush=True)

for text in failures[:30]:
    print(f"poison: FAILED {text[:1500]}")
print(f"RESULT poison {checks} call sites (target, result form, with and without stages), {len(REFILLS)} refills each: {len(failures)} failures; "
      f"largest difference {worst_all:.1e}, from upstream {worst_upstream:.1e}")
sys.exit(bool(failures))
