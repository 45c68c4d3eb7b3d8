"""The life of real custom calls inside a real XLA: jax's CPU runtime, which calls instantiate and execute.

There is no CUDA stream there, so execute must end in an error, which reaches the caller whole. Everything before that
is what happens on a GPU too: registration, types, payloads, sharing, states and their destruction.
"""

import json

import pytest
from conftest import NO_DRIVER, run

# Registers for the CPU platform; ORDER says in which order, "targets" alone leaves the state type to our handlers.
PREPARE = """
import json, threading
import jax, numpy as np
import openequivariance_extjax as module
from make_payloads import PAYLOADS, generate

def types():
    for name, parts in module.type_registrations().items():
        if jax.__version_info__ >= (0, 8, 1):
            jax.ffi.register_ffi_type(name, parts, platform="cpu")
        else:
            jax.ffi.register_ffi_type_id(name, parts["type_id"], platform="cpu")

def targets():
    for name, stages in module.registrations().items():
        jax.ffi.register_ffi_target(name, stages, platform="cpu")

def backend():
    jax.devices()

def payload(name):
    made = generate(name, **PAYLOADS[name])
    return made.kernel_string, made.hash

def tensors(text, family, order):
    p = json.loads(text)["kernel_prop"]
    n, e = 5, 7 if family == "conv" else 5
    x, y, w, z = [np.ones(shape, np.float32) for shape in
                  ((n, p["L1_dim"]), (e, p["L2_dim"]), (e, p["weight_numel"]), (n, p["L3_dim"]))]
    tail = [np.zeros(e, np.int32), np.zeros(e, np.int32), np.zeros(p["workspace_size"], np.uint8),
            np.zeros(e if p["deterministic"] else 1, np.int32)] if family == "conv" else []
    operands = ([x, y, w], [x, y, w, z], [x, y, w, z, x, y, w])[order] + tail
    results = ([z], [x, y, w], [x, y, w, z])[order]
    return operands, [jax.ShapeDtypeStruct(r.shape, r.dtype) for r in results]

def jitted(target, results, **attributes):
    call = jax.ffi.ffi_call(target, results, vmap_method="sequential")
    return jax.jit(lambda *operands: call(*operands, **attributes))

def failure(work):
    try:
        jax.block_until_ready(work())
    except Exception as error:
        # Which class it is depends on jax's version, and on whether a run was over when its result was asked for.
        return str(error)
    return None

def compiling(call, operands):
    def work():
        call.lower(*operands).compile()
    return failure(work)
"""

ORDERS = {
    "types, then targets": "types(); targets()",
    "targets, then types": "targets(); types()",
    "targets, backend, types": "targets(); backend(); types()",
    "types, backend, targets": "types(); backend(); targets()",
    "targets alone": "targets()",
    "twice": "types(); targets(); backend(); types(); targets()",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS.keys())
def test_a_call_reaches_execute_in_whatever_order_things_were_registered(order, has_driver):
    if has_driver:
        pytest.skip("this machine has a CUDA driver")
    printed = run(
        PREPARE
        + order
        + """
text, value = payload("tp_uvu_f32")
operands, results = tensors(text, "tp", 0)
print(failure(lambda: jitted("tp_forward", results, kernel=text, hash=value)(*operands)))
print(json.dumps(module.stats()))
"""
    )
    error, counters = printed.splitlines()
    assert error.startswith("FAILED_PRECONDITION: "), error
    assert "tp_forward" in error and NO_DRIVER in error, error
    assert json.loads(counters)["kernels_interned"] == 1


