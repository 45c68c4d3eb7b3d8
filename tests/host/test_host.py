"""The host platform through a real XLA: jax's CPU runtime, with real payloads made on the spot.

Environment: OEQ_NATIVE_LIBRARY, the library to test (what the module finds by itself by default); OEQ_TEST_OPENEQUIVARIANCE,
the folder that holds openequivariance-VERSION (target/test-cache by default); OEQ_TEST_PYTHON, the interpreter with jax (this
one by default).
"""

import json
import os
import pathlib
import stat
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCES = pathlib.Path(os.environ.get("OEQ_TEST_OPENEQUIVARIANCE", ROOT / "target" / "test-cache"))
VERSION = "0.7.0"

PREPARE = """
import json, os, threading
import jax, numpy as np
import jax.numpy as jnp
import openequivariance_extjax as module
import numerics, reference

def failure(work):
    try:
        jax.block_until_ready(work())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None

def case(name):
    return reference.Case(name, **reference.cases()[name])

def program(case, order=0, **attributes):
    operands, results = case.operands(order, *case.inputs())
    call = jax.ffi.ffi_call(f"{case.family}_{numerics.SUFFIXES[order]}", [jax.ShapeDtypeStruct(s, case.dtype) for s in results.values()])
    return jax.jit(lambda *a: call(*a, kernel=case.payload, hash=np.int64(case.hash), **attributes)), operands

module.enable_host()
"""


def run(program, version=VERSION, **environment):
    """Runs a program in an interpreter of its own; returns what it printed. A value of None removes a variable."""
    folders = (ROOT / "ffi-headers" / "python", SOURCES / f"openequivariance-{version}", ROOT / "tests" / "host")
    settings = {
        "OEQ_NOTORCH": "1",
        "OEQ_STORE": "off",
        "OEQ_DEVICE": "H200",
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_X64": "1",
        "PYTHONPATH": os.pathsep.join(map(str, folders)),
        **environment,
    }
    merged = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    python = os.environ.get("OEQ_TEST_PYTHON", sys.executable)
    outcome = subprocess.run([python, "-c", textwrap.dedent(program)], env=merged, capture_output=True, text=True, timeout=900)
    assert outcome.returncode == 0, f"exit {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome.stdout


def test_every_kind_of_kernel_computes_what_the_definition_says():
    printed = run("import numerics, sys; wrong = numerics.main(); print('WRONG' if wrong else 'RIGHT')")
    print(printed)
    assert printed.splitlines()[-1] == "RIGHT", printed


def test_forces_and_their_derivatives_agree_with_finite_differences():
    """A small model's energy by OpenEquivariance's own jax functions, differentiated once and twice by jax."""
    printed = run(
        PREPARE.replace("module.enable_host()", "")
        + """
import openequivariance as oeq

module.enable_host()
random = np.random.default_rng(0)
for deterministic in (False, True):
    problem = reference.problem("uvu", (8, 1, 0), (1, 1, 2), np.float64)
    conv = oeq.jax.TensorProductConv(problem, deterministic=deterministic)
    pairs = np.array([(a, b) for a in range(5) for b in range(5) if a != b])
    rows, cols = pairs.T.astype(np.int32)
    graph = (rows, cols) + ((np.lexsort((rows, cols)).astype(np.int32),) if deterministic else ())
    features = random.standard_normal((5, problem.irreps_in1.dim))
    weights = random.standard_normal((len(rows), problem.weight_numel))
    mix = random.standard_normal(problem.irreps_out.dim)

    @jax.jit
    def energy(positions):
        between = positions[rows] - positions[cols]
        length = jnp.linalg.norm(between, axis=1, keepdims=True)
        harmonics = jnp.concatenate([jnp.ones_like(length), jnp.sqrt(3) * between[:, jnp.array([1, 2, 0])] / length], axis=1)
        return jnp.sum(jnp.tanh(conv.forward(features, harmonics, weights * jnp.exp(-length), *graph) @ mix * 0.05))

    forces = jax.jit(jax.grad(energy))
    loss = jax.jit(lambda p: jnp.sum(jnp.sin(forces(p))))
    positions = 2 * random.standard_normal((5, 3))
    for function, derivative in ((energy, forces), (loss, jax.jit(jax.grad(loss)))):
        step, found = 1e-5, np.zeros((5, 3))
        for place in np.ndindex(5, 3):
            there, back = positions.copy(), positions.copy()
            there[place] += step
            back[place] -= step
            found[place] = (function(there) - function(back)) / (2 * step)
        exact = np.asarray(derivative(positions))
        print(np.abs(found - exact).max() / np.abs(exact).max(), np.abs(exact).max())
"""
    )
    errors = [line.split() for line in printed.splitlines()]
    assert len(errors) == 4
    for error, size in errors:
        assert float(error) < 1e-7 and float(size) > 1e-4, printed


