"""Launches by `tileattn.backends.entry`, as the driver sees them; without a GPU."""

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

HERE = Path(__file__).parent
INCLUDE = Path(triton.__file__).parent / "backends" / "nvidia" / "include"
# made of descriptors by the host, pointers, descriptors by kernels (which need memory), captured tensors
CALLS = ["three_like_it", "one_tensor", "unaligned", "varlen", "mods"]


@pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")
def test_the_driver_gets_what_triton_would_have_given_it(tmp_path):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{INCLUDE}", "-o", library, HERE / "driver_stub.c"], check=True)
    (tmp_path / "libcuda.so").symlink_to(library)
    paths = {"TRITON_LIBCUDA_PATH": str(tmp_path), "LD_LIBRARY_PATH": str(tmp_path)}
    paths["PYTHONPATH"] = os.pathsep.join([str(HERE), *sys.path])
    command = [sys.executable, HERE / "entering.py", tmp_path / "launch", *CALLS, *CALLS]
    done = subprocess.run(command, env=os.environ | paths, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    compared, repeated = map(int, done.stdout.split())
    assert compared >= 2 * 3 * len(CALLS)
    assert repeated >= 3 * (len(CALLS) + 1)


def test_every_thread_is_given_a_context_once(monkeypatch):
    from tileattn.backends import entry

    given = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch, "zeros", lambda *_, device: given.append((threading.get_ident(), device)))
    for _ in range(2):
        with ThreadPoolExecutor(1) as pool:
            used = pool.submit(lambda: (entry.need_context(), entry.need_context(), threading.get_ident())).result()[-1]
        assert given.pop() == (used, "cuda")
        assert not given
