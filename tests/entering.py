"""Run by test_driver_entry.py, with driver_stub.c for a driver: what kept launches hand to it is what Triton's runner
does, to the byte."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from typing import Any

import torch
import triton
from oracle import Case, build, wanted
from test_portable_launch import calls
from triton.backends.nvidia.driver import CudaDriver

from tileattn.backends import entry, portable
from tileattn.backends.hopper import launch as hopper_launch
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
            rank = kind.split("[")[1].split("]")[0].count(",") + 1
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

    def expect(self, compiled: Any) -> None:
        compiled._init_handles()
        sizes = [*parameter_sizes(compiled.src.signature.values()), 8, 8]  # and two kinds of scratch memory
        stub.stub_expect(self.log.encode(), len(sizes), (ctypes.c_int * len(sizes))(*sizes))

    def noted(self) -> str:
        stub.stub_close()
        return Path(self.log).read_text()

    def begin(self, kernel: Any, call: launch.Launch) -> Any:
        options = launch.compile_options(call.tile)
        self.compiled = kernel.run(*call.args, grid=(call.programs,), warmup=True, **options)
        self.expect(self.compiled)
        self.start(kernel, call)
        self.fresh = self.noted()
        return self.compiled

    def compare(self, launcher: launch.Launcher, kernel: Any, role: Any, describe: Any, outputs: Any) -> None:
        key = kernel.fn, role, tuning._lookup
        before, self.fresh = launcher.kept.get(key), ""
        launcher.kept[key] = None  # as after a first call
        self.launch(launcher, kernel, role, describe, outputs)
        if not self.fresh:  # no programs
            return
        for launch_kept in [launcher.kept[key]] + [before] * (before is not None):
            launcher.kept[key] = launch_kept
            self.expect(self.compiled)
            self.launch(launcher, kernel, role, describe, outputs)
            assert launch_kept.entered, kernel.__name__
            assert self.noted() == self.fresh, kernel.__name__
        self.compared += 1
        self.repeated += before is not None

    def compare_runner(
        self,
        kernel: Any,
        runners: list[Any],
        programs: int,
        args: Any,
        stream: int,
        options: Any = hopper_launch.OPTIONS,
    ) -> None:
        """In place of the Hopper backend's _run."""
        compiled = kernel.run(*args, grid=(programs,), warmup=True, **options)
        self.expect(compiled)
        compiled[(programs, 1, 1)](*args, stream=stream)
        self.fresh = self.noted()
        self.repeated += len(runners)
        runners += [entry.Runner(compiled)] * (not runners)
        self.expect(compiled)
        runners[0](programs, args, stream)
        assert runners[0].entry is not None, kernel.__name__
        assert self.noted() == self.fresh, kernel.__name__
        self.compared += 1


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
    hopper_launch._run = recorder.compare_runner
    torch.cuda.current_device = lambda: None  # that of tensors on the CPU
    torch.cuda.is_current_stream_capturing = lambda: False
    cases = {"dense": {}, "others_like_it": {"seed": 1}, "packed": {"lengths_q": (70, 80), "lengths_k": (70, 80)}}
    for fields in cases.values():
        case = Case(seqlen_q=150, seqlen_k=150, head_dim=64, head_dim_v=64, dtype=torch.bfloat16, causal=True)
        hopper_launch.forward(*build(case.but(**fields))[:2])
    print(recorder.compared, recorder.repeated)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