@pytest.mark.parametrize("version", ["0.7.0", "0.6.8"])
def test_enable_host_is_all_that_openequivariance_needs(version):
    """Both operators, by themselves and in programs, forwards and backwards, from several threads; and an export for two
    platforms at once."""
    printed = run(
        """
import json, threading
import openequivariance_extjax as module
threads = [threading.Thread(target=module.enable_host) for _ in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
module.enable_host()

import jax, jax.export, numpy as np, jax.numpy as jnp
import openequivariance as oeq
import reference

random = np.random.default_rng(0)
problem = reference.problem("uvu", (8, 1, 0), (1, 1, 2), np.float64)
product = oeq.jax.TensorProduct(problem)
conv = oeq.jax.TensorProductConv(problem, deterministic=False)
rows, cols = random.integers(0, 5, (2, 20)).astype(np.int32)
x = random.standard_normal((5, problem.irreps_in1.dim))
y = random.standard_normal((20, problem.irreps_in2.dim))
w = random.standard_normal((20, problem.weight_numel))

def by_products(x, y, w):
    return jax.ops.segment_sum(product.forward(x[cols], y, w), rows, 5)

def by_conv(x, y, w):
    return conv.forward(x, y, w, rows, cols)

def all_of(function):
    value = lambda *a: jnp.sum(jnp.sin(function(*a)))
    first = jax.grad(value, (0, 1, 2))
    second = jax.grad(lambda *a: sum(jnp.sum(jnp.cos(each)) for each in first(*a)), (0, 1, 2))
    return lambda *a: (value(*a), *first(*a), *second(*a))

one, other = all_of(by_products), all_of(by_conv)
expected = one(x, y, w)
found = [other(x, y, w), jax.jit(one)(x, y, w), jax.jit(other)(x, y, w)]
check = jax.export.DisabledSafetyCheck.custom_call
targets = [check(name) for name in module.registrations()]
exported = jax.export.export(jax.jit(other), platforms=("cpu", "cuda"), disabled_checks=targets)(x, y, w)
found.append(jax.export.deserialize(exported.serialize()).call(x, y, w))
error = max(float(jnp.abs(f - e).max() / jnp.abs(e).max()) for each in found for f, e in zip(each, expected, strict=True))
print(json.dumps([error, list(exported.platforms), min(float(jnp.abs(e).max()) for e in expected), module.stats()["launches"]]))
""",
        version=version,
    )
    error, platforms, least, launches = json.loads(printed)
    assert error < 1e-13 and least > 0.1 and launches > 20, printed
    assert platforms == ["cpu", "cuda"]


def test_enable_host_needs_no_openequivariance(tmp_path):
    """An exported model is run where only jax is. What is missing but openequivariance is told."""
    run(
        PREPARE
        + f"""
import jax.export
c = case("tp_uvu_narrow_f64")
call, operands = program(c)
targets = [jax.export.DisabledSafetyCheck.custom_call(name) for name in module.registrations()]
open({str(tmp_path / "model")!r}, "wb").write(jax.export.export(call, disabled_checks=targets)(*operands).serialize())
np.savez({str(tmp_path / "inputs")!r}, *operands, expected=c.expected(0, *c.inputs())["L3"])
"""
    )
    (tmp_path / "broken" / "openequivariance" / "jax").mkdir(parents=True)
    (tmp_path / "broken" / "openequivariance" / "jax" / "jvp.py").write_text("import nowhere_to_be_found")
    printed = run(
        f"""
import sys
import numpy as np, jax.export
import openequivariance_extjax as module
module.enable_host()
assert "openequivariance" not in sys.modules
inputs = np.load({str(tmp_path / "inputs.npz")!r})
(found,) = jax.export.deserialize(open({str(tmp_path / "model")!r}, "rb").read()).call(*(inputs[f"arr_{{i}}"] for i in range(3)))
print(float(np.abs(found - inputs["expected"]).max()))
sys.path.append({str(tmp_path / "broken")!r})
try:
    module.enable_host()
except ModuleNotFoundError as error:
    print(error.name)
""",
        version="of no kind",
    ).split()
    assert float(printed[0]) < 1e-12 and printed[1] == "nowhere_to_be_found", printed


