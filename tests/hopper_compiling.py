"""Compile the Hopper kernels, through the arguments their launchers make, on a machine without a GPU."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from machine_code import instructions
from triton.backends.compiler import GPUTarget

from tileattn.backends.entry import TRITON
from tileattn.backends.hopper.backward import attention_backward
from tileattn.backends.hopper.backward_launch import backward_arguments, backward_plan_for, workspace_for
from tileattn.backends.hopper.forward import attention_forward
from tileattn.backends.hopper.launch import OPTIONS, arguments, plan_for
from tileattn.backends.hopper.ranking import TABLE_FIELDS, rank_cached, rank_sequences
from tileattn.problem import Inputs, Problem

# Bytes of spills a thread that Triton 3.8 and 3.9 were seen to need beyond the budgets, which are those of 3.6 and 3.7.
MORE_SPILLS = 136 if TRITON >= (3, 8) else 0


class Compiled(NamedTuple):
    """code: the instructions, one a line. spills: bytes of local memory a thread. warnings: of the assembler."""

    code: list[str]
    spills: int
    shared: int
    warnings: list[str]
    ptx: str
    ttgir: str

    def count(self, instruction: str) -> int:
        return sum(bool(re.search(rf"\b{instruction}", line)) for line in self.code)


class CompileDriver:
    """What Triton asks of a driver when it only compiles."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 90

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def is_active(self) -> bool:
        return True


def call_of(
    seqlen_q: int, seqlen_k: int, head_dim: int, head_dim_v: int, dtype: torch.dtype, *, group: int = 1, **options: Any
) -> tuple[Problem, Inputs]:
    q, k, v = (
        torch.empty(1, n, heads, d, dtype=dtype)
        for n, heads, d in (
            (seqlen_q, 2 * group, head_dim),
            (seqlen_k, 2, head_dim),
            (seqlen_k, 2, head_dim_v),
        )
    )
    return Problem.of(q, k, v, **options)


def packed(call: tuple[Problem, Inputs], **options: Any) -> tuple[Problem, Inputs]:
    """The same call as one of packed sequences, though of one."""
    q, k, v = (x[0] for x in call[1][:3])
    ends = (torch.tensor([0, x.shape[0]], dtype=torch.int32) for x in (q, k))
    return Problem.of(q, k, v, **dict(zip(("cu_seqlens_q", "cu_seqlens_k"), ends, strict=True)), **options)


def compile_forward(problem: Problem, inputs: Inputs) -> Compiled:
    out = torch.empty(*inputs.q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    lse, counter = torch.empty(1, problem.num_heads, problem.seqlen_q), torch.zeros(1, dtype=torch.int32)
    table = torch.zeros(TABLE_FIELDS, problem.batch + 1, dtype=torch.int32) if problem.varlen else None
    return _compile(attention_forward, *arguments(plan_for(problem), inputs, out, lse, counter, table))


def compile_backward(problem: Problem, inputs: Inputs) -> Compiled:
    plan, counter = backward_plan_for(problem), torch.zeros(1, dtype=torch.int32)
    dout = torch.empty(*inputs.q.shape[:-1], problem.head_dim_v, dtype=problem.dtype)
    dk, dv = (torch.empty(x.shape, dtype=x.dtype) for x in inputs[1:3])
    workspace = workspace_for(problem, plan, inputs.q)
    table = torch.zeros(TABLE_FIELDS, problem.batch + 1, dtype=torch.int32) if problem.varlen else None
    args = backward_arguments(plan, inputs, dout, workspace, dk, dv, counter, table)
    return _compile(attention_backward, *args, options=plan.tile.options)


def compile_ranking() -> Compiled:
    numbers = torch.zeros(8, dtype=torch.int32)
    return _compile(rank_sequences, numbers, numbers, numbers, 7, 2, 128)


def compile_cached_ranking(lengths: bool, pages: bool, leftpad: bool, dtype: torch.dtype) -> Compiled:
    numbers, table = torch.zeros(8, dtype=dtype), torch.zeros(8, dtype=torch.int32)
    tensors = [numbers if there else None for there in (lengths, pages, leftpad)]
    return _compile(rank_cached, *tensors, table, 7, 2, 128, 70, 1, 0, 70, 400, 450, 9)


def _compile(function: Any, *args: Any, options: dict[str, Any] = OPTIONS) -> Compiled:
    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(CompileDriver())
    try:
        kernel = function.warmup(*args, grid=(1,), **options)
    finally:
        triton.runtime.driver._active = before
    ptx = kernel.asm["ptx"]
    nvidia = triton.knobs.nvidia
    # The assembler once more, for what it says: Triton keeps its warnings to itself.
    for tool in (nvidia.ptxas, getattr(nvidia, "ptxas_blackwell", nvidia.ptxas)):
        with tempfile.TemporaryDirectory() as folder:
            source, binary = Path(folder, "kernel.ptx"), Path(folder, "kernel.cubin")
            source.write_text(ptx)
            said = subprocess.run(
                [tool.path, "-v", "--gpu-name=sm_90a", source, "-o", binary], capture_output=True, text=True
            )
            if said.returncode == 0:
                code = instructions(binary)
                break
    else:
        raise AssertionError(said.stderr)
    spilled = re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", said.stderr)
    return Compiled(
        code=code,
        spills=sum(int(a) + int(b) for a, b in spilled),
        shared=kernel.metadata.shared,
        warnings=re.findall(r".*(?:C75\d\d|[Pp]otential).*", said.stderr),
        ptx=ptx,
        ttgir=kernel.asm["ttgir"],
    )
