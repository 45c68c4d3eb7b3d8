"""OpenEquivariance's JAX extension, answered by oeq-native.

OpenEquivariance imports a module of this name for its handlers and for the properties of the device that it generates
kernels for. This one has no compiled part of its own: it opens the shared library of oeq-native and reads the C surface
that ffi-headers/oeq.h describes. Put the folder above this file on PYTHONPATH in place of the other extension.

The library is looked for at OEQ_NATIVE_LIBRARY, else beside this file, else where cargo builds it in the repository
that this file lies in. It stays open until the process ends: XLA keeps the addresses that registrations() hands out.

Set OEQ_DEVICE ("H200", or "sm_90,MULTIPROCESSORS,SHARED_BYTES") to export models on a machine without a GPU. enable_host()
lets models run on one, on jax's CPU platform.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pathlib
import pkgutil
import sys
import threading
from typing import Any

__all__ = ["DeviceProp", "GPUTimer", "enable_host", "is_hip", "registrations", "stats", "type_registrations"]

# The layout of the handler table that the structures below describe: OEQ_FFI_ABI_VERSION in oeq.h.
_ABI_VERSION = 3

_LIBRARY_VARIABLE = "OEQ_NATIVE_LIBRARY"
_LIBRARY_NAME = {"darwin": "liboeq_native.dylib", "win32": "oeq_native.dll"}.get(sys.platform, "liboeq_native.so")


class _Handler(ctypes.Structure):
    _fields_ = [
        ("name", ctypes.c_char_p),
        ("instantiate", ctypes.c_void_p),
        ("prepare", ctypes.c_void_p),
        ("initialize", ctypes.c_void_p),
        ("execute", ctypes.c_void_p),
        ("traits", ctypes.c_uint32),
    ]


class _Type(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("type_id", ctypes.c_void_p), ("type_info", ctypes.c_void_p)]


class _Table(ctypes.Structure):
    _fields_ = [
        ("abi_version", ctypes.c_uint32),
        ("type_count", ctypes.c_uint32),
        ("types", ctypes.POINTER(_Type)),
        ("handler_count", ctypes.c_uint32),
        ("handlers", ctypes.POINTER(_Handler)),
    ]


class _DeviceProperties(ctypes.Structure):
    _fields_ = [
        ("struct_size", ctypes.c_uint64),
        ("name", ctypes.c_char * 256),
        ("compute_major", ctypes.c_int32),
        ("compute_minor", ctypes.c_int32),
        ("multiprocessor_count", ctypes.c_int32),
        ("warp_size", ctypes.c_int32),
        ("shared_memory_per_block", ctypes.c_int32),
    ]


class _Stats(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "struct_size", "kernels_interned", "kernels_shared", "compiled", "failed", "loaded", "launches"
        )
    ]  # fmt: skip


# Result and parameters of every function of oeq.h that this module calls.
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "oeq_last_error": (ctypes.c_char_p, []),
    "oeq_version": (ctypes.c_char_p, []),
    "oeq_ffi_handler_table": (ctypes.POINTER(_Table), []),
    "oeq_ffi_handler_table_on": (ctypes.c_void_p, [ctypes.c_uint32, ctypes.c_char_p]),
    "oeq_get_stats": (ctypes.c_int32, [ctypes.POINTER(_Stats)]),
    "oeq_device_properties": (ctypes.c_int32, [ctypes.c_int32, ctypes.POINTER(_DeviceProperties)]),
    "oeq_timer_create": (ctypes.c_int32, [ctypes.POINTER(ctypes.c_void_p)]),
    "oeq_timer_start": (ctypes.c_int32, [ctypes.c_void_p]),
    "oeq_timer_stop": (ctypes.c_int32, [ctypes.c_void_p, ctypes.POINTER(ctypes.c_float)]),
    "oeq_timer_destroy": (None, [ctypes.c_void_p]),
    "oeq_clear_l2_cache": (ctypes.c_int32, []),
}


def _open() -> ctypes.CDLL:
    """Opens the library; ImportError says where it was looked for."""
    here = pathlib.Path(__file__).resolve().parent
    if explicit := os.environ.get(_LIBRARY_VARIABLE):
        candidates = [pathlib.Path(explicit)]
    else:
        target = here.parents[2] / "target"
        candidates = [folder / _LIBRARY_NAME for folder in (here, target / "release", target / "debug")]
    path = next((candidate for candidate in candidates if candidate.exists()), None)
    if path is None:
        looked = ", ".join(map(str, candidates))
        raise ImportError(
            f"oeq-native's library was not found (looked at {looked}); set {_LIBRARY_VARIABLE} to its path"
        )
    try:
        # ctypes never closes a library, which is what the addresses given to XLA need.
        library = ctypes.CDLL(str(path))
        for name, (result, parameters) in _FUNCTIONS.items():
            function = getattr(library, name)
            function.restype, function.argtypes = result, parameters
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} is not a usable library of oeq-native: {error}") from error
    return library


_library = _open()

__version__: str = _library.oeq_version().decode()


def _failure() -> RuntimeError:
    """This thread's last failure in the library."""
    return RuntimeError(_library.oeq_last_error().decode())


def _check(status: int) -> None:
    if status != 0:
        raise _failure()


def _table(platform: str = "CUDA") -> _Table:
    """The library's handler table of a platform, once its layout is known to be the one read here."""
    pointer = _library.oeq_ffi_handler_table()
    if pointer and platform != "CUDA":
        pointer = ctypes.cast(_library.oeq_ffi_handler_table_on(_ABI_VERSION, platform.encode()), ctypes.POINTER(_Table))
    if not pointer:
        raise _failure()
    table = pointer.contents
    if table.abi_version != _ABI_VERSION:
        raise RuntimeError(
            f"oeq-native's handler table has layout {table.abi_version}, and this module reads layout {_ABI_VERSION}: "
            "the library and the module are of different versions"
        )
    return table


