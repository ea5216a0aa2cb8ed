"""What a warpgroup of the backward kernel does with a block of queries: the steps.

`step` is the plain one, of 64 queries, for softcap at head dims up to 128. `tall_step` makes room for 128 queries at
head dims up to 128. backward_alone.py and backward_wide.py have those for smaller and larger ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.entry import TRITON
from tileattn.backends.hopper.forward import ROWS, operand_layout, product_layout
from tileattn.backends.hopper.gluon_names import (
    fence_async_shared,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from tileattn.backends.hopper.pipeline import WARPGROUPS
from tileattn.backends.hopper.ptx import (
    barrier_arrive,
    barrier_sync,
    boundary,
    narrow,
    narrow_product,
    opaque,
    reciprocal,
)
from tileattn.backends.hopper.softmax import LOG2_E

# In Triton 3.9's code the assembler (13.4) lacks registers for dP of the second half of the queries and dK of the
# first in flight at once, and would serialise all products.
LATE_DK = gl.constexpr(TRITON >= (3, 9))


class BackwardMode(NamedTuple):
    """What a kernel is compiled for, every field a constexpr.

    WARPGROUPS: 1: see backward_alone.py. KEY_STAGES, DOUT_STAGES: blocks of keys and of dout in flight (of queries: 2).
    TALL, WIDE: the step that is taken. PARTS: blocks of dq's descriptor that a warpgroup's part of dQ, a half or all,
    fills. BARRIERS: the first named barrier.
    VARLEN: packed sequences. CAUSAL, LEFT: the window bounds that side. MASKED: blocks of queries, a key block's first,
    which hide scores (LEFT: all may). TAIL: the last key block is not full, and nothing else hides what it lacks.
    SPLIT: tiles of the last round may be shared by programs, see key_schedule.next_steps; heads are not grouped then,
    and dK and dV of a tile fill whole blocks of dQ's size. BOTH_WAYS: see key_schedule.from_diagonal.
    """

    WARPGROUPS: Any
    BLOCK_M: Any
    BLOCK_N: Any
    KEY_STAGES: Any
    DOUT_STAGES: Any
    TALL: Any
    WIDE: Any
    PARTS: Any
    BARRIERS: Any
    VARLEN: Any
    CAUSAL: Any
    LEFT: Any
    MASKED: Any
    TAIL: Any
    SOFTCAP: Any
    ALIBI: Any
    DETERMINISTIC: Any
    SPLIT: Any
    BOTH_WAYS: Any


class Scales(NamedTuple):
    """scale, and scale and softcap in log2. slope: where ALiBi's slopes lie, (sequences, num_heads) in float32, or
    None; see of_head."""

    scale: Any
    scale_log2: Any
    softcap_log2: Any
    slope: Any


class Pipes(NamedTuple):
    """What goes between the partitions.

    queue: of tiles, whose ring is k. statistics: lse and delta of a block of queries, [2, 2 * BLOCK_M], on the
    mbarriers of q. ds: dS^T of both warpgroups, [2, BLOCK_N, BLOCK_M], of one alone [1, ...]; TALL: two of
    [1, BLOCK_N, 64], by halves of the queries. p: WIDE: P^T, [BLOCK_N, BLOCK_M]. outboxes: of the warpgroups. turn:
    TALL: the mbarrier by which the first warpgroup passes the matrix units on (one that nobody waits for is dead to
    Triton, which gives its memory away; the hardware still writes there). relay: see
    backward_carry.make_relay.
    """

    queue: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    statistics: Any
    ds: Any
    p: Any
    outboxes: Any
    turn: Any
    relay: Any


class Span(NamedTuple):
    """The numbers of a tile's first and last block of queries."""

    first: Any
    last: Any


@gluon.jit
def as_block(memory, desc, BLOCKS: gl.constexpr = 1):
    """Memory of BLOCKS blocks of desc's size as those: the first."""
    return reinterpret(memory, desc.dtype, [BLOCKS] + desc.block_type.shape, desc.layout).index(0)  # noqa: RUF005


