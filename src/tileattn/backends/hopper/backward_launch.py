"""From a Problem and its tensors to the three launches of a backward call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.runtime import driver

from tileattn.backends import ahead
from tileattn.backends.hopper.backward import attention_backward
from tileattn.backends.hopper.backward_ends import finish_kernel, prepare_kernel
from tileattn.backends.hopper.backward_steps import BackwardMode, Scales
from tileattn.backends.hopper.forward import ROWS
from tileattn.backends.hopper.launch import (
    ELEMENT,
    OPTIONS,
    UNLIMITED,
    _aligned,
    _Descriptor,
    _descriptor,
    _kernel,
    _num_sms,
    _packed_descriptor,
    _run,
    compile_only,
    on,
    sides_of,
    slopes_of,
    table_of,
)
from tileattn.backends.hopper.ptx import first_barrier
from tileattn.backends.hopper.schedule import counter_for
from tileattn.backends.hopper.softmax import LOG2_E
from tileattn.problem import Forward, Gradients, Inputs, Problem, Wanted, aligned_strides


class BackwardTile(NamedTuple):
    """block_dim, block_dim_v: the head dims that shared memory is laid out for; smaller ones are padded there. See
    BackwardMode."""

    block_dim: int
    block_dim_v: int
    block_m: int
    key_stages: int
    dout_stages: int = 2
    tall: bool = False
    wide: bool = False
    alone: bool = False

    @property
    def warpgroups(self) -> int:
        return 1 if self.alone else 2

    @property
    def parts(self) -> int:
        """Blocks of 16 KiB that a warpgroup's part of a block of dQ fills."""
        return max(self.block_m * self.block_dim // (4096 * self.warpgroups), 1)

    @property
    def options(self) -> dict[str, Any]:
        """Two programs of one warpgroup, 256 threads each, share a multiprocessor's 65,536 registers."""
        return OPTIONS | {"maxnreg": 128} if self.alone else OPTIONS

    @property
    def block_n(self) -> int:
        return ROWS.value if self.wide else 2 * ROWS.value

    @property
    def sums(self) -> int:
        """Blocks of dQ whose memory dV and dK of a part of a tile take."""
        return 2 * self.block_n // self.block_m


# The first that holds a problem's head dims serves it; those that are tall or alone have no registers for softcap and
# ALiBi.
BACKWARD_TILES = (
    BackwardTile(64, 64, block_m=64, key_stages=1, alone=True),
    BackwardTile(64, 64, block_m=64, key_stages=2),
    BackwardTile(128, 128, block_m=128, key_stages=1, dout_stages=1, tall=True),
    BackwardTile(128, 128, block_m=64, key_stages=2),
    BackwardTile(256, 128, block_m=64, key_stages=1, wide=True),
    BackwardTile(256, 256, block_m=64, key_stages=1, dout_stages=1, wide=True),
)


class BackwardPlan(NamedTuple):
    """Everything of a launch but the tensors.

    blocks, layouts: of the descriptors, in the order of attention_backward's arguments. sizes: left, right, section,
    steps. shared: tiles that programs share. units: of lse and delta in the statistics. query_blocks: of queries, that
    a sequence has, or (packed) least_blocks. most_programs: that run at once. kernels: lists that hold, once they are
    compiled, prepare_kernel without and with dlse, attention_backward, finish_kernel and rank_sequences; plans that
    differ in sizes only share them.
    """

    tile: BackwardTile
    blocks: tuple[list[int], ...]
    layouts: tuple[Any, ...]
    sizes: tuple[int, int, int, int]
    shared: int
    scales: Scales
    units: tuple[float, float]
    query_blocks: int
    most_programs: int
    mode: BackwardMode
    kernels: tuple[list[Any], ...]

    @property
    def steps(self) -> int:
        return self.sizes[3]

    @property
    def parts(self) -> int:
        """Of tiles that programs share, at most: every range ends one, and every tile."""
        return max(-(-self.shared * self.query_blocks // self.steps) + self.shared - 1, 0)


def backward_tile_for(problem: Problem) -> BackwardTile:
    p = problem
    fits = (t for t in BACKWARD_TILES if p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v)
    return next(t for t in fits if not ((p.softcap or p.has_alibi) and (t.tall or t.alone)))


def backward_mode_of(problem: Problem) -> BackwardMode:
    p, tile = problem, backward_tile_for(problem)
    causal, left = sides_of(p)
    before_diagonal = (p.seqlen_q - p.seqlen_k - p.window_right - 1) % tile.block_m
    aligned = not p.varlen and before_diagonal in (0, tile.block_m - 1)
    return BackwardMode(
        WARPGROUPS=tile.warpgroups,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        KEY_STAGES=tile.key_stages,
        DOUT_STAGES=tile.dout_stages,
        TALL=tile.tall,
        WIDE=tile.wide,
        PARTS=tile.parts,
        BARRIERS=first_barrier(1 + 2 * tile.warpgroups),  # partitions; carry_in_turn's last, a warp, needs none
        VARLEN=p.varlen,
        CAUSAL=causal,
        LEFT=left,
        MASKED=tile.block_n // tile.block_m + (not aligned) if causal and not left else 0,
        # Where no row sees beyond its diagonal, which hides keys past the end as well, one kernel serves all lengths.
        TAIL=(p.varlen or p.seqlen_k % tile.block_n != 0) and not (causal and p.window_right == 0),
        SOFTCAP=p.softcap != 0.0,
        ALIBI=p.has_alibi,
        DETERMINISTIC=p.deterministic,
        # Bounded ones, longest first, end together as they are.
        SPLIT=not (causal or left or p.varlen or p.deterministic)
        and p.num_heads == p.num_heads_k
        and p.head_dim == p.head_dim_v
        and (tile.block_m == tile.block_n or tile.alone),
        BOTH_WAYS=p.deterministic and tile.wide and causal and not left,
    )


@functools.lru_cache(maxsize=1024)
def backward_plan_for(problem: Problem) -> BackwardPlan:
    p, tile, mode = problem, backward_tile_for(problem), backward_mode_of(problem)
    element = ELEMENT[p.dtype]
    sides = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    dims = (tile.block_dim, tile.block_dim, tile.block_dim_v, tile.block_dim_v)
    one = [1, 1] if p.varlen else [1]
    rows = [[*one, n, 1, dim] for n, dim in zip(sides, dims, strict=True)]
    stored = ROWS.value * (2 if tile.alone else 1)
    halves = [[*one, stored, 1, dim // (2 if tile.wide else 1)] for dim in (tile.block_dim, tile.block_dim_v)]
    statistics, dq = [2 * tile.block_m], [tile.block_m * tile.block_dim // (32 * tile.warpgroups * tile.parts), 32]
    of = gl.NVMMASharedLayout.get_default_for
    flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=1)
    least = max(mode.MASKED, 1)
    query_blocks = least if p.varlen else max(-(-p.seqlen_q // tile.block_m), least)
    shared, steps = _last_round_of(p, query_blocks) if mode.SPLIT else (0, query_blocks)
    scale_log2 = p.scale * LOG2_E.value
    return BackwardPlan(
        tile,
        (*rows, statistics, dq, *halves),
        (*(of(block, element) for block in rows), flat, of(dq, gl.float32), *(of(block, element) for block in halves)),
        (-min(p.window_left, UNLIMITED), min(p.window_right, UNLIMITED) + 1, _section_of(p), steps),
        shared,
        Scales(p.scale, scale_log2, p.softcap * LOG2_E.value, None),
        (-1.0 / p.scale, -1.0) if tile.tall else (LOG2_E.value, 1.0),
        query_blocks,
        _most_programs(p),
        BackwardMode(*map(gl.constexpr, mode)),
        (*_kernels(p.device, p.dtype, p.head_dim, p.head_dim_v, tile, mode), _kernel(p.device)),
    )


@functools.lru_cache(maxsize=256)
def _kernels(*_compiled_for: Any) -> tuple[list[Any], ...]:
    return [], [], [], []


def num_tiles(problem: Problem, k: Tensor | None = None) -> int:
    """Of packed sequences, for which k is needed, at most: every one may end in a block that is not full."""
    p, block_n = problem, backward_tile_for(problem).block_n
    if p.varlen:
        assert k is not None
        blocks = k.shape[0] // block_n + p.batch
    else:
        blocks = -(-p.seqlen_k // block_n) * p.batch
    return blocks * p.num_heads_k


def _most_programs(problem: Problem) -> int:
    return _num_sms(problem.device) * (2 if backward_tile_for(problem).alone else 1)


def _last_round_of(problem: Problem, steps: int) -> tuple[int, int]:
    """The tiles that are too few for all programs, and how many of their steps a program does, so that all end
    together; none, and the steps of a tile, where that would save less than a hundredth.

    What it costs, some three steps: most programs begin and end a tile more, and parts are stored, read and summed.
    """
    programs = _most_programs(problem)
    rounds, tiles = divmod(num_tiles(problem), programs)
    share = -(-tiles * steps // programs)
    saves = tiles > 0 and 100 * (steps - share - 3) >= (rounds + 1) * steps
    return (tiles, share) if saves else (0, steps)


def _section_of(problem: Problem) -> int:
    """Queries, of all the heads of keys that are worked on together: one head, or, causal, those whose queries and
    dout share L2, 16 MiB.

    Deterministic tiles of a head follow each other at a distance. Where they get shorter they wait for it, every time
    anew, so few of them should run at once: four, or eight where dQ is wide and would come from memory for four. Where
    all are as long, or walk both ways, they wait once, and wide ones are worked on a few heads at once, for L2; not on
    one alone if all are as long, where each would wait whenever the one before it is late.
    """
    p, wide = problem, backward_tile_for(problem).wide
    bounded, left = sides_of(p)
    section = (16 << 20) // (p.group * (p.head_dim + p.head_dim_v) * p.dtype.itemsize) if bounded else 0
    if not p.deterministic:
        return section
    if wide and not left:
        return max(1 << 14, 0 if bounded else min(2 * p.seqlen_q, UNLIMITED))
    return max(section, min(_num_sms(p.device) // (8 if wide else 4) * p.seqlen_q, UNLIMITED))


class Workspace(NamedTuple):
    """statistics: by (head, place of a block of queries) BLOCK_M of lse, then BLOCK_M of delta. dq: float32 sums, in
    the order of backward_steps.keep_dq, and behind them those of dV and dK of each part of a tile that programs share.
    turns: of each half of a block (WIDE: part), how many key blocks have added to it."""

    statistics: Tensor
    dq: Tensor
    turns: Tensor | None


def places_for(problem: Problem, plan: BackwardPlan, q: Tensor) -> int:
    """Blocks of queries of a head, see key_schedule.first_place."""
    p = problem
    return p.batch * plan.query_blocks + (q.shape[0] // plan.tile.block_m if p.varlen else 0)


def workspace_for(problem: Problem, plan: BackwardPlan, q: Tensor) -> Workspace:
    p, tile, device = problem, plan.tile, q.device
    blocks = p.num_heads * places_for(p, plan, q)
    sums = blocks + tile.sums * plan.parts
    return Workspace(
        torch.empty(blocks * 2 * tile.block_m, dtype=torch.float32, device=device),
        torch.empty(sums * tile.block_m * tile.block_dim // 32, 32, dtype=torch.float32, device=device),
        torch.empty(blocks * 2, dtype=torch.int32, device=device) if p.deterministic else None,
    )


def backward_arguments(
    plan: BackwardPlan,
    inputs: Inputs,
    dout: Tensor,
    workspace: Workspace,
    dk: Tensor,
    dv: Tensor,
    counter: Tensor,
    table: Tensor | None,
) -> tuple[Any, ...]:
    """What attention_backward takes. An input that does not start at a multiple of 16 bytes is copied."""
    q, k, v = inputs[:3]
    statistics, dq, turns = workspace
    sequences = q.shape[0] if table is None else table.shape[1] - 1
    describe = _descriptor if table is None else _packed_descriptor
    *inputs_blocks, statistics_block, dq_block, dk_block, dv_block = zip(plan.blocks, plan.layouts, strict=True)
    return (
        *(describe(x, *block) for x, block in zip((q, k, v, dout), inputs_blocks, strict=True)),
        _Descriptor(statistics, [statistics.numel()], [1], *statistics_block),
        _Descriptor(dq, list(dq.shape), [32, 1], *dq_block),
        describe(dk, *dk_block),
        describe(dv, *dv_block),
        turns,
        counter,
        table,
        sequences,
        *plan.sizes,
        plan.scales._replace(slope=slopes_of(inputs, sequences)),
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
    def begin(
        kernel: Any,
        compiled: list[Any],
        programs: int,
        args: tuple[Any, ...],
        stream: int,
        options: dict[str, Any] = OPTIONS,
    ) -> None:
        if not compiled:
            ahead.begin(problem.device, functools.partial(compile_only, kernel, programs, args, options))

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
    if group > 1 and 4 * num_tiles(p, inputs.k) < 3 * _num_sms(p.device):
        # Too few key blocks for all multiprocessors: one for each head of queries, and their sums.
        k, v = (x.repeat_interleave(group, -2) for x in inputs[1:3])
        problem, inputs = dataclasses.replace(p, num_heads_k=p.num_heads), inputs._replace(k=k, v=v)
        found = _differentiate(problem, inputs, forward, dout, dlse, wanted, run)
        dk, dv = (None if x is None else x.unflatten(-2, (-1, group)).sum(-2) for x in (found.dk, found.dv))
        return found._replace(dk=dk, dv=dv)
    return on(p.device, _launch, p, inputs, forward, dout, dlse, wanted, run)


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
    workspace, table = workspace_for(p, plan, inputs.q), None
    if p.varlen:
        ends = inputs.cu_seqlens_k, inputs.cu_seqlens_q
        table = table_of(*ends, p.num_heads_k, tile.block_n, plan.kernels[4], stream, run)
    args = backward_arguments(plan, inputs, dout, workspace, dk, dv, counter_for(p.device, stream), table)
    dout = args[3]
    blocks, of_tiles = p.num_heads * places_for(p, plan, inputs.q), tile.sums * plan.shared
    sizes = inputs.cu_seqlens_q, p.batch, inputs.q.shape[-3], p.num_heads, plan.query_blocks
    prepare = (
        _aligned(forward.out),
        dout.base,
        *[stride // 8 for stride in dout.strides[-4:-1]],
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
    tiles = num_tiles(p, inputs.k)
    programs = plan.most_programs if plan.shared else min(plan.most_programs, tiles)
    run(attention_backward, plan.kernels[2], programs, args, stream, tile.options)
    shared = dk, dv, p.seqlen_k, tiles - plan.shared, of_tiles, plan.steps
    finish = (workspace.dq, dq, *shared, *sizes, p.scale, p.head_dim, tile.block_dim, tile.block_m, tile.sums)
    run(finish_kernel, plan.kernels[3], blocks + of_tiles, finish, stream)
    return Gradients(
        dq if wanted.q else None,
        dk if wanted.k else None,
        dv if wanted.v else None,
        dsink=_sink_gradient(plan, inputs, workspace) if wanted.sink else None,
    )


def _addressable(x: Tensor) -> Tensor:
    """By TMA; `Problem.aligned` says that of q, k and v."""
    return x if x.stride(-1) == 1 and aligned_strides(x) else x.contiguous()


def _sink_gradient(plan: BackwardPlan, inputs: Inputs, workspace: Workspace) -> Tensor:
    """The sink is one more score, with probability exp(sink - lse) and no value: its dP is 0."""
    sink = inputs.sink
    assert sink is not None
    lse, delta = workspace.statistics.view(sink.shape[0], -1, 2, plan.tile.block_m).unbind(2)
    lse_unit, delta_unit = plan.units
    probabilities = torch.exp(sink.float()[:, None, None] - lse / lse_unit)
    return (-(probabilities * delta).sum((1, 2)) / delta_unit).to(sink.dtype)
