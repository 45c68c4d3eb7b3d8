"""Entry points compiled alone must be the machine code that they are in the whole program.

usage: machine_code.py --nvrtc LIBNVRTC --cut CUT_SOURCE [--arch sm_90] [--jobs N] PAYLOAD...

CUT_SOURCE is the example of that name, built. Each PAYLOAD (JSON text) is compiled whole, then once per entry point from
what CUT_SOURCE keeps, and once with half of the entry points. Code, constant bank and attributes (registers, stack, ...)
of every kernel must be equal byte for byte, and no kernel may be in an image that was not asked for.
Prints one line per kernel and exits with 1 on any difference.

Holds for NVRTC 12.2 to 13.5. NVRTC 12.0 and 12.1 place some address computations of one kernel differently (its
floating-point operations and their order are the same), which this script reports as a difference.
"""

import argparse
import collections
import concurrent.futures
import ctypes
import json
import os
import struct
import subprocess
import sys
import tempfile
import time


class Nvrtc:
    """The part of NVRTC that is needed here."""

    def __init__(self, path):
        self.library = ctypes.CDLL(path)
        self.library.nvrtcGetErrorString.restype = ctypes.c_char_p

    def _call(self, name, *arguments):
        status = getattr(self.library, name)(*arguments)
        if status != 0:
            raise RuntimeError(f"{name}: {self.library.nvrtcGetErrorString(status).decode()}")

    def compile(self, source, arch, entries):
        """The cubin of a program and the names of its entry points in there."""
        program = ctypes.c_void_p()
        self._call("nvrtcCreateProgram", ctypes.byref(program), source.encode(), b"payload.cu", 0, None, None)
        try:
            for entry in entries:
                self._call("nvrtcAddNameExpression", program, entry.encode())
            options = [b"--std=c++17", b"--use_fast_math", f"-arch={arch}".encode()]
            if self.library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
                size = ctypes.c_size_t()
                self._call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
                log = ctypes.create_string_buffer(size.value)
                self._call("nvrtcGetProgramLog", program, log)
                raise RuntimeError(log.value.decode(errors="replace"))
            lowered = {}
            for entry in entries:
                name = ctypes.c_char_p()
                self._call("nvrtcGetLoweredName", program, entry.encode(), ctypes.byref(name))
                lowered[entry] = name.value.decode()
            size = ctypes.c_size_t()
            self._call("nvrtcGetCUBINSize", program, ctypes.byref(size))
            image = ctypes.create_string_buffer(size.value)
            self._call("nvrtcGetCUBIN", program, image)
            return image.raw, lowered
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))


def sections(image):
    """Name to content of each section of a 64-bit ELF file."""
    if image[:5] != b"\x7fELF\x02":
        raise RuntimeError("the image is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", image, 0x28)
    entry_size, count, names_index = struct.unpack_from("<HHH", image, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", image, table + i * entry_size) for i in range(count)]
    names_at = headers[names_index][4]
    return {text_at(image, names_at + h[0]): b"" if h[1] == 8 else image[h[4] : h[4] + h[5]] for h in headers}


def text_at(data, start):
    return data[start : data.index(b"\0", start)].decode()


def attributes(found):
    """Symbol to the sorted (attribute, value) pairs that the section .nv.info has about it."""
    result = collections.defaultdict(list)
    info, at = found[".nv.info"], 0
    while at < len(info):
        layout, attribute, size = struct.unpack_from("<BBH", info, at)
        at += 4
        if layout != 4:  # The value is in the field of the size.
            continue
        if size == 8:
            symbol, value = struct.unpack_from("<II", info, at)
            (name,) = struct.unpack_from("<I", found[".symtab"], 24 * symbol)
            result[text_at(found[".strtab"], name)].append((attribute, value))
        at += size
    return {name: sorted(pairs) for name, pairs in result.items()}


def kernel(found, symbol):
    """What has to be equal."""
    return found[f".text.{symbol}"], found.get(f".nv.constant0.{symbol}", b""), attributes(found)[symbol]


def check(nvrtc, cut, arch, path, pool):
    """Compares one payload; returns the number of differences."""
    with open(path, encoding="utf-8") as file:
        source = json.load(file)["kernel"]
    with tempfile.NamedTemporaryFile("w", suffix=".cu", encoding="utf-8", newline="") as file:
        file.write(source)
        file.flush()
        names = subprocess.run([cut, file.name], check=True, capture_output=True, text=True).stdout.split()
        wanted = [[name] for name in names] + [names[::2]]
        programs = [
            subprocess.run([cut, file.name, *keep], check=True, capture_output=True).stdout.decode() for keep in wanted
        ]
    if not names:
        raise RuntimeError(f"{path}: no entry points")

    def timed(text, keep):
        start = time.monotonic()
        image, lowered = nvrtc.compile(text, arch, keep)
        return sections(image), lowered, time.monotonic() - start

    jobs = [pool.submit(timed, source, names)]
    jobs += [pool.submit(timed, text, keep) for text, keep in zip(programs, wanted)]
    whole, lowered, seconds = jobs[0].result()
    expected = {name: kernel(whole, lowered[name]) for name in names}
    if len({code for code, _, _ in expected.values()}) < 2 or not all(pairs for _, _, pairs in expected.values()):
        raise RuntimeError(f"{path}: kernels without attributes or all the same, comparing them shows nothing")
    print(f"{path} {arch} whole program {seconds:.2f} s", flush=True)
    differences = 0
    for keep, job in zip(wanted, jobs[1:]):
        found, symbols, seconds = job.result()
        extra = {name for name, symbol in lowered.items() if f".text.{symbol}" in found} - set(keep)
        for name in keep:
            same = symbols[name] == lowered[name] and kernel(found, symbols[name]) == expected[name] and not extra
            differences += not same
            code, constants, pairs = expected[name]
            print(
                f"  {'same' if same else 'DIFFERENT'} {name}, {len(keep)} of {len(names)} kept: {len(code)} bytes, "
                f"{len(constants)} constant bytes, attributes {pairs}, {seconds:.2f} s",
                flush=True,
            )
    return differences


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nvrtc", required=True)
    parser.add_argument("--cut", required=True)
    parser.add_argument("--arch", default="sm_90")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("payloads", nargs="+")
    options = parser.parse_args()
    nvrtc = Nvrtc(options.nvrtc)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        differences = sum(check(nvrtc, options.cut, options.arch, path, pool) for path in options.payloads)
    print(f"{differences} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
