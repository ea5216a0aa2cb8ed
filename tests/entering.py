"""Run by test_driver_entry.py, with driver_stub.c for a driver: what kept launches hand to it is what Triton's runner
does, to the byte."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from oracle import wanted
from test_portable_launch import calls
from triton.backends.nvidia.driver import CudaDriver

from tileattn.backends import portable
from tileattn.backends.portable import kept, launch, tuning

stub = ctypes.CDLL("libcuda.so.1")
scratch: dict[int, torch.Tensor] = {}
SIZES = {"i32": 4, "i64": 8, "fp32": 4}


class Driver(CudaDriver):
    def __init__(self) -> None:
        super().__init__()
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_device = lambda: 0
        self.get_current_stream = lambda device=0: 77


def parameter_sizes(signature: Any) -> list[int]:
    found: list[int] = []
    for kind in signature:
        if isinstance(kind, tuple):
            found += parameter_sizes(kind)
        elif kind.startswith("tensordesc"):
            rank = kind.split("[")[1].count(",") + 1
            found += [128] + rank * [4] + rank * [8]
        elif kind != "constexpr":
            found.append(8 if kind.startswith("*") else SIZES[kind])
    return found


class Recorder:
    """Launches everything twice, by Triton's runner and kept, and compares."""

    def __init__(self, log: str) -> None:
        self.log, self.compared, self.repeated = log, 0, 0
        self.start, self.launch = launch.start, launch.Launcher._launch
        launch.start = self.begin
        launch.Launcher._launch = lambda *call: self.compare(*call)

    def expect(self) -> None:
        sizes = [*parameter_sizes(self.compiled.src.signature.values()), 8, 8]  # and two kinds of scratch memory
        stub.stub_expect(self.log.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def noted(self) -> str:
        stub.stub_close()
        return Path(self.log).read_text()

    def begin(self, kernel: Any, call: launch.Launch) -> Any:
        options = launch.compile_options(call.tile)
        self.compiled = kernel.run(*call.args, grid=(call.programs,), warmup=True, **options)
        self.expect()
        self.start(kernel, call)
        self.fresh = self.noted()
        return self.compiled

    def compare(self, launcher: launch.Launcher, kernel: Any, role: Any, describe: Any, outputs: Any) -> None:
        key = kernel.fn, role, tuning._lookup
        before, self.fresh = launcher.kept.pop(key, None), ""
        self.launch(launcher, kernel, role, describe, outputs)
        if not self.fresh:  # no programs
            return
        for entry in [launcher.kept[key]] + [before] * (before is not None):
            launcher.kept[key] = entry
            self.expect()
            self.launch(launcher, kernel, role, describe, outputs)
            assert entry.entered, kernel.__name__
            assert self.noted() == self.fresh, kernel.__name__
        self.compared += 1
        self.repeated += before is not None


def main(log: str, names: list[str]) -> None:
    triton.runtime.driver.set_active(Driver())
    tuning.table_for = lambda device, dtype: tuning.HOPPER
    allocate = lambda size, alignment=0, stream=None: scratch.setdefault(size, torch.empty(size, dtype=torch.int8))  # noqa: E731
    launch.allocate = kept.allocate = allocate
    recorder, every = Recorder(log), calls()
    for name in names:
        call = every[name]
        forward = portable.forward(call.problem, call.inputs)
        portable.backward(call.problem, call.inputs, forward, call.dout, call.dlse, wanted(call.inputs))
    print(recorder.compared, recorder.repeated)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
