"""Which tile of queries is computed where and when: the one order that every partition of a kernel follows.

A persistent program takes its first tile by its own number and every further one from a counter in global memory, so a
slow SM takes fewer. Tiles of causal attention are handed out longest first, in sections of heads whose keys and values
fit into L2 together; packed sequences longest first, by a table (ranking.py). Those of the backward, which are of keys,
are in key_schedule.py.
"""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.problem import Problem

FAR = gl.constexpr(2**30)


class Grid(NamedTuple):
    """Sizes of a call. A row on the diagonal column d sees columns from d + left to below d + right.

    seqlen_q, seqlen_k: of every sequence, or (VARLEN) rows of the packed tensors.
    """

    num_heads: Any
    group: Any
    seqlen_q: Any
    seqlen_k: Any
    sequences: Any
    left: Any
    right: Any
    section: Any  # keys, of all heads that are worked on together
    num_tiles: Any


class Work(NamedTuple):
    """A tile: rows from `row` on, which may be negative, of a head, or of PACK heads from `head` on, and `blocks` key
    blocks, those below block `end`. No blocks: no tile.

    first_q, first_k: the packed rows where its sequence starts.
    """

    batch: Any
    head: Any
    row: Any
    end: Any
    blocks: Any
    seqlen_q: Any
    seqlen_k: Any
    first_q: Any
    first_k: Any


