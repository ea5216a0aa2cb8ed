"""FlashAttention backward for Hopper: one warp loads, two warpgroups multiply, two or three warps carry dQ away.

A program takes blocks of 128 keys; each warpgroup holds 64 of them, with their dK and dV, and walks along the queries.
(Up to head_dim 64 there is one warpgroup with all of them, and two programs share a multiprocessor. Above head_dim 128
a block is 64 keys; one warpgroup has their dV, the other their dK.)
Of a block of queries, transposed so that P and dS stay in the registers that the next products read them from:

    S^T = K Q^T;  P^T = exp(S^T - lse);  dP^T = V dO^T;  dS^T = P^T (dP^T - delta)
    dV += P^T dO;  dK += dS^T Q;  dQ += dS K

dS goes through shared memory for the last, of which each warpgroup computes one half. All key blocks add to one float32
dQ in global memory; the bulk-copy engine does that addition. backward_ends.py makes lse and delta ready and rounds dQ.
"""

# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.backward_alone import differentiate_alone
from tileattn.backends.hopper.backward_carry import CARRIERS, carry, carry_in_turn, make_relay
from tileattn.backends.hopper.backward_steps import (
    Pipes,
    Span,
    as_block,
    halves,
    keep_dq,
    keep_rows,
    of_head,
    send_halves,
    walk,
)
from tileattn.backends.hopper.backward_wide import differentiate_wide
from tileattn.backends.hopper.forward import ROWS, product_layout
from tileattn.backends.hopper.gluon_names import (
    fence_async_shared,
    mbarrier,
    tma_load,
)
from tileattn.backends.hopper.key_schedule import (
    block_of,
    first_place,
    grid_of_keys,
    is_part,
    locate_keys,
    next_steps,
    part_of,
)
from tileattn.backends.hopper.pipeline import WARP, WARPGROUP_THREADS, make_outbox, make_queue, make_ring
from tileattn.backends.hopper.ptx import NAMED_BARRIERS
from tileattn.backends.hopper.schedule import sequence_of


@gluon.jit
def load(pipes, q_desc, k_desc, v_desc, dout_desc, statistics_desc, counter_ptr, table_ptr, grid, mode):
    """The loading warp: for every tile its keys and, in the order of block_of, its queries with their statistics, and
    dout."""
    sequence = grid.num_tiles * 0
    entry = grid.num_tiles * 0
    i = grid.num_tiles * 0
    tile, step, left = next_steps(counter_ptr, i, i, grid, mode)
    while tile < grid.num_tiles:
        sequence = sequence_of(tile, sequence, table_ptr, grid, mode)
        work = locate_keys(tile, sequence, table_ptr, grid, mode)
        if mode.SPLIT:
            work = part_of(work, step, left)
        first = i
        pipes.queue.post(entry, work)
        pipes.k.fill(entry, k_desc, work.batch, work.first_k, work.row, work.seqlen_k, work.head, mode)
        for member in range(grid.group):
            head = work.head * grid.group + member
            place = first_place(work, head, grid, mode)
            for down in range(work.end - 1, work.end - work.blocks - 1, -1):
                block = down
                if mode.BOTH_WAYS:
                    block = block_of(work.end - 1 - down, work, grid, mode)
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
        tile, step, left = next_steps(counter_ptr, tile + 1, left - work.blocks, grid, mode)
    pipes.queue.close(entry)
    pipes.v.drain(entry)
    pipes.q.drain(i)
    pipes.dout.drain(i)
    pipes.k.drain(entry + 1)


@gluon.jit
def differentiate(WARPGROUP: gl.constexpr, pipes, dk_desc, dv_desc, grid, scales, mode):
    """A warpgroup: 64 keys of every tile that the queue brings."""
    DIM: gl.constexpr = dk_desc.block_type.shape[-1]
    DIM_V: gl.constexpr = dv_desc.block_type.shape[-1]
    outbox = pipes.outboxes[WARPGROUP]
    entry = grid.num_tiles * 0
    i = grid.num_tiles * 0
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        dk = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
        dv = gl.zeros([ROWS, DIM_V], gl.float32, product_layout(DIM_V))
        span = Span(i, i + grid.group * work.blocks - 1)
        if not mode.TALL:
            pipes.v.wait(entry)
        for member in range(grid.group):
            of_member = scales
            if mode.ALIBI:
                of_member = of_head(scales, work, member, grid)
            dk, dv, i = walk(dk, dv, i, entry, span, work, WARPGROUP, pipes, grid, of_member, mode)
        if not mode.TALL:
            pipes.k.release(entry)
            pipes.v.release(entry)
        payload = i + (1 if mode.TALL else 2) * entry
        outbox.wait(payload)
        if mode.TALL:
            pipes.v.release(entry)  # not before, see tall_step
        if mode.SPLIT and is_part(work, mode):
            send_sums(dk, dv, payload, outbox)
        else:
            keep_rows(dv, outbox.part(0), dv_desc)
            if not mode.TALL:
                outbox.send()
                outbox.wait(payload + 1)
            keep_rows(dk * scales.scale, outbox.part(1), dk_desc)
            outbox.send()
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)


@gluon.jit
def send_sums(dk, dv, payload, outbox):
    """TALL: dV and dK of a part of a tile, as dQ leaves, in payloads that are odd in number where a whole tile's are.

    Both parts of dV in one. Those of dK, which leave with the next tile begun, are not in lent memory.
    """
    left, right = halves(dv)
    keep_dq(left, outbox.part(0))
    keep_dq(right, outbox.part(1))
    outbox.send()
    send_halves(dk, outbox, payload + 1)


