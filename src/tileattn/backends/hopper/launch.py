"""From a Problem and its tensors to a launch: what can be decided once a Problem is, and kept."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from tileattn.backends.entry import Runner, need_context
from tileattn.backends.hopper.forward import ROWS, Mode, attention_forward
from tileattn.backends.hopper.ptx import first_barrier
from tileattn.backends.hopper.ranking import RANKED, TABLE_FIELDS, rank_sequences
from tileattn.backends.hopper.schedule import FAR, counter_for, section_of
from tileattn.backends.hopper.softmax import LOG2_E, Modifiers
from tileattn.problem import Forward, Inputs, Problem

ELEMENT = {torch.float16: gl.float16, torch.bfloat16: gl.bfloat16}
UNLIMITED = 2**30  # more than any sequence; sums of it and a length fit 32 bits


class Tile(NamedTuple):
    """block_dim, block_dim_v: the head dims that shared memory is laid out for; smaller ones are padded there.

    parts: blocks side by side that block_dim is made of. columns: of O, sent at a time. holds_q: queries are kept in
    registers; where causal alone, elsewhere that is slower. ahead, which pays where products are short, and passes: see
    Mode.
    """

    block_dim: int
    block_dim_v: int
    block_n: int
    stages: int
    slots: int
    columns: int
    parts: int = 1
    warpgroups: int = 2
    holds_q: bool = False
    ahead: bool = False
    passes: bool = False

    @property
    def rows(self) -> int:
        return self.warpgroups * ROWS.value


# The first that holds a problem's head dims, and suits it, serves it. Shared memory has 227 KB.
TILES = (
    Tile(64, 64, block_n=64, stages=3, slots=1, columns=64, warpgroups=3, holds_q=True, ahead=True),
    Tile(64, 64, block_n=64, stages=3, slots=2, columns=64, warpgroups=3, ahead=True, passes=True),
    Tile(64, 64, block_n=128, stages=4, slots=2, columns=64, ahead=True),
    Tile(96, 128, block_n=64, stages=3, slots=2, columns=64, parts=3, warpgroups=3),
    Tile(96, 128, block_n=128, stages=2, slots=2, columns=128, parts=3),
    Tile(128, 128, block_n=64, stages=3, slots=2, columns=64, warpgroups=3),
    Tile(128, 128, block_n=128, stages=2, slots=2, columns=128),
    Tile(192, 128, block_n=128, stages=2, slots=1, columns=64, parts=3),
    Tile(256, 256, block_n=64, stages=2, slots=1, columns=128),
)


class Plan(NamedTuple):
    """Everything of a launch but the tensors: blocks and layouts of their descriptors (q, k, v, out), the scalars.

    kernel, ranking: hold the compiled kernels once there are any; plans that differ in sizes only share them.
    """

    blocks: tuple[list[int], ...]
    layouts: tuple[Any, ...]
    sizes: tuple[int, int, int]
    scales: tuple[float, float]
    mode: Mode
    most_programs: int
    kernel: list[Any]
    ranking: list[Any]


def tile_for(problem: Problem) -> Tile:
    p = problem
    most = 3 if suits_three_warpgroups(p) else 2
    causal, _ = sides_of(p)
    fits = (t for t in TILES if p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v and t.warpgroups <= most)
    return next(t for t in fits if causal or not t.holds_q)


def suits_three_warpgroups(problem: Problem) -> bool:
    """Whether tiles of 192 rows pay. They read keys and values less often, which saves power, but do more in vain at a
    diagonal and at a sequence's end; and softcap and ALiBi need registers that three warpgroups do not have."""
    p = problem
    causal, left = sides_of(p)
    long = p.seqlen_q >= (1536 if causal else 2048)
    tiles = p.batch * p.num_heads * p.seqlen_q // (3 * ROWS.value)
    return long and tiles >= 2 * _num_sms(p.device) and not (left or p.varlen or p.softcap or p.has_alibi)


