"""The gradient of a bias: one program a tile of the bias, which sums over whatever the tile was broadcast over."""

from __future__ import annotations

import triton
import triton.language as tl

from tileattn.backends.portable.device.gradients import score_gradient
from tileattn.backends.portable.device.masks import FULL, SKIPPED, kind_at, tile_ranges
from tileattn.backends.portable.device.rows import (
    SIZES,
    Sequences,
    base_of,
    load_rows,
    locate,
    open_rows,
    span,
    workspace_at,
)
from tileattn.backends.portable.device.scores import open_head


@triton.jit(do_not_specialize=[*SIZES, "batches", "heads"])
def backward_bias_kernel(
    q, k, v, dout, based_lse, delta, dbias, seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k,
    total_q, total_k, num_heads, window_left, window_right, mods, blocks, captured, mode, group, batches, heads,
    SHARED_ROWS: tl.constexpr, SHARED_COLS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One tile of the gradient of the bias, summed over all the scores that shared it: `batches` and `heads` say over
    how many, SHARED_ROWS and SHARED_COLS whether one row or column of bias serves all."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    longest_q, longest_k = seqs.seqlen_q, seqs.seqlen_k
    blocks_m = 1 if SHARED_ROWS else tl.cdiv(longest_q, BLOCK_M)
    blocks_n = 1 if SHARED_COLS else tl.cdiv(longest_k, BLOCK_N)
    block_n, block_m, pair = locate(tl.program_id(0), blocks_n, blocks_m)
    bias_heads = seqs.num_heads // heads
    bias_batch, bias_head = pair // bias_heads, pair % bias_heads
    start_m, start_n = block_m * BLOCK_M, block_n * BLOCK_N
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for nth_batch in tl.range(0, batches, num_stages=1):
        batch = bias_batch * batches + nth_batch
        start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
        start_k, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
        end_m = seqlen_q if SHARED_ROWS else tl.minimum(start_m + BLOCK_M, seqlen_q)
        end_n = seqlen_k if SHARED_COLS else tl.minimum(start_n + BLOCK_N, seqlen_k)
        for nth_head in tl.range(0, heads, num_stages=1):
            head = bias_head * heads + nth_head
            q_rows = open_rows(q, batch, head, start_q, seqlen_q, mode, mode.dim, mode.block_dim, BLOCK_M)
            dout_rows = open_rows(dout, batch, head, start_q, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
            k_rows = open_rows(k, batch, head // group, start_k, seqlen_k, mode, mode.dim, mode.block_dim, BLOCK_N)
            v_rows = open_rows(v, batch, head // group, start_k, seqlen_k, mode, mode.dim_v, mode.block_dim_v, BLOCK_N)
            lse_ptr = workspace_at(based_lse, batch, head, start_q)
            delta_ptr = workspace_at(delta, batch, head, start_q)
            in_head = open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k)
            for row in tl.range(start_m, end_m, BLOCK_M, num_stages=1):
                offs_m = row + tl.arange(0, BLOCK_M)
                q_tile = load_rows(q_rows, row, mode, True)
                dout_tile = load_rows(dout_rows, row, mode, True)
                row_lse = tl.load(lse_ptr + offs_m)
                row_delta = tl.load(delta_ptr + offs_m)
                lo, _full_lo, _full_hi, hi = tile_ranges(
                    row, seqlen_k, seqlen_k - seqlen_q, seqs.window_left, seqs.window_right,
                    mode.left, mode.right, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                for col in tl.range(tl.maximum(lo, start_n), tl.minimum(hi, end_n), BLOCK_N):
                    visit, full = True, False
                    if mode.kinds == "of a tile":
                        kind = kind_at(row, col, in_head)
                        visit, full = kind != SKIPPED, kind == FULL
                    if visit:
                        k_tile = load_rows(k_rows, col, mode, True)
                        v_tile = load_rows(v_rows, col, mode, True)
                        ds, _dqk = score_gradient(
                            q_tile, k_tile, v_tile, dout_tile, row_lse, row_delta, row, col, full, in_head, seqs, mods,
                            mode, True, BLOCK_M, BLOCK_N,
                        )  # fmt: skip
                        acc += ds
    rows = start_m + tl.arange(0, BLOCK_M)[:, None]
    cols = start_n + tl.arange(0, BLOCK_N)[None, :]
    inside = (rows < longest_q) & (cols < longest_k)
    if SHARED_ROWS:
        acc = tl.sum(acc, 0, keep_dims=True)
        rows = tl.zeros([1, 1], tl.int32)
        inside = cols < longest_k
    if SHARED_COLS:
        acc = tl.sum(acc, 1, keep_dims=True)
        cols = tl.zeros([1, 1], tl.int32)
        inside = rows < (1 if SHARED_ROWS else longest_q)
    ptrs = base_of(dbias, pair * 0, pair, rows) + cols
    tl.store(ptrs, acc.to(dbias.ptr.dtype.element_ty), mask=inside)
