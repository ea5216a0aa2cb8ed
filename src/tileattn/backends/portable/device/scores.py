"""From q.k to scores: softcap -> + alibi -> + bias -> mask, in the base of `power`."""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileattn.backends.portable.device.rows import size, stride
from tileattn.backends.portable.device.softmax import LOG2E, from_natural


class Modifiers(NamedTuple):
    """What happens to q.k and to the probabilities; None for what a call does not have. A field such as bias_row is a
    stride, 0 where the tensor broadcasts; those of bias and mask but for columns are `sized` with align
    bias_align, a tl.constexpr. (Flat: Triton 3.6 loses constants in nested tuples.)

    threshold: the 32 bits of philox.threshold as a signed int; rescale: 1 / (1 - dropout_p).
    """

    scale: float
    softcap: float | None
    alibi: Any
    alibi_batch: int
    alibi_head: int
    bias: Any
    bias_batch: int
    bias_head: int
    bias_row: int
    bias_col: int
    bias_align: Any
    mask: Any
    mask_batch: int
    mask_head: int
    mask_row: int
    mask_col: int
    mask_align: Any
    seed: Any
    threshold: int
    rescale: float


@triton.jit
def _at(ptr, batch, head, stride_batch, stride_head):
    return ptr + batch.to(tl.int64) * stride_batch + head.to(tl.int64) * stride_head


@triton.jit
def _load(ptr, rows, cols, stride_row, stride_col, ALIGN: tl.constexpr, seqlen_q, seqlen_k):
    ptrs = ptr + (rows.to(tl.int64) * stride(stride_row, ALIGN) + cols.to(tl.int64) * stride_col)
    return tl.load(ptrs, mask=(rows < seqlen_q) & (cols < seqlen_k), other=0)


@triton.jit
def open_head(mods, batch, head, seqlen_q, seqlen_k):
    """What scores depend on inside one head of one sequence: its indices and lengths, its ALiBi slope, and where its
    bias and mask begin."""
    slope = 0.0
    bias = batch
    mask = batch
    if mods.alibi is not None:
        slope = tl.load(_at(mods.alibi, batch, head, size(mods.alibi_batch), mods.alibi_head)).to(tl.float32)
    if mods.bias is not None:
        bias = _at(
            mods.bias, batch, head, stride(mods.bias_batch, mods.bias_align), stride(mods.bias_head, mods.bias_align)
        )
    if mods.mask is not None:
        mask = _at(
            mods.mask, batch, head, stride(mods.mask_batch, mods.mask_align), stride(mods.mask_head, mods.mask_align)
        )
    return batch, head, seqlen_q, seqlen_k, slope, bias, mask


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    y = (1.0 - e) / (1.0 + e)
    y = tl.where(x < 0.0, -y, y)
    if EXACT:  # 1 - e cancels for small x: the series there
        x2 = x * x
        tail = -17 / 315 + x2 * (62 / 2835 + x2 * (-1382 / 155925 + x2 * (21844 / 6081075)))
        y = tl.where(x2 < 0.1, x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * tail))), y)
    return y


@triton.jit
def score_unit(mods, mode):
    """What scores are to be multiplied with. Plain ones are q.k itself: their scale folds into the exponent."""
    if mode.plain:
        return from_natural(mods.scale, mode)
    else:
        return 1.0


@triton.jit
def distance(rows, cols, seqlen_q, seqlen_k):
    return tl.abs(cols - rows - (seqlen_k - seqlen_q)).to(tl.float32)


@triton.jit
def score_tile(qk, rows, cols, in_head, mods, mode):
    """Scores (see `score_unit`), and what `uncap` needs. rows and cols broadcast to qk, either way round."""
    _, _, seqlen_q, seqlen_k, slope, bias, mask = in_head
    s = qk
    capped = qk
    if not mode.plain:
        s = qk * mods.scale
        if mods.softcap is not None:
            capped = tanh(s / mods.softcap, mode.exact)
            s = capped * mods.softcap
        if mods.alibi is not None:
            s -= slope * distance(rows, cols, seqlen_q, seqlen_k)
        if mods.bias is not None:
            s += _load(bias, rows, cols, mods.bias_row, mods.bias_col, mods.bias_align, seqlen_q, seqlen_k).to(
                tl.float32
            )
        s = from_natural(s, mode)
    if mods.mask is not None:
        s = tl.where(
            _load(mask, rows, cols, mods.mask_row, mods.mask_col, mods.mask_align, seqlen_q, seqlen_k) != 0,
            s,
            float("-inf"),
        )
    return s, capped


@triton.jit
def uncap(ds, capped, mods):
    """From the gradient of scores to that of q.k * scale."""
    if mods.softcap is not None:
        return ds * (1.0 - capped * capped)
    else:
        return ds
