"""Python's side of frames.c: device buffers, libraries of FFI handlers, call sites, payload shapes and NVRTC."""

import ctypes
import functools
import glob
import hashlib
import json
import os
import re
import subprocess
import sysconfig
import tempfile

import numpy as np

HERE = os.path.dirname(os.path.abspath(__file__))
FAMILY = {"tp": "oeq_tensor_product", "conv": "oeq_convolution"}
ORDERS = ("forward", "backward", "double_backward")
# Dtype codes of payloads: XLA's code and numpy's type.
DTYPES = {1: (11, np.float32), 2: (12, np.float64), 3: (4, np.int32), 4: (5, np.int64), 5: (6, np.uint8)}


class Failure(Exception):
    """A call into frames.c, the driver or a handler failed."""


def _build():
    ready = os.environ.get("OEQ_FRAMES")
    if ready:
        return ready
    import jax

    out = os.path.join(tempfile.mkdtemp(prefix="oeq-frames-"), "libframes.so")
    subprocess.check_call(["cc", "-O2", "-shared", "-fPIC", "-w", f"-I{jax.ffi.include_dir()}", f"{HERE}/frames.c", "-o", out, "-ldl"])
    return out


class _Lazy:
    """frames.c, compiled and opened at its first use: shapes and payloads need none of it."""

    def __getattr__(self, name):
        return getattr(_open(), name)


_lib = _Lazy()


@functools.cache
def _open():
    return _declare(ctypes.CDLL(_build()))


V, I64, SZ, INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_size_t, ctypes.c_int
ARGUMENTS = {
    "gpu_alloc": [V, SZ], "gpu_free": [ctypes.c_ulonglong], "gpu_fill": [ctypes.c_ulonglong, INT, SZ],
    "gpu_write": [ctypes.c_ulonglong, V, SZ], "gpu_read": [V, ctypes.c_ulonglong, SZ],
    "library_open": [ctypes.c_char_p, INT], "library_abi": [V], "library_types": [V], "library_count": [V],
    "library_name": [V, ctypes.c_uint32], "library_traits": [V, ctypes.c_uint32], "library_has_stage": [V, ctypes.c_uint32, INT],
    "site_open": [V, V, ctypes.c_char_p, ctypes.c_char_p, SZ, I64, I64, INT, INT, V, V, V, V, INT, V],
    "site_initialize": [V], "site_execute": [V], "site_close": [V], "site_time": [V, INT, INT, INT, V, V],
    "site_enqueue": [V], "site_move": [V, INT, V], "gpu_unused": [V], "gpu_own_stream": [], "gpu_capture_begin": [INT], "gpu_capture_end": [V], "gpu_graph_launch": [V],
    "gpu_context": [V], "gpu_context_none": [], "gpu_context_other": [],
    "floor_function": [V, V, ctypes.c_char_p, INT], "floor_run": [V, INT, V, INT],
    "floor_time": [V, INT, V, INT, INT, INT, V, V],
    "floor_graph": [V, V, INT, V, INT], "floor_graph_time": [V, INT, INT, V, V],
}


def _declare(lib):
    for name, types in ARGUMENTS.items():
        getattr(lib, name).argtypes = types
    lib.frames_error.restype = lib.library_name.restype = ctypes.c_char_p
    lib.library_open.restype = ctypes.c_void_p
    lib.site_close.restype = lib.site_move.restype = None
    return lib


def check(code):
    if code:
        raise Failure(_lib.frames_error().decode(errors="replace"))


def open_gpu():
    check(_lib.gpu_open())


def unused_bytes():
    """Device memory that nobody has taken."""
    value = ctypes.c_size_t()
    check(_lib.gpu_unused(ctypes.byref(value)))
    return value.value


def own_stream():
    """Makes a stream for all that this thread does from now on."""
    check(_lib.gpu_own_stream())


class Capture:
    """Captures what is enqueued on this thread's stream inside the `with` block; `replay` runs it."""

    MODES = {"global": 0, "thread-local": 1, "relaxed": 2}

    def __init__(self, mode):
        self.mode, self.executable = self.MODES[mode], V()

    def __enter__(self):
        check(_lib.gpu_capture_begin(self.mode))
        return self

    def __exit__(self, *_error):
        check(_lib.gpu_capture_end(ctypes.byref(self.executable)))

    def replay(self):
        check(_lib.gpu_graph_launch(self.executable))


