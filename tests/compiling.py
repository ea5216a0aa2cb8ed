"""Compile the portable kernels for GPUs that this machine does not have, through the launchers that users run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
from machine_code import instructions, spilled
from oracle import wanted
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from tileattn import ops
from tileattn.backends import ahead, portable
from tileattn.backends.portable import launch, tuning
from tileattn.problem import Forward, Inputs, Problem, Wanted

TARGETS = {
    **{f"sm{arch}": GPUTarget("cuda", arch, 32) for arch in (80, 86, 89, 90, 100, 120)},
    "gfx942": GPUTarget("hip", "gfx942", 64),
    "gfx950": GPUTarget("hip", "gfx950", 64),
    "gfx1100": GPUTarget("hip", "gfx1100", 32),
}

# KiB of shared memory that a program can have
SHARED = {"sm80": 163, "sm86": 99, "sm89": 99, "sm90": 227, "sm100": 227, "sm120": 99}
SHARED |= {"gfx942": 64, "gfx950": 160, "gfx1100": 64}


class Compiled(NamedTuple):
    """Registers a thread; bytes of spills a thread, counted as loads and stores of local memory in the code. code: the
    instructions, one a line; of NVIDIA's chips alone."""

    name: str
    registers: int
    spills: int
    shared: int
    code: list[str]
    kernel: Any


class _Driver:
    """What Triton asks of a driver when it only compiles. Each target is a device: Triton caches by device. One more
    each where nothing ever is compiled."""

    def __init__(self, target: GPUTarget, compiles: bool) -> None:
        self.target, self.compiles = target, compiles

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return list(TARGETS.values()).index(self.target) + (0 if self.compiles else len(TARGETS))

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


@contextlib.contextmanager
def _compiling_for(target: GPUTarget, table: tuning.Table, found: list[Compiled] | None) -> Iterator[None]:
    """Launches compile, with the tiles of `table`, and are measured if that is asked for."""

    def record(kernel: Any, call: launch.Launch) -> None:
        options = launch.compile_options(call.tile)
        compiled = kernel.run(*call.args, grid=(call.programs,), warmup=True, **options)
        if found is not None:
            found.append(_measure(kernel.__name__, compiled, target))

    before = launch.start, tuning.table_for, triton.runtime.driver._active
    tuning._lookup.cache_clear()
    tuning.table_for = lambda device, dtype: table
    triton.runtime.driver.set_active(_Driver(target, found is not None))
    launch.start = record
    try:
        yield
    finally:
        launch.start, tuning.table_for = before[:2]
        tuning._lookup.cache_clear()
        triton.runtime.driver._active = before[2]


def _measure(name: str, kernel: Any, target: GPUTarget) -> Compiled:
    if target.backend == "cuda":
        code = instructions(kernel.asm["cubin"])
        spills = sum(map(spilled, code))
        return Compiled(name, _registers_of(kernel.asm["cubin"]), spills, kernel.metadata.shared, code, kernel)
    amdgcn = kernel.asm["amdgcn"]
    registers = re.search(r"\.vgpr_count:\s*(\d+)", amdgcn)
    spills = re.search(r"\.vgpr_spill_count:\s*(\d+)", amdgcn)
    assert registers is not None
    assert spills is not None
    return Compiled(name, int(registers[1]), 4 * int(spills[1]), kernel.metadata.shared, [], kernel)


def _registers_of(cubin: bytes) -> int:
    """What the file says: the code names two less than are allocated."""
    attribute = re.search(rb"\x04\x2f\x08\x00.{4}(.{4})", cubin, re.DOTALL)  # EIATTR_REGCOUNT of a symbol
    assert attribute is not None
    return int.from_bytes(attribute[1], "little")


def layouts_of_exponentials(found: Compiled) -> set[str]:
    """Of tiles of scores. Two where Triton has all of them computed twice."""
    return set(re.findall(r"math\.exp2 .*: tensor<\d+x(?!1x)\d+xf32, #(\w+)>", found.kernel.asm["ttgir"]))


def compile_call(
    problem: Problem,
    inputs: Inputs,
    target: GPUTarget,
    table: tuning.Table,
    wanted: Wanted | None = Wanted(),  # noqa: B008
) -> list[Compiled]:
    """Every kernel of a call, forward and (unless wanted is None) backward."""
    found: list[Compiled] = []
    with _compiling_for(target, table, found):
        forward = portable.forward(problem, inputs)
        if wanted is not None:
            portable.backward(problem, inputs, forward, forward.out, None, wanted)
    return found


def backward_kernels(problem: Problem, inputs: Inputs, target: GPUTarget, table: tuning.Table) -> list[set[str]]:
    """What Triton would compile for backward: when it is anticipated, and when it runs."""
    asked: set[tuple[str, str]] = set()
    compile_kernel = JITFunction._do_compile
    JITFunction._do_compile = lambda kernel, key, *_, **__: asked.add((kernel.__name__, str(key)))
    found = []
    try:
        with _compiling_for(target, table, None):
            like = ops.without_memory(inputs)
            forward = Forward.unwritten(like.q, problem.head_dim_v)
            portable.anticipate(problem, like, forward, forward.out, None, wanted(inputs))
            ahead.wait()
            found.append(set(asked))
            forward = portable.forward(problem, inputs)
            asked.clear()
            portable.backward(problem, inputs, forward, forward.out, None, wanted(inputs))
            found.append(set(asked))
    finally:
        JITFunction._do_compile = compile_kernel
    return found


def specialisations(calls: list[tuple[Problem, Inputs]], target: GPUTarget, table: tuning.Table) -> list[str]:
    """Names of the kernels that Triton would compile for these calls, forward and backward; compiles none."""
    asked: set[tuple[str, str]] = set()
    compile_kernel = JITFunction._do_compile
    JITFunction._do_compile = lambda kernel, key, *_, **__: asked.add((kernel.__name__, str(key)))
    try:
        with _compiling_for(target, table, None):
            for problem, inputs in calls:
                forward = portable.forward(problem, inputs)
                portable.backward(problem, inputs, forward, forward.out, None, wanted(inputs))
    finally:
        JITFunction._do_compile = compile_kernel
    return sorted(name for name, _ in asked)
