"""From a Problem and its tensors to the three launches of a backward call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from tileattn.backends import ahead
from tileattn.backends.hopper.backward import BackwardMode, Scales, attention_backward
from tileattn.backends.hopper.backward_ends import finish_kernel, prepare_kernel
from tileattn.backends.hopper.forward import ROWS
from tileattn.backends.hopper.launch import ELEMENT, _aligned, _descriptor, _num_sms, _run, compile_only, sides_of
from tileattn.backends.hopper.schedule import counter_for
from tileattn.backends.hopper.softmax import LOG2_E
from tileattn.problem import Forward, Gradients, Inputs, Problem, Wanted, aligned_strides

FIRST_BARRIER = 6  # Triton's own come before; a kernel here has five partitions


class BackwardTile(NamedTuple):
    """block_dim, block_dim_v: the head dims that shared memory is laid out for; smaller ones are padded there. See
    BackwardMode."""

    block_dim: int
    block_dim_v: int
    block_m: int
    key_stages: int
    dout_stages: int = 2
    primed: bool = False
    wide: bool = False

    @property
    def block_n(self) -> int:
        return ROWS.value if self.wide else 2 * ROWS.value


# The first that holds a problem's head dims, and is not primed where softcap comes in between, serves it.
BACKWARD_TILES = (
    BackwardTile(64, 64, block_m=128, key_stages=2, primed=True),
    BackwardTile(64, 64, block_m=64, key_stages=2),
    BackwardTile(128, 128, block_m=64, key_stages=2),
    BackwardTile(256, 128, block_m=64, key_stages=1, wide=True),
    BackwardTile(256, 256, block_m=64, key_stages=1, dout_stages=1, wide=True),
)


class BackwardPlan(NamedTuple):
    """Everything of a launch but the tensors.

    blocks, layouts: of the descriptors, in the order of attention_backward's arguments. sizes: left, right, section.
    units: of lse and delta in the statistics. blocks_m: blocks of queries of a head, of which there is workspace.
    kernels: lists that hold, once they are compiled, prepare_kernel without and with dlse, attention_backward and
    finish_kernel; plans that differ in sizes only share them.
    """

    tile: BackwardTile
    blocks: tuple[list[int], ...]
    layouts: tuple[Any, ...]
    sizes: tuple[int, int, int]
    scales: Scales
    units: tuple[float, float]
    blocks_m: int
    mode: BackwardMode
    programs: int
    kernels: tuple[list[Any], ...]


def backward_tile_for(problem: Problem) -> BackwardTile:
    p = problem
    fits = (t for t in BACKWARD_TILES if p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v)
    return next(t for t in fits if not (t.primed and p.softcap))


def backward_mode_of(problem: Problem) -> BackwardMode:
    p, tile = problem, backward_tile_for(problem)
    causal, left = sides_of(p)
    before_diagonal = (p.seqlen_q - p.seqlen_k - p.window_right - 1) % tile.block_m
    aligned = before_diagonal in (0, tile.block_m - 1)
    return BackwardMode(
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        KEY_STAGES=tile.key_stages,
        DOUT_STAGES=tile.dout_stages,
        WIDE=tile.wide,
        PRIMED=tile.primed,
        BARRIERS=FIRST_BARRIER,
        VARLEN=p.varlen,
        CAUSAL=causal,
        LEFT=left,
        MASKED=tile.block_n // tile.block_m + (not aligned) if causal and not left else 0,
        # Where no row sees beyond its diagonal, which hides keys past the end as well, one kernel serves all lengths.
        TAIL=p.seqlen_k % tile.block_n != 0 and not (causal and p.window_right == 0),
        SOFTCAP=p.softcap != 0.0,
        DETERMINISTIC=p.deterministic,
    )


@functools.lru_cache(maxsize=1024)
def backward_plan_for(problem: Problem) -> BackwardPlan:
    p, tile, mode = problem, backward_tile_for(problem), backward_mode_of(problem)
    element, split = ELEMENT[p.dtype], 2 if tile.wide else 1
    sides = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    dims = (tile.block_dim, tile.block_dim, tile.block_dim_v, tile.block_dim_v)
    rows = [[1, n, 1, dim] for n, dim in zip(sides, dims, strict=True)]
    halves = [[1, ROWS.value, 1, dim // split] for dim in (tile.block_dim, tile.block_dim_v)]
    statistics, dq = [2 * tile.block_m], [tile.block_m * tile.block_dim // (64 * split), 32]
    of = gl.NVMMASharedLayout.get_default_for
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    shift = p.seqlen_k - p.seqlen_q
    left, right = shift - min(p.window_left, p.seqlen_k), shift + min(p.window_right, p.seqlen_q) + 1
    scale_log2 = p.scale * LOG2_E.value
    return BackwardPlan(
        tile,
        (*rows, statistics, dq, *halves),
        (*(of(block, element) for block in rows), flat, of(dq, gl.float32), *(of(block, element) for block in halves)),
        (left, right, _section_of(p)),
        Scales(p.scale, scale_log2, p.softcap * LOG2_E.value),
        (-1.0 / p.scale, -1.0) if mode.PRIMED else (LOG2_E.value, 1.0),
        max(-(-p.seqlen_q // tile.block_m), mode.MASKED),
        BackwardMode(*map(gl.constexpr, mode)),
        min(_num_sms(p.device), _num_tiles(p)),
        _kernels(p.device, p.dtype, p.head_dim, p.head_dim_v, tile, mode),
    )


@functools.lru_cache(maxsize=256)
def _kernels(*_compiled_for: Any) -> tuple[list[Any], ...]:
    return [], [], [], []


def _num_tiles(problem: Problem) -> int:
    return -(-problem.seqlen_k // backward_tile_for(problem).block_n) * problem.batch * problem.num_heads_k


def _section_of(problem: Problem) -> int:
    """Heads of keys that are worked on together: one, or, causal, those whose queries and dout share L2, 16 MiB.

    Deterministic tiles of a head follow each other at a distance, so no more than four of them should run at once.
    """
    p = problem
    per_head = p.group * p.seqlen_q * (p.head_dim + p.head_dim_v) * p.dtype.itemsize
    section = (16 << 20) // per_head if p.window_right >= 0 else 1
    if p.deterministic:
        section = max(section, _num_sms(p.device) // 4)
    return max(1, min(section, p.batch * p.num_heads_k))


class Workspace(NamedTuple):
    """statistics: by (batch, head, block of queries) BLOCK_M of lse, then BLOCK_M of delta. dq: float32 sums, in the
    order of backward.send_dq. turns: of each half of a block, how many key blocks have added to it."""

    statistics: Tensor
    dq: Tensor
    turns: Tensor | None


def workspace_for(problem: Problem, plan: BackwardPlan, device: torch.device) -> Workspace:
    p, tile = problem, plan.tile
    blocks = p.batch * p.num_heads * plan.blocks_m
    return Workspace(
        torch.empty(blocks * 2 * tile.block_m, dtype=torch.float32, device=device),
        torch.empty(blocks * tile.block_m * tile.block_dim // 32, 32, dtype=torch.float32, device=device),
        torch.empty(blocks * 2, dtype=torch.int32, device=device) if p.deterministic else None,
    )


def backward_arguments(
    plan: BackwardPlan, inputs: Inputs, dout: Tensor, workspace: Workspace, dk: Tensor, dv: Tensor, counter: Tensor
) -> tuple[Any, ...]:
    """What attention_backward takes. An input that does not start at a multiple of 16 bytes is copied."""
    q, k, v = inputs[:3]
    statistics, dq, turns = workspace
    *inputs_blocks, statistics_block, dq_block, dk_block, dv_block = zip(plan.blocks, plan.layouts, strict=True)
    return (
        *(_descriptor(x, *block) for x, block in zip((q, k, v, dout), inputs_blocks, strict=True)),
        TensorDescriptor(statistics, [statistics.numel()], [1], *statistics_block),
        TensorDescriptor(dq, list(dq.shape), [32, 1], *dq_block),
        _descriptor(dk, *dk_block),
        _descriptor(dv, *dv_block),
        turns,
        counter,
        *plan.sizes,
        plan.scales,
        plan.mode,
    )


def backward(
    problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    ahead.wait()
    return _differentiate(problem, inputs, forward, dout, dlse, wanted, _run)


def anticipate(
    problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
) -> None:
    def begin(kernel: Any, compiled: list[Any], programs: int, args: tuple[Any, ...], stream: int) -> None:
        if not compiled:
            ahead.begin(problem.device, functools.partial(compile_only, kernel, programs, args))

    _differentiate(problem, inputs, forward, dout, dlse, wanted, begin)


def _differentiate(
    problem: Problem,
    inputs: Inputs,
    forward: Forward,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Wanted,
    run: Callable[..., None],
) -> Gradients:
    """Gradients, by kernels that `run` is given as `_run` is."""
    p, group = problem, problem.group
    if group > 1 and 4 * _num_tiles(p) < 3 * _num_sms(p.device):
        # Too few key blocks for all multiprocessors: one for each head of queries, and their sums.
        k, v = (x.repeat_interleave(group, 2) for x in inputs[1:3])
        problem, inputs = dataclasses.replace(p, num_heads_k=p.num_heads), inputs._replace(k=k, v=v)
        found = _differentiate(problem, inputs, forward, dout, dlse, wanted, run)
        dk, dv = (None if x is None else x.unflatten(2, (-1, group)).sum(3) for x in (found.dk, found.dv))
        return found._replace(dk=dk, dv=dv)
    if problem.device.index != torch.cuda.current_device():
        with torch.cuda.device(problem.device):
            return _launch(problem, inputs, forward, dout, dlse, wanted, run)
    return _launch(problem, inputs, forward, dout, dlse, wanted, run)


def _launch(
    problem: Problem,
    inputs: Inputs,
    forward: Forward,
    dout: Tensor | None,
    dlse: Tensor | None,
    wanted: Wanted,
    run: Callable[..., None],
) -> Gradients:
    p, plan = problem, backward_plan_for(problem)
    tile, stream = plan.tile, driver.active.get_current_stream(p.device.index)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in inputs[:3])
    dout = torch.zeros_like(forward.out) if dout is None else _addressable(dout)
    workspace = workspace_for(p, plan, dq.device)
    args = backward_arguments(plan, inputs, dout, workspace, dk, dv, counter_for(p.device, stream))
    dout = args[3]
    blocks = p.batch * p.num_heads * plan.blocks_m
    sizes = p.seqlen_q, p.num_heads, plan.blocks_m
    prepare = (
        _aligned(forward.out),
        dout.base,
        *[stride // 8 for stride in dout.strides[:3]],
        _aligned(forward.lse),
        None if dlse is None else _aligned(dlse),
        *workspace,
        *sizes,
        *plan.units,
        p.head_dim_v,
        tile.block_dim_v,
        tile.block_dim,
        tile.block_m,
    )
    run(prepare_kernel, plan.kernels[0 if dlse is None else 1], blocks, prepare, stream)
    run(attention_backward, plan.kernels[2], plan.programs, args, stream)
    finish = (workspace.dq, dq, *sizes, p.scale, p.head_dim, tile.block_dim, tile.block_m)
    run(finish_kernel, plan.kernels[3], blocks, finish, stream)
    return Gradients(
        dq if wanted.q else None,
        dk if wanted.k else None,
        dv if wanted.v else None,
        dsink=_sink_gradient(p, plan, inputs, workspace) if wanted.sink else None,
    )


def _addressable(x: Tensor) -> Tensor:
    """By TMA; `Problem.aligned` says that of q, k and v."""
    return x if x.stride(-1) == 1 and aligned_strides(x) else x.contiguous()


def _sink_gradient(problem: Problem, plan: BackwardPlan, inputs: Inputs, workspace: Workspace) -> Tensor:
    """The sink is one more score, with probability exp(sink - lse) and no value: its dP is 0."""
    p, sink = problem, inputs.sink
    assert sink is not None
    lse, delta = workspace.statistics.view(p.batch, p.num_heads, plan.blocks_m, 2, -1).unbind(3)
    lse_unit, delta_unit = plan.units
    probabilities = torch.exp(sink.float()[:, None, None] - lse / lse_unit)
    return (-(probabilities * delta).sum((0, 2, 3)) / delta_unit).to(sink.dtype)