def context():
    """The address of this thread's current context, None for none."""
    current = V()
    check(_lib.gpu_context(ctypes.byref(current)))
    return current.value


def context_none():
    check(_lib.gpu_context_none())


def context_other():
    """Makes a new context and makes it this thread's."""
    check(_lib.gpu_context_other())


class Buffer:
    """Device memory with a shape; freed with the object."""

    def __init__(self, shape, code, value=None):
        self.shape, self.code, self.dtype = tuple(int(d) for d in shape), code, np.dtype(DTYPES[code][1])
        self.bytes = int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize
        self.at = ctypes.c_ulonglong()
        check(_lib.gpu_alloc(ctypes.byref(self.at), max(self.bytes, 256)))
        if value is not None:
            self.write(value)

    def write(self, value):
        value = np.ascontiguousarray(value, dtype=self.dtype)
        assert value.shape == self.shape, (value.shape, self.shape)
        check(_lib.gpu_write(self.at, value.ctypes.data_as(V), self.bytes))

    def fill(self, byte):
        check(_lib.gpu_fill(self.at, byte, self.bytes))

    def read(self):
        out = np.empty(self.shape, self.dtype)
        check(_lib.gpu_read(out.ctypes.data_as(V), self.at, self.bytes))
        return out

    def __del__(self):
        if getattr(self, "at", None) and self.at.value:
            _lib.gpu_free(self.at)


class Library:
    """A library that exports a handler table. register_types=False leaves its handlers to register their types."""

    def __init__(self, path, register_types=True):
        self.path = path
        self.handle = _lib.library_open(os.fsencode(path), int(register_types))
        if not self.handle:
            raise Failure(_lib.frames_error().decode(errors="replace"))
        self.abi, self.types = _lib.library_abi(self.handle), _lib.library_types(self.handle)
        count = _lib.library_count(self.handle)
        self.targets = [_lib.library_name(self.handle, i).decode() for i in range(count)]
        stages = ("instantiate", "prepare", "initialize", "execute")
        self.stages = {t: [s for k, s in enumerate(stages) if _lib.library_has_stage(self.handle, i, k)] for i, t in enumerate(self.targets)}
        self.traits = {t: _lib.library_traits(self.handle, i) for i, t in enumerate(self.targets)}


class Site:
    """One call site: instantiate to initialize have run once it exists (unless bare)."""

    def __init__(self, library, target, payload, args, rets, derivative=-1, bare=False):
        self.args, self.rets, self.payload = args, rets, payload
        all_ = args + rets
        n = len(all_)
        self.dtypes = (ctypes.c_int32 * n)(*[DTYPES[b.code][0] for b in all_])
        self.data = (V * n)(*[b.at.value for b in all_])
        self.ranks = (I64 * n)(*[len(b.shape) for b in all_])
        self.shapes = [(I64 * max(len(b.shape), 1))(*b.shape) for b in all_]
        self.dims = (V * n)(*[ctypes.cast(s, V).value for s in self.shapes])
        self.stage_ns = (ctypes.c_double * 3)()
        self.handle = V()
        check(_lib.site_open(ctypes.byref(self.handle), library.handle, target.encode(), payload.raw, len(payload.raw), payload.hash,
                             derivative, len(args), len(rets), self.dtypes, self.data, self.ranks, self.dims, int(bare), self.stage_ns))

    def execute(self):
        check(_lib.site_execute(self.handle))

    def enqueue(self):
        """Execute without waiting for the device."""
        check(_lib.site_enqueue(self.handle))

    def move(self, index, buffer):
        """Gives the tensor (operands first, then results) another buffer."""
        (self.args + self.rets)[index]  # It must be one.
        if index < len(self.args):
            self.args[index] = buffer
        else:
            self.rets[index - len(self.args)] = buffer
        _lib.site_move(self.handle, index, buffer.at.value)

    def close(self):
        """Destroys the state, as XLA does with its executable."""
        self.__del__()

    def time(self, samples, per_sample, with_initialize=False):
        """Host nanoseconds per call and nanoseconds per call with the device's work, one of each per sample."""
        host, total = (ctypes.c_double * samples)(), (ctypes.c_double * samples)()
        check(_lib.site_time(self.handle, samples, per_sample, int(with_initialize), host, total))
        return list(host), list(total)

    def __del__(self):
        if getattr(self, "handle", None) and self.handle.value:
            _lib.site_close(self.handle)
            self.handle = V()