def test_every_target_classic_and_variadic_says_why_it_cannot_run(has_driver):
    if has_driver:
        pytest.skip("this machine has a CUDA driver")
    printed = run(
        PREPARE
        + """
targets()
cases = []
for family, name in (("tp", "tp_uvu_f32"), ("conv", "conv_det_f32"), ("conv", "conv_uvu_f32")):
    text, value = payload(name)
    for order, suffix in enumerate(("forward", "backward", "double_backward")):
        operands, results = tensors(text, family, order)
        variadic = "oeq_tensor_product" if family == "tp" else "oeq_convolution"
        for target, extra in ((f"{family}_{suffix}", {}), (variadic, {"derivative": np.int64(order)})):
            call = jitted(target, results, kernel=text, hash=value, **extra)
            compiled = call.lower(*operands).compile()
            first, second = (failure(lambda: compiled(*operands)) for _ in range(2))
            cases.append([target, first, second])
print(json.dumps([cases, module.stats()]))
"""
    )
    cases, counters = json.loads(printed)
    assert len(cases) == 18
    for target, error, again in cases:
        assert error is not None, f"{target} ran without a GPU"
        assert error.startswith("FAILED_PRECONDITION: "), error
        assert target in error and NO_DRIVER in error and "libcuda" in error, error
        # Only what XLA puts in front may differ.
        assert again.partition("oeq-native: ")[1:] == error.partition("oeq-native: ")[1:]
    # Three payloads, each under six call sites.
    assert counters["kernels_interned"] == 3
    assert counters["kernels_shared"] == 15
    assert counters["launches"] == 0


def test_a_handler_without_its_other_stages_finds_out_where_it_is():
    """Its frame is that of a CPU, so it runs there, without a driver and whatever the name that it was registered by."""
    printed = run(
        PREPARE
        + """
for name, stages in module.registrations().items():
    jax.ffi.register_ffi_target(name, stages["execute"], platform="cpu")
text, value = payload("conv_uvu_f32")
operands, results = tensors(text, "conv", 0)
print(failure(lambda: jitted("conv_forward", results, kernel=text, hash=value)(*operands)))
print(failure(lambda: jitted("conv_forward", results, kernel=text[:-1], hash=value)(*operands)))
counters = module.stats()
print(counters["compiled"], counters["launches"])
"""
    ).splitlines()
    assert printed[0] == "None" and printed[-1] == "1 1", printed
    assert printed[1].startswith("INVALID_ARGUMENT: ") and "conv_forward, execute" in printed[1], printed


# What is wrong, how the call's attributes are made from a good payload, and what the error must say. `edit` changes a
# member of the payload.
BAD = {
    "no payload": ("dict(hash=value)", ["kernel", "missing"]),
    "payload is a number": ("dict(kernel=np.int64(3), hash=value)", ["kernel"]),
    "not JSON": ("dict(kernel='no JSON', hash=value)", ["JSON"]),
    "cut short": ("dict(kernel=text[:-100], hash=value)", ["JSON"]),
    "negative dimension": ("edit('kernel_prop', 'L1_dim', -1)", ["L1_dim", "-1"]),
    "zero dimension": ("edit('kernel_prop', 'L3_dim', 0)", ["L3_dim", "0"]),
    "unknown dtype": ("edit('kernel_prop', 'irrep_dtype', 77)", ["irrep_dtype", "77"]),
    "flag that is no flag": ("edit('kernel_prop', 'shared_weights', 2)", ["shared_weights", "2"]),
    "too many threads": ("edit('forward_config', 'num_threads', 2048)", ["forward_config", "num_threads", "2048"]),
    "text for a number": ("edit('backward_config', 'num_blocks', 'many')", ["backward_config", "num_blocks"]),
    "an entry point is gone": ("dict(kernel=text.replace('double_backward_A', 'double_backward_C'), hash=value)",
                               ["double_backward_A"]),
    "a tensor product's payload": ("dict(kernel=payload('tp_small')[0], hash=value)", ["workspace_size"]),
}  # fmt: skip


def test_a_wrong_payload_is_an_error_when_the_model_is_compiled():
    printed = run(
        PREPARE
        + """
targets()
text, value = payload("conv_det_f32")
operands, results = tensors(text, "conv", 0)

def edit(group, member, found):
    changed = json.loads(text)
    changed[group][member] = found
    return dict(kernel=json.dumps(changed), hash=value)

answers = {}
for what, attributes in json.loads(%r).items():
    made = eval(attributes)
    answers[what] = compiling(jitted("conv_forward", results, **made), operands)
answers["as it should be"] = compiling(jitted("conv_forward", results, kernel=text, hash=value), operands)
print(json.dumps(answers))
"""
        % json.dumps({what: attributes for what, (attributes, _) in BAD.items()})
    )
    answers = json.loads(printed)
    assert answers.pop("as it should be") is None
    for what, error in answers.items():
        assert error is not None, f"{what}: accepted"
        assert error.startswith("INVALID_ARGUMENT: "), f"{what}: {error}"
        for word in ["conv_forward", *BAD[what][1]]:
            assert word in error, f"{what}: {error}"