def test_threads_share_executables_and_get_the_right_numbers():
    """Eight threads, one executable for all and one for each, four payloads, one of them with atomics."""
    printed = run(
        PREPARE
        + """
names = ["conv_det_uvu_narrow_f64", "tp_uvu_narrow_f64", "conv_uvu_narrow_f64", "tp_uvw_narrow_f64_small"]
cases = [case(name) for name in names]
wanted = [c.expected(1, *c.inputs()) for c in cases]
shared = [program(c, 1)[0] for c in cases]
errors, start = [], threading.Barrier(8)

def work(index):
    start.wait()
    for turn in range(6):
        which = (index + turn) % 4
        c = cases[which]
        mine, operands = program(c, 1)
        for each in (shared[which], mine):
            for name, value in zip(wanted[which], each(*operands)):
                errors.append(c.error(name, np.asarray(value), wanted[which][name]))

threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([len(errors), max(errors), module.stats()]))
""",
        OEQ_HOST_THREADS="4",
    )
    count, error, counters = json.loads(printed)
    assert count == 8 * 6 * 2 * 3
    assert error < 8e-15
    assert counters["kernels_interned"] == 4 and counters["compiled"] == 4


THREADS = """
import collections, pathlib

def threads():
    \"\"\"Ticks of CPU time that each thread of the process has taken so far, and the thread's name, by its number.\"\"\"
    found = {}
    for each in pathlib.Path("/proc/self/task").iterdir():
        name, fields = each.joinpath("stat").read_text().split("(", 1)[1].rsplit(")", 1)
        found[int(each.name)] = sum(map(int, fields.split()[11:13])), name
    return found
"""


def test_grids_run_on_xlas_own_threads():
    """One long call after another on the main thread: who else works is a thread of XLA's, and none of the library's."""
    printed = run(
        PREPARE
        + THREADS
        + """
c = reference.Case("long", "conv", mode="uvu", mul=(64, 1, 0), top=(1, 2, 2))
operands, results = c.operands(1, *c.inputs(nodes=100, edges=2000))
target = jax.ffi.ffi_call("conv_backward", [jax.ShapeDtypeStruct(s, c.dtype) for s in results.values()])
call = jax.jit(lambda *a: target(*a, kernel=c.payload, hash=np.int64(c.hash)))
jax.block_until_ready(call(*operands))
before = threads()
for _ in range(100):
    jax.block_until_ready(call(*operands))
    spent = {id: (ticks - before.get(id, (0,))[0], name) for id, (ticks, name) in threads().items()}
    if sum(ticks for ticks, _ in spent.values()) > 300:
        break
print(json.dumps([os.getpid(), spent]))
""",
        OEQ_HOST_THREADS="2",
        OEQ_COMPILE_THREADS="1",
    )
    main, spent = json.loads(printed)
    names = [name for _, name in spent.values()]
    # The one that compiled may still be there, and does nothing.
    assert sum(name.startswith("oeq-") for name in names) <= 1, spent
    assert sum(ticks for ticks, name in spent.values() if name.startswith("oeq-")) == 0, spent
    # What is neither the caller nor the library's is XLA's; it names its threads in newer releases only.
    everything, workers = sum(ticks for ticks, _ in spent.values()), {**spent}
    del workers[str(main)]
    if os.cpu_count() > 1:
        assert sum(ticks for ticks, _ in workers.values()) > everything / 5, spent


