"""Which tile of queries is computed where and when: the one order that every partition of a kernel follows.

A persistent program takes its first tile by its own number and every further one from a counter in global memory, so a
slow SM takes fewer. Tiles of causal attention are handed out longest first, in sections of heads whose keys and values
fit into L2 together.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.problem import Problem


class Grid(NamedTuple):
    """Sizes of a call. Row r sees columns from r + left to below r + right, those that there are."""

    num_heads: Any
    group: Any
    seqlen_q: Any
    seqlen_k: Any
    left: Any
    right: Any
    section: Any  # heads that are worked on together
    all_heads: Any  # of all batches
    blocks_m: Any  # tiles of a head
    num_tiles: Any


class Work(NamedTuple):
    """A tile: rows from `row` on of one head, and `blocks` key blocks, those below block `end`. No blocks: no tile."""

    batch: Any
    head: Any
    row: Any
    end: Any
    blocks: Any


@gluon.jit
def grid_of(q_desc, k_desc, left, right, section, mode):
    batch = q_desc.shape[0]
    seqlen_q = q_desc.shape[1]
    num_heads = q_desc.shape[2]
    blocks_m = (seqlen_q + mode.BLOCK_M - 1) // mode.BLOCK_M
    return Grid(
        num_heads,
        num_heads // k_desc.shape[2],
        seqlen_q,
        k_desc.shape[1],
        left,
        right,
        section,
        batch * num_heads,
        blocks_m,
        batch * num_heads * blocks_m,
    )


@gluon.jit
def locate(tile, grid, mode):
    """The Work that a tile's number stands for. There are MASKED blocks at least, be they all hidden."""
    per_section = grid.section * grid.blocks_m
    first_head = tile // per_section * grid.section
    heads = gl.minimum(grid.section, grid.all_heads - first_head)
    within = tile % per_section
    block_m = within // heads
    head = first_head + within % heads
    if mode.CAUSAL:
        block_m = grid.blocks_m - 1 - block_m
    row = block_m * mode.BLOCK_M
    columns = grid.seqlen_k
    if mode.CAUSAL:
        columns = gl.minimum(columns, row + mode.BLOCK_M - 1 + grid.right)
    end = gl.maximum((columns + mode.BLOCK_N - 1) // mode.BLOCK_N, mode.MASKED)
    blocks = end
    if mode.LEFT:
        blocks = gl.maximum(end - gl.maximum(row + grid.left, 0) // mode.BLOCK_N, mode.MASKED)
    return Work(head // grid.num_heads, head % grid.num_heads, row, end, blocks)


@gluon.jit
def next_tile(counter_ptr, num_tiles):
    """The next tile of this program; the launch's last call sets the counter back to 0.

    A launch makes num_tiles calls: one for each tile but the programs' first, and one in vain for each program.
    """
    taken = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    gl.store(counter_ptr, 0, mask=taken == num_tiles - 1)
    return taken + gl.num_programs(0)


def section_of(problem: Problem) -> int:
    """Heads whose keys and values share L2: 32 MiB of them, 16 where sequences are short (measured on an H200)."""
    p = problem
    per_head = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype.itemsize // p.group
    mebibytes = 32 if p.seqlen_k >= 2048 else 16
    return max(1, min((mebibytes << 20) // max(per_head, 1), p.batch * p.num_heads))


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counter_for(device: torch.device, stream: int) -> Tensor:
    """A counter at 0 that no launch in flight uses: each stream has its own, and so has each captured launch."""
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    key = device, stream
    if key not in _counters:
        _counters[key] = torch.zeros(1, dtype=torch.int32, device=device)
    return _counters[key]
