"""FlashAttention-3 for Hopper: one warp loads, two or three warpgroups multiply, and softmax runs under the products.

Shah et al. 2024, persistent: the scores S = Q K^T of the next key block are issued together with O += P V of the block
before, and softmax of S runs while that product is in flight; at head_dim 64 this pipeline goes on over all the tiles
that a program gets. The warpgroups, 64 query rows each, take turns at issuing.
"""

# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.gluon_names import (
    fence_async_shared,
    store_wait,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tileattn.backends.hopper.pipeline import WARPGROUP_THREADS, make_queue, make_ring
from tileattn.backends.hopper.ptx import (
    NAMED_BARRIERS,
    any_reaches,
    barrier_arrive,
    barrier_sync,
    boundary,
    declare_flag,
    reciprocal,
)
from tileattn.backends.hopper.schedule import coordinates, grid_of, locate, next_tile, sequence_of
from tileattn.backends.hopper.softmax import (
    NOTHING,
    exponentials,
    headroom_of,
    hide,
    hide_left,
    limit_of,
    modify,
    raised,
    rows_of,
    scale_rows,
    with_sink,
)

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup


class Mode(NamedTuple):
    """What a kernel is compiled for, every field a constexpr.

    WARPGROUPS: that multiply. BLOCK_M, BLOCK_N: positions of queries and of keys. PACK: heads of q, of one head of k,
    that a tile takes together. SLOTS: tiles of queries in flight. HOLDS_Q: a warpgroup keeps its queries in registers.
    AHEAD: a tile's first scores are issued beside the last product of the tile before. COLUMN_PARTS: blocks side by
    side that hold head_dim. PASSES: a warpgroup whose rows lie behind the sequence's end passes over blocks. STAGGERED:
    so does one that sees nothing of a block that others see. BARRIERS: the first named barrier. VARLEN: sequences of
    different lengths are packed. CAUSAL, LEFT: the window bounds that side.
    HIDES: the first MASKED blocks that a warpgroup works on may hide scores at a row's end.
    """

    WARPGROUPS: Any
    BLOCK_M: Any
    BLOCK_N: Any
    STAGES: Any
    PACK: Any
    SLOTS: Any
    HOLDS_Q: Any
    AHEAD: Any
    COLUMN_PARTS: Any
    PASSES: Any
    STAGGERED: Any
    BARRIERS: Any
    VARLEN: Any
    CAUSAL: Any
    LEFT: Any
    HIDES: Any
    MASKED: Any
    SOFTCAP: Any
    ALIBI: Any
    SINK: Any


@gluon.constexpr_function
def product_layout(columns):
    """Layout of a warpgroup's [64, columns] product."""
    return gl.NVMMADistributedLayout([3, 0], [4, 1], [16, columns, 16])


@gluon.constexpr_function
def operand_layout(columns):
    """Layout of the register operand of such a product."""
    return gl.DotOperandLayout(operand_index=0, parent=product_layout(columns), k_width=2)


@gluon.jit
def load(queue, keys, values, q_desc, k_desc, v_desc, counter_ptr, table_ptr, grid, mode):
    """The loading warp: for every tile its number, its queries and, last block first, its keys and values.

    Values come one block after the keys they belong to, across tiles too, as the products want them.
    """
    tile = gl.program_id(0)
    zero = grid.num_tiles * 0
    entry = zero
    block = zero
    sequence = zero
    batch, first, length, head = zero, zero, zero, zero  # of the keys whose values are next
    row = zero
    while tile < grid.num_tiles:
        sequence = sequence_of(tile, sequence, table_ptr, grid, mode)
        work = locate(tile, sequence, table_ptr, grid, mode)
        row_k = (work.end - 1) * mode.BLOCK_N
        head_k = work.head // grid.group
        keys.acquire(block)
        keys.fill(block, k_desc, work.batch, work.first_k, row_k, work.seqlen_k, head_k, mode)
        if block > 0:
            values.acquire(block - 1)
            values.fill(block - 1, v_desc, batch, first, row, length, head, mode)
        queue.send(entry, work, q_desc, mode)
        batch, first, length, head = work.batch, work.first_k, work.seqlen_k, head_k
        row = row_k
        block += 1
        for _ in range(1, work.blocks):
            keys.acquire(block)
            keys.fill(block, k_desc, batch, first, row - mode.BLOCK_N, length, head, mode)
            values.acquire(block - 1)
            values.fill(block - 1, v_desc, batch, first, row, length, head, mode)
            row -= mode.BLOCK_N
            block += 1
        tile = next_tile(counter_ptr, grid.num_tiles)  # no sooner: who has long tiles takes fewer
        entry += 1
    values.acquire(block - 1)
    values.fill(block - 1, v_desc, batch, first, row, length, head, mode)
    queue.close(entry)
    keys.drain(block)
    values.drain(block)
    queue.queries.drain(entry + 1)