def test_calls_from_every_thread_of_xlas_do_not_stop_each_other():
    """A program whose calls do not depend on each other, run many times at once: XLA's threads call, and are asked to help."""
    printed = run(
        PREPARE
        + """
import concurrent.futures
c = case("conv_det_uvu_narrow_f64")
call, operands = program(c, 1)

@jax.jit
def many(x, *rest):
    # Between the calls, work that XLA gives to its threads.
    mixed = [jnp.tanh(jnp.ones((300, 300)) * x[0, 0]) @ jnp.ones((300, 300)) for _ in range(2)]
    calls = [call(x * (1.0 + i), *rest)[0] for i in range(6)]
    return calls, sum(each.sum() for each in mixed)

expected = [np.asarray(each) for each in many(*operands)[0]]
wanted = c.expected(1, *c.inputs())["L1"]
print(max(c.error("L1", each, wanted) for each in expected))
with concurrent.futures.ThreadPoolExecutor(8) as pool:
    runs = [pool.submit(lambda: [np.asarray(each) for each in many(*operands)[0]]) for _ in range(200)]
    print(all(np.array_equal(a, b) for each in runs for a, b in zip(each.result(), expected)))
""",
        OEQ_HOST_THREADS="16",
    ).split()
    # The gradient with respect to the first operand does not depend on it.
    assert float(printed[0]) < 8e-15 and printed[1] == "True", printed


def test_deterministic_calls_that_share_a_workspace_do_not_disturb_each_other():
    """All calls get one and the same operand to write to, as XLA gives them equal constants, and run at the same time."""
    printed = run(
        PREPARE
        + """
import concurrent.futures
c = case("conv_det_uvu_narrow_f64")
call, operands = program(c)
wanted = c.expected(0, *c.inputs())["L3"]
alone = lambda *a: call(*a)[0]

@jax.jit
def many(x, *rest):
    # The calls differ, their workspace does not; a power of two scales every result without rounding.
    mixed = [jnp.tanh(jnp.ones((300, 300)) * x[0, 0]) @ jnp.ones((300, 300)) for _ in range(2)]
    return [alone(x * 2.0**i, *rest) for i in range(8)], sum(each.sum() for each in mixed)

expected = np.asarray(alone(*operands))
print(c.error("L3", expected, wanted))
of_one = lambda runs: sum(np.array_equal(np.asarray(each), expected * 2.0**i) for _ in range(runs) for i, each in enumerate(many(*operands)[0]))
print(of_one(60))
shared = [jnp.asarray(each) for each in operands]
before = [np.array(each) for each in shared]

def one(i):
    return sum(np.array_equal(np.asarray(alone(shared[0] * 2.0**i, *shared[1:])), expected * 2.0**i) for _ in range(100))

with concurrent.futures.ThreadPoolExecutor(4) as pool:
    print(sum(pool.map(one, range(4))))
# What XLA owns is as it was.
print(all(np.array_equal(a, np.asarray(b)) for a, b in zip(before, shared)))
""",
        OEQ_HOST_THREADS="16",
    ).split()
    assert float(printed[0]) < 8e-15 and printed[1:] == ["480", "400", "True"], printed


@pytest.mark.parametrize(
    "handlers",
    [
        "{name: stages['execute'] for name, stages in module.registrations('cpu').items()}",
        # Functions that serve every platform: they see from the frame that this is the CPU.
        "{name: stages['execute'] for name, stages in module.registrations('CUDA').items()}",
        "{name: jax.ffi.pycapsule(getattr(module._library, 'oeq_execute_' + name)) for name in module.registrations()}",
        "{name: jax.ffi.pycapsule(getattr(module._library, name)) for name in module.registrations()}",
    ],
    ids=["host", "cuda", "symbols", "plain symbols"],
)
def test_a_handler_without_its_other_stages_works(handlers):
    """Payloads of one length that differ in one byte, orders and shapes, in turns and from several threads."""
    printed = run(
        PREPARE.replace("module.enable_host()", "")
        + f"handlers = {handlers}"
        + """
for name, handler in handlers.items():
    jax.ffi.register_ffi_target(name, handler, platform="cpu")
cases = [case(name) for name in ("tp_uvu_narrow_f64", "conv_det_uvu_narrow_f64")]
calls = [(c, order, *program(c, order), c.expected(order, *c.inputs())) for c in cases for order in range(3)]
# The first one again, but for one byte: the signs of some results.
other = case("tp_uvu_narrow_f64")
changed = other.payload.replace("l3[j + 0] = L3_smem", "l3[j + 0] =-L3_smem", 1)
assert changed != other.payload and len(changed) == len(other.payload)
other.payload = changed
negated = other.expected(0, *other.inputs())
negated["L3"][:, :5] *= -1
calls.append((other, 0, *program(other, 0), negated))
errors = []

def work():
    for _ in range(4):
        for c, _, call, operands, expected in calls:
            for (name, wanted), value in zip(expected.items(), call(*operands)):
                errors.append(c.error(name, np.asarray(value), wanted))

threads = [threading.Thread(target=work) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
counters = module.stats()
print(len(errors), max(errors), counters["kernels_interned"], counters["launches"])
"""
    ).split()
    assert printed[0] == str(4 * 4 * (2 * 8 + 1)) and float(printed[1]) < 8e-15, printed
    assert printed[2:] == ["3", str(4 * 4 * 7)], printed


