"""Gradients of one tile of scores, from P recomputed."""

from __future__ import annotations

import triton
import triton.language as tl

from tileattn.backends.portable.device.dropout import keep_tile
from tileattn.backends.portable.device.masks import visible
from tileattn.backends.portable.device.scores import score_tile, score_unit, uncap
from tileattn.backends.portable.device.softmax import power


@triton.jit
def score_gradient(
    q_tile, k_tile, v_tile, dout_tile, row_lse, row_delta, offs_m, start_n, in_head, seqs, mods, mode,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """(gradient of the scores, that of q.k * scale), [BLOCK_M, BLOCK_N]."""
    rows = offs_m[:, None]
    cols = (start_n + tl.arange(0, BLOCK_N))[None, :]
    qk = tl.dot(q_tile, k_tile.T, input_precision=mode.precision)
    s, capped = score_tile(qk, rows, cols, in_head, mods, mode)
    p = power(s * score_unit(mods, mode) - row_lse[:, None], mode)
    if MASKED:
        p = tl.where(visible(rows, cols, in_head, seqs, mode), p, 0.0)
    dp = tl.dot(dout_tile, v_tile.T, input_precision=mode.precision)
    if mods.seed is not None:
        dp = tl.where(keep_tile(offs_m, start_n, in_head, mods, BLOCK_M, BLOCK_N), dp * mods.rescale, 0.0)
    ds = p * (dp - row_delta[:, None])
    return ds, uncap(ds, capped, mods)
