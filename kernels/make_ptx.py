#!/usr/bin/env python3
"""Makes the PTX that the library carries from the CUDA source beside it, or checks that it is what the source gives.

usage: make_ptx.py NVRTC_LIBRARY [--check]

The committed PTX is made by NVRTC 12.0.140 (PyPI: nvidia-cuda-nvrtc-cu12==12.0.140) for the oldest architecture that it
knows how to target without complaint, so that every driver since CUDA 12.0 and every GPU since Maxwell can finish it.
"""
import ctypes
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
SOURCES = ["zero_fill"]
OPTIONS = [b"--std=c++17", b"--gpu-architecture=compute_52"]


def compile_ptx(nvrtc, name):
    def check(status, what):
        if status:
            nvrtc.nvrtcGetErrorString.restype = ctypes.c_char_p
            raise SystemExit(f"{name}: {what}: {nvrtc.nvrtcGetErrorString(status).decode()}")

    program = ctypes.c_void_p()
    source = (HERE / f"{name}.cu").read_bytes()
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, f"{name}.cu".encode(), 0, None, None), "create")
    options = (ctypes.c_char_p * len(OPTIONS))(*OPTIONS)
    status = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), options)
    size = ctypes.c_size_t()
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    if log.value.strip():
        print(log.value.decode(), file=sys.stderr)
    check(status, "compile")
    check(nvrtc.nvrtcGetPTXSize(program, ctypes.byref(size)), "size")
    text = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetPTX(program, text), "text")
    # The compiler's comments name its build, and it defines constants of its own that nothing here uses.
    lines = [line.rstrip() for line in text.value.decode().splitlines()]
    code = "\n".join(line for line in lines if line and not line.lstrip().startswith("//") and "nv6target" not in line)
    return f"// Made from {name}.cu by make_ptx.py; do not edit.\n{code}\n"


def main():
    if len(sys.argv) not in (2, 3) or (len(sys.argv) == 3 and sys.argv[2] != "--check"):
        raise SystemExit(__doc__)
    nvrtc = ctypes.CDLL(sys.argv[1])
    for name in SOURCES:
        ptx = compile_ptx(nvrtc, name)
        path = HERE / f"{name}.ptx"
        if len(sys.argv) == 2:
            path.write_text(ptx)
        elif path.read_text() != ptx:
            raise SystemExit(f"{path} is not what {name}.cu gives; run make_ptx.py without --check")
    print("made" if len(sys.argv) == 2 else "unchanged:", *SOURCES)


main()