class Payload:
    """A kernel payload file and the shapes that its targets take."""

    def __init__(self, path=None, name=None, raw=None):
        self.name = name or os.path.basename(path).rsplit(".", 1)[0]
        self.raw = raw if raw is not None else open(path, "rb").read()
        self.json = json.loads(self.raw)
        self.hash = int.from_bytes(hashlib.sha256(self.raw).digest()[:7], "big")
        self.family = "conv" if self.name.startswith("conv") else "tp"
        self.prop = self.json["kernel_prop"]
        # Without atomics every element has one writer, and equal calls give equal bits.
        self.exact = "atomicAdd(" not in self.json["kernel"]
        self.double = self.prop["irrep_dtype"] == 2

    def targets(self, variadic=True):
        """(target, order, derivative attribute or -1)"""
        out = [(f"{self.family}_{name}", order, -1) for order, name in enumerate(ORDERS)]
        return out + ([(FAMILY[self.family], order, order) for order in range(3)] if variadic else [])

    def shapes(self, order, nodes, edges):
        """[(name, shape, dtype code)] of the operands and of the results."""
        k, conv = self.prop, self.family == "conv"
        ir, wt, ix = k["irrep_dtype"], k["weight_dtype"], k["idx_dtype"]
        rows = edges if conv else nodes
        l1, l2, l3 = ("L1", (nodes, k["L1_dim"]), ir), ("L2", (rows, k["L2_dim"]), ir), ("L3", (nodes, k["L3_dim"]), ir)
        w = ("W", (k["weight_numel"],) if k["shared_weights"] else (rows, k["weight_numel"]), wt)
        named = lambda tensor, suffix: (tensor[0] + suffix, *tensor[1:])
        graph = []
        if conv:
            graph = [("rows", (edges,), ix), ("cols", (edges,), ix), ("workspace", (k["workspace_size"],), 5),
                     ("transpose_perm", (edges if k["deterministic"] else 1,), ix)]
        grads = [named(t, "_grad") for t in (l1, l2, w)]
        if order == 0:
            return [l1, l2, w] + graph, [l3]
        if order == 1:
            return [l1, l2, w, named(l3, "_grad")] + graph, grads
        return [l1, l2, w, named(l3, "_grad")] + [named(t, "_dgrad") for t in (l1, l2, w)] + graph, grads + [named(l3, "_dgrad")]

    def inputs(self, order, nodes, edges, seed=0):
        """Random operands as numpy arrays; one seed gives every order the same tensors."""
        rng = np.random.default_rng([seed, nodes, edges])
        graph = random_graph(rng, nodes, edges) if self.family == "conv" else {}
        values = []
        for name, shape, code in self.shapes(order, nodes, edges)[0]:
            if name == "workspace":
                values.append(np.zeros(shape, np.uint8))
            elif name == "transpose_perm" and not self.prop["deterministic"]:
                values.append(np.zeros(shape, DTYPES[code][1]))
            elif name in graph:
                values.append(graph[name].astype(DTYPES[code][1]))
            else:
                values.append(_normal(rng, shape, DTYPES[code][1]))
        return values


def _normal(rng, shape, dtype, block=(1 << 20) + 7):
    """Normal numbers; large arrays repeat a block of an odd length, since drawing them all would take longer than the test."""
    size = int(np.prod(shape, dtype=np.int64))
    return np.resize(rng.standard_normal(min(size, block), dtype=dtype), shape)


