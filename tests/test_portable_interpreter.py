"""Runs the tests of Triton kernels in its interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SUITES = {"kernels": ("test_portable.py", "test_codegen.py"), "kvcache": ("test_kvcache_portable.py",)}


@pytest.mark.parametrize("suites", SUITES.values(), ids=SUITES)
def test_portable_backend_in_the_interpreter(suites):
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-n", "auto"),
            *(str(Path(__file__).with_name(name)) for name in suites),
        ],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
