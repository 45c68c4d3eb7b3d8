"""Calls per second of 1 to 16 threads on one device, each thread with a call site and a stream of its own, ours beside
upstream's. The driver has locks of its own; what counts is that ours do not add to them.

usage: thread_rate.py LIBRARY PAYLOADS [UPSTREAM_LIBRARY]
"""

import os
import sys
import threading

import frames

SAMPLES, PER_SAMPLE = 40, 25
libraries = {"ours": sys.argv[1]} | ({"upstream": sys.argv[3]} if len(sys.argv) > 3 else {})
path = os.path.join(sys.argv[2], "conv_uvu_f32.json")
frames.open_gpu()
opened = {name: frames.Library(file) for name, file in libraries.items()}


def rate(name, count):
    payload = frames.Payload(path)
    gate, spans, errors = threading.Barrier(count), [], []

    def body():
        try:
            frames.open_gpu()
            frames.own_stream()
            args, rets = payload.shapes(1, 32, 256)
            args = [frames.Buffer(shape, code, value) for (_, shape, code), value in zip(args, payload.inputs(1, 32, 256))]
            rets = [frames.Buffer(shape, code) for _, shape, code in rets]
            site = frames.Site(opened[name], "conv_backward", payload, args, rets)
            site.execute()
            gate.wait()
            host, _ = site.time(SAMPLES, PER_SAMPLE, True)
            spans.append(sum(host) * PER_SAMPLE * 1e-9)
        except Exception as error:
            errors.append(str(error))
            gate.abort()

    threads = [threading.Thread(target=body) for _ in range(count)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    if errors:
        raise SystemExit(f"thread_rate: {name}, {count} threads: {errors[0]}")
    return sum(SAMPLES * PER_SAMPLE / span for span in spans)


print("threads  " + "  ".join(f"{name + ' calls/s':>18}" for name in opened))
for count in (1, 2, 4, 8, 16):
    print(f"{count:7}  " + "  ".join(f"{rate(name, count):18.0f}" for name in opened))
print("RESULT thread_rate done")