def random_graph(rng, nodes, edges):
    """A random undirected graph: every edge in both directions, sorted by (row, column), and the order that sorts the
    edges by (column, row). Deterministic convolutions take the one list for the other, so they need this symmetry."""
    assert edges % 2 == 0, "every edge comes in both directions"
    one, other = rng.integers(0, nodes, edges // 2), rng.integers(0, nodes, edges // 2)
    rows, cols = np.concatenate([one, other]), np.concatenate([other, one])
    order = np.lexsort((cols, rows))
    rows, cols = rows[order], cols[order]
    return {"rows": rows, "cols": cols, "transpose_perm": np.lexsort((rows, cols))}


def payloads(folder, pattern=""):
    return [Payload(p) for p in sorted(glob.glob(os.path.join(folder, "*.json"))) if re.search(pattern, os.path.basename(p))]


def difference(a, b):
    """Largest difference over the largest magnitude of b; infinite where either is not finite."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        return float("inf")
    scale = np.abs(b).max() if b.size else 0.0
    return float(np.abs(a - b).max() / (scale if scale > 0 else 1.0)) if b.size else 0.0


# Sums of a few dozen to a few thousand terms in another order: rounding, not more.
TOLERANCE = {False: 2e-5, True: 1e-12}


# ---- NVRTC, for the floor of dispatch ---------------------------------------------------------------------------------------------


def nvrtc():
    places = ["libnvrtc.so.13", "libnvrtc.so.12", "libnvrtc.so"]
    site = sysconfig.get_paths()["purelib"]
    places += sorted(glob.glob(f"{site}/nvidia/*/lib/libnvrtc.so.1[0-9]")) + sorted(glob.glob("/usr/local/cuda/lib64/libnvrtc.so.1[0-9]"))
    for place in places:
        try:
            return ctypes.CDLL(place)
        except OSError:
            continue
    raise Failure("no libnvrtc found")


def compile_payload(payload, architecture="sm_90"):
    """The payload's whole program as a cubin, and the symbol of each entry point."""
    lib = nvrtc()
    source = payload.json["kernel"].encode()
    names = ["forward", "backward", "double_backward_A", "double_backward_B"]
    if payload.family == "conv" and payload.prop["deterministic"]:
        names += ["fixup_forward", "fixup_backward", "fixup_double_backwardB"]
    program = V()

    def call(name, *args):
        code = getattr(lib, name)(*args)
        if code and name != "nvrtcCompileProgram":
            raise Failure(f"{name}: {code}")
        return code

    call("nvrtcCreateProgram", ctypes.byref(program), source, b"kernel.cu", 0, None, None)
    for name in names:
        call("nvrtcAddNameExpression", program, name.encode())
    options = [b"--std=c++17", f"-arch={architecture}".encode(), b"--use_fast_math"]
    if call("nvrtcCompileProgram", program, len(options), (ctypes.c_char_p * len(options))(*options)):
        size = SZ()
        call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        call("nvrtcGetProgramLog", program, log)
        raise Failure(log.value.decode(errors="replace"))
    size = SZ()
    call("nvrtcGetCUBINSize", program, ctypes.byref(size))
    image = ctypes.create_string_buffer(size.value)
    call("nvrtcGetCUBIN", program, image)
    symbols = {}
    for name in names:
        symbol = ctypes.c_char_p()
        call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(symbol))
        symbols[name] = symbol.value.decode()
    call("nvrtcDestroyProgram", ctypes.byref(program))
    return image, symbols


class _Zero(ctypes.Structure):
    _fields_ = [("at", ctypes.c_ulonglong), ("bytes", SZ)]


class _Launch(ctypes.Structure):
    _fields_ = [("function", V), ("blocks", ctypes.c_uint32), ("threads", ctypes.c_uint32), ("shared", ctypes.c_uint32), ("parameters", V)]


class _Conv(ctypes.Structure):
    _fields_ = [("rows", ctypes.c_ulonglong), ("cols", ctypes.c_ulonglong), ("nnz", ctypes.c_ulonglong), ("nodes", ctypes.c_ulonglong)]