@pytest.mark.parametrize("explicit", [None, "/nowhere/c++", "nowhere-c++", "/bin/false"])
def test_without_a_compiler_instantiate_says_how_to_get_one(explicit):
    printed = run(
        PREPARE
        + """
os.environ["PATH"] = "/nowhere"
call, operands = program(case("tp_uvu_narrow_f64"))
print(failure(lambda: call.lower(*operands).compile() and None))
""",
        OEQ_CXX=explicit,
    )
    assert printed.startswith("JaxRuntimeError: FAILED_PRECONDITION: "), printed
    assert "tp_forward, instantiate" in printed and "apt install g++" in printed and "OEQ_CXX" in printed, printed
    for name in [explicit] if explicit else ["c++", "g++", "clang++"]:
        assert name in printed, printed


def test_what_was_compiled_once_is_found_again_with_and_without_a_compiler(tmp_path):
    program = (
        PREPARE
        + """
c = case("conv_det_uvu_narrow_f64")
call, operands = program(c)
print(c.error("L3", np.asarray(call(*operands)[0]), c.expected(0, *c.inputs())["L3"]), module.stats()["compiled"])
"""
    )
    for explicit, compiled in ((None, "1"), (None, "0"), ("/nowhere/c++", "0")):
        printed = run(program, OEQ_STORE="on", OEQ_STORE_DIR=str(tmp_path / "store"), OEQ_CXX=explicit).split()
        assert float(printed[0]) < 8e-15 and printed[1] == compiled, printed


BUNDLES = """
import ctypes
library = module._library
library.oeq_load_bundle.argtypes = [ctypes.c_char_p]
library.oeq_load_bundle_bytes.argtypes = [ctypes.c_char_p, ctypes.c_size_t]
library.oeq_export_compiled.argtypes = [ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_size_t)]
library.oeq_free_bytes.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

class Progress(ctypes.Structure):
    _fields_ = [("struct_size", ctypes.c_uint64), ("unit", ctypes.c_char_p), ("step", ctypes.c_int32),
                ("seconds", ctypes.c_double), ("done", ctypes.c_uint64), ("total", ctypes.c_uint64)]

Callback = ctypes.CFUNCTYPE(None, ctypes.POINTER(Progress), ctypes.c_void_p)
heard = []

@Callback
def hear(event, user):
    e = event.contents
    heard.append((e.unit.decode(), e.step, e.done, e.total))

library.oeq_set_progress.argtypes = [Callback, ctypes.c_void_p]

def check(status):
    assert status == 0, library.oeq_last_error()

def use(name):
    c = case(name)
    call, operands = program(c)
    return c.error("L3", np.asarray(call(*operands)[0]), c.expected(0, *c.inputs())["L3"])

def export():
    data, size = ctypes.c_void_p(), ctypes.c_size_t()
    check(library.oeq_export_compiled(data, size))
    copy = ctypes.string_at(data, size.value)
    library.oeq_free_bytes(data, size)
    return copy
"""
# Units as the progress callback names them, and its steps.
TP, CONV = "tensor_product/forward for host", "convolution/forward+fixup_forward for host"
QUEUED, FROM_BUNDLE = 0, 5


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Two compiled kernels, as oeq_export_compiled gives them."""
    path = tmp_path_factory.mktemp("bundle") / "host.oeqb"
    printed = run(
        PREPARE
        + BUNDLES
        + f"""
