"""Which tile of keys is differentiated where and when, in which parts, and in which order tiles add to dQ.

As schedule.py for queries. Every tile, the first as well, comes from the counter.
"""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.schedule import Work, ranked


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
def heads_together(seqlen_q, all_heads, grid, mode):
    """Heads of a section; BOTH_WAYS: at most half of all, for those of the last differ."""
    if mode.BOTH_WAYS:
        all_heads = (all_heads + 1) // 2
    return gl.maximum(gl.minimum(grid.section // gl.maximum(seqlen_q, 1), all_heads), 1)


@gluon.jit
def locate_keys(tile, sequence, table_ptr, grid, mode):
    """The Work that a tile's number stands for: its keys begin at `row`, its blocks of queries are those below `end`.

    The longest causal tiles come first (BOTH_WAYS: of the last section). The table's tiles are blocks of keys.
    """
    heads_k = grid.num_heads // grid.group
    if mode.VARLEN:
        first_tile, batch, first_k, seqlen_k, first_q, seqlen_q = ranked(table_ptr + sequence, grid.sequences)
        tile -= first_tile
        all_heads = heads_k
    else:
        first_q = grid.num_heads * 0
        first_k = first_q
        seqlen_q = grid.seqlen_q
        seqlen_k = grid.seqlen_k
        all_heads = grid.sequences * heads_k
    blocks_n = (seqlen_k + mode.BLOCK_N - 1) // mode.BLOCK_N
    section = heads_together(seqlen_q, all_heads, grid, mode)
    per_section = section * blocks_n
    first_head = tile // per_section * section
    heads = gl.minimum(section, all_heads - first_head)
    within = tile % per_section
    head = first_head + within % heads
    if not mode.VARLEN:
        batch = head // heads_k
    number = within // heads
    if mode.BOTH_WAYS:
        number = gl.where(first_head + section < all_heads, blocks_n - 1 - number, number)
    column = number * mode.BLOCK_N
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
def from_diagonal(work, grid, mode):
    """BOTH_WAYS: whether a tile's queries come from the diagonal on, not from the last block on, and the key blocks of
    its head last first.

    Then tiles of a head need not wait for each other, as each begins a block before the one that it follows. But the
    longest come last, so those of the last section come the other way.
    """
    heads_k = grid.num_heads // grid.group
    head = work.head
    all_heads = heads_k
    if not mode.VARLEN:
        head += work.batch * heads_k
        all_heads *= grid.sequences
    section = heads_together(work.seqlen_q, all_heads, grid, mode)
    return head // section * section + section < all_heads


@gluon.jit
def block_of(n, work, grid, mode):
    """The block of queries that comes n-th, counted from 0, to a tile."""
    block = work.end - 1 - n
    if mode.BOTH_WAYS:
        block = gl.where(from_diagonal(work, grid, mode), work.end - work.blocks + n, block)
    return block


@gluon.jit
def turn_of(block, work, grid, mode):
    """How many key blocks before this one add to a block of queries. Those are tiles with lower numbers."""
    turn = work.row // mode.BLOCK_N
    if mode.BOTH_WAYS:
        column = block * mode.BLOCK_M + mode.BLOCK_M - 2 + work.seqlen_k - work.seqlen_q + grid.right
        last = (work.seqlen_k - 1) // mode.BLOCK_N
        seen = query_blocks(work.seqlen_q, mode) - least_blocks(mode)  # blocks behind it are met by all keys
        last = gl.where(block < seen, gl.minimum(column // mode.BLOCK_N, last), last)
        turn = gl.where(from_diagonal(work, grid, mode), last - turn, turn)
    if mode.LEFT:  # keys far left are hidden from all but the first block, where those come that no row sees
        column = block * mode.BLOCK_M + work.seqlen_k - work.seqlen_q + grid.left
        turn -= gl.where(block == 0, 0, gl.maximum(column, 0) // mode.BLOCK_N)
    return turn
