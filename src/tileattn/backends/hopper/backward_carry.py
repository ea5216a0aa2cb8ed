"""The backward's carrying warps: dQ, dV and dK from the warpgroups' outboxes to global memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.backward_steps import rows_in
from tileattn.backends.hopper.forward import ROWS
from tileattn.backends.hopper.gluon_names import mbarrier, tma_reduce_add, tma_store
from tileattn.backends.hopper.key_schedule import block_of, first_place, is_part, place_of_sums, turn_of
from tileattn.backends.hopper.ptx import pass_turn, wait_for_turn
from tileattn.backends.hopper.schedule import coordinates

CARRIERS = gl.constexpr(3)  # of carry_in_turn


@gluon.jit
def pass_turn_before(block, turns_ptr, work, grid, mode):
    """With the addition to `block` on its way, pass on the turn of the block before, if there is one.

    That block's addition is over by now; a warp that waited for each would take longer than a step.
    """
    before = block + 1
    if before < work.end:
        pass_turn(turns_ptr + before * mode.WARPGROUPS, turn_of(before, work, grid, mode) + 1, 1)


@gluon.jit
def carry(WARPGROUP: gl.constexpr, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode):
    """A carrying warp: adds a warpgroup's halves of dQ to global memory, stores its dV and dK.

    DETERMINISTIC: key blocks add to a block of dQ in their order.
    """
    outbox = pipes.outboxes[WARPGROUP]
    entry = grid.num_tiles * 0
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        pipes.k.release(entry)
        last = work.end - work.blocks
        for member in range(grid.group):
            first = first_place(work, work.head * grid.group + member, grid, mode) * mode.WARPGROUPS + WARPGROUP
            for block in range(work.end - 1, last - 1, -1):
                half = first + block * mode.WARPGROUPS
                if mode.DETERMINISTIC:
                    wait_for_turn(turns_ptr + half, turn_of(block, work, grid, mode))
                for part in gl.static_range(mode.PARTS):
                    if part == 0 or mode.WIDE:
                        outbox.receive()
                    at = (half * mode.PARTS + part) * dq_desc.block_type.shape[0]
                    tma_reduce_add(dq_desc, [at, 0], outbox.part(part))
                    if mode.DETERMINISTIC and part == 0:
                        pass_turn_before(block, turns_ptr + first, work, grid, mode)
                    if part + 1 == mode.PARTS or mode.WIDE:
                        outbox.release()
            if mode.DETERMINISTIC:
                pass_turn(turns_ptr + (first + last * mode.WARPGROUPS), turn_of(last, work, grid, mode) + 1, 0)
        if mode.SPLIT and is_part(work, mode):
            carry_sums(WARPGROUP, outbox, dq_desc, work, grid, mode)
        else:
            for part in gl.static_range(2):
                if part == 0 or not mode.TALL:
                    outbox.receive()
                store_rows(WARPGROUP, part, outbox.part(part), dk_desc, dv_desc, work, mode)
                if part == 1 or not mode.TALL:
                    outbox.release()
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)


@gluon.jit
def carry_sums(WARPGROUP: gl.constexpr, outbox, dq_desc, work, grid, mode):
    """Store a part's dV and dK as an outbox has them; finish_kernel sums the parts of a tile."""
    place = place_of_sums(work, grid, mode)
    for n in gl.static_range(2 * mode.PARTS * mode.BLOCK_N // mode.BLOCK_M):
        if not mode.TALL or n != 1:  # dV is one payload there
            outbox.receive()
        if mode.WIDE:
            part = (place + WARPGROUP) * 2 * mode.PARTS + n
        else:
            part = ((place + n // mode.PARTS) * mode.WARPGROUPS + WARPGROUP) * mode.PARTS + n % mode.PARTS
        at = part * dq_desc.block_type.shape[0]
        tma_store(dq_desc, [at, 0], outbox.part(1 if mode.TALL and n == 1 else 0))
        if not mode.TALL or n != 0:
            outbox.release()


@gluon.jit
def make_relay():
    """For each outbox and each warp of carry_in_turn: by which the warp before, with its payload, lets it wait for the
    next. Outbox.receive counts one warp."""
    relay = gl.allocate_shared_memory(gl.int64, [2 * CARRIERS, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(2 * CARRIERS):
        mbarrier.init(relay.index(place), count=1)
    return relay


@gluon.jit
def receive_in_turn(WARPGROUP: gl.constexpr, CARRIER: gl.constexpr, payload, pipes):
    mbarrier.wait(pipes.relay.index(CARRIERS * WARPGROUP + CARRIER), payload // CARRIERS & 1)
    pipes.outboxes[WARPGROUP].receive()
    mbarrier.arrive(pipes.relay.index(CARRIERS * WARPGROUP + (CARRIER + 1) % CARRIERS), count=1)


@gluon.jit
def carry_in_turn(CARRIER: gl.constexpr, pipes, dq_desc, dk_desc, dv_desc, turns_ptr, grid, mode):
    """As carry, DETERMINISTIC and WIDE, for both warpgroups: every third of their payloads, which are parts of a block
    of dQ or of dV and dK.

    Turns are of a part. This warp waits until its own is in global memory while the others carry what comes next: all
    of that takes longer than a step, and the next key block shall follow soon.
    """
    if CARRIER == 0:
        mbarrier.arrive(pipes.relay.index(0), count=1)  # nobody comes before the first payload
        mbarrier.arrive(pipes.relay.index(CARRIERS), count=1)
    entry = grid.num_tiles * 0
    start = entry
    payload = entry + CARRIER
    work = pipes.queue.receive(entry, grid)
    while work.blocks > 0:
        pipes.k.release(entry)
        for member in range(grid.group):
            first = first_place(work, work.head * grid.group + member, grid, mode)
            end = start + 2 * work.blocks
            while payload < end:
                part = (payload - start) % 2
                block = block_of((payload - start) // 2, work, grid, mode)
                turn = turn_of(block, work, grid, mode)
                turn_ptr = turns_ptr + ((first + block) * 2 + part)
                wait_for_turn(turn_ptr, turn)
                for warpgroup in gl.static_range(1, -1, -1):  # the second's comes half a step before the first's
                    receive_in_turn(warpgroup, CARRIER, payload, pipes)
                    place = ((first + block) * 2 + warpgroup) * 2 + part
                    at = place * dq_desc.block_type.shape[0]
                    tma_reduce_add(dq_desc, [at, 0], pipes.outboxes[warpgroup].block)
                    pipes.outboxes[warpgroup].release()
                pass_turn(turn_ptr, turn + 1, 0)
                payload += CARRIERS
            start = end
        while payload < start + 2:
            for warpgroup in gl.static_range(1, -1, -1):
                receive_in_turn(warpgroup, CARRIER, payload, pipes)
                store_rows(warpgroup, payload - start, pipes.outboxes[warpgroup].block, dk_desc, dv_desc, work, mode)
                pipes.outboxes[warpgroup].release()
            payload += CARRIERS
        start += 2
        entry += 1
        work = pipes.queue.receive(entry, grid)
    pipes.k.release(entry)


@gluon.jit
def store_rows(WARPGROUP: gl.constexpr, part, block, dk_desc, dv_desc, work, mode):
    """Store what `keep_rows` put into a warpgroup's outbox: dV, then dK of its keys; WIDE: halves of columns of one."""
    IS_DK: gl.constexpr = WARPGROUP == 1 if mode.WIDE else part == 1
    desc = dk_desc if IS_DK else dv_desc
    row = work.row
    column = 0
    if mode.WIDE:
        column = part * desc.block_type.shape[-1]
    else:
        row += WARPGROUP * ROWS
    rows: gl.constexpr = desc.block_type.shape[-3]
    at = coordinates(work.batch, work.first_k, row, work.seqlen_k, work.head, column, rows, mode)
    tma_store(desc, at, rows_in(block, desc))
