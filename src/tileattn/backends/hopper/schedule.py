"""Which tile of queries is computed where and when: the one order that every partition of a kernel follows.

A persistent program takes its first tile by its own number and every further one from a counter in global memory, so a
slow SM takes fewer. Tiles of causal attention are handed out longest first, in sections of heads whose keys and values
fit into L2 together; packed sequences longest first, by a table made on the GPU: the host never waits for lengths.
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
TABLE_FIELDS = 6  # of a sequence: its first tile's number, batch index, first row and length of q, those of k


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
def _ranked(entry, sequences):
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
        first_tile, batch, first_q, seqlen_q, first_k, seqlen_k = _ranked(table_ptr + sequence, grid.sequences)
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


RANKED = gl.constexpr(128)  # sequences that a program of rank_sequences places


class Cached(NamedTuple):
    """Where sequences have their keys in a cache: each in a page of it.

    lengths, pages, leftpad: `kvcache.CacheInputs`' cache_seqlens, table and leftpad, None for what a call does not
    have. length: without lengths. page_rows: from a page's first row to the next one's.
    """

    lengths: Any
    pages: Any
    leftpad: Any
    pages_stride: Any
    length: Any
    new: Any
    capacity: Any
    page_rows: Any
    num_pages: Any


@gluon.jit
def packed_rows(cu_ptr, offs, sequences):
    """First rows and lengths of packed sequences; those of sequences that there are not: 0."""
    there = offs < sequences
    first = gl.load(cu_ptr + offs, mask=there, other=0)
    return first, gl.load(cu_ptr + offs + 1, mask=there, other=0) - first


@gluon.jit
def equal_rows(length, offs, sequences):
    """As packed_rows, where all sequences have one length."""
    there = offs < sequences
    return gl.where(there, offs * length, 0), gl.where(there, length, 0)


@gluon.jit
def cached_rows(cached, offs, sequences):
    """As packed_rows; inside the cache whatever its tables hold."""
    there = offs < sequences
    length = offs * 0 + cached.length
    if cached.lengths is not None:
        length = gl.load(cached.lengths + offs, mask=there, other=0)
    end = gl.minimum(gl.maximum(length + cached.new, 0), cached.capacity).to(gl.int32)
    page = offs
    if cached.pages is not None:
        page = gl.load(cached.pages + offs * cached.pages_stride, mask=there, other=0)
    page = gl.minimum(gl.maximum(page, 0), cached.num_pages - 1).to(gl.int32)
    pad = offs * 0
    if cached.leftpad is not None:
        pad = gl.load(cached.leftpad + offs, mask=there, other=0)
        pad = gl.minimum(gl.maximum(pad, 0), end).to(gl.int32)
    return page * cached.page_rows + pad, gl.where(there, end - pad, 0)


@gluon.jit(do_not_specialize=["sequences", "packs", "block_m"], do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"])
def rank_sequences(cu_q_ptr, cu_k_ptr, table_ptr, sequences, packs, block_m):
    """Fill the table for packed sequences. Tiles are blocks of queries; with queries and keys exchanged, of keys."""
    _rank(packed_rows, cu_q_ptr, packed_rows, cu_k_ptr, table_ptr, sequences, packs, block_m)


CACHED_SIZES = [
    "sequences", "packs", "block_m", "seqlen_q", "pages_stride", "length", "new", "capacity", "page_rows", "num_pages"
]  # fmt: skip


@gluon.jit(do_not_specialize=CACHED_SIZES, do_not_specialize_on_alignment=["lengths_ptr", "pages_ptr", "leftpad_ptr"])
def rank_cached(
    lengths_ptr, pages_ptr, leftpad_ptr, table_ptr, sequences, packs, block_m, seqlen_q, pages_stride, length, new,
    capacity, page_rows, num_pages,
):  # fmt: skip
    """Fill the table for seqlen_q queries of each sequence of a cache."""
    cached = Cached(lengths_ptr, pages_ptr, leftpad_ptr, pages_stride, length, new, capacity, page_rows, num_pages)
    _rank(equal_rows, seqlen_q, cached_rows, cached, table_ptr, sequences, packs, block_m)


@gluon.jit
def _rank(
    rows_q: gl.constexpr, of_q, rows_k: gl.constexpr, of_k, table_ptr, sequences, packs, block_m,
):  # fmt: skip
    """Fill the table, int32 (TABLE_FIELDS, sequences + 1): sequences by falling number of keys, then an empty one.
    rows_q(of_q, ..) tells where they have their queries, rows_k(of_k, ..) their keys.

    A sequence's place is the number of those that come before it, and its first tile the number of their tiles.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0])
    offs = gl.program_id(0) * RANKED + gl.arange(0, RANKED, gl.SliceLayout(1, layout))
    first_q, seqlen_q = rows_q(of_q, offs, sequences)
    first_k, seqlen_k = rows_k(of_k, offs, sequences)
    place = offs * 0
    first_tile = offs * 0
    all_tiles = sequences * 0
    for start in range(0, sequences, 32):
        others = start + gl.arange(0, 32, gl.SliceLayout(0, layout))
        _, other_q = rows_q(of_q, others, sequences)
        _, other_k = rows_k(of_k, others, sequences)
        tiles = (other_q + block_m - 1) // block_m * packs
        longer = other_k[None, :] > seqlen_k[:, None]
        earlier = (other_k[None, :] == seqlen_k[:, None]) & (others[None, :] < offs[:, None])
        before = ((longer | earlier) & (others < sequences)[None, :]).to(gl.int32)
        place += gl.sum(before, 1)
        first_tile += gl.sum(before * tiles[None, :], 1)
        all_tiles += gl.sum(tiles, 0)
    last = offs == sequences
    place = gl.where(last, sequences, place)
    first_tile = gl.where(last, all_tiles, first_tile)
    known = offs <= sequences
    gl.store(table_ptr + place, first_tile, mask=known)
    gl.store(table_ptr + place + (sequences + 1), gl.where(last, 0, offs), mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 2, first_q, mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 3, seqlen_q, mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 4, first_k, mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 5, seqlen_k, mask=known)


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