# A prototype of our own: the attributes of ctypes.pythonapi.PyCapsule_New are shared with everybody who sets them, and
# jax.ffi.pycapsule does.
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(
    ("PyCapsule_New", ctypes.pythonapi)
)


def _capsule(address: int) -> Any:
    """An unnamed capsule, which is what jax unwraps."""
    return _new_capsule(address, None, None)


def registrations(platform: str = "CUDA") -> dict[str, dict[str, Any]]:
    """What jax.ffi.register_ffi_target takes: for each target the capsules of the stages that it has on a platform.

    The platform is "CUDA", or "cpu" for kernels that are compiled with the system's C++ compiler and run on the CPU.
    """
    table = _table(platform)
    return {
        handler.name.decode(): {
            stage: _capsule(address)
            for stage in ("instantiate", "prepare", "initialize", "execute")
            if (address := getattr(handler, stage))
        }
        for handler in table.handlers[: table.handler_count]
    }


def type_registrations() -> dict[str, dict[str, Any]]:
    """What jax.ffi.register_ffi_type takes: for each state type the capsules of its id and of how to destroy it.

    Registering types is optional. A target whose type nobody registered does it by itself.
    """
    table = _table()
    return {
        kind.name.decode(): {"type_id": _capsule(kind.type_id), "type_info": _capsule(kind.type_info)}
        for kind in table.types[: table.type_count]
    }


_enabling = threading.Lock()
_lowered: set[Any] = set()


def enable_host() -> None:
    """Lets OpenEquivariance's operators, and exported models that hold them, run on jax's CPU platform.

    Registers the targets with jax for "cpu". If openequivariance can be imported, it is, and jax is told how to lower its
    primitives there: OpenEquivariance itself does so for GPUs only. Call it before the first use on the CPU; again does no
    harm. RuntimeError when the library was built without the host platform, ImportError when there is no jax.
    """
    import jax
    from jax.extend import core
    from jax.interpreters import mlir

    with _enabling:
        for name, stages in registrations("cpu").items():
            jax.ffi.register_ffi_target(name, stages, platform="cpu")
        try:
            # Versions before 0.6 have no primitives: what they call is lowered by jax for every platform.
            package = importlib.import_module("openequivariance.jax.jvp")
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "openequivariance":
                raise
            return
        for each in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
            for primitive in vars(importlib.import_module(each.name)).values():
                if isinstance(primitive, core.Primitive) and primitive not in _lowered:
                    rule = mlir.lower_fun(primitive.impl, multiple_results=primitive.multiple_results)
                    mlir.register_lowering(primitive, rule, platform="cpu")
                    _lowered.add(primitive)


def is_hip() -> bool:
    """Whether the handlers are for AMD GPUs: never."""
    return False


def stats() -> dict[str, int]:
    """The library's counters since the process began, by the names that OeqStats has in oeq.h."""
    counters = _Stats(struct_size=ctypes.sizeof(_Stats))
    _check(_library.oeq_get_stats(ctypes.byref(counters)))
    return {name: getattr(counters, name) for name, _ in _Stats._fields_[1:]}


class DeviceProp:
    """Properties of a CUDA device, or of the one that OEQ_DEVICE describes.

    Attributes: `name`; `major` and `minor`, the compute capability; `multiprocessorCount`; `warpsize` in threads;
    `maxSharedMemPerBlock` in bytes, the most that a kernel can ask for. RuntimeError says why there is no such device.
    """

    __slots__ = ("name", "warpsize", "major", "minor", "multiprocessorCount", "maxSharedMemPerBlock")

    def __init__(self, ordinal: int) -> None:
        properties = _DeviceProperties(struct_size=ctypes.sizeof(_DeviceProperties))
        _check(_library.oeq_device_properties(ordinal, ctypes.byref(properties)))
        self.name: str = properties.name.decode()
        self.warpsize: int = properties.warp_size
        self.major: int = properties.compute_major
        self.minor: int = properties.compute_minor
        self.multiprocessorCount: int = properties.multiprocessor_count
        self.maxSharedMemPerBlock: int = properties.shared_memory_per_block

    def __repr__(self) -> str:
        return f"DeviceProp({', '.join(f'{name}={getattr(self, name)!r}' for name in self.__slots__)})"


class GPUTimer:
    """Measures time on the device between two points of the default stream. RuntimeError when there is no device."""

    __slots__ = ("_timer",)

    def __init__(self) -> None:
        self._timer = ctypes.c_void_p()
        _check(_library.oeq_timer_create(ctypes.byref(self._timer)))

    def start(self) -> None:
        """Marks the first point."""
        _check(_library.oeq_timer_start(self._timer))

    def stop_clock_get_elapsed(self) -> float:
        """Marks the second point, waits for it and returns the milliseconds since the first."""
        milliseconds = ctypes.c_float()
        _check(_library.oeq_timer_stop(self._timer, ctypes.byref(milliseconds)))
        return milliseconds.value

    def clear_L2_cache(self) -> None:
        """Evicts what the device's L2 cache holds, and waits."""
        _check(_library.oeq_clear_l2_cache())

    def __del__(self) -> None:
        # The slot is still empty when the library refused to make a timer.
        if self._timer.value is not None:
            _library.oeq_timer_destroy(self._timer)