@gluon.jit
def make_ds(dtype: gl.constexpr, BLOCKS: gl.constexpr, QUERIES: gl.constexpr, mode):
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([mode.BLOCK_N, QUERIES], dtype)
    return gl.allocate_shared_memory(dtype, [BLOCKS, mode.BLOCK_N, QUERIES], layout)


@gluon.jit
def make_exchange(dtype: gl.constexpr, dq_desc, FILLED: gl.constexpr, mode):
    """Memory for dS (see Pipes), and the outboxes."""
    if mode.WARPGROUPS == 1:
        return make_ds(dtype, 1, mode.BLOCK_M, mode), (make_outbox(dq_desc, FILLED),)
    elif mode.TALL:
        # An outbox is lent the half of dS that its warpgroup is the last to read.
        left = make_ds(dtype, 1, ROWS, mode)
        right = make_ds(dtype, 1, ROWS, mode)
        return (left, right), (
            make_outbox(dq_desc, FILLED, as_block(left, dq_desc)),
            make_outbox(dq_desc, FILLED + 1, as_block(right, dq_desc)),
        )
    else:
        return make_ds(dtype, 2, mode.BLOCK_M, mode), (make_outbox(dq_desc, FILLED), make_outbox(dq_desc, FILLED + 1))


@gluon.jit
def make_turn():
    turn = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turn.index(0), count=1)
    return turn


# Not specialised on: one kernel for all sizes. (Integers inside a tuple would be specialised on all the same.)
@gluon.jit(do_not_specialize=["sequences", "left", "right", "section", "steps"])
def attention_backward(
    q_desc, k_desc, v_desc, dout_desc, statistics_desc, dq_desc, dk_desc, dv_desc, turns_ptr, counter_ptr, table_ptr,
    sequences, left, right, section, steps, scales, mode,
):  # fmt: skip
    grid = grid_of_keys(q_desc, k_desc, table_ptr, sequences, left, right, section, steps, mode)
    K_EMPTIED: gl.constexpr = mode.BARRIERS + (2 if mode.TALL or mode.WIDE else 1)
    V_EMPTIED: gl.constexpr = K_EMPTIED + mode.KEY_STAGES
    Q_EMPTIED: gl.constexpr = V_EMPTIED + 1
    DOUT_EMPTIED: gl.constexpr = Q_EMPTIED + 2
    FILLED: gl.constexpr = DOUT_EMPTIED + mode.DOUT_STAGES
    gl.static_assert(FILLED + 2 <= NAMED_BARRIERS, "more named barriers than there are")
    THREADS: gl.constexpr = mode.WARPGROUPS * WARPGROUP_THREADS
    # WIDE: the second warpgroup alone reads values, and is the last to read queries.
    READERS: gl.constexpr = WARPGROUP_THREADS if mode.WIDE else THREADS
    IN_TURN: gl.constexpr = mode.DETERMINISTIC and mode.WIDE
    CARRYING: gl.constexpr = CARRIERS if IN_TURN else mode.WARPGROUPS
    keys = make_ring(k_desc, mode.KEY_STAGES, 1, 1, K_EMPTIED, THREADS + CARRYING * WARP)
    ds, outboxes = make_exchange(q_desc.dtype, dq_desc, FILLED, mode)
    pipes = Pipes(
        make_queue(keys, mode),
        keys,
        make_ring(v_desc, 1, 1, 1, V_EMPTIED, READERS),
        make_ring(q_desc, 2, 1, 1, Q_EMPTIED, READERS),
        make_ring(dout_desc, mode.DOUT_STAGES, 1, 1, DOUT_EMPTIED, THREADS),
        gl.allocate_shared_memory(gl.float32, [2, 2 * mode.BLOCK_M], statistics_desc.layout),
        ds,
        make_ds(q_desc.dtype, 1, mode.BLOCK_M, mode).index(0) if mode.WIDE else None,
        outboxes,
        make_turn() if mode.TALL else None,
        make_relay() if IN_TURN else None,
    )
    fence_async_shared()
    if mode.WARPGROUPS == 1:
        gl.warp_specialize(
            [
                (differentiate_alone, (pipes, dk_desc, dv_desc, grid, scales, mode)),
                (load, (pipes, q_desc, k_desc, v_desc, dout_desc, statistics_desc, counter_ptr, table_ptr, grid, mode)),
                (carry, (0, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
            ],
            [1, 1],
            [24, 24],
        )
    elif IN_TURN:
        gl.warp_specialize(
            [
                (differentiate_wide, (0, pipes, dk_desc, dv_desc, grid, scales, mode)),
                (differentiate_wide, (1, pipes, dk_desc, dv_desc, grid, scales, mode)),
                (load, (pipes, q_desc, k_desc, v_desc, dout_desc, statistics_desc, counter_ptr, table_ptr, grid, mode)),
                (carry_in_turn, (0, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
                (carry_in_turn, (1, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
                (carry_in_turn, (2, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
            ],
            [4, 1, 1, 1, 1],
            [240, 24, 24, 24, 24],
        )
    else:
        gl.warp_specialize(
            [
                (differentiate_wide if mode.WIDE else differentiate, (0, pipes, dk_desc, dv_desc, grid, scales, mode)),
                (differentiate_wide if mode.WIDE else differentiate, (1, pipes, dk_desc, dv_desc, grid, scales, mode)),
                (load, (pipes, q_desc, k_desc, v_desc, dout_desc, statistics_desc, counter_ptr, table_ptr, grid, mode)),
                (carry, (0, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
                (carry, (1, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode)),
            ],
            [4, 1, 1, 1],
            [240, 24, 24, 24],
        )