class KeyGrid(NamedTuple):
    """Sizes of a backward call, whose tiles are blocks of keys; as in Grid, but for:

    section: queries, of all heads that are worked on together. steps: of a range, see next_steps. places: blocks of
    queries of a head, in all sequences.
    """

    num_heads: Any
    group: Any
    seqlen_q: Any
    seqlen_k: Any
    sequences: Any
    left: Any
    right: Any
    section: Any
    steps: Any
    places: Any
    num_tiles: Any


@gluon.jit
def least_blocks(mode):
    """Blocks of queries that every block of keys meets, be they all hidden, and that every sequence has places for."""
    return gl.maximum(mode.MASKED, 1)


@gluon.jit
def query_blocks(seqlen_q, mode):
    return gl.maximum((seqlen_q + mode.BLOCK_M - 1) // mode.BLOCK_M, least_blocks(mode))


@gluon.jit
def grid_of_keys(q_desc, k_desc, table_ptr, sequences, left, right, section, steps, mode):
    num_heads = q_desc.shape[-2]
    heads_k = k_desc.shape[-2]
    group = num_heads // heads_k
    if mode.VARLEN:
        places = (q_desc.shape[0] - 1) // mode.BLOCK_M + sequences * least_blocks(mode)
        return KeyGrid(num_heads, group, q_desc.shape[0] - 1, k_desc.shape[0] - 1, sequences, left, right, section,
                       steps, places, gl.load(table_ptr + sequences))  # fmt: skip
    else:
        places = sequences * query_blocks(q_desc.shape[1], mode)
        blocks_n = (k_desc.shape[1] + mode.BLOCK_N - 1) // mode.BLOCK_N
        return KeyGrid(num_heads, group, q_desc.shape[1], k_desc.shape[1], sequences, left, right, section,
                       steps, places, sequences * heads_k * blocks_n)  # fmt: skip


@gluon.jit
def locate_keys(tile, sequence, table_ptr, grid, mode):
    """The Work that a tile's number stands for: its keys begin at `row`, its blocks of queries are those below `end`.

    The longest causal tiles come first. The table's tiles are blocks of keys.
    """
    heads_k = grid.num_heads // grid.group
    if mode.VARLEN:
        first_tile, batch, first_k, seqlen_k, first_q, seqlen_q = _ranked(table_ptr + sequence, grid.sequences)
        tile -= first_tile
        all_heads = heads_k
    else:
        first_q = grid.num_heads * 0
        first_k = first_q
        seqlen_q = grid.seqlen_q
        seqlen_k = grid.seqlen_k
        all_heads = grid.sequences * heads_k
    blocks_n = (seqlen_k + mode.BLOCK_N - 1) // mode.BLOCK_N
    section = gl.maximum(gl.minimum(grid.section // gl.maximum(seqlen_q, 1), all_heads), 1)
    per_section = section * blocks_n
    first_head = tile // per_section * section
    heads = gl.minimum(section, all_heads - first_head)
    within = tile % per_section
    head = first_head + within % heads
    if not mode.VARLEN:
        batch = head // heads_k
    column = within // heads * mode.BLOCK_N
    last_row = column - (seqlen_k - seqlen_q)
    first = column * 0
    end = query_blocks(seqlen_q, mode)
    if mode.CAUSAL:
        first = gl.minimum(gl.maximum(last_row - grid.right + 1, 0) // mode.BLOCK_M, end - least_blocks(mode))
    if mode.LEFT:
        rows = gl.maximum(last_row + mode.BLOCK_N - grid.left, 0)
        end = gl.minimum(gl.maximum((rows + mode.BLOCK_M - 1) // mode.BLOCK_M, first + least_blocks(mode)), end)
    return Work(batch, head % heads_k, column, end, end - first, seqlen_q, seqlen_k, first_q, first_k)


@gluon.jit
def first_place(work, head, grid, mode):
    """Where the statistics and dQ of a sequence's first block lie: (heads of queries, grid.places).

    Packed sequences have room for every block and for least_blocks, wherever they begin.
    """
    if mode.VARLEN:
        place = work.first_q // mode.BLOCK_M + work.batch * least_blocks(mode)
    else:
        place = work.batch * query_blocks(work.seqlen_q, mode)
    return head * grid.places + place


@gluon.jit
def draw_tile(counter_ptr, num_tiles):
    """The next tile of this program, its first one too; the launch's last call sets the counter back to 0.

    So a tile is handed out only after all that come before it, to programs that run: it may wait for them, also where
    another kernel keeps some of this launch's programs from starting. A launch makes a call for each tile and one in
    vain for each program.
    """
    taken = gl.atomic_add(counter_ptr, 1, sem="relaxed")
    gl.store(counter_ptr, 0, mask=taken == num_tiles + gl.num_programs(0) - 1)
    return taken


@gluon.jit
def whole_tiles(grid):
    """SPLIT: tiles that are handed out whole, as many rounds of all programs as they fill."""
    return grid.num_tiles // gl.num_programs(0) * gl.num_programs(0)


@gluon.jit
def next_steps(counter_ptr, tile, left, grid, mode):
    """What a program does next, and where in it: the tile, the step that it begins with, and how many steps are left of
    what was drawn, the first of them in this tile. `tile` comes next if any are left.

    SPLIT: the tiles of the last round, which are too few for all programs, are handed out in ranges of grid.steps of
    their steps, one after the other. So a range has the end of one tile, the beginning of the next, or both.
    """
    first = tile * 0
    if not mode.SPLIT:
        tile = draw_tile(counter_ptr, grid.num_tiles)
    elif left == 0:
        blocks = query_blocks(grid.seqlen_q, mode)
        whole = whole_tiles(grid)
        all_steps = (grid.num_tiles - whole) * blocks
        draw = draw_tile(counter_ptr, whole + (all_steps + grid.steps - 1) // grid.steps)
        begin = gl.maximum(draw - whole, 0) * grid.steps
        tile = gl.minimum(draw, whole) + begin // blocks
        first = begin % blocks
        left = gl.where(draw < whole, blocks, gl.minimum(grid.steps, all_steps - begin))
    return tile, first, left


@gluon.jit
def part_of(work, first, left):
    """The steps of a tile from `first` on, `left` or until its end."""
    end = work.end - first
    return Work(work.batch, work.head, work.row, end, gl.minimum(end, left), work.seqlen_q, work.seqlen_k,
                work.first_q, work.first_k)  # fmt: skip


@gluon.jit
def is_part(work, mode):
    """SPLIT: whether another program has the rest of this tile's steps."""
    return work.blocks < query_blocks(work.seqlen_q, mode)


@gluon.jit
def place_of_sums(work, grid, mode):
    """SPLIT: where a part's dV, and behind it its dK, lie, in blocks of BLOCK_M rows, part after part behind dQ.

    With a part its tile ends, or its range, or both: the sum of their numbers is no other part's. Tiles are numbered
    head after head, as no window bounds them.
    """
    blocks = query_blocks(work.seqlen_q, mode)
    blocks_n = (work.seqlen_k + mode.BLOCK_N - 1) // mode.BLOCK_N
    tile = (work.batch * grid.num_heads + work.head) * blocks_n + work.row // mode.BLOCK_N - whole_tiles(grid)
    part = tile + (tile * blocks + blocks - work.end) // grid.steps
    return grid.num_heads * grid.places + 2 * mode.BLOCK_N // mode.BLOCK_M * part


@gluon.jit
def turn_of(block, work, grid, mode):
    """How many key blocks before this one add to a block of queries. Those are tiles with lower numbers."""
    turn = work.row // mode.BLOCK_N
    if mode.LEFT:  # keys far left are hidden from all but the first block, where those come that no row sees
        column = block * mode.BLOCK_M + work.seqlen_k - work.seqlen_q + grid.left
        turn -= gl.where(block == 0, 0, gl.maximum(column, 0) // mode.BLOCK_N)
    return turn