def test_a_variadic_call_must_name_an_order_that_exists():
    printed = run(
        PREPARE
        + """
targets()
text, value = payload("tp_small")
operands, results = tensors(text, "tp", 0)
for extra in ({}, *({"derivative": order} for order in (np.int64(3), np.int64(-1), "first", np.float64(0)))):
    print(compiling(jitted("oeq_tensor_product", results, kernel=text, hash=value, **extra), operands))
""",
        JAX_ENABLE_X64="1",
    ).splitlines()
    assert len(printed) == 5
    for error in printed:
        assert error.startswith("INVALID_ARGUMENT: "), error
        assert "oeq_tensor_product" in error and "derivative" in error, error


def test_wrong_tensors_are_named(has_driver):
    """The CPU runtime shows no tensors before execute; there they are looked at before the device is."""
    if has_driver:
        pytest.skip("this machine has a CUDA driver")
    printed = run(
        PREPARE
        + """
targets()
text, value = payload("tp_uvu_f32")
(x, y, w), results = tensors(text, "tp", 0)
for operands in ((x[:, 1:], y, w), (x, y, w[:, 1:]), (x, y), (x, y.astype(np.int32), w), (x[0], y, w), (x, y[:3], w)):
    print(failure(lambda: jitted("tp_forward", results, kernel=text, hash=value)(*operands)))
"""
    ).splitlines()
    assert len(printed) == 6
    for error in printed:
        assert error.startswith("INVALID_ARGUMENT: "), error
        assert "tp_forward" in error, error


def test_threads_compile_and_run_the_same_model():
    """Eight threads, forty executables, four payloads: every one is compiled and ends in the same error."""
    printed = run(
        PREPARE
        + """
targets()
names = ["tp_small", "tp_uvu_shared", "tp_uvw_f32", "tp_uvu_f32"]
payloads = [payload(name) for name in names]
errors, start = [], threading.Barrier(8)

def work(index):
    text, value = payloads[index % 4]
    p = json.loads(text)["kernel_prop"]
    operands, results = tensors(text, "tp", 0)
    if p["shared_weights"]:
        operands[2] = operands[2][0]
    start.wait()
    for round in range(5):
        # Another constant for each executable, so that none is taken from jax's cache.
        call = jitted("tp_forward", results, kernel=text, hash=value)
        salt = np.float32(index * 100 + round)
        compiled = jax.jit(lambda *a: call(a[0] + salt, *a[1:])).lower(*operands).compile()
        errors.append(failure(lambda: compiled(*operands)))

threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps([errors, module.stats()]))
"""
    )
    errors, counters = json.loads(printed)
    assert len(errors) == 40
    for error in errors:
        assert error is not None and error.startswith("FAILED_PRECONDITION: "), error
    # A record lives as long as a call site that names it, so a payload may have been interned more than once.
    assert counters["kernels_interned"] + counters["kernels_shared"] == 40
    assert counters["kernels_interned"] >= 4


def test_states_are_destroyed_with_their_executables():
    """Making and dropping executables again and again neither grows nor crashes."""
    printed = run(
        PREPARE
        + """
import gc, resource
targets()
text, value = payload("conv_large")
operands, results = tensors(text, "conv", 0)

def once(salt):
    call = jitted("conv_forward", results, kernel=text, hash=value)
    compiled = jax.jit(lambda *a: call(a[0] * salt, *a[1:])).lower(*operands).compile()
    del compiled, call
    jax.clear_caches()
    gc.collect()

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

for salt in range(10):
    once(np.float32(salt))
before = resident()
for salt in range(10, 50):
    once(np.float32(salt))
print(json.dumps([len(text), resident() - before]))
"""
    )
    size, growth = json.loads(printed)
    # Forty states that each kept their payload would be forty times its size.
    assert growth < 20 * size, (size, growth)
