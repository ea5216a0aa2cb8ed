"""FlashAttention backward for Hopper: one warp loads, two warpgroups multiply, two warps carry dQ away.

A program takes blocks of 128 keys; each warpgroup holds 64 of them, with their dK and dV, and walks up the queries.
Of a block of queries, transposed so that P and dS stay in the registers that the next products read them from:

    S^T = K Q^T;  P^T = exp(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta)
    dV += P^T dO;  dK += dS^T Q;  dQ += dS K

dS goes through shared memory for the last, of which each warpgroup computes one half. All key blocks add to one float32
dQ in global memory; the bulk-copy engine does that addition. backward_ends.py makes lse and delta ready and rounds dQ.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.forward import ROWS, operand_layout, product_layout
from tileattn.backends.hopper.gluon_names import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    tma_load,
    tma_reduce_add,
    tma_store,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tileattn.backends.hopper.pipeline import WARP, WARPGROUPS, make_outbox, make_queue, make_ring
from tileattn.backends.hopper.ptx import (
    NAMED_BARRIERS,
    barrier_sync,
    boundary,
    look_ahead,
    narrow,
    opaque,
    pass_turn,
    reciprocal,
    wait_for_turn,
)
from tileattn.backends.hopper.schedule import (
    coordinates,
    draw_tile,
    first_place,
    grid_of_keys,
    locate_keys,
    sequence_of,
    turn_of,
)
from tileattn.backends.hopper.softmax import LOG2_E


class BackwardMode(NamedTuple):
    """What a kernel is compiled for, every field a constexpr.

    KEY_STAGES, DOUT_STAGES: blocks of keys and of dout in flight (of queries: 2). WIDE: the warpgroups share 64 keys
    and split the head dim. PRIMED: lse and delta are where the products S and dP start
    from, which saves registers. BARRIERS: the first named barrier.
    VARLEN: packed sequences. CAUSAL, LEFT: the window bounds that side. MASKED: blocks of queries, a key block's first,
    which hide scores (LEFT: all may). TAIL: the last key block is not full, and nothing else hides what it lacks.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    KEY_STAGES: Any
    DOUT_STAGES: Any
    WIDE: Any
    PRIMED: Any
    BARRIERS: Any
    VARLEN: Any
    CAUSAL: Any
    LEFT: Any
    MASKED: Any
    TAIL: Any
    SOFTCAP: Any
    DETERMINISTIC: Any


class Scales(NamedTuple):
    """scale, and scale and softcap in log2."""

    scale: Any
    scale_log2: Any
    softcap_log2: Any


class Pipes(NamedTuple):
    """What goes between the partitions. queue: of tiles, whose ring is k. statistics: lse and delta of a block of
    queries, [2, 2 * BLOCK_M], on the mbarriers of q. ds: dS^T of both warpgroups, [2, BLOCK_N, BLOCK_M]; WIDE: P^T and
    dS^T, [4, BLOCK_N, BLOCK_M]. turn: PRIMED: the mbarrier by which the first warpgroup passes the matrix units on (one
    that nobody waits for is dead to Triton, which gives its memory away; the hardware still writes there). outboxes: of
    both warpgroups."""

    queue: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    statistics: Any
    ds: Any
    turn: Any
    outboxes: Any


@gluon.jit
def load(pipes, q_desc, k_desc, v_desc, dout_desc, statistics_desc, counter_ptr, table_ptr, grid, mode):
    """The loading warp: for every tile its keys and, last block first, its queries with their statistics, and dout."""
    tile = draw_tile(counter_ptr, grid.num_tiles)
    sequence = grid.num_tiles * 0
    entry = grid.num_tiles * 0
    i = grid.num_tiles * 0
    while tile < grid.num_tiles:
        sequence = sequence_of(tile, sequence, table_ptr, grid, mode)
        work = locate_keys(tile, sequence, table_ptr, grid, mode)
        first = i
        pipes.queue.post(entry, work)
        pipes.k.fill(entry, k_desc, work.batch, work.first_k, work.row, work.seqlen_k, work.head, mode)
        for member in range(grid.group):
            head = work.head * grid.group + member
            place = first_place(work, head, grid, mode)
            for block in range(work.end - 1, work.end - work.blocks - 1, -1):
                stage = i % pipes.q.STAGES
                pipes.q.acquire(i)
                row = block * mode.BLOCK_M
                nbytes: gl.constexpr = statistics_desc.block_type.nbytes
                pipes.q.fill(i, q_desc, work.batch, work.first_q, row, work.seqlen_q, head, mode, nbytes)
                tma_load(
                    statistics_desc,
                    [(place + block) * (2 * mode.BLOCK_M)],
                    pipes.q.landed.index(stage),
                    pipes.statistics.index(stage),
                )
                if i == first:
                    pipes.v.acquire(entry)
                    pipes.v.fill(entry, v_desc, work.batch, work.first_k, work.row, work.seqlen_k, work.head, mode)
                pipes.dout.acquire(i)
                pipes.dout.fill(i, dout_desc, work.batch, work.first_q, row, work.seqlen_q, head, mode)
                i += 1
        entry += 1
        tile = draw_tile(counter_ptr, grid.num_tiles)
    pipes.queue.close(entry)
    pipes.v.drain(entry)
    pipes.q.drain(i)
    pipes.dout.drain(i)
    pipes.k.drain(entry + 1)


