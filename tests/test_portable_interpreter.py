"""Runs test_portable.py and test_codegen.py in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


def test_portable_backend_in_the_interpreter():
    suites = [str(Path(__file__).with_name(name)) for name in ("test_portable.py", "test_codegen.py")]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *suites],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
