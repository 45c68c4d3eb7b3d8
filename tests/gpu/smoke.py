"""First look: does the library load, is its table whole, and does each family run once? Prints what failed, in detail.

env: OEQ_NATIVE_LIBRARY, PAYLOADS; OEQ_UPSTREAM (folder of upstream's module) adds a comparison
"""

import ctypes
import os
import sys
import traceback

import numpy as np

import frames

WANTED = {"tp_forward", "tp_backward", "tp_double_backward", "conv_forward", "conv_backward", "conv_double_backward",
          "oeq_tensor_product", "oeq_convolution"}
failed = []


def step(name):
    def run(function):
        try:
            print(f"smoke: {name}: {function()}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"smoke: {name}: FAILED: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, (frames.Failure, AssertionError)):
                traceback.print_exc()
    return run


class Stats(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint64) for n in ("struct_size", "kernels_interned", "kernels_shared", "compiled", "failed", "loaded", "launches")]


class Properties(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("name", ctypes.c_char * 256)] + [
        (n, ctypes.c_int32) for n in ("major", "minor", "multiprocessors", "warp", "shared")]


path = os.environ["OEQ_NATIVE_LIBRARY"]
library = upstream = None
small = {p.name: p for p in frames.payloads(os.environ["PAYLOADS"], "_f32|_f64")}


@step("driver")
def _():
    frames.open_gpu()
    return "a context on device 0"


@step("load")
def _():
    global library
    library = frames.Library(path)
    raw = ctypes.CDLL(path)
    raw.oeq_version.restype = ctypes.c_char_p
    return f"version {raw.oeq_version().decode()}, table layout {library.abi}, {len(library.targets)} targets, {library.types} types"


@step("table")
def _():
    missing, more = WANTED - set(library.targets), set(library.targets) - WANTED
    assert not missing, f"missing {sorted(missing)}"
    bad = [t for t in library.targets if library.traits[t] != 1 or "execute" not in library.stages[t]]
    assert not bad, f"traits or stages of {bad}: {library.traits} {library.stages}"
    return f"all eight, all with the command-buffer trait, stages {library.stages['tp_forward']}, others {sorted(more)}"


@step("device properties")
def _():
    raw = ctypes.CDLL(path)
    raw.oeq_last_error.restype = ctypes.c_char_p
    properties = Properties(struct_size=ctypes.sizeof(Properties))
    code = raw.oeq_device_properties(0, ctypes.byref(properties))
    assert code == 0, f"status {code}: {raw.oeq_last_error().decode()}"
    return {n: getattr(properties, n) for n, _ in Properties._fields_}


if "OEQ_UPSTREAM" in os.environ:

    @step("upstream's module")
    def _():
        global upstream
        frames.preload("libcudart.so.13", "libnvrtc.so.13")
        upstream = frames.Library(frames.upstream_module(os.environ["OEQ_UPSTREAM"]))
        return f"table layout {upstream.abi}, {upstream.targets}"


for name in ("tp_uvu_f32", "conv_uvu_f32", "conv_det_f32"):
    for target, order, derivative in small[name].targets():

        @step(f"{name} {target}" + (f" derivative {derivative}" if derivative >= 0 else ""))
        def _(payload=small[name], target=target, order=order, derivative=derivative):
            args, rets = payload.shapes(order, 64, 512)
            operands = [frames.Buffer(s, c, v) for (_, s, c), v in zip(args, payload.inputs(order, 64, 512))]
            results = [frames.Buffer(s, c) for _, s, c in rets]

            def values(lib, target, derivative):
                for r in results:
                    r.fill(0)
                site = frames.Site(lib, target, payload, operands, results, derivative)
                site.execute()
                return [r.read() for r in results], site

            ours, site = values(library, target, derivative)
            norms = [float(np.linalg.norm(v.astype(np.float64))) for v in ours]
            assert all(np.isfinite(norms)) and all(n > 0 for n in norms), f"norms {norms}"
            text = f"instantiate {site.stage_ns[0] / 1e6:.2f} ms, initialize {site.stage_ns[2] / 1e6:.2f} ms, norms {[round(n, 3) for n in norms]}"
            if upstream:
                theirs, _ = values(upstream, f"{payload.family}_{frames.ORDERS[order]}", -1)
                worst = max(frames.difference(a, b) for a, b in zip(ours, theirs))
                text += f", from upstream {worst:.1e}"
                assert worst <= (0.0 if payload.exact else frames.TOLERANCE[payload.double]), text
            return text


@step("Python module")
def _():
    import openequivariance_extjax as module

    device, timer = module.DeviceProp(0), module.GPUTimer()
    assert device.warpsize == 32 and device.maxSharedMemPerBlock > 48 << 10 and device.multiprocessorCount > 0, device
    timer.start()
    timer.clear_L2_cache()
    elapsed = timer.stop_clock_get_elapsed()
    assert 0 < elapsed < 1000, elapsed
    return f"{device}, clearing the L2 cache took {elapsed:.3f} ms, {len(module.registrations())} targets, types {list(module.type_registrations())}"


@step("statistics")
def _():
    raw = ctypes.CDLL(path)
    stats = Stats(struct_size=ctypes.sizeof(Stats))
    code = raw.oeq_get_stats(ctypes.byref(stats))
    assert code == 0, f"status {code}"
    values = {n: getattr(stats, n) for n, _ in Stats._fields_[1:]}
    assert values["loaded"] >= 3 and values["failed"] == 0, values
    return values


print(f"RESULT smoke {'FAILED: ' + ', '.join(failed) if failed else 'ok'}")
sys.exit(bool(failed))