@gluon.jit
def rows_in(block, desc):
    """An outbox's memory, of float32, as blocks of desc: the first."""
    return as_block(block, desc, 4 * block.shape[0] * block.shape[1] // desc.block_type.nbytes)


@gluon.jit
def keep_rows(x, block, desc, NUMBER: gl.constexpr = 0):
    """Put x, [64, head_dim], rounded, into memory of an outbox, as the 64 rows of that number."""
    rows = rows_in(block, desc).reshape([desc.block_type.shape[-3], x.shape[1]])
    rows.slice(NUMBER * ROWS, ROWS, dim=0).store(narrow(x, desc.dtype))


@gluon.jit
def keep_dq(dq, block):
    """Put dq, [64, columns], into memory of an outbox as the threads hold it, four elements at a time.

    So stores need no shuffles and meet no bank conflicts; backward_ends.py undoes the order.
    """
    N: gl.constexpr = dq.shape[1]
    dq = dq.reshape([4, 2, 8, N // 8, 4, 2])  # warp, half, lane // 4, eighth of the columns, lane % 4, pair
    block.store(dq.permute((3, 0, 2, 4, 1, 5)).reshape(block.shape))


@gluon.jit
def send_dq(dq, outbox, i):
    """Payload i: dq."""
    outbox.wait(i)
    keep_dq(dq, outbox.block)
    outbox.send()


@gluon.jit
def send_halves(dq, outbox, i):
    """Payloads number i and the next: dq's halves."""
    left, right = halves(dq)
    send_dq(left, outbox, i)
    send_dq(right, outbox, i + 1)


@gluon.jit
def halves(x):
    """The halves of x's columns, which each thread has in its own registers."""
    ROWS_OF: gl.constexpr = x.shape[0]
    HALF: gl.constexpr = x.shape[1] // 2
    left, right = gl.split(x.reshape([ROWS_OF, 2, HALF]).permute((0, 2, 1)))
    return gl.convert_layout(left, product_layout(HALF)), gl.convert_layout(right, product_layout(HALF))


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
def of_head(scales, work, member, grid):
    """ALIBI: scales, whose slope is that of a tile's head of queries, in log2."""
    place = work.batch * grid.num_heads + work.head * grid.group + member
    return Scales(scales.scale, scales.scale_log2, scales.softcap_log2, gl.load(scales.slope + place) * LOG2_E)


@gluon.jit
def probabilities(s, lse, row, column, scales, mode):
    """P^T of scores of 64 keys from `column` on and queries from the one with diagonal `row` on, and the factor that
    softcap's derivative gives dS."""
    factor = 1.0
    if mode.SOFTCAP:
        # tanh x = 1 - 2 / (2^(2 x log2(e)) + 1)
        power = gl.exp2(s * (2.0 * LOG2_E * scales.scale_log2 / scales.softcap_log2))
        tanh = 1.0 - 2.0 * reciprocal(power + 1.0)
        s = tanh * scales.softcap_log2
    else:
        s = s * scales.scale_log2
    if mode.ALIBI:
        layout: gl.constexpr = s.type.layout
        columns = opaque(column - row) + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        rows = gl.arange(0, s.shape[1], gl.SliceLayout(0, layout))
        s = s - scales.slope * gl.abs((columns[:, None] - rows[None, :]).to(gl.float32))
    p = gl.exp2(s - lse[None, :])
    if mode.SOFTCAP:
        factor = 1.0 - tanh * tanh
    return p, factor


@gluon.jit
def step(dk, dv, i, entry, span, row, work, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, pipes, grid, scales, mode):
    """Block of queries number i, whose first looks at column `row` along the diagonal: add to dK and dV, send this
    warpgroup's half of its dQ, half the columns."""
    DIM: gl.constexpr = dk.shape[1]
    DIM_V: gl.constexpr = dv.shape[1]
    DQ: gl.constexpr = DIM // 2
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
    s_token = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    pipes.dout.wait(i)
    dp_token = warpgroup_mma(v, dout.permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(1, deps=(s_token,))
    p, factor = probabilities(s, lse, row, work.row + WARPGROUP * ROWS, scales, mode)
    p = hide(p, row, work.row + WARPGROUP * ROWS, work.seqlen_k, MASKED, grid, mode)
    p = boundary(p)  # else the assembler waits for dP before it has computed more than a few exponentials
    p_operand = gl.convert_layout(narrow(p, dtype), operand_layout(DIM_V))
    p *= factor
    delta = statistics.slice(mode.BLOCK_M, mode.BLOCK_M).load(per_query)
    ds = narrow(p * (warpgroup_mma_wait(0, deps=(dp_token,)) - delta[None, :]), dtype)

    exchange = pipes.ds.index(i % 2)
    exchange.slice(WARPGROUP * ROWS, ROWS, dim=0).store(ds)
    dv_token = warpgroup_mma(p_operand, dout, dv, is_async=True)
    fence_async_shared()
    barrier_sync(mode.BARRIERS, WARPGROUPS)  # dS of both warpgroups is there, and both have read the block before
    k_half = keys.slice(WARPGROUP * DQ, DQ, dim=1)
    no_dq = gl.zeros([ROWS, DQ], gl.float32, product_layout(DQ))
    dq_token = warpgroup_mma(exchange.permute((1, 0)), k_half, no_dq, use_acc=False, is_async=True)
    dk_token = warpgroup_mma(gl.convert_layout(ds, operand_layout(DIM)), q, dk, is_async=True)
    dv = warpgroup_mma_wait(2, deps=(dv_token,))
    pipes.dout.release(i)
    send_dq(warpgroup_mma_wait(1, deps=(dq_token,)), pipes.outboxes[WARPGROUP], i + 2 * entry)
    dk = warpgroup_mma_wait(0, deps=(dk_token,))
    pipes.q.release(i)
    return dk, dv


@gluon.jit
def half_of(ring, i, half):
    """Half of the 128 rows of a ring's fill. Every use computes addresses anew; there are no registers to keep them."""
    return ring.block(i, opaque(0), 0).slice(half * ROWS, ROWS, dim=0)


@gluon.jit
def tall_scores(i, entry, DIM: gl.constexpr, WARPGROUP: gl.constexpr, pipes, mode):
    """S - lse / scale, of one warpgroup after the other, so that one multiplies while the other computes exponentials.

    The first passes its turn on when half of the head dim is multiplied: the other's start takes as long as the rest.
    """
    HALF: gl.constexpr = DIM // 2
    layout: gl.constexpr = product_layout(mode.BLOCK_M)
    pipes.q.wait(i)
    lse = pipes.statistics.index(i % pipes.q.STAGES).slice(0, mode.BLOCK_M).load(gl.SliceLayout(0, layout))
    if WARPGROUP == 1:
        mbarrier.wait(pipes.turn.index(0), i & 1)
    k = half_of(pipes.k, entry, WARPGROUP)
    q = pipes.q.block(i, opaque(0), 0)
    s = lse[None, :] - gl.zeros([ROWS, mode.BLOCK_M], gl.float32, layout)
    for half in gl.static_range(2):
        q_half = q.slice(half * HALF, HALF, dim=1)
        s = warpgroup_mma(k.slice(half * HALF, HALF, dim=1), q_half.permute((1, 0)), s, is_async=True)
    if WARPGROUP == 0:
        s = warpgroup_mma_wait(1, deps=(s,))
        mbarrier.arrive(pipes.turn.index(0), count=1)
    return warpgroup_mma_wait(0, deps=(s,))


@gluon.jit
def tall_probabilities(
    s, half, row, work, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, grid, scales, mode, dtype: gl.constexpr
):
    """P^T of half the queries, in 16 bits before anything that follows, which has no registers for it in 32."""
    p = gl.exp2(s * scales.scale_log2)
    p = hide(p, row + half * ROWS, work.row + WARPGROUP * ROWS, work.seqlen_k, MASKED, grid, mode)
    return boundary(narrow(p, dtype))


@gluon.jit
def start_dp(half, i, entry, WARPGROUP: gl.constexpr, pipes, mode):
    """Start dP^T - delta of half the queries."""
    layout: gl.constexpr = product_layout(ROWS)
    statistics = pipes.statistics.index(i % pipes.q.STAGES)
    delta = statistics.slice(mode.BLOCK_M + half * ROWS, ROWS).load(gl.SliceLayout(0, layout))
    dp = delta[None, :] - gl.zeros([ROWS, ROWS], gl.float32, layout)
    return warpgroup_mma(
        half_of(pipes.v, entry, WARPGROUP), half_of(pipes.dout, i, half).permute((1, 0)), dp, is_async=True
    )


@gluon.jit
def share_ds(ds, half: gl.constexpr, payload, WARPGROUP: gl.constexpr, pipes, mode):
    """Put dS^T of half the queries into shared memory, where the warpgroup of that number waits for it."""
    pipes.outboxes[half].wait(payload)  # it was lent this memory
    pipes.ds[half].index(opaque(0)).slice(WARPGROUP * ROWS, ROWS, dim=0).store(ds)
    fence_async_shared()
    if half != WARPGROUP:
        barrier_arrive(mode.BARRIERS + half, WARPGROUPS)


@gluon.jit
def tall_step(
    dk, dv, i, entry, span, row, work, MASKED: gl.constexpr, WARPGROUP: gl.constexpr, pipes, grid, scales, mode
):
    """Block of queries number i, of 128, whose first looks at column `row` along the diagonal: add to dK and dV, send
    this warpgroup's half of its dQ, half the rows.

    Wider products read less of shared memory a multiplication. Beside dK and dV there are registers for S, or for P and
    dP of half the queries, or for dQ. So the halves follow each other, with exponentials, dS and dQ's way out of the
    registers behind the other products; boundaries keep the assembler from holding more at once. The products S and dP
    start from lse and delta instead of from 0.

    The second part of a payload lies in the warpgroup's half of dS. Both warpgroups wait for it to leave before they
    write the next dS, by an mbarrier that does not tell two payloads apart. So neither may be two ahead of the other's
    outbox: within a tile they need each other's dS, and between tiles values, which a warpgroup releases when its last
    dQ has left.
    """
    DIM: gl.constexpr = dk.shape[1]
    dk_operand: gl.constexpr = operand_layout(DIM)
    dv_operand: gl.constexpr = operand_layout(dv.shape[1])
    dtype: gl.constexpr = pipes.q.blocks.dtype
    outbox = pipes.outboxes[WARPGROUP]
    payload = i + entry

    s0, s1 = halves(tall_scores(i, entry, DIM, WARPGROUP, pipes, mode))
    p0 = tall_probabilities(s0, 0, row, work, MASKED, WARPGROUP, grid, scales, mode, dtype)
    pipes.v.wait(entry, i == span.first)
    pipes.dout.wait(i)
    dp0 = start_dp(0, i, entry, WARPGROUP, pipes, mode)
    dv = warpgroup_mma(gl.convert_layout(p0, dv_operand), half_of(pipes.dout, i, 0), dv, is_async=True)
    p1 = tall_probabilities(boundary(s1), 1, row, work, MASKED, WARPGROUP, grid, scales, mode, dtype)
    ds0 = boundary(narrow_product(p0, warpgroup_mma_wait(1, deps=(dp0,)), dtype))
    dp1 = start_dp(1, i, entry, WARPGROUP, pipes, mode)
    dv = warpgroup_mma(gl.convert_layout(p1, dv_operand), half_of(pipes.dout, i, 1), dv, is_async=True)
    if not LATE_DK:
        dk = warpgroup_mma(gl.convert_layout(ds0, dk_operand), half_of(pipes.q, i, 0), dk, is_async=True)
    share_ds(ds0, 0, payload, WARPGROUP, pipes, mode)
    ds1 = boundary(narrow_product(p1, warpgroup_mma_wait(1 if LATE_DK else 2, deps=(dp1,)), dtype))
    if LATE_DK:
        dk = warpgroup_mma(gl.convert_layout(ds0, dk_operand), half_of(pipes.q, i, 0), dk, is_async=True)
    share_ds(ds1, 1, payload, WARPGROUP, pipes, mode)
    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))
    pipes.dout.release(i)

    barrier_sync(mode.BARRIERS + WARPGROUP, WARPGROUPS)
    keys = pipes.k.block(entry, opaque(0), 0)
    no_dq = gl.zeros([ROWS, DIM], gl.float32, product_layout(DIM))
    ds = pipes.ds[WARPGROUP].index(opaque(0))
    dq = warpgroup_mma(ds.permute((1, 0)), keys, no_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(gl.convert_layout(ds1, dk_operand), half_of(pipes.q, i, 1), dk, is_async=True)
    dq = warpgroup_mma_wait(1, deps=(dq,))
    pipes.k.release(entry, i == span.last)
    left, right = halves(dq)
    keep_dq(left, outbox.part(0))  # both parts are free since share_ds waited for them
    keep_dq(right, outbox.part(1))
    outbox.send()
    dk = warpgroup_mma_wait(0, deps=(dk,))
    pipes.q.release(i)
    return dk, dv


@gluon.jit
def walk(dk, dv, i, entry, span, work, WARPGROUP: gl.constexpr, pipes, grid, scales, mode):
    """Up a head's queries, from block number i on: add to dK and dV. Returns them and the next block's number."""
    step_up: gl.constexpr = tall_step if mode.TALL else step
    row = work.end * mode.BLOCK_M + work.seqlen_k - work.seqlen_q
    for _ in range(mode.MASKED, work.blocks):
        row -= mode.BLOCK_M
        dk, dv = step_up(dk, dv, i, entry, span, row, work, mode.LEFT, WARPGROUP, pipes, grid, scales, mode)
        i += 1
    for _ in range(opaque(0), mode.MASKED):  # opaque: side by side, two steps are too much for the compiler
        row -= mode.BLOCK_M
        dk, dv = step_up(dk, dv, i, entry, span, row, work, True, WARPGROUP, pipes, grid, scales, mode)
        i += 1
    return dk, dv, i