@gluon.jit
def pass_turn_before(block, turns_ptr, work, grid, mode):
    """With the addition to `block` on its way, pass on the turn of the block before, if there is one.

    That block's addition is over by now; a warp that waited for each would take longer than a step.
    """
    before = block + 1
    if before < work.end:
        pass_turn(turns_ptr + before * 2, turn_of(before, work, grid, mode) + 1, 1)


@gluon.jit
def carry(WARPGROUP: gl.constexpr, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode):
    """A carrying warp: adds a warpgroup's halves of dQ to global memory, stores its dV and dK.

    DETERMINISTIC: key blocks add to a block of dQ in their order.
    """
    PARTS: gl.constexpr = 2 if mode.WIDE else 1
    outbox = pipes.outboxes[WARPGROUP]
    entry = grid.num_tiles * 0
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        pipes.k.release(entry)
        last = work.end - work.blocks
        for member in range(grid.group):
            first = first_place(work, work.head * grid.group + member, grid, mode) * 2 + WARPGROUP
            for block in range(work.end - 1, last - 1, -1):
                half = first + block * 2
                if mode.DETERMINISTIC:
                    wait_for_turn(turns_ptr + half, turn_of(block, work, grid, mode))
                for part in gl.static_range(PARTS):
                    outbox.receive()
                    tma_reduce_add(dq_desc, [(half * PARTS + part) * dq_desc.block_type.shape[0], 0], outbox.block)
                    if mode.DETERMINISTIC:
                        pass_turn_before(block, turns_ptr + first, work, grid, mode)
                    outbox.release()
            if mode.DETERMINISTIC:
                pass_turn(turns_ptr + (first + last * 2), turn_of(last, work, grid, mode) + 1, 0)
        store_rows(dv_desc, outbox, work, WARPGROUP, mode)
        store_rows(dk_desc, outbox, work, WARPGROUP, mode)
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)


@gluon.jit
def carry_parts(PART: gl.constexpr, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode):
    """As carry, DETERMINISTIC and WIDE: every second payload of both warpgroups, a part of each dQ, then dV or dK.

    Turns are of a part. This warp waits until its part is in global memory while the other carries the other part, so
    the next key block follows sooner.
    """
    rows_desc = dk_desc if PART else dv_desc
    entry = grid.num_tiles * 0
    payload = grid.num_tiles * 0 + PART
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        pipes.k.release(entry)
        last = work.end - work.blocks
        for member in range(grid.group):
            first = first_place(work, work.head * grid.group + member, grid, mode)
            seen = last * 0 - 1
            for block in range(work.end - 1, last - 1, -1):
                turn = turn_of(block, work, grid, mode)
                turn_ptr = turns_ptr + ((first + block) * 2 + PART)
                wait_for_turn(turn_ptr, turn, seen)
                for warpgroup in gl.static_range(2):
                    outbox = pipes.outboxes[warpgroup]
                    outbox.wait(payload)
                    outbox.receive()
                    part = ((first + block) * 2 + warpgroup) * 2 + PART
                    tma_reduce_add(dq_desc, [part * dq_desc.block_type.shape[0], 0], outbox.block)
                pipes.outboxes[0].release(1)
                pipes.outboxes[1].release()
                seen = look_ahead(turns_ptr + ((first + gl.maximum(block - 1, last)) * 2 + PART))
                pass_turn(turn_ptr, turn + 1, 0)
                payload += 2
        for warpgroup in gl.static_range(2):
            pipes.outboxes[warpgroup].wait(payload)
            store_rows(rows_desc, pipes.outboxes[warpgroup], work, warpgroup, mode)
        payload += 2
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)