empty = len(export())
errors = [use("tp_uvu_narrow_f64"), use("conv_det_uvu_narrow_f64")]
bundle = export()
open({str(path)!r}, "wb").write(bundle)
print(json.dumps([errors, empty < len(bundle)]))
"""
    )
    assert max(json.loads(printed)[0]) < 8e-15 and json.loads(printed)[1], printed
    return path


FILE, BYTES = "oeq_load_bundle(path)", "oeq_load_bundle_bytes(data, len(data))"


@pytest.mark.parametrize(
    "when, load",
    [
        ("before anything", FILE),
        ("before anything", BYTES),
        ("after the runtime", FILE),
        ("after the host", BYTES),
        ("after the host", FILE),
        ("from the environment", None),
    ],
)
def test_bundles_and_listeners_reach_the_host_whenever_they_are_given(bundle, when, load):
    """There is no compiler but in one case, where it is needed: what is not compiled came out of the bundle."""
    give = f"""
path = {str(bundle)!r}.encode()
data = open(path, "rb").read()
check(library.{load})
check(library.oeq_set_progress(hear, None))
"""
    use = """
print(use("tp_uvu_narrow_f64"))
print(use("conv_det_uvu_narrow_f64"))
"""
    first = "print(use('tp_uvw_narrow_f64_small'))\n"
    program, environment = {
        "before anything": (give + use, {"OEQ_CXX": "/nowhere/c++"}),
        "after the runtime": ("module.stats()\n" + give + use, {"OEQ_CXX": "/nowhere/c++"}),
        "after the host": (first + give + use, {}),
        "from the environment": ("check(library.oeq_set_progress(hear, None))\n" + use,
                                 {"OEQ_CXX": "/nowhere/c++", "OEQ_BUNDLE": str(bundle)}),
    }[when]  # fmt: skip
    report = "print(json.dumps([heard, module.stats()]))"
    printed = run(PREPARE + BUNDLES + program + report, **environment).splitlines()
    errors, (heard, counters) = printed[:-1], json.loads(printed[-1])
    before = when == "after the host"
    assert len(errors) == 2 + before and all(float(error) < 8e-15 for error in errors), printed
    assert (counters["compiled"], counters["failed"], counters["launches"]) == (before, 0, 2 + before), counters
    # Each unit is queued and comes from the bundle, and the numbers count everything of the process.
    assert sorted(heard) == sorted(
        [unit, step, done + before, total + before]
        for unit, at in ((TP, 0), (CONV, 1))
        for step, done, total in ((QUEUED, at, at + 1), (FROM_BUNDLE, at + 1, at + 1))
    ), heard


def test_a_program_that_does_not_compile_shows_the_compilers_log_to_everybody():
    printed = run(
        PREPARE
        + """
c = case("tp_uvu_narrow_f64")
for broken in ("L3_out = nonsense;", "__shared__ float tile[4];"):
    payload = json.loads(c.payload)
    payload["kernel"] = payload["kernel"].replace("size_t num_products,", "size_t num_products, ", 1).replace("extern __shared__", broken + " extern __shared__", 1)
    c.payload = json.dumps(payload)
    call, operands = program(c)
    compiled = call.lower(*operands).compile()
    errors = [failure(lambda: compiled(*operands)) for _ in range(2)]
    assert errors[0] == errors[1]
    print(json.dumps(errors[0]))
print(module.stats()["failed"])
"""
    ).splitlines()
    for line, words in zip(printed, (["nonsense", ".cu:", "does not compile"], ["__shared__ type name[]", "line "])):
        error = json.loads(line)
        assert error.startswith("JaxRuntimeError: INVALID_ARGUMENT: ") and "tp_forward, execute" in error, error
        for word in words:
            assert word in error, error


def test_temporary_files_are_private_and_go_away(tmp_path):
    """A directory whose name would be a disaster in a shell; a compiler that looks around before it does its work."""
    folder = tmp_path / "a $(touch pwned) 'b' \\"
    folder.mkdir()
    witness, compiler = tmp_path / "witness", tmp_path / "my c++"
    compiler.write_text(f"#!/bin/sh\nstat -c %a . >> '{witness}'\nexec c++ \"$@\"\n")
    compiler.chmod(stat.S_IRWXU)
    printed = run(
        PREPARE
        + """
c = case("tp_uvu_narrow_f64")
call, operands = program(c)
print(c.error("L3", np.asarray(call(*operands)[0]), c.expected(0, *c.inputs())["L3"]))
""",
        TMPDIR=str(folder),
        OEQ_CXX=str(compiler),
    )
    assert float(printed) < 8e-15
    assert witness.read_text().split()[-1] == "700"
    assert list(folder.iterdir()) == [] and not list(tmp_path.rglob("pwned"))
