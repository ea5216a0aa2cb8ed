"""What comes before and after the backward kernel, a block a program: statistics, and sums rounded to their dtype."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _locate(pid, programs, cu_ptr, sequences, seqlen_q, num_heads, blocks, BLOCK_M: tl.constexpr):
    """The block of rows that a program takes: its batch, head, place among all and rows, and where they end.

    blocks: that a sequence has. With cu_ptr sequences are packed (batch is 0, seqlen_q that of all) and have room for
    `blocks` more than full ones, as in key_schedule.first_place. Heads of a block are neighbours in memory, so programs
    that run at once take those. The last places come first: L2 still holds some of the sums that were added to last,
    for finish_kernel.
    """
    pid = programs - 1 - pid
    head = pid % num_heads
    place = pid // num_heads
    if cu_ptr is None:
        batch = place // blocks
        start = place % blocks * BLOCK_M
        end = seqlen_q
    else:
        sequence = place * 0 - 1
        for first in range(0, sequences, 128):
            offs = first + tl.arange(0, 128)
            begin = tl.load(cu_ptr + offs, offs < sequences, 0)
            sequence += tl.sum(((offs < sequences) & (begin // BLOCK_M + offs * blocks <= place)).to(tl.int32), 0)
        begin = tl.load(cu_ptr + sequence)
        end = tl.load(cu_ptr + sequence + 1)
        batch = place * 0
        start = begin + (place - begin // BLOCK_M - sequence * blocks) * BLOCK_M
    places = programs // num_heads
    return batch, head, head.to(tl.int64) * places + place, start + tl.arange(0, BLOCK_M), end


@triton.jit
def _offsets(batch_stride, row_stride, head_stride, batch, head, rows, columns):
    start = batch.to(tl.int64) * batch_stride + head.to(tl.int64) * head_stride
    return (start + rows.to(tl.int64) * row_stride)[:, None] + columns[None, :]


@triton.jit(
    do_not_specialize=[
        "dout_batch",
        "dout_row",
        "dout_head",
        "sequences",
        "seqlen_q",
        "num_heads",
        "blocks",
        "lse_unit",
        "delta_unit",
    ],
    do_not_specialize_on_alignment=["cu_ptr"],
)
def prepare_kernel(
    out_ptr, dout_ptr, dout_batch, dout_row, dout_head, lse_ptr, dlse_ptr, statistics_ptr, sums_ptr, turns_ptr,
    cu_ptr, sequences, seqlen_q, num_heads, blocks, lse_unit, delta_unit,
    DIM_V: tl.constexpr, BLOCK_DIM_V: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """lse and delta = rowsum(dout * out) - dlse of a block, in the kernel's units; its dQ, and its turns, set to 0.

    Rows that see nothing, and those past the end, get an lse of infinity: their probabilities are 0. Strides of dout
    count eight elements.
    """
    pid, programs = tl.program_id(0), tl.num_programs(0)
    batch, head, place, rows, end = _locate(pid, programs, cu_ptr, sequences, seqlen_q, num_heads, blocks, BLOCK_M)
    offs_m = tl.arange(0, BLOCK_M)
    columns = tl.arange(0, BLOCK_DIM_V)
    inside = rows < end
    mask = inside[:, None] & (columns < DIM_V)[None, :]
    row_stride = num_heads * DIM_V
    offsets = _offsets(row_stride.to(tl.int64) * seqlen_q, row_stride, DIM_V, batch, head, rows, columns)
    out = tl.load(out_ptr + offsets, mask, 0.0)
    offsets = _offsets(dout_batch.to(tl.int64) * 8, dout_row * 8, dout_head * 8, batch, head, rows, columns)
    dout = tl.load(dout_ptr + offsets, mask, 0.0)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    pair = (batch * num_heads + head).to(tl.int64)
    if dlse_ptr is not None:
        delta -= tl.load(dlse_ptr + pair * seqlen_q + rows, inside, 0.0)
    lse = tl.load(lse_ptr + pair * seqlen_q + rows, inside, float("-inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse)
    tl.store(statistics_ptr + place * (2 * BLOCK_M) + offs_m, lse * lse_unit)
    tl.store(statistics_ptr + place * (2 * BLOCK_M) + BLOCK_M + offs_m, delta * delta_unit)
    tl.store(sums_ptr + place * (BLOCK_M * BLOCK_DIM) + tl.arange(0, BLOCK_M * BLOCK_DIM), 0.0)
    if turns_ptr is not None:
        tl.store(turns_ptr + place * 2 + tl.arange(0, 2), 0)


@triton.jit(
    do_not_specialize=[
        "seqlen_k",
        "first_shared",
        "of_tiles",
        "steps",
        "sequences",
        "seqlen_q",
        "num_heads",
        "blocks",
    ],
    do_not_specialize_on_alignment=["cu_ptr"],
)
def finish_kernel(
    sums_ptr, dq_ptr, dk_ptr, dv_ptr, seqlen_k, first_shared, of_tiles, steps,
    cu_ptr, sequences, seqlen_q, num_heads, blocks, scale,
    DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK_M: tl.constexpr, TILE_SUMS: tl.constexpr,
):  # fmt: skip
    """A block of dQ, from the order of backward_steps.keep_dq to rows, scaled and rounded. The last of_tiles programs
    sum dV and dK of the tiles from first_shared on, TILE_SUMS blocks each, whose parts lie as place_of_sums in
    key_schedule.py says: in one order always."""
    pid, programs = tl.program_id(0), tl.num_programs(0) - of_tiles
    parts = 1
    if pid < programs:
        batch, head, place, rows, end = _locate(pid, programs, cu_ptr, sequences, seqlen_q, num_heads, blocks, BLOCK_M)
        into_ptr, length = dq_ptr, seqlen_q
    else:
        HALF: tl.constexpr = TILE_SUMS // 2
        number = (pid - programs) % TILE_SUMS
        tile = (pid - programs) // TILE_SUMS
        first_range = tile * blocks // steps
        parts = (tile * blocks + blocks - 1) // steps - first_range + 1
        place = (programs + (tile + first_range) * TILE_SUMS + number).to(tl.int64)
        tile += first_shared
        blocks_n = tl.cdiv(seqlen_k, BLOCK_M * HALF)
        batch, head = tile // blocks_n // num_heads, tile // blocks_n % num_heads
        rows, end = (tile % blocks_n * HALF + number % HALF) * BLOCK_M + tl.arange(0, BLOCK_M), seqlen_k
        into_ptr, length = dk_ptr, seqlen_k
        if number < HALF:
            into_ptr, scale = dv_ptr, 1.0
    N: tl.constexpr = min(64, BLOCK_M * BLOCK_DIM // 128)  # columns of a part; the parts of 64 rows come together
    block = sums_ptr + place * (BLOCK_M * BLOCK_DIM) + tl.arange(0, BLOCK_M * BLOCK_DIM)
    sums = tl.load(block)
    for part in range(1, parts):
        sums += tl.load(block + part * (TILE_SUMS * BLOCK_M * BLOCK_DIM))
    sums = sums.reshape([BLOCK_M // 64, BLOCK_DIM // N, N // 8, 4, 8, 4, 2, 2]).permute((0, 3, 6, 4, 1, 2, 5, 7))
    columns = tl.arange(0, BLOCK_DIM)
    mask = (rows < end)[:, None] & (columns < DIM)[None, :]
    row_stride = num_heads * DIM
    offsets = _offsets(row_stride.to(tl.int64) * length, row_stride, DIM, batch, head, rows, columns)
    x = (sums.reshape([BLOCK_M, BLOCK_DIM]) * scale).to(into_ptr.dtype.element_ty)
    tl.store(into_ptr + offsets, x, mask)
