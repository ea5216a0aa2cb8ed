"""From a Problem and its tensors to a launch: what can be decided once a Problem is, and kept."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from tileattn.backends.hopper.forward import ROWS, Mode, attention_forward
from tileattn.backends.hopper.ptx import FIRST_BARRIER
from tileattn.backends.hopper.schedule import counter_for, section_of
from tileattn.backends.hopper.softmax import LOG2_E, Modifiers
from tileattn.problem import Forward, Inputs, Problem

MAX_COLUMNS = 128  # of O, sent at a time
ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}


class Tile(NamedTuple):
    """block_dim, block_dim_v: the head dims that shared memory is laid out for; smaller ones are padded there."""

    block_dim: int
    block_dim_v: int
    block_n: int
    stages: int
    slots: int
    block_m: int = 2 * ROWS.value


# The first that holds a problem's head dims serves it. Shared memory, 227 KB, is full in all but the first.
TILES = (
    Tile(64, 64, block_n=128, stages=4, slots=2),
    Tile(128, 128, block_n=128, stages=2, slots=2),
    Tile(256, 128, block_n=64, stages=2, slots=1),
    Tile(256, 256, block_n=64, stages=2, slots=1),
)


class Plan(NamedTuple):
    """Everything of a launch but the tensors: blocks and layouts of their descriptors (q, k, v, out), the scalars.

    kernel: holds the compiled kernel once there is one; plans that differ in sizes only share it.
    """

    blocks: tuple[list[int], ...]
    layouts: tuple[Any, ...]
    sizes: tuple[int, int, int]
    scales: tuple[float, float]
    mode: Mode
    programs: int
    kernel: list[Any]


def tile_for(problem: Problem) -> Tile:
    p = problem
    return next(t for t in TILES if p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v)


def mode_of(problem: Problem) -> Mode:
    p, tile = problem, tile_for(problem)
    # A window that hides nothing from the first row, or from the last, is none.
    causal = 0 <= p.window_right < p.seqlen_q - 1
    left = 0 <= p.window_left < p.seqlen_k - 1
    aligned = (p.seqlen_k - p.seqlen_q + p.window_right) % tile.block_n == 0
    return Mode(
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        SLOTS=tile.slots,
        BARRIERS=FIRST_BARRIER,
        CAUSAL=causal,
        LEFT=left,
        HIDES=causal or left or p.seqlen_k % tile.block_n != 0,
        MASKED=tile.block_m // tile.block_n + (not aligned) if causal and not left else 1,
        SOFTCAP=p.softcap != 0.0,
        ALIBI=p.has_alibi,
        SINK=p.has_sink,
    )


@functools.lru_cache(maxsize=1024)
def plan_for(problem: Problem) -> Plan:
    p, tile, mode = problem, tile_for(problem), mode_of(problem)
    rows = (ROWS.value, tile.block_n, tile.block_n, ROWS.value)
    dims = (tile.block_dim, tile.block_dim, tile.block_dim_v, min(tile.block_dim_v, MAX_COLUMNS))
    blocks = tuple([1, r, 1, d] for r, d in zip(rows, dims, strict=True))
    layouts = tuple(gl.NVMMASharedLayout.get_default_for(block, ELEMENT[p.dtype]) for block in blocks)
    shift = p.seqlen_k - p.seqlen_q
    left, right = shift - min(p.window_left, p.seqlen_k), shift + min(p.window_right, p.seqlen_q) + 1
    section = section_of(p) if mode.CAUSAL else 1
    num_tiles = -(-p.seqlen_q // tile.block_m) * p.batch * p.num_heads
    return Plan(
        blocks,
        layouts,
        (left, right, section),
        (p.scale * LOG2_E.value, p.softcap * LOG2_E.value),
        Mode(*map(gl.constexpr, mode)),
        min(_num_sms(p.device), num_tiles),
        _kernel(p.device, p.dtype, tile, mode),
    )


@functools.lru_cache(maxsize=256)
def _kernel(*compiled_for: Any) -> list[Any]:
    return []


@functools.lru_cache(maxsize=64)
def _num_sms(device: torch.device) -> int:
    """132, that of an H100 or H200, where there is no GPU: compiling needs none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def arguments(plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, counter: Tensor) -> tuple[Any, ...]:
    """What attention_forward takes. A q, k or v that TMA cannot address is copied."""
    slopes, sink = inputs.alibi_slopes, inputs.sink
    if slopes is not None:
        slopes = slopes.float().expand(out.shape[0], -1).contiguous()
    if sink is not None:
        sink = sink.float().contiguous()
    q_block, k_block, v_block, out_block = plan.blocks
    q_layout, k_layout, v_layout, out_layout = plan.layouts
    return (
        _descriptor(inputs.q, q_block, q_layout),
        _descriptor(inputs.k, k_block, k_layout),
        _descriptor(inputs.v, v_block, v_layout),
        _descriptor(out, out_block, out_layout),
        lse,
        counter,
        *plan.sizes,
        Modifiers(*plan.scales, slopes, sink),
        plan.mode,
    )


class _Descriptor(TensorDescriptor):
    def __post_init__(self) -> None:
        """_descriptor has seen to what is checked here, in a tenth of the time."""


def _descriptor(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """TMA wants 16-byte aligned data and strides, positive ones; along a dim of size 1 any will do."""
    shape, strides = list(x.shape), list(x.stride())
    for i in range(3):
        if shape[i] == 1:
            strides[i] = 8
    if x.data_ptr() % 16 or strides[0] % 8 or strides[1] % 8 or strides[2] % 8 or not all(strides) or strides[3] != 1:
        x = x.clone(memory_format=torch.contiguous_format)
        strides = list(x.stride())
    return _Descriptor(x, shape, strides, block, layout)


def forward(problem: Problem, inputs: Inputs) -> Forward:
    """out, contiguous, and lse."""
    p = problem
    out = torch.empty((p.batch, p.seqlen_q, p.num_heads, p.head_dim_v), dtype=p.dtype, device=p.device)
    lse = torch.empty((p.batch, p.num_heads, p.seqlen_q), dtype=torch.float32, device=p.device)
    if p.device.index != torch.cuda.current_device():
        with torch.cuda.device(p.device):
            _launch(plan_for(p), inputs, out, lse)
    else:
        _launch(plan_for(p), inputs, out, lse)
    return Forward(out, lse)


def _launch(plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor) -> None:
    stream = driver.active.get_current_stream(out.device.index)
    args = arguments(plan, inputs, out, lse, counter_for(out.device, stream))
    if plan.kernel:  # Triton's own look-up of the compiled kernel takes as long as all the rest
        plan.kernel[0][(plan.programs, 1, 1)](*args, stream=stream)
    else:
        plan.kernel.append(attention_forward[(plan.programs,)](*args, num_warps=4))
