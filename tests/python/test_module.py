"""The module by itself: no jax, no OpenEquivariance."""

import ctypes
import os
import subprocess
import threading
import tomllib

import openequivariance_extjax as module
import pytest
from conftest import MODULE, NO_DRIVER, ROOT, TARGETS, run

STAGES = {"instantiate", "initialize", "execute"}

_address = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", ctypes.pythonapi)
)


def addresses(registrations):
    """Every capsule's address, which only an unnamed capsule gives for no name."""
    return {
        (name, key): _address(capsule, None) for name, parts in registrations.items() for key, capsule in parts.items()
    }


def test_every_target_is_there_with_its_stages():
    registrations = module.registrations()
    assert list(registrations) == TARGETS
    for name, stages in registrations.items():
        assert set(stages) == STAGES, name
    # Each target and stage is a function of its own.
    found = addresses(registrations)
    assert len(set(found.values())) == len(found)


def test_addresses_stay_the_same():
    assert addresses(module.registrations()) == addresses(module.registrations())
    assert addresses(module.type_registrations()) == addresses(module.type_registrations())


def test_the_state_type_has_an_id_and_a_deleter():
    types = module.type_registrations()
    assert len(types) == 1
    (parts,) = types.values()
    assert set(parts) == {"type_id", "type_info"}
    info = (ctypes.c_size_t * 3).from_address(_address(parts["type_info"], None))
    assert info[0] == ctypes.sizeof(info)
    assert info[2] != 0, "the type has no deleter"


def test_threads_get_the_same_registrations():
    expected, seen, start = addresses(module.registrations()), [], threading.Barrier(8)

    def register():
        start.wait()
        for _ in range(50):
            seen.append(addresses(module.registrations()))

    threads = [threading.Thread(target=register) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8 * 50
    assert all(found == expected for found in seen)


def test_a_second_interpreter_of_the_process_gets_the_same_registrations():
    program = """
        import ctypes, openequivariance_extjax as module
        prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
        get = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))
        found = module.registrations()
        print([(name, stage, get(found[name][stage], None)) for name in found for stage in found[name]], flush=True)
    """
    # An interpreter that shares the lock of the first, as programs that embed Python make theirs.
    printed = run(f"""
        import textwrap
        program = textwrap.dedent({program!r})
        exec(program)
        try:
            import _interpreters as interpreters
            inner = interpreters.create("legacy")
            assert interpreters.exec(inner, program) is None
        except ImportError:
            import _xxsubinterpreters as interpreters
            inner = interpreters.create(isolated=False)
            interpreters.run_string(inner, program)
        interpreters.destroy(inner)
        exec(program)
    """)
    first, second, third = printed.splitlines()
    assert first == second == third
    assert first.count("execute") == len(TARGETS)


def test_the_version_is_the_crate_s():
    manifest = tomllib.loads((ROOT / "Cargo.toml").read_text(encoding="utf-8"))
    assert module.__version__ == manifest["package"]["version"]


def test_it_is_not_for_amd():
    assert module.is_hip() is False


def test_counters_are_told_by_name():
    counters = module.stats()
    assert set(counters) == {"kernels_interned", "kernels_shared", "compiled", "failed", "loaded", "launches"}
    assert all(isinstance(value, int) for value in counters.values())


def test_a_known_device_needs_no_driver(monkeypatch):
    monkeypatch.setenv("OEQ_DEVICE", "H200")
    device = module.DeviceProp(0)
    assert (device.major, device.minor, device.multiprocessorCount) == (9, 0, 132)
    assert (device.warpsize, device.maxSharedMemPerBlock) == (32, 232448)
    assert "H200" in device.name


def test_a_device_can_be_spelled_out(monkeypatch):
    monkeypatch.setenv("OEQ_DEVICE", "sm_86,84,101376")
    device = module.DeviceProp(3)
    assert (device.major, device.minor) == (8, 6)
    assert (device.multiprocessorCount, device.maxSharedMemPerBlock) == (84, 101376)


@pytest.mark.parametrize("description", ["H2OO", "sm_90", "sm_90,132", "sm_90,0,232448", "sm_90,132,-1", "sm_90,132,x"])
def test_a_bad_description_is_an_error_that_quotes_it(monkeypatch, description):
    monkeypatch.setenv("OEQ_DEVICE", description)
    with pytest.raises(RuntimeError, match="INVALID_ARGUMENT.*OEQ_DEVICE") as caught:
        module.DeviceProp(0)
    assert description in str(caught.value)


def test_without_a_driver_a_device_is_an_error_that_says_what_to_do(monkeypatch, has_driver):
    if has_driver:
        pytest.skip("this machine has a CUDA driver")
    monkeypatch.delenv("OEQ_DEVICE", raising=False)
    with pytest.raises(RuntimeError, match=f"FAILED_PRECONDITION.*{NO_DRIVER}.*OEQ_DEVICE"):
        module.DeviceProp(0)
    with pytest.raises(RuntimeError, match=f"FAILED_PRECONDITION.*{NO_DRIVER}"):
        module.GPUTimer()


def import_error(**environment):
    return run(
        """
        try:
            import openequivariance_extjax
        except ImportError as error:
            print(error)
        """,
        PYTHONPATH=str(MODULE),
        **environment,
    )


def test_a_missing_library_is_an_import_error_with_the_places(tmp_path):
    missing = tmp_path / "nothing.so"
    assert str(missing) in import_error(OEQ_NATIVE_LIBRARY=str(missing))


def test_a_library_that_is_not_ours_is_an_import_error():
    assert "not a usable library of oeq-native" in import_error(OEQ_NATIVE_LIBRARY=_libc())


def _libc():
    """The path of the C library that this process uses."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next(line.split()[-1] for line in maps if "/libc.so" in line or "/libc-" in line)


def test_the_library_is_found_beside_the_module(tmp_path):
    package = tmp_path / "openequivariance_extjax"
    package.mkdir()
    (package / "__init__.py").write_bytes((MODULE / "openequivariance_extjax" / "__init__.py").read_bytes())
    (package / "liboeq_native.so").symlink_to(module._library._name)
    printed = run(
        "import openequivariance_extjax as m; print(m.__file__, m._library._name, len(m.registrations()))",
        PYTHONPATH=str(tmp_path),
        OEQ_NATIVE_LIBRARY=None,
    )
    assert printed.split() == [str(package / "__init__.py"), str(package / "liboeq_native.so"), str(len(TARGETS))]


# A library with the whole C surface and a table of a layout that nobody knows yet.
LATER = """
#include "oeq.h"
static const OeqFfiHandlerTable table = {4, 0, 0, 0, 0};
const OeqFfiHandlerTable* oeq_ffi_handler_table(void) { return &table; }
const void* oeq_ffi_handler_table_on(uint32_t v, const char* p) { (void)v; (void)p; return &table; }
const char* oeq_last_error(void) { return "the text"; }
const char* oeq_version(void) { return "9.9.9"; }
OeqStatus oeq_get_stats(OeqStats* s) { (void)s; return OEQ_INTERNAL; }
OeqStatus oeq_device_properties(int32_t o, OeqDeviceProperties* p) { (void)o; (void)p; return OEQ_NOT_FOUND; }
OeqStatus oeq_timer_create(OeqTimer** t) { (void)t; return OEQ_INTERNAL; }
OeqStatus oeq_timer_start(OeqTimer* t) { (void)t; return OEQ_INTERNAL; }
OeqStatus oeq_timer_stop(OeqTimer* t, float* m) { (void)t; (void)m; return OEQ_INTERNAL; }
void oeq_timer_destroy(OeqTimer* t) { (void)t; }
OeqStatus oeq_clear_l2_cache(void) { return OEQ_INTERNAL; }
"""


def test_another_layout_of_the_table_is_refused_and_errors_carry_the_library_s_text(tmp_path):
    source, library = tmp_path / "later.c", tmp_path / "later.so"
    source.write_text(LATER, encoding="utf-8")
    compiler = os.environ.get("CC", "cc")
    subprocess.run([compiler, "-shared", "-fPIC", f"-I{ROOT / 'ffi-headers'}", source, "-o", library], check=True)
    printed = run(
        """
        import openequivariance_extjax as module
        tables = [module.registrations, module.type_registrations]
        for call in (*tables, module.stats, lambda: module.DeviceProp(0), module.GPUTimer):
            try:
                call()
            except RuntimeError as error:
                print(error)
        """,
        PYTHONPATH=str(MODULE),
        OEQ_NATIVE_LIBRARY=str(library),
    ).splitlines()
    assert len(printed) == 5
    for line in printed[:2]:
        assert "layout 4" in line and "layout 3" in line
    assert printed[2:] == ["the text"] * 3
