"""The backward of a warpgroup that has 128 keys to itself, for head dims up to 64.

It waits for no other warpgroup. Two programs of one each share a multiprocessor: while one computes exponentials or
sends dQ on its way, the other multiplies.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.backward_steps import half_of, hide, keep_dq, keep_rows, send_dq
from tileattn.backends.hopper.forward import ROWS, operand_layout, product_layout
from tileattn.backends.hopper.gluon_names import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from tileattn.backends.hopper.key_schedule import is_part
from tileattn.backends.hopper.pipeline import WARPGROUP_THREADS
from tileattn.backends.hopper.ptx import barrier_sync, boundary, narrow, narrow_product, opaque


@gluon.jit
def start_product(ring, half: gl.constexpr, entry, queries, i):
    """Start K Q^T, or V dO^T, of half the keys: [64 keys, 64 queries]."""
    zero = gl.zeros([ROWS, ROWS], gl.float32, product_layout(ROWS))
    block = queries.block(i, opaque(0), 0)
    return warpgroup_mma(half_of(ring, entry, half), block.permute((1, 0)), zero, use_acc=False, is_async=True)


@gluon.jit
def await_block(i, pipes):
    pipes.q.wait(i)
    pipes.dout.wait(i)


@gluon.jit
def statistics_of(i, FIELD: gl.constexpr, pipes):
    """lse (0) or delta (1) of block i."""
    block = pipes.statistics.index(i % pipes.q.STAGES).slice(FIELD * ROWS, ROWS)
    return block.load(gl.SliceLayout(0, product_layout(ROWS)))


@gluon.jit
def probabilities_of(
    s, lse, half: gl.constexpr, row, work, MASKED: gl.constexpr, grid, scales, mode, dtype: gl.constexpr
):
    """P^T of half the keys, in 16 bits before anything that follows, which has no registers for it in 32."""
    p = gl.exp2(s * scales.scale_log2 - lse[None, :])
    p = hide(p, row, work.row + half * ROWS, work.seqlen_k, MASKED, grid, mode)
    return boundary(narrow(p, dtype))


@gluon.jit
def step_alone(dk, dv, lse, s0, i, then, entry, row, work, MASKED: gl.constexpr, pipes, grid, scales, mode):
    """Block of queries number i, of 64, whose first looks at column `row` along the diagonal: add to dK and dV, send
    its dQ. lse and s0, S of the first half of the keys, are there; returned are those of block `then`.

    The halves of the keys follow each other, exponentials and dS of one behind products of the other, and dQ leaves
    behind S of the next block. Beside dK and dV there are registers for S of both halves, or for P of both and dP of
    one; for dP of the first while S of the second is there they do not suffice.
    """
    DIM: gl.constexpr = pipes.q.blocks.shape[-1]
    operand: gl.constexpr = operand_layout(DIM)
    dtype: gl.constexpr = pipes.q.blocks.dtype
    dk0, dk1 = dk
    dv0, dv1 = dv
    q = pipes.q.block(i, 0, 0)
    dout = pipes.dout.block(i, 0, 0)
    ds = pipes.ds.index(0)
    outbox = pipes.outboxes[0]

    s1 = start_product(pipes.k, 1, entry, pipes.q, i)
    p0 = probabilities_of(s0, lse, 0, row, work, MASKED, grid, scales, mode, dtype)
    dv0 = warpgroup_mma(gl.convert_layout(p0, operand), dout, dv0, is_async=True)
    s1 = warpgroup_mma_wait(1, deps=(s1,))
    p1 = probabilities_of(s1, lse, 1, row, work, MASKED, grid, scales, mode, dtype)
    dp0 = start_product(pipes.v, 0, entry, pipes.dout, i)
    dv1 = warpgroup_mma(gl.convert_layout(p1, operand), dout, dv1, is_async=True)
    delta = statistics_of(i, 1, pipes)
    dv0, dp0 = warpgroup_mma_wait(1, deps=(dv0, dp0))
    ds0 = boundary(narrow_product(p0, dp0 - delta[None, :], dtype))
    dp1 = start_product(pipes.v, 1, entry, pipes.dout, i)
    dk0 = warpgroup_mma(gl.convert_layout(ds0, operand), q, dk0, is_async=True)
    ds.slice(0, ROWS, dim=0).store(ds0)
    dv1, dp1 = warpgroup_mma_wait(1, deps=(dv1, dp1))
    pipes.dout.release(i)
    ds1 = boundary(narrow_product(p1, dp1 - delta[None, :], dtype))
    ds.slice(ROWS, ROWS, dim=0).store(ds1)
    dk1 = warpgroup_mma(gl.convert_layout(ds1, operand), q, dk1, is_async=True)
    outbox.wait(i + 2 * entry)
    dk0 = warpgroup_mma_wait(1, deps=(dk0,))
    fence_async_shared()
    barrier_sync(mode.BARRIERS, WARPGROUP_THREADS)  # all of dS is there
    no_dq = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
    keys = pipes.k.block(entry, opaque(0), 0)
    dq = warpgroup_mma(ds.permute((1, 0)), keys, no_dq, use_acc=False, is_async=True)
    await_block(then, pipes)
    dk1, dq = warpgroup_mma_wait(0, deps=(dk1, dq))
    s0 = start_product(pipes.k, 0, entry, pipes.q, then)
    keep_dq(dq, outbox.block)
    outbox.send()
    lse = statistics_of(then, 0, pipes)
    s0 = warpgroup_mma_wait(0, deps=(s0,))
    pipes.q.release(i)
    return (dk0, dk1), (dv0, dv1), lse, s0


@gluon.jit
def walk_alone(dk, dv, i, entry, work, pipes, grid, scales, mode):
    """As backward_steps.walk. The last block computes its own S once more, as there is no next."""
    row = work.end * mode.BLOCK_M + work.seqlen_k - work.seqlen_q
    last = i + work.blocks - 1
    await_block(i, pipes)
    lse = statistics_of(i, 0, pipes)
    s = warpgroup_mma_wait(0, deps=(start_product(pipes.k, 0, entry, pipes.q, i),))
    for _ in range(mode.MASKED, work.blocks):
        row -= mode.BLOCK_M
        dk, dv, lse, s = step_alone(
            dk, dv, lse, s, i, gl.minimum(i + 1, last), entry, row, work, mode.LEFT, pipes, grid, scales, mode
        )
        i += 1
    for _ in range(opaque(0), mode.MASKED):  # opaque: side by side, two steps are too much for the compiler
        row -= mode.BLOCK_M
        dk, dv, lse, s = step_alone(
            dk, dv, lse, s, i, gl.minimum(i + 1, last), entry, row, work, True, pipes, grid, scales, mode
        )
        i += 1
    return dk, dv, i


@gluon.jit
def differentiate_alone(pipes, dk_desc, dv_desc, grid, scales, mode):
    """The warpgroup: every tile that the queue brings."""
    outbox = pipes.outboxes[0]
    DIM: gl.constexpr = dk_desc.block_type.shape[-1]
    entry = grid.num_tiles * 0
    i = grid.num_tiles * 0
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        zero = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
        dk = (zero, zero)
        dv = (zero, zero)
        pipes.v.wait(entry)
        for _ in range(grid.group):
            dk, dv, i = walk_alone(dk, dv, i, entry, work, pipes, grid, scales, mode)
        pipes.k.release(entry)
        pipes.v.release(entry)
        payload = i + 2 * entry
        if mode.SPLIT and is_part(work, mode):
            for half in gl.static_range(2):
                send_dq(dv[half], outbox, payload + half)
            for half in gl.static_range(2):
                send_dq(dk[half], outbox, payload + 2 + half)
        else:
            outbox.wait(payload)
            for half in gl.static_range(2):
                keep_rows(dv[half], outbox.block, dv_desc, half)
            outbox.send()
            outbox.wait(payload + 1)
            for half in gl.static_range(2):
                keep_rows(dk[half] * scales.scale, outbox.block, dk_desc, half)
            outbox.send()
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)
