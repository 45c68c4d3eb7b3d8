"""Captures that this test makes itself, threads and contexts, where XLA would not go.

- The first call ever of a kernel inside a capture, in each of the driver's three modes: it is compiled and loaded meanwhile.
- The graph is replayed after the call site's state is gone.
- One thread captures without pause while another compiles and loads kernels: no capture is invalidated.
- A thread without a current context, and one with another: calls work, and the context is the same afterwards.

usage: graphs.py LIBRARY PAYLOADS [unload]

With `unload` the library keeps nothing that no call site uses (OEQ_KEEP_BYTES=0), and the test is about that: a call site
goes while its work is still on the device, and modules are unloaded while another thread captures.
"""

import json
import os
import sys
import threading

import numpy as np

import frames

LOADS = int(os.environ.get("GRAPHS_LOADS", 50))
UNLOAD = sys.argv[3:] == ["unload"]
if UNLOAD:
    os.environ["OEQ_KEEP_BYTES"] = "0"
NODES, EDGES = (1000, 20000) if UNLOAD else (50, 400)
library_path, folder = sys.argv[1:3]
frames.open_gpu()
library = frames.Library(library_path)
serial = iter(range(10**9))


def fresh(path):
    """The same kernel as a payload of its own: one unknown member more makes it another, compiled and loaded anew."""
    payload = json.loads(open(path, "rb").read())
    payload["graphs_test"] = next(serial)
    return frames.Payload(name=os.path.basename(path)[:-5], raw=json.dumps(payload).encode())


def call(payload, target, order):
    args, rets = payload.shapes(order, NODES, EDGES)
    values = payload.inputs(order, NODES, EDGES)
    args = [frames.Buffer(shape, code, value) for (_, shape, code), value in zip(args, values)]
    rets = [frames.Buffer(shape, code) for _, shape, code in rets]
    return args, rets


def results(rets):
    return [ret.read() for ret in rets]


def close(a, b):
    return all(frames.difference(x, y) < 2e-5 for x, y in zip(a, b))


paths = {kind: os.path.join(folder, f"{kind}.json") for kind in ("conv_uvu_f32", "conv_det_f32", "tp_uvu_f32")}
failures = []

for kind, path in () if UNLOAD else paths.items():
    family = kind.split("_")[0]
    for order, name in enumerate(("forward", "backward", "double_backward")):
        target = f"{family}_{name}"
        payload = fresh(path)
        args, rets = call(payload, target, order)
        site = frames.Site(library, target, payload, args, rets)
        site.execute()
        expected = results(rets)
        site.close()
        for mode, bare in [(mode, bare) for mode in frames.Capture.MODES for bare in (False, True)]:
            # Bare: neither instantiate nor initialize has run, so everything happens inside the capture. Otherwise the
            # kernel is being compiled when the capture begins.
            site = frames.Site(library, target, fresh(path), args, rets, bare=bare)
            for ret in rets:
                ret.fill(0xFF)
            with frames.Capture(mode) as capture:
                site.enqueue()
            for attempt in ("replayed", "replayed after the state was gone"):
                for ret in rets:
                    ret.fill(0xFF)
                capture.replay()
                if not close(results(rets), expected):
                    failures.append(f"{kind} {target} {mode}: {attempt}: results differ")
                site.close()
if not UNLOAD:
    print(f"graphs: {len(paths) * 3} targets, first call inside a capture in {len(frames.Capture.MODES)} modes, replayed twice")

# The call site is gone as soon as its work is enqueued.
for round_ in range(20 if UNLOAD else 0):
    payload = fresh(paths["conv_uvu_f32"])
    args, rets = call(payload, "conv_backward", 1)
    site = frames.Site(library, "conv_backward", payload, args, rets)
    site.execute()
    expected = results(rets)
    for _ in range(30):
        site.enqueue()
    site.close()
    frames.check(frames._lib.gpu_sync())
    if not close(results(rets), expected):
        failures.append(f"round {round_}: results differ after the call site went with work in flight")
if UNLOAD:
    print("graphs: 20 times, a call site went with 30 calls in flight")

# One thread captures without pause, another compiles and loads.
done, captures, errors = threading.Event(), 0, []
payload = fresh(paths["conv_uvu_f32"])
args, rets = call(payload, "conv_backward", 1)
site = frames.Site(library, "conv_backward", payload, args, rets)
site.execute()
expected = results(rets)


def load_many():
    try:
        frames.open_gpu()
        frames.own_stream()
        for index in range(LOADS):
            other = fresh(paths["tp_uvu_f32"])
            a, r = call(other, "tp_forward", 0)
            frames.Site(library, "tp_forward", other, a, r).execute()
    except Exception as error:
        errors.append(f"loading: {error}")
    done.set()


loader = threading.Thread(target=load_many)
loader.start()
while not done.is_set():
    try:
        # Thread-local: the strictest mode that lets another thread work at all; XLA's own.
        with frames.Capture("thread-local") as capture:
            for _ in range(20):
                site.enqueue()
        capture.replay()
        captures += 1
    except frames.Failure as error:
        errors.append(f"capture {captures}: {error}")
        break
loader.join()
if not close(results(rets), expected):
    errors.append("results after the captures differ")
failures += errors
print(f"graphs: {captures} captures of 20 calls while another thread compiled and loaded {LOADS} kernels: {len(errors)} errors")


def elsewhere(prepare, what):
    def body():
        try:
            prepare()
            before = frames.context()
            site.enqueue()
            if frames.context() != before:
                failures.append(f"{what}: the current context changed")
        except Exception as error:
            failures.append(f"{what}: {error}")

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    frames.check(frames._lib.gpu_sync())


for ret in rets:
    ret.fill(0xFF)
elsewhere(frames.context_none, "no current context")
if not close(results(rets), expected):
    failures.append("no current context: results differ")
for ret in rets:
    ret.fill(0xFF)
elsewhere(frames.context_other, "another current context")
if not close(results(rets), expected):
    failures.append("another current context: results differ")
print("graphs: threads without a context and with another")

for failure in failures:
    print("graphs:", failure)
print(f"RESULT graphs {'ok' if not failures else str(len(failures)) + ' failures'}")
sys.exit(bool(failures))
