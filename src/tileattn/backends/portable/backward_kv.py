"""dK and dV: one program a block of keys, which stays on the chip while rows of q and dout pass by."""

from __future__ import annotations

import triton
import triton.language as tl

from tileattn.backends.portable.device.dropout import keep_tile
from tileattn.backends.portable.device.gradients import probabilities
from tileattn.backends.portable.device.masks import entry_at, read_for_mask, tile_of, visible, walk_of
from tileattn.backends.portable.device.rows import (
    SIZES,
    Sequences,
    load_block,
    load_rows,
    locate,
    open_rows,
    span,
    store_block,
    workspace_at,
)
from tileattn.backends.portable.device.scores import (
    open_head,
    read_for_scores,
    score_tile,
    score_unit,
    uncap,
    unmodify,
)


@triton.jit
def _walk_rows(
    dk, dv, lo, hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows, lse_ptr, delta_ptr, in_head, seqs, mods, mode,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the rows at the places [lo, hi) give to the gradients of a block of keys. Score tiles are transposed:
    keys down."""
    unit = score_unit(mods, mode)
    origin = start_n - (in_head.seqlen_k - in_head.seqlen_q)
    ahead = entry_at(lo, tiles, mode, BLOCK_M)
    for place in tl.range(lo, hi, BLOCK_M):
        start_m, full = tile_of(place, ahead, mode, BLOCK_M)
        ahead = entry_at(place + BLOCK_M, tiles, mode, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        rows = offs_m[None, :]
        cols = (start_n + tl.arange(0, BLOCK_N))[:, None]
        q_tile = load_rows(q_rows, start_m, mode, True)  # [BLOCK_M, BLOCK_DIM]
        qk = tl.dot(k_tile, q_tile.T, input_precision=mode.precision)  # [BLOCK_N, BLOCK_M]
        row_lse = tl.load(lse_ptr + offs_m)
        for_scores = read_for_scores(rows, cols, in_head, mods, mode, True)
        s, capped, raw = score_tile(qk, for_scores, rows, cols, origin, in_head, mods, mode, True)
        p = probabilities(s, unit, row_lse[None, :], mode)
        if MASKED:
            for_mask = read_for_mask(rows, cols, in_head, mods, mode)
            p = tl.where(visible(for_mask, rows, cols, full, in_head, seqs, mods, mode), p, 0.0)
        dout_tile = load_rows(dout_rows, start_m, mode, True)  # [BLOCK_M, BLOCK_DV]
        dropped = p
        if mods.seed is not None:
            keep = keep_tile(offs_m, start_n, in_head, mods, BLOCK_M, BLOCK_N).T
            dropped = tl.where(keep, p * mods.rescale, 0.0)
        if WANT_V:
            dv = tl.dot(dropped.to(dout_tile.dtype), dout_tile, dv, input_precision=mode.precision)
        if WANT_K:
            dp = tl.dot(v_tile, dout_tile.T, input_precision=mode.precision)
            if mods.seed is not None:
                dp = tl.where(keep, dp * mods.rescale, 0.0)
            row_delta = tl.load(delta_ptr + offs_m)
            ds = unmodify(p * (dp - row_delta[None, :]), p, raw, rows, cols, in_head, mode)
            ds = uncap(ds, capped, mods)
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=mode.precision)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def backward_kv_kernel(
    q,
    k,
    v,
    dout,
    based_lse,
    delta,
    dk,
    dv,
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
    """dk and dv of one block of keys (those that are not None), over all rows of all the query heads that read it."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    block, head_k, batch = locate(tl.program_id(0), tl.cdiv(seqs.seqlen_k, BLOCK_N), seqs.num_heads // group)
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_k, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
    start_n = block * BLOCK_N
    WANT_K: tl.constexpr = dk is not None
    WANT_V: tl.constexpr = dv is not None
    if seqs.cu_seqlens_k is not None and start_n >= seqlen_k:
        return

    k_tile = load_block(k, batch, head_k, start_k, start_n, seqlen_k, mode, mode.dim, mode.block_dim, BLOCK_N)
    v_tile = load_block(v, batch, head_k, start_k, start_n, seqlen_k, mode, mode.dim_v, mode.block_dim_v, BLOCK_N)
    dk_tile = tl.zeros([BLOCK_N, mode.block_dim], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, mode.block_dim_v], tl.float32)

    for member in tl.range(0, group, num_stages=1):  # the walk inside is what to pipeline
        head = head_k * group + member
        q_rows = open_rows(q, batch, head, start_q, seqlen_q, mode, mode.dim, mode.block_dim, BLOCK_M)
        dout_rows = open_rows(dout, batch, head, start_q, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
        lse_ptr = workspace_at(based_lse, batch, head, start_q)
        delta_ptr = workspace_at(delta, batch, head, start_q)
        in_head = open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k)
        # rows past the end need no mask: they are zeros, of probability 0
        left_lo, left_hi, whole_lo, whole_hi, right_lo, right_hi, tiles = walk_of(
            block, start_n, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M, seqlen_q - seqlen_k,
            seqs.window_right, seqs.window_left, in_head, mode, mode.right, mode.left, BLOCK_N, BLOCK_M,
        )  # fmt: skip
        if mode.right and mode.ranges:
            dk_tile, dv_tile = _walk_rows(
                dk_tile, dv_tile, left_lo, left_hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows,
                lse_ptr, delta_ptr, in_head, seqs, mods, mode, WANT_K, WANT_V, True, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if mode.ranges or mode.listed:
            dk_tile, dv_tile = _walk_rows(
                dk_tile, dv_tile, whole_lo, whole_hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows,
                lse_ptr, delta_ptr, in_head, seqs, mods, mode, WANT_K, WANT_V, False, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if mode.left or not mode.ranges:
            dk_tile, dv_tile = _walk_rows(
                dk_tile, dv_tile, right_lo, right_hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows,
                lse_ptr, delta_ptr, in_head, seqs, mods, mode, WANT_K, WANT_V, True, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    if start_n < seqlen_k:  # always: a branch, so that LLVM shares nothing of the stores with the loops
        if WANT_K:
            dk_tile *= mods.scale
            store_block(dk, dk_tile, batch, head_k, start_k, start_n, seqlen_k, mode.dim, mode.block_dim, BLOCK_N)
        if WANT_V:
            store_block(dv, dv_tile, batch, head_k, start_k, start_n, seqlen_k, mode.dim_v, mode.block_dim_v, BLOCK_N)