@gluon.jit
def store_rows(desc, outbox, work, WARPGROUP: gl.constexpr, mode):
    """Carry a payload of `send_rows` to a warpgroup's part of dV or dK."""
    row = work.row
    column = 0
    if mode.WIDE:
        column = WARPGROUP * desc.block_type.shape[-1]
    else:
        row += WARPGROUP * ROWS
    at = coordinates(work.batch, work.first_k, row, work.seqlen_k, work.head, column, ROWS, mode)
    outbox.receive()
    tma_store(desc, at, rows_in(outbox, desc))
    outbox.release()


@gluon.jit
def rows_in(outbox, desc):
    """The outbox's memory, of float32, as blocks of desc: the first."""
    blocks: gl.constexpr = 4 * outbox.block.shape[0] * outbox.block.shape[1] // desc.block_type.nbytes
    return reinterpret(outbox.block, desc.dtype, [blocks] + desc.block_type.shape, desc.layout).index(0)  # noqa: RUF005


@gluon.jit
def send_rows(x, outbox, i, desc):
    """Payload i: x, [64, head_dim], rounded."""
    outbox.wait(i)
    rows_in(outbox, desc).reshape(x.shape).store(narrow(x, desc.dtype))
    outbox.send()


@gluon.jit
def send_dq(dq, outbox, i):
    """Payload i: dq, [64, columns], in the order in which the threads hold it, four elements at a time.

    So stores need no shuffles and meet no bank conflicts; backward_ends.py undoes the order.
    """
    N: gl.constexpr = dq.shape[1]
    dq = dq.reshape([4, 2, 8, N // 8, 4, 2])  # warp, half, lane // 4, eighth of the columns, lane % 4, pair
    dq = dq.permute((3, 0, 2, 4, 1, 5))
    outbox.wait(i)
    outbox.block.store(dq.reshape(outbox.block.shape))
    outbox.send()


@gluon.jit
def hide(p, row, column, seqlen_k, MASKED: gl.constexpr, grid, mode):
    """0 where a query may not look; p: [64 keys from `column` on, queries from the one with diagonal `row` on]."""
    layout: gl.constexpr = p.type.layout
    columns = column + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    rows = gl.arange(0, p.shape[1], gl.SliceLayout(0, layout))
    if mode.TAIL:
        p = gl.where((columns < seqlen_k)[:, None], p, 0.0)
    if MASKED and mode.CAUSAL:
        p = gl.where(rows[None, :] > (columns - (row + grid.right))[:, None], p, 0.0)
    if MASKED and mode.LEFT:
        p = gl.where(rows[None, :] <= (columns - (row + grid.left))[:, None], p, 0.0)
    return p


@gluon.jit
def probabilities(s, lse, scales, mode):
    """P^T, and the factor that softcap's derivative gives dS."""
    factor = 1.0
    if mode.PRIMED:
        p = gl.exp2(s * scales.scale_log2)
    elif mode.SOFTCAP:
        # tanh x = 1 - 2 / (2^(2 x log2(e)) + 1)
        power = gl.exp2(s * (2.0 * LOG2_E * scales.scale_log2 / scales.softcap_log2))
        tanh = 1.0 - 2.0 * reciprocal(power + 1.0)
        p = gl.exp2(tanh * scales.softcap_log2 - lse[None, :])
        factor = 1.0 - tanh * tanh
    else:
        p = gl.exp2(s * scales.scale_log2 - lse[None, :])
    return p, factor


@gluon.jit
def step(dk, dv, i, entry, row, work, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, pipes, outbox, grid, scales, mode):
    """Block of queries number i, whose first looks at column `row` along the diagonal: add to dK and dV, send this
    warpgroup's half of its dQ."""
    DIM: gl.constexpr = dk.shape[1]
    DIM_V: gl.constexpr = dv.shape[1]
    DQ: gl.constexpr = mode.BLOCK_M * DIM // 128  # [64, DQ]: half the rows of a block of 128, half the columns of 64
    dtype: gl.constexpr = pipes.q.blocks.dtype
    s_layout: gl.constexpr = product_layout(mode.BLOCK_M)
    per_query: gl.constexpr = gl.SliceLayout(0, s_layout)
    zero = gl.zeros([ROWS, mode.BLOCK_M], gl.float32, s_layout)
    # Else all addresses in K and V would be computed once and kept, and there are no registers to keep them in.
    here = opaque(0)
    keys = pipes.k.block(entry, here, 0)
    k = keys.slice(WARPGROUP * ROWS, ROWS, dim=0)
    v = pipes.v.block(entry, here, 0).slice(WARPGROUP * ROWS, ROWS, dim=0)
    q = pipes.q.block(i, 0, 0)
    dout = pipes.dout.block(i, 0, 0)
    statistics = pipes.statistics.index(i % pipes.q.STAGES)

    pipes.q.wait(i)
    lse = statistics.slice(0, mode.BLOCK_M).load(per_query)
    if mode.PRIMED:
        # One warpgroup after the other, so that one multiplies while the other computes exponentials.
        if WARPGROUP == 1:
            mbarrier.wait(pipes.turn.index(0), i & 1)
        s_token = warpgroup_mma(k, q.permute((1, 0)), lse[None, :] - zero, is_async=True)
        pipes.dout.wait(i)
        delta = statistics.slice(mode.BLOCK_M, mode.BLOCK_M).load(per_query)
        dp_token = warpgroup_mma(v, dout.permute((1, 0)), delta[None, :] - zero, is_async=True)
    else:
        s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
        pipes.dout.wait(i)
        dp_token = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    if mode.PRIMED and WARPGROUP == 0:
        mbarrier.arrive(pipes.turn.index(0), count=1)
    p, factor = probabilities(s, lse, scales, mode)
    p = hide(p, row, work.row + WARPGROUP * ROWS, work.seqlen_k, MASKED, grid, mode)
    if not mode.PRIMED:
        p = boundary(p)  # else the assembler waits for dP before it has computed more than a few exponentials
    p_operand = gl.convert_layout(narrow(p, dtype), operand_layout(DIM_V))
    p *= factor
    if mode.PRIMED:
        ds = narrow(p * warpgroup_mma_wait(0, deps=(dp_token,)), dtype)
    else:
        delta = statistics.slice(mode.BLOCK_M, mode.BLOCK_M).load(per_query)
        ds = narrow(p * (warpgroup_mma_wait(0, deps=(dp_token,)) - delta[None, :]), dtype)

    exchange = pipes.ds.index(i % 2)
    exchange.slice(WARPGROUP * ROWS, ROWS, dim=0).store(ds)
    dv_token = warpgroup_mma(p_operand, dout, dv, is_async=True)
    fence_async_shared()
    barrier_sync(mode.BARRIERS, WARPGROUPS)  # dS of both warpgroups is there, and both have read the block before
    if mode.BLOCK_M == 2 * ROWS:
        ds_half = exchange.slice(WARPGROUP * ROWS, ROWS, dim=1)
        k_half = keys
    else:
        ds_half = exchange
        k_half = keys.slice(WARPGROUP * DQ, DQ, dim=1)
    no_dq = gl.zeros([ROWS, DQ], gl.float32, product_layout(DQ))
    dq_token = warpgroup_mma(ds_half.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds, operand_layout(DIM)), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    pipes.dout.release(i)
    send_dq(warpgroup_mma_wait(1, deps=(dq_token,)), outbox, i + 2 * entry)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    pipes.q.release(i)
    return dk, dv


@gluon.jit
def walk(dk, dv, i, entry, work, WARPGROUP: gl.constexpr, pipes, outbox, grid, scales, mode):
    """Up a head's queries, from block number i on: add to dK and dV. Returns them and the next block's number."""
    row = work.end * mode.BLOCK_M + work.seqlen_k - work.seqlen_q
    for _ in range(mode.MASKED, work.blocks):
        row -= mode.BLOCK_M
        dk, dv = step(dk, dv, i, entry, row, work, mode.LEFT, WARPGROUP, pipes, outbox, grid, scales, mode)
        i += 1
    for _ in gl.static_range(mode.MASKED):
        row -= mode.BLOCK_M
        dk, dv = step(dk, dv, i, entry, row, work, True, WARPGROUP, pipes, outbox, grid, scales, mode)
        i += 1
    return dk, dv, i


@gluon.jit
def wide_scores(i, entry, WARPGROUP: gl.constexpr, pipes, mode):
    """Start S of this warpgroup's half of block i."""
    HALF: gl.constexpr = mode.BLOCK_M // 2
    zero = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    pipes.q.wait(i)
    q_half = pipes.q.block(i, 0, 0).slice(WARPGROUP * HALF, HALF, dim=0)
    return warpgroup_mma(pipes.k.block(entry, opaque(0), 0), q_half.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def wide_step(
    dk, dv, s, i, entry, row, work, MASKED: gl.constexpr, MORE: gl.constexpr, WARPGROUP: gl.constexpr,
    pipes, outbox, grid, scales, mode,
):  # fmt: skip
    """A step of warpgroups that share their 64 keys: dP of half the queries each, then half the columns each of dV, dQ
    and dK, for which P and dS of both go through shared memory.

    s: S of this block; MORE: that of the next is computed behind the other products and returned.
    """
    DIM: gl.constexpr = dk.shape[1]
    DIM_V: gl.constexpr = dv.shape[1]
    HALF: gl.constexpr = mode.BLOCK_M // 2
    dtype: gl.constexpr = pipes.q.blocks.dtype
    per_query: gl.constexpr = gl.SliceLayout(0, product_layout(HALF))
    zero = gl.zeros([ROWS, HALF], gl.float32, product_layout(HALF))
    here = opaque(0)
    k = pipes.k.block(entry, here, 0)
    v = pipes.v.block(entry, here, 0)
    q = pipes.q.block(i, 0, 0)
    dout = pipes.dout.block(i, 0, 0)
    statistics = pipes.statistics.index(i % pipes.q.STAGES)

    pipes.dout.wait(i)
    dout_half = dout.slice(WARPGROUP * HALF, HALF, dim=0)
    dp_token = warpgroup_mma(v, dout_half.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = statistics.slice(WARPGROUP * HALF, HALF).load(per_query)
    p, factor = probabilities(s, lse, scales, mode)
    p = hide(p, row + WARPGROUP * HALF, work.row, work.seqlen_k, MASKED, grid, mode)
    both_p = pipes.ds.index(i % 2 * 2)
    both_ds = pipes.ds.index(i % 2 * 2 + 1)
    both_p.slice(WARPGROUP * HALF, HALF, dim=1).store(narrow(p, dtype))
    p *= factor
    delta = statistics.slice(mode.BLOCK_M + WARPGROUP * HALF, HALF).load(per_query)
    ds = narrow(p * (warpgroup_mma_wait(0, deps=(dp_token,)) - delta[None, :]), dtype)
    both_ds.slice(WARPGROUP * HALF, HALF, dim=1).store(ds)
    fence_async_shared()
    barrier_sync(mode.BARRIERS, WARPGROUPS)  # P and dS of both warpgroups are there

    dv_token = warpgroup_mma(both_p, dout.slice(WARPGROUP * DIM_V, DIM_V, dim=1), dv, is_async=True)
    no_dq = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
    k_half = k.slice(WARPGROUP * DIM, DIM, dim=1)
    dq_token = warpgroup_mma(both_ds.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(both_ds, q.slice(WARPGROUP * DIM, DIM, dim=1), dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    pipes.dout.release(i)
    left, right = gl.split(warpgroup_mma_wait(1, deps=(dq_token,)).reshape([ROWS, 2, DIM // 2]).permute((0, 2, 1)))
    send_dq(left, outbox, 2 * i + 2 * entry)
    if MORE:
        s_token = wide_scores(i + 1, entry, WARPGROUP, pipes, mode)
    send_dq(right, outbox, 2 * i + 1 + 2 * entry)
    if MORE:
        dk, s = warpgroup_mma_wait(0, deps=(dk_token, s_token))
    else:
        dk = warpgroup_mma_wait(0, deps=(dk_token,))
    pipes.q.release(i)
    return dk, dv, s


@gluon.jit
def wide_walk(dk, dv, i, entry, work, WARPGROUP: gl.constexpr, pipes, outbox, grid, scales, mode):
    """As walk. The blocks that the diagonal crosses start from an S of their own."""
    LAST: gl.constexpr = 1 if mode.MASKED == 0 else mode.MASKED
    HIDES: gl.constexpr = mode.LEFT or mode.MASKED > 0
    row = work.end * mode.BLOCK_M + work.seqlen_k - work.seqlen_q
    s = warpgroup_mma_wait(0, deps=(wide_scores(i, entry, WARPGROUP, pipes, mode),))
    for _ in range(LAST, work.blocks):
        row -= mode.BLOCK_M
        dk, dv, s = wide_step(
            dk, dv, s, i, entry, row, work, mode.LEFT, True, WARPGROUP, pipes, outbox, grid, scales, mode
        )
        i += 1
    for last in gl.static_range(LAST):
        row -= mode.BLOCK_M
        if last > 0:
            s = warpgroup_mma_wait(0, deps=(wide_scores(i, entry, WARPGROUP, pipes, mode),))
        dk, dv, s = wide_step(
            dk, dv, s, i, entry, row, work, HIDES, False, WARPGROUP, pipes, outbox, grid, scales, mode
        )
        i += 1
    return dk, dv, i


@gluon.jit
def differentiate(WARPGROUP: gl.constexpr, pipes, outbox, dk_desc, dv_desc, grid, scales, mode):
    """A warpgroup: 64 keys of every tile that the queue brings, or half the columns of those."""
    walk_up: gl.constexpr = wide_walk if mode.WIDE else walk
    PARTS: gl.constexpr = 2 if mode.WIDE else 1
    DIM: gl.constexpr = dk_desc.block_type.shape[-1]
    DIM_V: gl.constexpr = dv_desc.block_type.shape[-1]
    entry = grid.num_tiles * 0
    i = grid.num_tiles * 0
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        dk = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
        dv = gl.zeros([ROWS, DIM_V], gl.float32, product_layout(DIM_V))
        pipes.v.wait(entry)
        for _ in range(grid.group):
            dk, dv, i = walk_up(dk, dv, i, entry, work, WARPGROUP, pipes, outbox, grid, scales, mode)
        pipes.k.release(entry)
        pipes.v.release(entry)
        payload = i * PARTS + 2 * entry
        send_rows(dv, outbox, payload, dv_desc)
        send_rows(dk * scales.scale, outbox, payload + 1, dk_desc)
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)


@gluon.jit
def make_turn():
    turn = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    return turn


# Not specialised on: one kernel for all sizes. (Integers inside a tuple would be specialised on all the same.)
@gluon.jit(do_not_specialize=["sequences", "left", "right", "section"])
def attention_backward(
    q_desc, k_desc, v_desc, dout_desc, statistics_desc, dq_desc, dk_desc, dv_desc, turns_ptr, counter_ptr, table_ptr,
    sequences, left, right, section, scales, mode,
):  # fmt: skip
    grid = grid_of_keys(q_desc, k_desc, table_ptr, sequences, left, right, section, mode)
    K_EMPTIED: gl.constexpr = mode.BARRIERS + 1
    V_EMPTIED: gl.constexpr = K_EMPTIED + mode.KEY_STAGES
    Q_EMPTIED: gl.constexpr = V_EMPTIED + 1
    DOUT_EMPTIED: gl.constexpr = Q_EMPTIED + 2
    FILLED: gl.constexpr = DOUT_EMPTIED + mode.DOUT_STAGES
    gl.static_assert(FILLED + 2 <= NAMED_BARRIERS, "more named barriers than there are")
    DS: gl.constexpr = 4 if mode.WIDE else 2  # WIDE: P and dS
    exchange: gl.constexpr = gl.NVMMASharedLayout.get_default_for([mode.BLOCK_N, mode.BLOCK_M], q_desc.dtype)
    keys = make_ring(k_desc, mode.KEY_STAGES, 1, 1, K_EMPTIED, WARPGROUPS + 2 * WARP)
    pipes = Pipes(
        make_queue(keys, mode),
        keys,
        make_ring(v_desc, 1, 1, 1, V_EMPTIED),
        make_ring(q_desc, 2, 1, 1, Q_EMPTIED),
        make_ring(dout_desc, mode.DOUT_STAGES, 1, 1, DOUT_EMPTIED),
        gl.allocate_shared_memory(gl.float32, [2, 2 * mode.BLOCK_M], statistics_desc.layout),
        gl.allocate_shared_memory(q_desc.dtype, [DS, mode.BLOCK_N, mode.BLOCK_M], exchange),
        make_turn() if mode.PRIMED else None,
        (make_outbox(dq_desc, FILLED), make_outbox(dq_desc, FILLED + 1)),
    )
    BY_PART: gl.constexpr = mode.DETERMINISTIC and mode.WIDE
    fence_async_shared()
    gl.warp_specialize(
        [
            (differentiate, (0, pipes, pipes.outboxes[0], dk_desc, dv_desc, grid, scales, mode)),
            (differentiate, (1, pipes, pipes.outboxes[1], dk_desc, dv_desc, grid, scales, mode)),
            (load, (pipes, q_desc, k_desc, v_desc, dout_desc, statistics_desc, counter_ptr, table_ptr, grid, mode)),
            (carry_parts if BY_PART else carry, (0, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
            (carry_parts if BY_PART else carry, (1, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
        ],
        [4, 1, 1, 1],
        [240, 24, 24, 24],
    )
