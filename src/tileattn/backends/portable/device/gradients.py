"""Gradients of one tile of scores, from P recomputed."""

from __future__ import annotations

import triton
import triton.language as tl

from tileattn.backends.portable.device.dropout import keep_tile
from tileattn.backends.portable.device.masks import read_for_mask, visible
from tileattn.backends.portable.device.rows import stats_at
from tileattn.backends.portable.device.scores import read_for_scores, score_tile, score_unit, uncap, unmodify
from tileattn.backends.portable.device.softmax import from_natural, power


@triton.jit
def probabilities(s, unit, row_lse, mode):
    """P of scores, from lse in the base of `power`: +inf for rows that see nothing or lie beyond the sequence."""
    p = power(s * unit - row_lse, mode)
    if mode.score_mod is not None:  # which may have made inf or NaN of such a row's zeros
        p = tl.where(row_lse == float("inf"), 0.0, p)
    return p


@triton.jit
def row_statistics(out_tile, dout_tile, lse, dlse, batch, head, start, offs_m, length, mode):
    """(lse in the base of `power`: +inf for rows that see nothing or lie beyond the sequence, so that their
    probabilities are 0; delta)."""
    inside = offs_m < length
    row_lse = tl.load(stats_at(lse, batch, head, start) + offs_m, mask=inside, other=float("-inf"))
    row_delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if dlse.ptr is not None:
        row_delta -= tl.load(stats_at(dlse, batch, head, start) + offs_m, mask=inside, other=0.0)
    return tl.where(row_lse == float("-inf"), float("inf"), from_natural(row_lse, mode)), row_delta


@triton.jit
def score_gradient(
    q_tile, k_tile, v_tile, dout_tile, row_lse, row_delta, start_m, start_n, full, in_head, seqs, mods, mode,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(gradient of the scores as bias and ALiBi left them, that of q.k * scale), [BLOCK_M, BLOCK_N]."""
    offs_m = start_m + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    cols = (start_n + tl.arange(0, BLOCK_N))[None, :]
    qk = tl.dot(q_tile, k_tile.T, input_precision=mode.precision)
    for_scores = read_for_scores(rows, cols, in_head, mods, mode, MASKED)
    s, capped, raw = score_tile(qk, for_scores, rows, cols, start_m, in_head, mods, mode, MASKED)
    p = probabilities(s, score_unit(mods, mode), row_lse[:, None], mode)
    if MASKED:
        for_mask = read_for_mask(rows, cols, in_head, mods, mode)
        p = tl.where(visible(for_mask, rows, cols, full, in_head, seqs, mods, mode), p, 0.0)
    dp = tl.dot(dout_tile, v_tile.T, input_precision=mode.precision)
    if mods.seed is not None:
        dp = tl.where(keep_tile(offs_m, start_n, in_head, mods, BLOCK_M, BLOCK_N), dp * mods.rescale, 0.0)
    ds = unmodify(p * (dp - row_delta[:, None]), p, raw, rows, cols, in_head, mode)
    return ds, uncap(ds, capped, mods)