@gluon.jit
def grid_of(q_desc, k_desc, table_ptr, sequences, left, right, section, mode):
    num_heads = q_desc.shape[-2]
    group = num_heads // k_desc.shape[-2]
    if mode.VARLEN:
        # A program without a tile of its own gets an empty one.
        num_tiles = gl.maximum(gl.load(table_ptr + sequences), gl.num_programs(0))
        return Grid(num_heads, group, q_desc.shape[0] - 1, k_desc.shape[0] - 1, sequences, left, right, section,
                    num_tiles)  # fmt: skip
    else:
        blocks_m = (q_desc.shape[1] + mode.BLOCK_M - 1) // mode.BLOCK_M
        num_tiles = sequences * (num_heads // mode.PACK) * blocks_m
        return Grid(num_heads, group, q_desc.shape[1], k_desc.shape[1], sequences, left, right, section,
                    num_tiles)  # fmt: skip


@gluon.jit
def coordinates(batch, first, row, length, head, column, ROWS: gl.constexpr, mode):
    """TMA's coordinates of ROWS rows from `row` on of a sequence; those from `length` on are out of bounds.

    Packed sequences are described with three dims of rows: (total + 1, FAR + 1, FAR). The first and the last are a row
    apart; the one between is 2^34 bytes less a row apart, so its coordinate FAR means FAR rows back, modulo 2^64. A row
    has many addresses, then, and one puts the sequence's end at the end of the last dim. (The idea of Triton's
    ragged_tma.)
    """
    if mode.VARLEN:
        inside = gl.minimum(gl.maximum(length - row, 0), ROWS)
        return first + row + inside, FAR, FAR - inside, head, column
    else:
        return batch, row, head, column


@gluon.jit
def sequence_of(tile, sequence, table_ptr, grid, mode):
    """The place in the table, `sequence` or later, of the sequence that a tile belongs to: 32 are looked at at once."""
    if mode.VARLEN:
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        passed = grid.num_heads * 0 + 32
        while passed == 32:
            place = sequence + 1 + lanes
            first_tile = gl.load(table_ptr + place, mask=place <= grid.sequences, other=2**31 - 1)
            passed = gl.sum((first_tile <= tile).to(gl.int32), 0)
            sequence += passed
    return sequence


@gluon.jit
def ranked(entry, sequences):
    """A sequence of the table: its first tile, its place in the batch, the first row and the number of what tiles are
    made of, and of what they visit."""
    batch = gl.load(entry + (sequences + 1))
    first = gl.load(entry + (sequences + 1) * 2)
    length = gl.load(entry + (sequences + 1) * 3)
    first_visited = gl.load(entry + (sequences + 1) * 4)
    visited = gl.load(entry + (sequences + 1) * 5)
    return gl.load(entry), batch, first, length, first_visited, visited


@gluon.jit
def locate(tile, sequence, table_ptr, grid, mode):
    """The Work that a tile's number stands for. There are MASKED blocks at least, be they all hidden."""
    packs = grid.num_heads // mode.PACK
    if mode.VARLEN:
        first_tile, batch, first_q, seqlen_q, first_k, seqlen_k = ranked(table_ptr + sequence, grid.sequences)
        tile = gl.where(sequence < grid.sequences, tile - first_tile, 0)
        all_heads = packs
    else:
        first_q = grid.num_heads * 0
        first_k = first_q
        seqlen_q = grid.seqlen_q
        seqlen_k = grid.seqlen_k
        all_heads = grid.sequences * packs
    blocks_m = gl.maximum((seqlen_q + mode.BLOCK_M - 1) // mode.BLOCK_M, 1)
    visited = gl.maximum(seqlen_k, 1)  # keys of a head that are worked on at a time
    if mode.LEFT:
        visited = gl.minimum(visited, mode.BLOCK_M + grid.right - grid.left)
    section = gl.maximum(gl.minimum(grid.section // visited, all_heads), 1)
    per_section = section * blocks_m
    # The last section takes the heads that are too few for one of their own: long tiles that come late end late.
    number = gl.minimum(tile // per_section, all_heads // section - 1)
    first_head = number * section
    heads = gl.where(first_head + 2 * section > all_heads, all_heads - first_head, section)
    within = tile - number * per_section
    block_m = within // heads
    head = first_head + within % heads
    if not mode.VARLEN:
        batch = head // packs
    head = head % packs * mode.PACK
    if mode.CAUSAL:
        block_m = blocks_m - 1 - block_m
    row = block_m * mode.BLOCK_M
    if mode.STAGGERED and not mode.VARLEN:
        # What rows there are too few of, a warpgroup's each, are missing before the first row and not behind the last,
        # where they would see all keys.
        rows: gl.constexpr = mode.BLOCK_M // mode.WARPGROUPS
        row -= (blocks_m * mode.BLOCK_M - seqlen_q) // rows * rows
    diagonal = row + seqlen_k - seqlen_q
    columns = seqlen_k
    if mode.CAUSAL:
        columns = gl.minimum(columns, diagonal + mode.BLOCK_M - 1 + grid.right)
    end = gl.maximum((columns + mode.BLOCK_N - 1) // mode.BLOCK_N, mode.MASKED)
    blocks = end
    if mode.LEFT:
        blocks = gl.maximum(end - gl.maximum(diagonal + grid.left, 0) // mode.BLOCK_N, mode.MASKED)
    return Work(batch, head, row, end, blocks, seqlen_q, seqlen_k, first_q, first_k)


@gluon.jit
def next_tile(counter_ptr, num_tiles):
    """The next tile of this program; the launch's last call sets the counter back to 0.

    A launch makes num_tiles calls: one for each tile but the programs' first, and one in vain for each program.
    """
    taken = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    gl.store(counter_ptr, 0, mask=taken == num_tiles - 1)
    return taken + gl.num_programs(0)


def section_of(problem: Problem, left: bool) -> int:
    """Keys, of all the heads that share L2: 32 MiB of K and V, 16 where sequences are short, 4 where a window bounds
    the left side (measured on an H200)."""
    p = problem
    mebibytes = 4 if left else 32 if p.seqlen_k >= 2048 else 16
    return (mebibytes << 20) * p.group // ((p.head_dim + p.head_dim_v) * p.dtype.itemsize)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def counter_for(device: torch.device, stream: int) -> Tensor:
    """A counter at 0 that no launch in flight uses: each stream has its own, and so has each captured launch.

    One that is kept is made by a thread of its own, once. What this thread allocates may belong to a memory pool that
    is taken back, as where torch.compile(mode="reduce-overhead") runs a graph before it captures it.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(1, dtype=torch.int32, device=device)
    counter = _counters.get((device, stream))
    if counter is None:
        made: Future[Tensor] = Future()
        threading.Thread(target=_make_counter, args=(device, made)).start()
        counter = _counters.setdefault((device, stream), made.result())  # another thread's, if that was quicker
    return counter


def _make_counter(device: torch.device, made: Future[Tensor]) -> None:
    """Copied, for a copy from the host has happened when it returns: any stream may use it."""
    try:
        made.set_result(torch.zeros(1, dtype=torch.int32, device="cpu").to(device))
    except Exception as error:
        made.set_exception(error)