def pack_for(problem: Problem) -> int:
    """Query heads of one key head to put into a tile together: 1, or as many as fill it better by a tenth."""
    p, rows = problem, tile_for(problem).rows
    pack = 1

    def rows_computed(pack: int) -> int:
        return -(-p.seqlen_q * pack // rows) * rows // pack

    while p.group % (2 * pack) == 0 and 2 * pack <= ROWS.value and rows_computed(2 * pack) < 0.9 * rows_computed(pack):
        pack *= 2
    return pack


def sides_of(problem: Problem) -> tuple[bool, bool]:
    """Whether the window bounds the right side, and the left. One that hides nothing from the first row, or from the
    last, is none."""
    p = problem
    return 0 <= p.window_right < p.seqlen_q - 1, 0 <= p.window_left < p.seqlen_k - 1


def mode_of(problem: Problem) -> Mode:
    p, tile, pack = problem, tile_for(problem), pack_for(problem)
    block_m = tile.rows // pack
    causal, left = sides_of(p)
    # Blocks that the diagonal crosses, of rows that begin with the same block: a tile's, or (staggered) a warpgroup's.
    # It starts at a multiple of `step` in one. Fewer are passed over than a ring has stages: meanwhile the values of
    # the block before are not released, and the loader would wait for them.
    staggered = causal and not left and block_m > tile.block_n
    rows = ROWS.value // pack if staggered else block_m
    step = 1 if p.varlen else math.gcd(rows, tile.block_n, p.seqlen_k - p.seqlen_q + p.window_right)
    crossed = -(-(rows + tile.block_n - step) // tile.block_n)
    return Mode(
        WARPGROUPS=tile.warpgroups,
        BLOCK_M=block_m,
        BLOCK_N=tile.block_n,
        STAGES=tile.stages,
        PACK=pack,
        SLOTS=tile.slots,
        HOLDS_Q=tile.holds_q,
        AHEAD=tile.ahead,
        COLUMN_PARTS=tile.parts,
        PASSES=tile.passes,
        STAGGERED=staggered,
        BARRIERS=first_barrier(tile.warpgroups + 1),
        VARLEN=p.varlen,
        CAUSAL=causal,
        LEFT=left,
        HIDES=causal or p.varlen or p.seqlen_k % tile.block_n != 0,
        MASKED=crossed if causal else 1,
        SOFTCAP=p.softcap != 0.0,
        ALIBI=p.has_alibi,
        SINK=p.has_sink,
    )


@functools.lru_cache(maxsize=1024)
def plan_for(problem: Problem) -> Plan:
    p, tile, mode = problem, tile_for(problem), mode_of(problem)
    one = [1, 1] if p.varlen else [1]
    positions = ROWS.value // mode.PACK
    blocks = (
        [*one, positions, mode.PACK, tile.block_dim // tile.parts],
        [*one, tile.block_n, 1, tile.block_dim // tile.parts],
        [*one, tile.block_n, 1, tile.block_dim_v],
        [*one, positions, mode.PACK, tile.columns],
    )
    section = section_of(p, mode.LEFT) if mode.CAUSAL else 0
    return Plan(
        blocks,
        tuple(gl.NVMMASharedLayout.get_default_for(block, ELEMENT[p.dtype]) for block in blocks),
        (-min(p.window_left, UNLIMITED), min(p.window_right, UNLIMITED) + 1, section),
        (p.scale * LOG2_E.value, p.softcap * LOG2_E.value),
        Mode(*map(gl.constexpr, mode)),
        min(_num_sms(p.device), -(-p.seqlen_q // mode.BLOCK_M) * p.batch * (p.num_heads // mode.PACK)),
        _kernel(p.device, p.dtype, tile, mode),
        _kernel(p.device),
    )


@functools.lru_cache(maxsize=256)
def _kernel(*compiled_for: Any) -> list[Any]:
    return []


@functools.lru_cache(maxsize=64)
def _num_sms(device: torch.device) -> int:
    """132, that of an H100 or H200, where there is no GPU: compiling needs none."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def arguments(
    plan: Plan, inputs: Inputs, out: Tensor, lse: Tensor, counter: Tensor, table: Tensor | None
) -> tuple[Any, ...]:
    """What attention_forward takes. A q, k or v that does not start at a multiple of 16 bytes is copied."""
    sequences = out.shape[0] if table is None else table.shape[1] - 1
    sink = None if inputs.sink is None else _aligned(inputs.sink.float())
    describe = _descriptor if table is None else _packed_descriptor
    tensors = inputs.q, inputs.k, inputs.v, out
    return (
        *(describe(x, block, layout) for x, block, layout in zip(tensors, plan.blocks, plan.layouts, strict=True)),
        lse,
        counter,
        table,
        sequences,
        *plan.sizes,
        Modifiers(*plan.scales, slopes_of(inputs, sequences), sink),
        plan.mode,
    )


def slopes_of(inputs: Inputs, sequences: int) -> Tensor | None:
    """ALiBi's, (sequences, num_heads)."""
    slopes = inputs.alibi_slopes
    return None if slopes is None else _aligned(slopes.float().expand(sequences, -1))


def _aligned(x: Tensor) -> Tensor:
    """Contiguous, and at 16 bytes, as fresh memory is: what a kept kernel was compiled for."""
    return x if x.is_contiguous() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


class _Descriptor(TensorDescriptor):
    def __post_init__(self) -> None:
        """_descriptor has seen to what is checked here, in a tenth of the time."""


def _descriptor(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """TMA wants 16-byte aligned data and strides; along a dim of size 1 any will do."""
    if x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    shape, strides = list(x.shape), list(x.stride())
    for i in range(3):
        if shape[i] == 1:
            strides[i] = 8
    return _Descriptor(x, shape, strides, block, layout)


def _packed_descriptor(x: Tensor, block: list[int], layout: Any) -> TensorDescriptor:
    """Of x, (total, heads, head_dim), what schedule.coordinates speaks of."""
    described = _descriptor((x if x.shape[0] else x.new_empty(1, *x.shape[1:]))[None], block, layout)
    far, heads, head_dim = FAR.value, *x.shape[1:]
    _, row, head, _ = described.strides
    shape, strides = (
        [x.shape[0] + 1, far + 1, far, heads, head_dim],
        [row, 2**34 // x.element_size() - row, row, head, 1],
    )
    return _Descriptor(described.base, shape, strides, block, layout)


def forward(problem: Problem, inputs: Inputs) -> Forward:
    """out, contiguous, and lse."""
    plan = plan_for(problem)
    return attend(plan, inputs, functools.partial(_rank, plan, inputs) if problem.varlen else None)


def attend(plan: Plan, inputs: Inputs, rank: Callable[[int], Tensor] | None) -> Forward:
    """out, contiguous, and lse. rank makes the table of packed sequences on a stream."""
    result = Forward.unwritten(inputs.q, inputs.v.shape[-1])
    if result.out.numel():
        on(inputs.q.device, _launch, plan, inputs, result, rank)
    return result


def on(device: torch.device, function: Callable[..., Any], *args: Any) -> Any:
    """function(*args), with `device` the current one. To look whether it is takes less time than to make it so."""
    if device.index == torch.cuda.current_device():
        return function(*args)
    with torch.cuda.device(device):
        return function(*args)


def _launch(plan: Plan, inputs: Inputs, result: Forward, rank: Callable[[int], Tensor] | None) -> None:
    device = inputs.q.device
    stream = driver.active.get_current_stream(device.index)
    table = None if rank is None else rank(stream)
    args = arguments(plan, inputs, *result, counter_for(device, stream), table)
    _run(attention_forward, plan.kernel, plan.most_programs, args, stream)


def _rank(plan: Plan, inputs: Inputs, stream: int) -> Tensor:
    packs, block_m = inputs.q.shape[1] // plan.mode.PACK.value, plan.mode.BLOCK_M.value
    return table_of(inputs.cu_seqlens_q, inputs.cu_seqlens_k, packs, block_m, plan.ranking, stream, _run)


def table_of(
    cu_tiled: Tensor | None,
    cu_others: Tensor | None,
    per_block: int,
    block: int,
    compiled: list[Any],
    stream: int,
    run: Callable[..., None],
) -> Tensor:
    """Packed sequences in the order of their work, see rank_sequences, by a kernel that `run` is given as `_run` is:
    `per_block` tiles for every block of the rows that cu_tiled counts, as many steps in each as cu_others tells."""
    assert cu_tiled is not None
    sequences = cu_tiled.shape[0] - 1
    table = torch.empty((TABLE_FIELDS, sequences + 1), dtype=torch.int32, device=cu_tiled.device)
    args = cu_tiled, cu_others, table, sequences, per_block, block
    run(rank_sequences, compiled, sequences // RANKED.value + 1, args, stream)
    return table


OPTIONS = {"num_warps": 4, "enable_fp_fusion": True}


def compile_only(kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    return kernel.warmup(*args, grid=(programs,), **options)


def _run(
    kernel: Any,
    compiled: list[Any],
    programs: int,
    args: tuple[Any, ...],
    stream: int,
    options: dict[str, Any] = OPTIONS,
) -> None:
    """Launch; Triton's own look-up of the compiled kernel takes as long as all the rest."""
    if compiled:
        compiled[0](programs, args, stream)
    else:
        need_context()
        compiled.append(Runner(kernel[(programs,)](*args, **options)))
