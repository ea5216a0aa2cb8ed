"""FlashAttention-3 for Hopper: one warp loads, two warpgroups multiply, and softmax runs under the products.

Shah et al. 2024, with one software pipeline over all the tiles that a program gets: the scores S = Q K^T of the next
key block, be it the next tile's first, are issued together with O += P V of the block before, and softmax of S runs
while that product is in flight. The warpgroups, 64 query rows each, take turns at issuing.
"""

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
from tileattn.backends.hopper.pipeline import make_queue, make_ring
from tileattn.backends.hopper.ptx import any_reaches, barrier_arrive, barrier_sync, declare_flag, reciprocal
from tileattn.backends.hopper.schedule import grid_of, locate, next_tile
from tileattn.backends.hopper.softmax import (
    NOTHING,
    exponentials,
    headroom_of,
    hide,
    limit_of,
    modify,
    raised,
    scale_rows,
    slope_of,
    with_sink,
)

LN_2 = gl.constexpr(0.6931471805599453)
ROWS = gl.constexpr(64)  # of a warpgroup


class Mode(NamedTuple):
    """What a kernel is compiled for, every field a constexpr.

    SLOTS: tiles of queries in flight. BARRIERS: the first named barrier.
    CAUSAL, LEFT: the window bounds that side. HIDES: blocks may hide scores, the first MASKED of a tile (LEFT: all).
    """

    BLOCK_M: Any
    BLOCK_N: Any
    STAGES: Any
    SLOTS: Any
    BARRIERS: Any
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
def load(queue, keys, values, q_desc, k_desc, v_desc, counter_ptr, grid, mode):
    """The loading warp: for every tile its number, its queries and, last block first, its keys and values.

    Values come one block after the keys they belong to, across tiles too, as the products want them.
    """
    tile = gl.program_id(0)
    entry = grid.num_tiles * 0
    block = grid.num_tiles * 0
    batch_v = grid.num_tiles * 0
    head_v = grid.num_tiles * 0
    row_v = grid.num_tiles * 0
    while tile < grid.num_tiles:
        work = locate(tile, grid, mode)
        row_k = (work.end - 1) * mode.BLOCK_N
        keys.acquire(block)
        keys.fill(block, k_desc, work.batch, row_k, work.head // grid.group)
        if block > 0:
            values.acquire(block - 1)
            values.fill(block - 1, v_desc, batch_v, row_v, head_v)
        queue.send(entry, work, q_desc)
        tile = next_tile(counter_ptr, grid.num_tiles)
        batch_v = work.batch
        head_v = work.head // grid.group
        row_v = row_k
        block += 1
        for _ in range(1, work.blocks):
            keys.acquire(block)
            keys.fill(block, k_desc, batch_v, row_v - mode.BLOCK_N, head_v)
            values.acquire(block - 1)
            values.fill(block - 1, v_desc, batch_v, row_v, head_v)
            row_v -= mode.BLOCK_N
            block += 1
        entry += 1
    values.acquire(block - 1)
    values.fill(block - 1, v_desc, batch_v, row_v, head_v)
    queue.close(entry)
    keys.drain(block)
    values.drain(block)
    queue.queries.drain(entry + 1)


@gluon.jit
def issue(q, keys, values, p, o, block, more, WARPGROUP: gl.constexpr, mode):
    """In this warpgroup's turn, start S = Q K^T of a block and O += P V of the one before; wait for S.

    Returns s and the token of O.
    """
    zero = gl.zeros([ROWS, mode.BLOCK_N], gl.float32, product_layout(mode.BLOCK_N))
    barrier_sync(mode.BARRIERS + WARPGROUP, 256)
    s_token = warpgroup_mma(q, keys.block(block, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
    values.wait(block - 1)
    o_token = warpgroup_mma(p, values.block(block - 1, 0), o, is_async=True)
    barrier_arrive(mode.BARRIERS + 1 - WARPGROUP, 256)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    keys.release(block, more)
    return s, o_token


@gluon.jit
def finish(o_token, keys, values, block, more):
    """Wait for O of the block before, after the next block's keys.

    The order keeps the assembler from hoisting the wait for O above the softmax: a wait for an mbarrier is a loop,
    which it does not move code across.
    """
    keys.wait(block + 1, more)
    o = warpgroup_mma_wait(0, deps=(o_token,))
    values.release(block - 1)
    return o


@gluon.jit
def masked_step(
    q, keys, values, state, block, more, rows, column, slope, grid, modifiers, WARPGROUP: gl.constexpr, mode
):
    """A further block that may hide scores: with the running maximum."""
    o, m, l, p = state
    dtype: gl.constexpr = p.dtype
    s, o_token = issue(q, keys, values, p, o, block, True, WARPGROUP, mode)
    s, unit = modify(s, rows, column, slope, grid, modifiers, mode, product_layout(mode.BLOCK_N))
    s = hide(s, rows, column, grid, mode, product_layout(mode.BLOCK_N))
    m, alpha = raised(m, s, unit, dtype)
    p, parts = exponentials(s, m, unit, dtype, operand_layout(o.shape[1]))
    l = scale_rows(l, alpha) + parts
    o = finish(o_token, keys, values, block, more)
    return scale_rows(o, alpha), m, l, p


@gluon.jit
def step(q, keys, values, state, block, more, rows, column, slope, grid, modifiers, WARPGROUP: gl.constexpr, mode):
    """A block that all rows see whole."""
    o, m, l, p = state
    dtype: gl.constexpr = p.dtype
    s, o_token = issue(q, keys, values, p, o, block, True, WARPGROUP, mode)
    s, unit = modify(s, rows, column, slope, grid, modifiers, mode, product_layout(mode.BLOCK_N))
    p, parts = exponentials(s, m, unit, dtype, operand_layout(o.shape[1]))
    too_large = any_reaches(parts, limit_of(dtype))
    o = finish(o_token, keys, values, block, more)
    if too_large != 0:
        m, alpha = raised(m, s, unit, dtype)
        p, parts = exponentials(s, m, unit, dtype, operand_layout(o.shape[1]))
        l = scale_rows(l, alpha)
        o = scale_rows(o, alpha)
    return o, m, l + parts, p


@gluon.jit
def begin(s, rows, column, slope, grid, modifiers, dtype: gl.constexpr, p_layout: gl.constexpr, mode):
    """m, row parts and p of a tile's first block."""
    s, unit = modify(s, rows, column, slope, grid, modifiers, mode, product_layout(mode.BLOCK_N))
    if mode.HIDES:
        s = hide(s, rows, column, grid, mode, product_layout(mode.BLOCK_N))
    m = gl.maximum(gl.max(s, 1) * unit + headroom_of(dtype), NOTHING)
    p, parts = exponentials(s, m, unit, dtype, p_layout)
    return m, parts, p


@gluon.jit
def send_columns(o, first_column, row, work, o_desc, buffer):
    """Send columns of O, [64, those of a block of o_desc], to global memory through shared memory."""
    store_wait(0)  # what was sent before has left the buffer
    buffer.reshape([ROWS, o.shape[1]]).store(o.to(o_desc.dtype))
    fence_async_shared()
    tma_store(o_desc, [work.batch, row, work.head, first_column], buffer)


@gluon.jit
def write(o, m, l, work, rows, o_desc, buffer, lse_ptr, grid, modifiers, WARPGROUP: gl.constexpr, mode):
    """Divide O by the row sums and send it, in halves where shared memory has no room for more; store LSE."""
    m, total, factor = with_sink(m, gl.convert_layout(gl.sum(l, 1), m.type.layout), work, modifiers, mode)
    o = scale_rows(o, gl.where(total == 0.0, 0.0, factor * reciprocal(total)))
    COLUMNS: gl.constexpr = o_desc.block_type.shape[3]
    row = work.row + WARPGROUP * ROWS
    if o.shape[1] == COLUMNS:
        send_columns(o, 0, row, work, o_desc, buffer)
    else:
        left, right = gl.split(o.reshape([ROWS, 2, COLUMNS]).permute((0, 2, 1)))
        send_columns(gl.convert_layout(left, product_layout(COLUMNS)), 0, row, work, o_desc, buffer)
        send_columns(gl.convert_layout(right, product_layout(COLUMNS)), COLUMNS, row, work, o_desc, buffer)
    # After the fence, which would wait for this store.
    lse = gl.where(total == 0.0, float("-inf"), m * LN_2 + gl.log(total))
    at = (work.batch.to(gl.int64) * grid.num_heads + work.head) * grid.seqlen_q + rows
    gl.store(lse_ptr + at, lse, mask=rows < grid.seqlen_q)


@gluon.jit
def attend(WARPGROUP: gl.constexpr, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode):
    """A warpgroup: 64 rows of every tile that the queue brings."""
    dtype: gl.constexpr = o_desc.dtype
    DIM_V: gl.constexpr = values.blocks.shape[4]
    s_layout: gl.constexpr = product_layout(mode.BLOCK_N)
    p_layout: gl.constexpr = operand_layout(DIM_V)
    offs_m = WARPGROUP * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout))
    if WARPGROUP == 0:
        barrier_arrive(mode.BARRIERS, 256)

    entry = grid.num_tiles * 0
    block = grid.num_tiles * 0
    work = queue.receive(entry)
    slope = slope_of(work, grid, modifiers, mode)
    keys.wait(block)
    q = queue.queries.block(entry, WARPGROUP)
    zero = gl.zeros([ROWS, mode.BLOCK_N], gl.float32, s_layout)
    s_token = warpgroup_mma(q, keys.block(block, 0).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=(s_token,))
    keys.release(block)
    rows = work.row + offs_m
    column = (work.end - 1) * mode.BLOCK_N
    m, l, p = begin(s, rows, column, slope, grid, modifiers, dtype, p_layout, mode)
    o = gl.zeros([ROWS, DIM_V], gl.float32, product_layout(DIM_V))
    block += 1
    keys.wait(block, work.blocks > 1)

    while work.blocks > 0:
        q = queue.queries.block(entry, WARPGROUP)
        for i in gl.static_range(1, mode.MASKED):
            column -= mode.BLOCK_N
            o, m, l, p = masked_step(q, keys, values, (o, m, l, p), block, i + 1 < work.blocks, rows, column, slope,
                                     grid, modifiers, WARPGROUP, mode)  # fmt: skip
            block += 1
        for i in range(mode.MASKED, work.blocks):
            column -= mode.BLOCK_N
            advance: gl.constexpr = masked_step if mode.LEFT else step
            o, m, l, p = advance(q, keys, values, (o, m, l, p), block, i + 1 < work.blocks, rows, column, slope, grid,
                                 modifiers, WARPGROUP, mode)  # fmt: skip
            block += 1
        queue.queries.release(entry)

        # The next tile's first scores, beside this tile's last product.
        entry += 1
        next_work = queue.receive(entry)
        slope = slope_of(next_work, grid, modifiers, mode)
        keys.wait(block, next_work.blocks > 0)
        q = queue.queries.block(entry, WARPGROUP)
        s, o_token = issue(q, keys, values, p, o, block, next_work.blocks > 0, WARPGROUP, mode)
        next_rows = next_work.row + offs_m
        column = (next_work.end - 1) * mode.BLOCK_N
        next_m, next_l, p = begin(s, next_rows, column, slope, grid, modifiers, dtype, p_layout, mode)
        o = finish(o_token, keys, values, block, next_work.blocks > 1)
        write(o, m, l, work, rows, o_desc, o_buffers.index(WARPGROUP), lse_ptr, grid, modifiers, WARPGROUP, mode)
        o = gl.zeros([ROWS, DIM_V], gl.float32, product_layout(DIM_V))
        m = next_m
        l = next_l
        work = next_work
        rows = next_rows
        block += 1
    queue.queries.release(entry)
    if WARPGROUP == 0:
        barrier_sync(mode.BARRIERS, 256)
    store_wait(0)


# Not specialised on: one kernel for all sizes. (Integers inside a tuple would be specialised on all the same.)
@gluon.jit(do_not_specialize=["left", "right", "section"])
def attention_forward(q_desc, k_desc, v_desc, o_desc, lse_ptr, counter_ptr, left, right, section, modifiers, mode):
    declare_flag()
    grid = grid_of(q_desc, k_desc, left, right, section, mode)
    K_EMPTIED: gl.constexpr = mode.BARRIERS + 2
    V_EMPTIED: gl.constexpr = K_EMPTIED + mode.STAGES
    Q_EMPTIED: gl.constexpr = V_EMPTIED + mode.STAGES
    queue = make_queue(q_desc, mode.SLOTS, 2, Q_EMPTIED)
    keys = make_ring(k_desc, mode.STAGES, 1, K_EMPTIED)
    values = make_ring(v_desc, mode.STAGES, 1, V_EMPTIED)
    o_buffers = gl.allocate_shared_memory(o_desc.dtype, [2, 1, ROWS, 1, o_desc.block_type.shape[3]], o_desc.layout)
    fence_async_shared()
    gl.warp_specialize(
        [
            (attend, (0, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
            (attend, (1, queue, keys, values, o_desc, o_buffers, lse_ptr, grid, modifiers, mode)),
            (load, (queue, keys, values, q_desc, k_desc, v_desc, counter_ptr, grid, mode)),
        ],
        [4, 1],
        [240, 24],
    )
