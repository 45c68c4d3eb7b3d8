"""What the tests of the Python module share: a clean interpreter for each thing that is registered for a whole process.

Environment: OEQ_NATIVE_LIBRARY, the library to test (what the module finds by itself by default);
OEQ_TEST_OPENEQUIVARIANCE, the folder that holds openequivariance-VERSION (target/test-cache by default). tests/run.sh
sets both.
"""

import os
import pathlib
import re
import subprocess
import sys
import textwrap

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
MODULE = ROOT / "ffi-headers" / "python"
SOURCES = pathlib.Path(os.environ.get("OEQ_TEST_OPENEQUIVARIANCE", ROOT / "target" / "test-cache"))
# The first is the one that models are exported with; the others must still take the module for their own extension.
VERSIONS = re.findall(
    r"^openequivariance==(.+)$",
    (ROOT / "tests" / "requirements" / "openequivariance.txt").read_text(encoding="utf-8"),
    re.M,
)
TARGETS = sorted(
    [f"{family}_{order}" for family in ("tp", "conv") for order in ("forward", "backward", "double_backward")]
    + ["oeq_tensor_product", "oeq_convolution"]
)
NO_DRIVER = "no CUDA driver on this machine"

sys.path.insert(0, str(MODULE))


def run(program, version=VERSIONS[0], **environment):
    """Runs a program in an interpreter of its own, with one OpenEquivariance and our module; returns what it printed.

    The environment describes an H200; a value of None removes a variable.
    """
    settings = {
        "OEQ_NOTORCH": "1",
        "OEQ_DEVICE": "H200",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join(
            map(str, (MODULE, SOURCES / f"openequivariance-{version}", ROOT / "tests" / "python"))
        ),
        **environment,
    }
    merged = {name: value for name, value in {**os.environ, **settings}.items() if value is not None}
    program = textwrap.dedent(program)
    outcome = subprocess.run([sys.executable, "-c", program], env=merged, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, f"exit {outcome.returncode}\n{outcome.stdout}\n{outcome.stderr}"
    return outcome.stdout


@pytest.fixture(scope="session")
def has_driver():
    """Whether this machine has a CUDA driver, which changes what some calls answer."""
    import ctypes

    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True
