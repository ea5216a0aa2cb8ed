"""Kernels compiled beside others, so that a first call does not wait for one after the other."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from triton.runtime import cache, driver

MOST = 16  # kernels at a time, about those of two calls
_running: set[threading.Thread] = set()


def begin(device: torch.device, compile_kernel: Callable[[], Any]) -> None:
    """Begin to compile a kernel, in a thread of its own, into Triton's cache of this process; if too many are being
    compiled, leave it to whoever launches it. So is loading it, which a CUDA graph that is being captured somewhere
    may not bear."""

    def run() -> None:
        with contextlib.suppress(Exception), torch.cuda.device(device if device.type == "cuda" else -1):
            compiled = compile_kernel()  # whoever launches it will see what is wrong
            driver.active.launcher_cls(compiled.src, compiled.metadata)  # which gcc compiles, into a cache as well

    _running.difference_update([thread for thread in tuple(_running) if not thread.is_alive()])
    if len(_running) >= MOST:
        return
    with contextlib.suppress(RuntimeError):  # no thread is to be had: there are too many, or Python ends
        if not _running:
            _make_ready()
        # Python waits for it when it ends, also where autograd's thread begins it, as for a recomputed forward: threads
        # of that one would be daemons, and Python would end them inside of C++ that aborts the process for it.
        thread = threading.Thread(target=run, name="tileattn-compile", daemon=False)
        thread.start()
        _running.add(thread)  # only now: others may wait, and nobody can for a thread that has not started


def _make_ready() -> None:
    """Make what every compilation needs and would make for itself, half a second each: a library that calls the driver,
    and a hash of Triton's files."""
    hashing = threading.Thread(target=cache.triton_key)
    hashing.start()
    driver.active.get_current_target()
    hashing.join()


def wait() -> None:
    """Until all that was begun is compiled: no launch shall compile it again."""
    for thread in tuple(_running):
        thread.join()
        _running.discard(thread)
