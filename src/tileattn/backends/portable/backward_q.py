"""dQ: one program a block of rows, which stays on the chip while k and v pass by; and the statistics of rows."""

from __future__ import annotations

import triton
import triton.language as tl

from tileattn.backends.portable.device.gradients import row_statistics, score_gradient
from tileattn.backends.portable.device.masks import entry_at, tile_of, walk_of
from tileattn.backends.portable.device.rows import (
    PAD,
    SIZES,
    Sequences,
    held,
    load_block,
    load_rows,
    locate,
    open_rows,
    span,
    store_block,
    workspace_at,
)
from tileattn.backends.portable.device.scores import distance, open_head


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    out,
    dout,
    lse,
    dlse,
    based_lse,
    delta,
    seqlen_q,
    seqlen_k,
    cu_seqlens_q,
    cu_seqlens_k,
    total_q,
    total_k,
    num_heads,
    window_left,
    window_right,
    mode,
    BLOCK_M: tl.constexpr,
):
    """The statistics of rows for other kernels, where `backward_q_kernel` does not run."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    block, head, batch = locate(tl.program_id(0), tl.cdiv(seqs.seqlen_q, PAD) * (PAD // BLOCK_M), seqs.num_heads)
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_m = block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    out_tile = load_block(out, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    dout_tile = load_block(dout, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    row_lse, row_delta = row_statistics(
        out_tile, dout_tile, lse, dlse, batch, head, start_q, offs_m, seqlen_q, mode
    )  # fmt: skip
    padded = offs_m < tl.cdiv(seqlen_q, PAD) * PAD
    tl.store(workspace_at(based_lse, batch, head, start_q) + offs_m, row_lse, mask=padded)
    tl.store(workspace_at(delta, batch, head, start_q) + offs_m, row_delta, mask=padded)


@triton.jit
def _walk_keys(
    dq, dslope, lo, hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m, k_rows, v_rows, in_head, seqs, mods,
    mode, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the keys at the places [lo, hi) give to the gradients of a block of rows and of its ALiBi slope."""
    ahead = entry_at(lo, tiles, mode, BLOCK_N)
    for place in tl.range(lo, hi, BLOCK_N):
        start_n, full = tile_of(place, ahead, mode, BLOCK_N)
        ahead = entry_at(place + BLOCK_N, tiles, mode, BLOCK_N)
        k_tile = load_rows(k_rows, start_n, mode, MASKED)  # [BLOCK_N, BLOCK_DIM]
        v_tile = load_rows(v_rows, start_n, mode, MASKED)  # [BLOCK_N, BLOCK_DV]
        ds, dqk = score_gradient(
            held(q_tile, mode), k_tile, v_tile, held(dout_tile, mode), row_lse, row_delta, start_m, start_n, full,
            in_head, seqs, mods, mode, MASKED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if mods.alibi is not None:
            rows = (start_m + tl.arange(0, BLOCK_M))[:, None]
            cols = (start_n + tl.arange(0, BLOCK_N))[None, :]
            dslope -= tl.sum(ds * distance(rows, cols, start_m, in_head), 1)
        dq = tl.dot(dqk.to(k_tile.dtype), k_tile, dq, input_precision=mode.precision)  # [BLOCK_M, BLOCK_DIM]
    return dq, dslope


@triton.jit(do_not_specialize=SIZES)
def backward_q_kernel(
    q,
    k,
    v,
    dout,
    based_lse,
    delta,
    out,
    lse,
    dlse,
    dq,
    dslope,
    seqlen_q,
    seqlen_k,
    cu_seqlens_q,
    cu_seqlens_k,
    total_q,
    total_k,
    num_heads,
    window_left,
    window_right,
    mods,
    blocks,
    captured,
    mode,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of one block of rows, its statistics for other kernels, and its share of the gradient of the ALiBi slope:
    dslope (batch, heads, blocks)."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(seqs.seqlen_q, BLOCK_M)
    block, head, batch = locate(pid, blocks_m, seqs.num_heads)
    if mode.right:
        reverse = blocks_m - 1 - block
        pid += reverse - block
        block = reverse
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_k, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
    start_m = block * BLOCK_M
    if seqs.cu_seqlens_q is not None and start_m >= seqlen_q:
        if dslope is not None:
            tl.store(dslope + pid, 0.0)
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)

    k_rows = open_rows(k, batch, head // group, start_k, seqlen_k, mode, mode.dim, mode.block_dim, BLOCK_N)
    v_rows = open_rows(v, batch, head // group, start_k, seqlen_k, mode, mode.dim_v, mode.block_dim_v, BLOCK_N)
    in_head = open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k)

    q_tile = load_block(q, batch, head, start_q, start_m, seqlen_q, mode, mode.dim, mode.block_dim, BLOCK_M)
    dout_tile = load_block(dout, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    out_tile = load_block(out, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    row_lse, row_delta = row_statistics(
        out_tile, dout_tile, lse, dlse, batch, head, start_q, offs_m, seqlen_q, mode
    )  # fmt: skip
    lse_ptr = workspace_at(based_lse, batch, head, start_q)
    delta_ptr = workspace_at(delta, batch, head, start_q)
    tl.store(lse_ptr + offs_m, row_lse)
    tl.store(delta_ptr + offs_m, row_delta)
    if start_m + BLOCK_M >= seqlen_q:  # the padding, which no block of rows covers
        beyond = start_m + BLOCK_M + tl.arange(0, PAD)
        padding = beyond < tl.cdiv(seqlen_q, PAD) * PAD
        tl.store(lse_ptr + beyond, float("inf"), mask=padding)
        tl.store(delta_ptr + beyond, 0.0, mask=padding)
    dq_tile = tl.zeros([BLOCK_M, mode.block_dim], tl.float32)
    slope_tile = tl.zeros([BLOCK_M], tl.float32)

    left_lo, left_hi, whole_lo, whole_hi, right_lo, right_hi, tiles = walk_of(
        block, start_m, seqlen_k, seqlen_k - seqlen_q, seqs.window_left, seqs.window_right, in_head, mode,
        mode.left, mode.right, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if mode.left and mode.ranges:
        dq_tile, slope_tile = _walk_keys(
            dq_tile, slope_tile, left_lo, left_hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m,
            k_rows, v_rows, in_head, seqs, mods, mode, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if mode.ranges or mode.listed:
        dq_tile, slope_tile = _walk_keys(
            dq_tile, slope_tile, whole_lo, whole_hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m,
            k_rows, v_rows, in_head, seqs, mods, mode, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    dq_tile, slope_tile = _walk_keys(
        dq_tile, slope_tile, right_lo, right_hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m,
        k_rows, v_rows, in_head, seqs, mods, mode, True, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    dq_tile *= mods.scale
    store_block(dq, dq_tile, batch, head, start_q, start_m, seqlen_q, mode.dim, mode.block_dim, BLOCK_M)
    if dslope is not None:
        tl.store(dslope + pid, tl.sum(slope_tile, 0))
