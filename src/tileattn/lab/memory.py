"""Peak memory of a piece of work, measured."""

from __future__ import annotations

import ctypes
import threading

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of glibc's mallopt
_SMALL, _LARGE = 128 * 1024, 32 * 1024 * 1024


class PeakMemory:
    """Bytes by which the memory in use rose, at most, inside a with block. Not for work that is timed.

    On a CUDA device PyTorch's allocator counts. On a CPU a thread samples the resident set (needs psutil), good to a
    quarter of a MiB; what lives for less than a fraction of a millisecond is missed. There, memory that was freed must
    leave the process to be counted again, so glibc is told to give back every block of 128 KiB or more.

        with PeakMemory(device) as peak:
            work()
        print(peak.bytes)
    """

    INTERVAL = 0.0002  # seconds

    def __init__(self, device: torch.device):
        self.device = device
        self.bytes = 0

    def __enter__(self) -> PeakMemory:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            self._base = torch.cuda.memory_allocated(self.device)
        else:
            _keep_freed_blocks_up_to(_SMALL)
            self._base = self._highest = _resident()
            self._finished = threading.Event()
            self._sampler = threading.Thread(target=self._sample, daemon=True)
            self._sampler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self.device.type == "cuda":
            highest = torch.cuda.max_memory_allocated(self.device)
        else:
            self._finished.set()
            self._sampler.join()
            highest = max(self._highest, _resident())
            _keep_freed_blocks_up_to(_LARGE)
        self.bytes = highest - self._base

    def _sample(self) -> None:
        while not self._finished.wait(self.INTERVAL):
            self._highest = max(self._highest, _resident())


def _resident() -> int:
    import psutil

    return psutil.Process().memory_info().rss


def _keep_freed_blocks_up_to(size: int) -> None:
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt") and hasattr(libc, "malloc_trim"):  # glibc; others give large blocks back by themselves
        libc.mallopt(_M_MMAP_THRESHOLD, size)
        libc.mallopt(_M_TRIM_THRESHOLD, 2 * size)
        libc.malloc_trim(0)