@gluon.jit
def take(queries, entry, WARPGROUP: gl.constexpr, mode):
    """A tile's queries: in registers, so that the next tile's may come, or the entry of the ring that they stay in."""
    if mode.HOLDS_Q:
        q = queries.block(entry, WARPGROUP, 0).load(operand_layout(mode.BLOCK_N))
        queries.release(entry)
        return q
    else:
        return entry


@gluon.jit
def multiply(queries, q, keys, block, WARPGROUP: gl.constexpr, mode):
    """Start S = Q K^T of a block and return its token."""
    s = gl.zeros([ROWS, mode.BLOCK_N], gl.float32, product_layout(mode.BLOCK_N))
    for c in gl.static_range(mode.COLUMN_PARTS):
        rows = q if mode.HOLDS_Q else queries.block(q, WARPGROUP, c)
        s = warpgroup_mma(rows, keys.block(block, 0, c).permute((1, 0)), s, use_acc=c > 0, is_async=True)
    return s


@gluon.jit
def hidden_blocks(work, WARPGROUP: gl.constexpr, grid, mode):
    """How many of a tile's first blocks this warpgroup passes over: those that hide all its scores, while MASKED of the
    tile's are left."""
    hidden = work.blocks * 0
    if mode.STAGGERED:
        last_row = work.row + ((WARPGROUP + 1) * (ROWS // mode.PACK) - 1)
        columns = gl.minimum(last_row + (work.seqlen_k - work.seqlen_q) + grid.right, work.seqlen_k)
        hidden = work.end - (columns + mode.BLOCK_N - 1) // mode.BLOCK_N
        hidden = gl.maximum(gl.minimum(hidden, work.blocks - mode.MASKED), 0)
    return hidden


@gluon.jit
def take_turn(WARPGROUP: gl.constexpr, mode):
    barrier_sync(mode.BARRIERS + WARPGROUP, 2 * WARPGROUP_THREADS)


@gluon.jit
def end_turn(WARPGROUP: gl.constexpr, mode):
    barrier_arrive(mode.BARRIERS + (WARPGROUP + 1) % mode.WARPGROUPS, 2 * WARPGROUP_THREADS)


@gluon.jit
def first_scores(queries, q, keys, block, last, WARPGROUP: gl.constexpr, mode):
    """S = Q K^T of a tile's first block, beside no other product. last: it is the tile's last, too."""
    keys.wait(block)
    take_turn(WARPGROUP, mode)
    s_token = multiply(queries, q, keys, block, WARPGROUP, mode)
    end_turn(WARPGROUP, mode)
    s = warpgroup_mma_wait(0, deps=(s_token,))
    keys.release(block)
    if not mode.HOLDS_Q:
        queries.release(q, last)
    return boundary(s)


@gluon.jit
def issue(queries, q, keys, values, p, o, block, passed, more, last, WARPGROUP: gl.constexpr, mode):
    """In this warpgroup's turn, start S = Q K^T of a block and O += P V of the one before; wait for S.

    passed: blocks in between that were passed over; more: there is such a block; last: it is its tile's last. Returns
    s and the token of O.
    """
    keys.wait(block, more)
    take_turn(WARPGROUP, mode)
    s_token = multiply(queries, q, keys, block, WARPGROUP, mode)
    values.wait(block - passed - 1)
    o_token = warpgroup_mma(p, values.block(block - passed - 1, 0, 0), o, is_async=True)
    end_turn(WARPGROUP, mode)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    keys.release(block, more)
    if not mode.HOLDS_Q:
        queries.release(q, last)
    return boundary(s), o_token


@gluon.jit
def finish(o_token, values, block):
    """Wait for O of the block before."""
    o = warpgroup_mma_wait(0, deps=(o_token,))
    values.release(block - 1)
    return o


@gluon.jit
def last_product(values, p, o, block, WARPGROUP: gl.constexpr, mode):
    """O += P V of the block before, a tile's last."""
    values.wait(block - 1)
    take_turn(WARPGROUP, mode)
    o_token = warpgroup_mma(p, values.block(block - 1, 0, 0), o, is_async=True)
    end_turn(WARPGROUP, mode)
    return finish(o_token, values, block)


@gluon.jit
def pass_over(keys, values, block, unread, WARPGROUP: gl.constexpr, mode):
    """A block that this warpgroup does not work on: give back its keys, and the values of the block `unread`."""
    keys.wait(block)
    take_turn(WARPGROUP, mode)
    end_turn(WARPGROUP, mode)
    keys.release(block)
    values.wait(unread)
    values.release(unread)


@gluon.jit
def pass_over_hidden(keys, values, block, hidden, WARPGROUP: gl.constexpr, mode):
    """Pass over a tile's `hidden` first blocks, of which the first is `block`; returns the one behind them."""
    if mode.STAGGERED:
        for _ in range(hidden):
            pass_over(keys, values, block, block, WARPGROUP, mode)
            block += 1
    return block


@gluon.jit
def masked_step(
    queries, q, keys, values, state, block, last, rows, column, grid, modifiers, WARPGROUP: gl.constexpr, mode
):
    """A further block that a row may end in: with the running maximum."""
    o, m, l, p = state
    dtype: gl.constexpr = p.dtype
    s, o_token = issue(queries, q, keys, values, p, o, block, 0, True, last, WARPGROUP, mode)
    s, unit = modify(s, rows, column, modifiers, mode, product_layout(mode.BLOCK_N))
    s = hide(s, rows, column, mode, product_layout(mode.BLOCK_N))
    s = hide_left(s, rows, column, grid, mode, product_layout(mode.BLOCK_N))
    m, alpha = raised(m, s, unit, dtype)
    p, parts = exponentials(s, m, unit, dtype, operand_layout(o.shape[1]))
    o = finish(o_token, values, block)
    return scale_rows(o, alpha), m, scale_rows(l, alpha) + parts, p


@gluon.jit
def step(queries, q, keys, values, state, block, last, rows, column, grid, modifiers, WARPGROUP: gl.constexpr, mode):
    """A block that no row ends in."""
    o, m, l, p = state
    dtype: gl.constexpr = p.dtype
    s, o_token = issue(queries, q, keys, values, p, o, block, 0, True, last, WARPGROUP, mode)
    s, unit = modify(s, rows, column, modifiers, mode, product_layout(mode.BLOCK_N))
    s = hide_left(s, rows, column, grid, mode, product_layout(mode.BLOCK_N))
    p, parts = exponentials(s, m, unit, dtype, operand_layout(o.shape[1]))
    too_large = any_reaches(parts, limit_of(dtype))
    o = finish(o_token, values, block)
    if too_large != 0:
        m, alpha = raised(m, s, unit, dtype)
        p, parts = exponentials(s, m, unit, dtype, operand_layout(o.shape[1]))
        l = scale_rows(l, alpha)
        o = scale_rows(o, alpha)
    return o, m, l + parts, p


@gluon.jit
def begin(s, rows, column, grid, modifiers, dtype: gl.constexpr, p_layout: gl.constexpr, mode):
    """m, row parts and p of a tile's first block."""
    s, unit = modify(s, rows, column, modifiers, mode, product_layout(mode.BLOCK_N))
    if mode.HIDES:
        s = hide(s, rows, column, mode, product_layout(mode.BLOCK_N))
    s = hide_left(s, rows, column, grid, mode, product_layout(mode.BLOCK_N))
    m = gl.maximum(gl.max(s, 1) * unit + headroom_of(dtype), NOTHING)
    p, parts = exponentials(s, m, unit, dtype, p_layout)
    return m, parts, p


@gluon.jit
def send_columns(o, first_column, row, work, o_desc, buffer, mode):
    """Send columns of O, [64, those of a block of o_desc], to global memory through shared memory."""
    store_wait(0)  # what was sent before has left the buffer
    buffer.reshape([ROWS, o.shape[1]]).store(o.to(o_desc.dtype))
    fence_async_shared()
    positions: gl.constexpr = o_desc.block_type.shape[-3]
    at = coordinates(work.batch, work.first_q, row, work.seqlen_q, work.head, first_column, positions, mode)
    tma_store(o_desc, at, buffer)


@gluon.jit
def write(o, m, l, work, rows, o_desc, buffer, lse_ptr, grid, modifiers, WARPGROUP: gl.constexpr, mode):
    """Divide O by the row sums and send it, in halves where shared memory has no room for more; store LSE."""
    m, total, factor = with_sink(m, gl.convert_layout(gl.sum(l, 1), m.type.layout), rows, modifiers, mode)
    o = scale_rows(o, gl.where(total == 0.0, 0.0, factor * reciprocal(total)))
    COLUMNS: gl.constexpr = o_desc.block_type.shape[-1]
    row = work.row + WARPGROUP * o_desc.block_type.shape[-3]
    if mode.STAGGERED:
        # TMA clips a block behind the last row, and dies of one before the first.
        row = gl.where(row < 0, work.seqlen_q, row)
    if o.shape[1] == COLUMNS:
        send_columns(o, 0, row, work, o_desc, buffer, mode)
    else:
        left, right = gl.split(o.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
        send_columns(gl.convert_layout(left, product_layout(COLUMNS)), 0, row, work, o_desc, buffer, mode)
        send_columns(gl.convert_layout(right, product_layout(COLUMNS)), COLUMNS, row, work, o_desc, buffer, mode)
    # After the fence, which would wait for this store.
    HEADROOM: gl.constexpr = headroom_of(o_desc.dtype)  # taken back first: both terms would be far from their sum
    lse = gl.where(total == 0.0, float("-inf"), (m - HEADROOM) * LN_2 + gl.log(total * 2.0**HEADROOM))
    head = rows.head.to(gl.int64)
    if not mode.VARLEN:
        head += work.batch * grid.num_heads
    there = rows.position < work.seqlen_q
    if mode.STAGGERED:
        there = there & (rows.position >= 0)
    gl.store(lse_ptr + (head * grid.seqlen_q + work.first_q + rows.position), lse, mask=there)


@gluon.jit
def begin_tile(
    queries, entry, keys, values, block, work, offs_m, grid, modifiers, WARPGROUP: gl.constexpr, mode,
    dtype: gl.constexpr,
):  # fmt: skip
    """A tile up to its first block that is not passed over, beside no other product. Returns its queries, its rows,
    their m, l and p, that block and its number in the tile."""
    first = hidden_blocks(work, WARPGROUP, grid, mode)
    block = pass_over_hidden(keys, values, block, first, WARPGROUP, mode)
    q = take(queries, entry, WARPGROUP, mode)
    s = first_scores(queries, q, keys, block, work.blocks - first == 1, WARPGROUP, mode)
    rows = rows_of(work, offs_m, grid, modifiers, mode)
    column = (work.end - 1 - first) * mode.BLOCK_N
    p_layout: gl.constexpr = operand_layout(values.blocks.shape[-1])
    m, l, p = begin(s, rows, column, grid, modifiers, dtype, p_layout, mode)
    return q, rows, m, l, p, block, first


@gluon.jit
def further_blocks(
    queries, q, keys, values, state, block, first, work, rows, grid, modifiers, WARPGROUP: gl.constexpr, mode
):
    """What a tile has behind its first block, which is `block` - 1 and the tile's number `first`: those before it were
    passed over. Returns the state and the block behind all of them."""
    o, m, l, p = state
    column = (work.end - 1 - first) * mode.BLOCK_N
    for i in gl.static_range(1, mode.MASKED):
        column -= mode.BLOCK_N
        last = first + i + 1 == work.blocks
        o, m, l, p = masked_step(
            queries, q, keys, values, (o, m, l, p), block, last, rows, column, grid, modifiers, WARPGROUP, mode
        )
        block += 1
    first += mode.MASKED
    if mode.PASSES:
        begun = first
        first = gl.where(work.row + WARPGROUP * (ROWS // mode.PACK) < work.seqlen_q, first, work.blocks)
        for i in range(begun, first):
            pass_over(keys, values, block, block - 1, WARPGROUP, mode)
            if not mode.HOLDS_Q:
                queries.release(q, i + 1 == work.blocks)
            block += 1
    for i in range(first, work.blocks):
        column -= mode.BLOCK_N
        last = i + 1 == work.blocks
        o, m, l, p = step(
            queries, q, keys, values, (o, m, l, p), block, last, rows, column, grid, modifiers, WARPGROUP, mode
        )
        block += 1
    return o, m, l, p, block


@gluon.jit
def attend(WARPGROUP: gl.constexpr, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode):
    """A warpgroup: 64 rows of every tile that the queue brings."""
    if WARPGROUP == 0:
        end_turn(mode.WARPGROUPS - 1, mode)
    if mode.AHEAD:
        attend_ahead(WARPGROUP, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)
    else:
        attend_tiles(WARPGROUP, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)
    if WARPGROUP == 0:
        take_turn(WARPGROUP, mode)
    store_wait(0)


@gluon.jit
def attend_tiles(WARPGROUP: gl.constexpr, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode):
    """One tile behind the other; what the next one reads comes while this one's last product and its writing run."""
    dtype: gl.constexpr = o_desc.dtype
    DIM_V: gl.constexpr = values.blocks.shape[-1]
    offs_m = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(mode.BLOCK_N)))
    entry = grid.num_heads * 0
    block = grid.num_heads * 0
    work = queue.receive(entry, grid)
    while work.blocks > 0:
        q, rows, m, l, p, block, first = begin_tile(
            queue.queries, entry, keys, values, block, work, offs_m, grid, modifiers, WARPGROUP, mode, dtype
        )
        o = gl.zeros([ROWS, DIM_V], gl.float32, product_layout(DIM_V))
        o, m, l, p, block = further_blocks(queue.queries, q, keys, values, (o, m, l, p), block + 1, first, work, rows,
                                           grid, modifiers, WARPGROUP, mode)  # fmt: skip
        o = last_product(values, p, o, block, WARPGROUP, mode)
        write(o, m, l, work, rows, o_desc, o_buffers.index(WARPGROUP), lse_ptr, grid, modifiers, WARPGROUP, mode)
        entry += 1
        work = queue.receive(entry, grid)
    queue.queries.release(entry)


@gluon.jit
def attend_ahead(WARPGROUP: gl.constexpr, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode):
    """The next tile's first scores are issued beside this one's last product, under which softmax of them runs."""
    dtype: gl.constexpr = o_desc.dtype
    DIM_V: gl.constexpr = values.blocks.shape[-1]
    p_layout: gl.constexpr = operand_layout(DIM_V)
    offs_m = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, product_layout(mode.BLOCK_N)))
    entry = grid.num_heads * 0
    block = grid.num_heads * 0
    work = queue.receive(entry, grid)
    q, rows, m, l, p, block, first = begin_tile(
        queue.queries, entry, keys, values, block, work, offs_m, grid, modifiers, WARPGROUP, mode, dtype
    )
    while work.blocks > 0:
        rows = rows_of(work, offs_m, grid, modifiers, mode)
        o = gl.zeros([ROWS, DIM_V], gl.float32, product_layout(DIM_V))
        o, m, l, p, block = further_blocks(queue.queries, q, keys, values, (o, m, l, p), block + 1, first, work, rows,
                                           grid, modifiers, WARPGROUP, mode)  # fmt: skip
        entry += 1
        next_work = queue.receive(entry, grid)
        next_first = hidden_blocks(next_work, WARPGROUP, grid, mode)
        block = pass_over_hidden(keys, values, block, next_first, WARPGROUP, mode)
        more = next_work.blocks > 0
        last = next_work.blocks - next_first == 1
        q = take(queue.queries, entry, WARPGROUP, mode)
        s, o_token = issue(queue.queries, q, keys, values, p, o, block, next_first, more, last, WARPGROUP, mode)
        next_rows = rows_of(next_work, offs_m, grid, modifiers, mode)
        column = (next_work.end - 1 - next_first) * mode.BLOCK_N
        next_m, next_l, p = begin(s, next_rows, column, grid, modifiers, dtype, p_layout, mode)
        o = finish(o_token, values, block - next_first)
        write(o, m, l, work, rows, o_desc, o_buffers.index(WARPGROUP), lse_ptr, grid, modifiers, WARPGROUP, mode)
        m = next_m
        l = next_l
        work = next_work
        first = next_first
    if not mode.HOLDS_Q:
        queue.queries.release(q)


# Not specialised on: one kernel for all sizes. (Integers inside a tuple would be specialised on all the same.)
@gluon.jit(do_not_specialize=["sequences", "left", "right", "section"])
def attention_forward(
    q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, table_ptr, sequences, left, right, section, modifiers, mode
):
    declare_flag()
    grid = grid_of(q_desc, k_desc, table_ptr, sequences, left, right, section, mode)
    K_EMPTIED: gl.constexpr = mode.BARRIERS + mode.WARPGROUPS
    V_EMPTIED: gl.constexpr = K_EMPTIED + mode.STAGES
    Q_EMPTIED: gl.constexpr = V_EMPTIED + mode.STAGES
    gl.static_assert(Q_EMPTIED + mode.SLOTS <= NAMED_BARRIERS, "more named barriers than there are")
    READERS: gl.constexpr = mode.WARPGROUPS * WARPGROUP_THREADS
    queue = make_queue(make_ring(q_desc, mode.SLOTS, mode.WARPGROUPS, mode.COLUMN_PARTS, Q_EMPTIED, READERS), mode)
    keys = make_ring(k_desc, mode.STAGES, 1, mode.COLUMN_PARTS, K_EMPTIED, READERS)
    values = make_ring(v_desc, mode.STAGES, 1, 1, V_EMPTIED, READERS)
    o_shape: gl.constexpr = [mode.WARPGROUPS] + o_desc.block_type.shape  # noqa: RUF005  (Triton cannot unpack)
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, o_shape, o_desc.layout)
    fence_async_shared()
    if mode.WARPGROUPS == 2:
        gl.warp_specialize(
            [
                (attend, (0, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
                (attend, (1, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
                (load, (queue, keys, values, q_desc, k_desc, v_desc, counter_ptr, table_ptr, grid, mode)),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (attend, (0, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
                (attend, (1, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
                (attend, (2, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
                (load, (queue, keys, values, q_desc, k_desc, v_desc, counter_ptr, table_ptr, grid, mode)),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )
