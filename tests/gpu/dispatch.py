"""Host time of one execute call, ours beside upstream's and beside the bare driver calls, in one process on one GPU.

The floor is upstream's memsets and launches, the graph the same as one graph of the driver, both from a loop in C. Tiny batches show what a handler adds; real sizes show that it stays so and what the device then does ("with device").
The libraries take turns, the median over all turns counts. "+init" adds the initialize stage that XLA calls each time.

env: OEQ_NATIVE_LIBRARY, OEQ_UPSTREAM, PAYLOADS; DISPATCH_TURNS (7)
"""

import os
import statistics
import sys

import frames

frames.open_gpu()
frames.preload("libcudart.so.13", "libnvrtc.so.13")
libraries = {"ours": frames.Library(os.environ["OEQ_NATIVE_LIBRARY"])}
if "OEQ_UPSTREAM" in os.environ:
    libraries["upstream"] = frames.Library(frames.upstream_module(os.environ["OEQ_UPSTREAM"]))
turns = int(os.environ.get("DISPATCH_TURNS", 7))
slower, rows, failures, own, stage = [], 0, [], [], []

print(f"{'payload':16s} {'target':24s} {'size':>6s} | {'floor':>7s} {'graph':>6s} {'ours':>6s} {'upstr.':>7s} ratio | {'+init':>7s} {'upstr.':>7s} ratio | with device, us: floor, graph, ours, upstream")
SIZES = (  # payloads, nodes, edges, samples a turn, calls a sample, turns
    ("^(tp_uvu_f32|conv_uvu_f32|conv_det_f32)[.]", 8, 32, 12, 40, turns),
    ("^(tp_real64|conv_real64|conv_real128|conv_realdet128)[.]", int(os.environ.get("NODES", 2000)), int(os.environ.get("EDGES", 40000)), 2, 10, 3),
)
for pattern, nodes, edges, samples, per_sample, turns in SIZES:
    for payload in frames.payloads(os.environ["PAYLOADS"], pattern):
        try:
            program = frames.compile_payload(payload, os.environ.get("ARCHITECTURE", "sm_90"))
        except frames.Failure as error:
            program = None
            failures.append(f"{payload.name}: floor: {error}")
        for target, order, derivative in payload.targets(variadic=nodes < 100):
            classic = f"{payload.family}_{frames.ORDERS[order]}"
            try:
                args, rets = payload.shapes(order, nodes, edges)
                operands = [frames.Buffer(s, c, v) for (_, s, c), v in zip(args, payload.inputs(order, nodes, edges))]
                results = [frames.Buffer(s, c) for _, s, c in rets]
                contenders = {}
                if program:
                    contenders["floor"] = frames.Floor(payload, order, operands, results, program)
                    contenders["graph"] = frames.FloorGraph(contenders["floor"])
                contenders["ours"] = frames.Site(libraries["ours"], target, payload, operands, results, derivative)
                if "upstream" in libraries:
                    contenders["upstream"] = frames.Site(libraries["upstream"], classic, payload, operands, results)
                for c in contenders.values():  # load, warm up
                    c.execute()
                    c.time(1, 2 * per_sample)
                host = {n: [] for n in contenders}
                total = {n: [] for n in contenders}
                init = {n: [] for n in contenders if n in libraries}
                for _ in range(turns):
                    for n, c in contenders.items():
                        h, t = c.time(samples, per_sample)
                        host[n] += h
                        total[n] += t
                    for n in init:
                        init[n] += contenders[n].time(samples, per_sample, True)[0]
                m = {n: statistics.median(v) for n, v in host.items()}
                i = {n: statistics.median(v) for n, v in init.items()}
                t = {n: statistics.median(v) / 1e3 for n, v in total.items()}
            except frames.Failure as error:
                failures.append(f"{payload.name} {target}: {error}")
                continue
            rows += 1
            number = lambda d, n: f"{d[n]:7.0f}" if n in d else "      -"
            ratio = lambda d: f"{d['ours'] / d['upstream']:5.2f}" if "upstream" in d else "    -"
            label = target + ("" if derivative < 0 else f"({derivative})")
            print(f"{payload.name:16s} {label:24s} {edges if payload.family == 'conv' else nodes:6d} | {number(m, 'floor')} {number(m, 'graph')} {number(m, 'ours')} {number(m, 'upstream')} {ratio(m)} | "
                  f"{number(i, 'ours')} {number(i, 'upstream')} {ratio(i)} | " + ", ".join(f"{t[n]:.1f}" for n in ("floor", "graph", "ours", "upstream") if n in t), flush=True)
            if "graph" in m:
                own.append(m["ours"] - m["graph"])
                stage.append(i["ours"] - m["ours"])
            if "upstream" in m and nodes < 100 and m["ours"] > m["upstream"]:
                slower.append(f"{payload.name} {label} {m['ours'] / m['upstream']:.2f}")

for text in failures:
    print(f"dispatch: FAILED {text[:1500]}")
tell = lambda values: f"{statistics.median(values):.0f} ({min(values):.0f} to {max(values):.0f})" if values else "-"
print(f"RESULT dispatch {rows} rows, {len(failures)} failures; ns beyond the bare graph {tell(own)}, of initialize {tell(stage)}; tiny-batch targets slower than upstream: {', '.join(slower) or 'none'}")
sys.exit(bool(failures or slower))
