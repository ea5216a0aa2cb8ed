"""The backward of two warpgroups that share 64 keys, for head dims above 128.

The first computes S and P and sums dV, the second dP and dS and sums dK; each computes half of dQ. P goes to the second
and dS to both through shared memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.backward_steps import (
    halves,
    hide,
    keep_rows,
    of_head,
    probabilities,
    send_dq,
    send_halves,
)
from tileattn.backends.hopper.forward import ROWS, operand_layout, product_layout
from tileattn.backends.hopper.gluon_names import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from tileattn.backends.hopper.key_schedule import block_of, is_part
from tileattn.backends.hopper.pipeline import WARPGROUPS
from tileattn.backends.hopper.ptx import barrier_arrive, barrier_sync, narrow, opaque


@gluon.jit
def wide_probabilities(i, more, entry, work, pipes, grid, scales, mode):
    """P^T of block number i, behind which its head has `more`, and softcap's factor."""
    layout: gl.constexpr = product_layout(mode.BLOCK_M)
    zero = gl.zeros([ROWS, mode.BLOCK_M], gl.float32, layout)
    pipes.q.wait(i)
    q = pipes.q.block(i, opaque(0), 0)
    s = warpgroup_mma(pipes.k.block(entry, opaque(0), 0), q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = pipes.statistics.index(i % pipes.q.STAGES).slice(0, mode.BLOCK_M).load(gl.SliceLayout(0, layout))
    s = warpgroup_mma_wait(0, deps=(s,))
    first = work.end - work.blocks
    place = more
    if mode.BOTH_WAYS:
        place = block_of(work.blocks - 1 - more, work, grid, mode) - first
    row = (first + place) * mode.BLOCK_M + work.seqlen_k - work.seqlen_q
    p, factor = probabilities(s, lse, row, work.row, scales, mode)
    p = hide(p, row, work.row, work.seqlen_k, mode.LEFT, grid, mode)
    if mode.MASKED > 0 and place < mode.MASKED:
        p = hide(p, row, work.row, work.seqlen_k, True, grid, mode)
    return p, factor


@gluon.jit
def start_wide_dq(i, entry, WARPGROUP: gl.constexpr, pipes, mode):
    """Start this warpgroup's half of the columns of block i's dQ."""
    keys = pipes.k.block(entry, opaque(0), 0)
    DIM: gl.constexpr = keys.shape[1] // 2
    no_dq = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
    ds = pipes.ds.index(i % 2).permute((1, 0))
    return warpgroup_mma(ds, keys.slice(WARPGROUP * DIM, DIM, dim=1), no_dq, use_acc=False, is_async=True)


@gluon.jit
def wide_dv_step(dv, i, more, entry, FIRST: gl.constexpr, work, pipes, grid, scales, mode):
    """The first warpgroup's step: P of block number i, which goes to the other warpgroup, then dV. Beside that product,
    but for the FIRST block of a head, half of the dQ of the block before, whose dS has come meanwhile."""
    dtype: gl.constexpr = pipes.q.blocks.dtype
    outbox = pipes.outboxes[0]
    payload = 2 * (i - 1 + entry)
    p, factor = wide_probabilities(i, more, entry, work, pipes, grid, scales, mode)
    p_operand = gl.convert_layout(narrow(p, dtype), operand_layout(dv.shape[1]))
    if not FIRST:
        barrier_sync(mode.BARRIERS + 1, WARPGROUPS)  # dS of the block before is there, so its P has been read
    pipes.p.store(narrow(p * factor, dtype))
    barrier_arrive(mode.BARRIERS, WARPGROUPS)
    if not FIRST:
        dq = start_wide_dq(i - 1, entry, 0, pipes, mode)
    pipes.dout.wait(i)
    dv = warpgroup_mma(p_operand, pipes.dout.block(i, opaque(0), 0), dv, is_async=True)
    if not FIRST:
        left, right = halves(warpgroup_mma_wait(1, deps=(dq,)))
        send_dq(left, outbox, payload)
    dv = warpgroup_mma_wait(0, deps=(dv,))
    pipes.dout.release(i)
    if not FIRST:
        send_dq(right, outbox, payload + 1)
    return dv


@gluon.jit
def wide_dv_walk(dv, i, entry, work, pipes, grid, scales, mode):
    """As walk, of the first warpgroup: add to dV, send its halves of dQ."""
    dv = wide_dv_step(dv, i, work.blocks - 1, entry, True, work, pipes, grid, scales, mode)
    for more in range(work.blocks - 2, -1, -1):
        i += 1
        dv = wide_dv_step(dv, i, more, entry, False, work, pipes, grid, scales, mode)
    barrier_sync(mode.BARRIERS + 1, WARPGROUPS)
    dq = warpgroup_mma_wait(0, deps=(start_wide_dq(i, entry, 0, pipes, mode),))
    send_halves(dq, pipes.outboxes[0], 2 * (i + entry))
    return dv, i + 1


@gluon.jit
def wide_dk_step(dk, i, entry, pipes, mode):
    """The second warpgroup's step: dP of block number i and, with P from the other warpgroup, dS, which both need; then
    dK and the other half of dQ."""
    layout: gl.constexpr = product_layout(mode.BLOCK_M)
    dtype: gl.constexpr = pipes.q.blocks.dtype
    zero = gl.zeros([ROWS, mode.BLOCK_M], gl.float32, layout)
    pipes.dout.wait(i)
    dout = pipes.dout.block(i, opaque(0), 0)
    dp = warpgroup_mma(pipes.v.block(entry, opaque(0), 0), dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    pipes.q.wait(i)
    statistics = pipes.statistics.index(i % pipes.q.STAGES)
    delta = statistics.slice(mode.BLOCK_M, mode.BLOCK_M).load(gl.SliceLayout(0, layout))
    barrier_sync(mode.BARRIERS, WARPGROUPS)  # P is there
    p = pipes.p.load(layout)
    dp = warpgroup_mma_wait(0, deps=(dp,))
    pipes.dout.release(i)
    ds = narrow(p.to(gl.float32) * (dp - delta[None, :]), dtype)
    pipes.ds.index(i % 2).store(ds)
    fence_async_shared()
    barrier_arrive(mode.BARRIERS + 1, WARPGROUPS)
    dq = start_wide_dq(i, entry, 1, pipes, mode)
    q = pipes.q.block(i, opaque(0), 0)
    dk = warpgroup_mma(gl.convert_layout(ds, operand_layout(dk.shape[1])), q, dk, is_async=True)
    left, right = halves(warpgroup_mma_wait(1, deps=(dq,)))
    send_dq(left, pipes.outboxes[1], 2 * (i + entry))
    dk = warpgroup_mma_wait(0, deps=(dk,))
    pipes.q.release(i)
    send_dq(right, pipes.outboxes[1], 2 * (i + entry) + 1)
    return dk


@gluon.jit
def wide_dk_walk(dk, i, entry, work, pipes, grid, scales, mode):
    """As walk, of the second warpgroup: add to dK, send its halves of dQ."""
    for _ in range(work.blocks):
        dk = wide_dk_step(dk, i, entry, pipes, mode)
        i += 1
    return dk, i


@gluon.jit
def differentiate_wide(WARPGROUP: gl.constexpr, pipes, dk_desc, dv_desc, grid, scales, mode):
    """As differentiate, of warpgroups that share 64 keys: the first sums all columns of dV, the second those of dK."""
    walk_head: gl.constexpr = wide_dk_walk if WARPGROUP == 1 else wide_dv_walk
    desc = dk_desc if WARPGROUP == 1 else dv_desc
    DIM: gl.constexpr = 2 * desc.block_type.shape[-1]
    outbox = pipes.outboxes[WARPGROUP]
    entry = grid.num_tiles * 0
    i = grid.num_tiles * 0
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        sums = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
        if WARPGROUP == 1:
            pipes.v.wait(entry)
        for member in range(grid.group):
            of_member = scales
            if mode.ALIBI:
                of_member = of_head(scales, work, member, grid)
            sums, i = walk_head(sums, i, entry, work, pipes, grid, of_member, mode)
        pipes.k.release(entry)
        if WARPGROUP == 1:
            pipes.v.release(entry)
        payload = 2 * (i + entry)
        left, right = halves(sums)
        if mode.SPLIT and is_part(work, mode):
            send_halves(left, outbox, payload)
            send_halves(right, outbox, payload + 2)
        else:
            scale = scales.scale if WARPGROUP == 1 else 1.0
            outbox.wait(payload)
            keep_rows(left * scale, outbox.block, desc)
            outbox.send()
            outbox.wait(payload + 1)
            keep_rows(right * scale, outbox.block, desc)
            outbox.send()
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)
