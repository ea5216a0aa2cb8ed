"""From a Problem and its tensors to a launch: what can be decided once a Problem is, and kept."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tileattn.backends.hopper.forward import ROWS, Mode, attention_forward
from tileattn.backends.hopper.ptx import FIRST_BARRIER
from tileattn.backends.hopper.schedule import Grid, counter_for, section_of
from tileattn.problem import Forward, Inputs, Problem

ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Tile(NamedTuple):
    """block_dim, block_dim_v: the head dims that shared memory is laid out for; smaller ones are padded there."""

    block_dim: int
    block_dim_v: int
    block_n: int
    stages: int
    slots: int
    staged: bool
    block_m: int = 2 * ROWS.value


# The first that holds a problem's head dims serves it. Shared memory, 227 KB, is full in all but the first.
TILES = (
    Tile(64, 64, block_n=128, stages=4, slots=2, staged=True),
    Tile(128, 128, block_n=128, stages=2, slots=2, staged=True),
    Tile(256, 128, block_n=64, stages=2, slots=1, staged=True),
    Tile(256, 256, block_n=64, stages=2, slots=1, staged=False),
)


class Plan(NamedTuple):
    """Everything of a launch but the tensors: blocks and layouts of their descriptors (q, k, v, out) and scalars.

    kernel: holds the compiled kernel once there is one; plans that differ in sizes only share it.
    """

    blocks: tuple[list[int], ...]
    layouts: tuple[Any, ...]
    grid: Grid
    scale_log2: float
    mode: Mode
    kernel: list[Any]


def tile_for(problem: Problem) -> Tile:
    p = problem
    return next(t for t in TILES if p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v)


def mode_of(problem: Problem) -> Mode:
    p, tile = problem, tile_for(problem)
    # Rows differ in what they see unless the first row's window reaches the last column.
    causal = 0 <= p.window_right < p.seqlen_q - 1
    aligned = (p.seqlen_k - p.seqlen_q + p.window_right) % tile.block_n == 0
    return Mode(
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        SLOTS=tile.slots,
        STAGED=tile.staged,
        CAUSAL=causal,
        HIDES=causal or p.seqlen_k % tile.block_n != 0,
        MASKED=tile.block_m // tile.block_n + (not aligned) if causal else 1,
        BARRIERS=FIRST_BARRIER,
    )


@functools.lru_cache(maxsize=1024)
def plan_for(problem: Problem) -> Plan:
    p, tile, mode = problem, tile_for(problem), mode_of(problem)
    rows = (ROWS.value, tile.block_n, tile.block_n, ROWS.value)
    dims = (tile.block_dim, tile.block_dim, tile.block_dim_v, tile.block_dim_v)
    blocks = tuple([1, r, 1, d] for r, d in zip(rows, dims, strict=True))
    layouts = tuple(gl.NVMMASharedLayout.get_default_for(block, ELEMENT[p.dtype]) for block in blocks)
    blocks_m = -(-p.seqlen_q // tile.block_m)
    grid = Grid(
        num_heads=p.num_heads,
        group=p.group,
        seqlen_q=p.seqlen_q,
        seqlen_k=p.seqlen_k,
        right=p.seqlen_k - p.seqlen_q + p.window_right + 1,
        blocks_m=blocks_m,
        section=section_of(p) if mode.CAUSAL else 1,
        num_heads_all=p.batch * p.num_heads,
        num_tiles=blocks_m * p.batch * p.num_heads,
    )
    kernel = _kernel(p.device, p.dtype, tile, mode)
    return Plan(blocks, layouts, grid, p.scale * math.log2(math.e), Mode(*map(gl.constexpr, mode)), kernel)


@functools.lru_cache(maxsize=256)
def _kernel(*compiled_for: Any) -> list[Any]:
    return []


@functools.lru_cache(maxsize=64)
def _num_sms(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def addressable(x: Tensor) -> Tensor:
    """x, or a copy where TMA cannot address it: all strides but the last must be positive multiples of 16 bytes."""
    size = x.element_size()
    strides = (stride for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True) if n > 1)
    if x.data_ptr() % 16 == 0 and all(stride > 0 and stride * size % 16 == 0 for stride in strides):
        return x
    return x.contiguous().clone() if x.is_contiguous() else x.contiguous()


def _strides(x: Tensor) -> list[int]:
    """Strides, with any that will do along dims of size 1."""
    return [stride if n > 1 else 8 for n, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]


def arguments(
    plan: Plan, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, counter: Tensor
) -> tuple[Any, ...]:
    """What attention_forward takes."""
    descriptors = (
        TensorDescriptor(x, list(x.shape), _strides(x), block, layout)
        for x, block, layout in zip((q, k, v, out), plan.blocks, plan.layouts, strict=True)
    )
    return (*descriptors, out, lse, counter, plan.grid, plan.scale_log2, plan.mode)


def forward(problem: Problem, inputs: Inputs) -> Forward:
    """out, contiguous, and lse. Inputs that TMA cannot address (see addressable) are copied."""
    p = problem
    q, k, v = map(addressable, inputs[:3])
    out = torch.empty((p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), dtype=p.dtype, device=p.device)
    lse = torch.empty((p.batch, p.num_heads, p.seqlen_q), dtype=torch.float32, device=p.device)
    plan = plan_for(p)
    programs = min(_num_sms(p.device), plan.grid.num_tiles)
    with torch.cuda.device(p.device):
        args = arguments(plan, q, k, v, out, lse, counter_for(p.device))
        if plan.kernel:
            plan.kernel[0][(programs, 1, 1)](*args)
        else:
            plan.kernel.append(attention_forward[(programs,)](*args, num_warps=4))
    return Forward(out, lse)