class Floor:
    """The memsets and launches of one call without a handler: what a handler cannot beat."""

    def __init__(self, payload, order, args, rets, program):
        image, symbols = program
        names = [n for n, _, _ in payload.shapes(order, 1, 1)[0]]
        at = {name: buffer.at for name, buffer in zip(names, args)}
        outs = {n: b.at for (n, _, _), b in zip(payload.shapes(order, 1, 1)[1], rets)}
        deterministic, conv = bool(payload.prop["deterministic"]), payload.family == "conv"
        self.keep = [image, args, rets]
        nothing = ctypes.c_ulonglong(0)
        batch = ctypes.c_ulonglong(args[0].shape[0])
        if conv:
            graph = _Conv(at["rows"].value, at["cols"].value, args[names.index("rows")].shape[0], args[0].shape[0])
            space = at["workspace"] if deterministic else nothing
            tail = {0: [graph, space]}.get(order, [graph, space, at["transpose_perm"]])
            head = []
        else:
            tail, head, space = [], [batch], nothing
        if order == 0:
            body = [at["L1"], at["L2"], at["W"], outs["L3"]] if conv else [at["L1"], at["L2"], outs["L3"], at["W"]]
            calls = [("forward", "forward_config", head + body + tail)]
            after = [("fixup_forward", outs["L3"])]
        elif order == 1:
            body = [at["L1"], outs["L1_grad"], at["L2"], outs["L2_grad"], at["W"], outs["W_grad"], at["L3_grad"]]
            calls = [("backward", "backward_config", head + body + tail)]
            after = [("fixup_backward", outs["L1_grad"])]
        else:
            body = [at[n] for n in ("L1", "L2", "W", "L3_grad", "L1_dgrad", "L2_dgrad", "W_dgrad")]
            body += [outs[n] for n in ("L1_grad", "L2_grad", "W_grad", "L3_dgrad")]
            calls = [("double_backward_A", "forward_config", head + body + tail), ("double_backward_B", "double_backward_config", head + body + tail)]
            after = [("fixup_forward", outs["L3_dgrad"]), ("fixup_double_backwardB", outs["L1_grad"])]
        launches = []
        for (name, config, parameters), (fixup, target) in zip(calls, after):
            c = payload.json[config]
            launches.append(self._launch(image, symbols[name], c, c["smem"], parameters))
            if conv and deterministic:
                launches.append(self._launch(image, symbols[fixup], c, 0, [space, target]))
        zeroed = [] if (order == 0 and not conv) else rets
        self.zeros = (_Zero * max(len(zeroed), 1))(*[_Zero(b.at.value, b.bytes) for b in zeroed])
        self.n_zeros = len(zeroed)
        self.launches = (_Launch * len(launches))(*launches)

    def _launch(self, image, symbol, config, shared, parameters):
        function = V()
        check(_lib.floor_function(ctypes.byref(function), ctypes.cast(image, V), symbol.encode(), shared))
        pointers = (V * len(parameters))(*[ctypes.cast(ctypes.pointer(p), V).value for p in parameters])
        self.keep += [parameters, pointers]
        return _Launch(function.value, config["num_blocks"], config["num_threads"], shared, ctypes.cast(pointers, V).value)

    def execute(self):
        check(_lib.floor_run(self.zeros, self.n_zeros, self.launches, len(self.launches)))

    def time(self, samples, per_sample):
        host, total = (ctypes.c_double * samples)(), (ctypes.c_double * samples)()
        check(_lib.floor_time(self.zeros, self.n_zeros, self.launches, len(self.launches), samples, per_sample, host, total))
        return list(host), list(total)


class FloorGraph:
    """The floor as one graph of the driver, enqueued as a whole."""

    def __init__(self, floor):
        self.floor, self.handle = floor, V()
        check(_lib.floor_graph(ctypes.byref(self.handle), floor.zeros, floor.n_zeros, floor.launches, len(floor.launches)))

    def execute(self):
        check(_lib.gpu_graph_launch(self.handle))

    def time(self, samples, per_sample):
        host, total = (ctypes.c_double * samples)(), (ctypes.c_double * samples)()
        check(_lib.floor_graph_time(self.handle, samples, per_sample, host, total))
        return list(host), list(total)


def upstream_module(folder):
    """The compiled module in a folder, as a path."""
    found = sorted(glob.glob(os.path.join(folder, "openequivariance_extjax*.so")))
    if not found:
        raise Failure(f"no openequivariance_extjax*.so in {folder}")
    return found[0]


def preload(*names):
    """Loads CUDA libraries that upstream's module needs by name, from wherever this machine has them."""
    site = sysconfig.get_paths()["purelib"]
    for name in names:
        for place in [name, f"/usr/local/cuda/lib64/{name}", *sorted(glob.glob(f"{site}/nvidia/*/lib/{name}"))]:
            try:
                ctypes.CDLL(place, mode=ctypes.RTLD_GLOBAL)
                break
            except OSError:
                continue
