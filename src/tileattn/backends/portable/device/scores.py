"""From q.k to scores, softcap -> + alibi -> + bias -> score_mod, and back for gradients."""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileattn.backends.portable.device.pointwise import tanh
from tileattn.backends.portable.device.rows import size, stride
from tileattn.backends.portable.device.softmax import from_natural


class Modifiers(NamedTuple):
    """What happens to q.k and to the probabilities; None for what a call does not have. A field such as bias_row is a
    stride, 0 where the tensor broadcasts; those of bias and mask but for columns are `sized` with align
    bias_align, a tl.constexpr that also divides the number of columns. (Flat: Triton 3.6 loses constants in nested
    tuples.)

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
def rows_inside(rows, in_head):
    """Those that a tile has beyond the sequence are the last one. (Columns beyond it need no such care, but for reads:
    what becomes of them is masked, or not stored.)"""
    return tl.minimum(rows, in_head.seqlen_q - 1)


@triton.jit
def load_modifier(ptr, rows, cols, stride_row, stride_col, ALIGN: tl.constexpr, in_head, CHECK: tl.constexpr):
    """A tile of a bias or mask; without CHECK, of columns inside the sequence. What lies beyond it is anything that the
    tensor holds, or 0: a bound for each row or column would make a load of each element."""
    ptrs = ptr + rows_inside(rows, in_head).to(tl.int64) * stride(stride_row, ALIGN) + cols.to(tl.int64) * stride_col
    if CHECK:
        return tl.load(ptrs, mask=cols < tl.cdiv(in_head.seqlen_k, ALIGN) * ALIGN, other=0)
    else:
        return tl.load(ptrs)


class Blocks(NamedTuple):
    """A block mask as kernels take it (see `sparsity`). lists: of the tiles to visit, a row for each block of the
    kernel. kinds: uint8 map of blocks, each of size_q rows by size_k columns of scores. Strides are `sized`."""

    lists: Any
    lists_batch: int
    lists_head: int
    lists_row: int
    kinds: Any
    kinds_batch: int
    kinds_head: int
    kinds_row: int
    size_q: int
    size_k: int


class Head(NamedTuple):
    """What scores depend on inside one head of one sequence. bias, mask, lists, kinds: where those of this head begin.
    Made inside a kernel. (Without the Blocks themselves: a tuple that is returned cannot hold None.)"""

    batch: Any
    head: Any
    seqlen_q: Any
    seqlen_k: Any
    slope: Any
    bias: Any
    mask: Any
    lists: Any
    lists_row: Any
    kinds: Any
    kinds_row: Any
    size_q: Any
    size_k: Any
    captured: Any


@triton.jit
def open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k):
    slope = 0.0
    bias = batch
    mask = batch
    lists = batch
    kinds = batch
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
    if blocks.kinds is not None:
        kinds = _at(blocks.kinds, batch, head, size(blocks.kinds_batch), size(blocks.kinds_head))
    if blocks.lists is not None:
        lists = _at(blocks.lists, batch, head, size(blocks.lists_batch), size(blocks.lists_head))
    return Head(
        batch, head, seqlen_q, seqlen_k, slope, bias, mask, lists, size(blocks.lists_row), kinds,
        size(blocks.kinds_row), blocks.size_q, blocks.size_k, captured,
    )  # fmt: skip


@triton.jit
def score_unit(mods, mode):
    """What scores are to be multiplied with, for `power`. Plain ones are q.k itself: their scale folds into it."""
    if mode.plain:
        return from_natural(mods.scale, mode)
    else:
        return from_natural(1.0, mode)


@triton.jit
def distance(rows, cols, origin, in_head):
    """What ALiBi's slopes are multiplied with. Rows and columns become floats, which are few, not their differences;
    counted from origin, a row of the tile or one that its columns are near, so that small distances are exact."""
    diagonal = origin + (in_head.seqlen_k - in_head.seqlen_q)
    return tl.abs((cols - diagonal).to(tl.float32) - (rows - origin).to(tl.float32))


@triton.jit
def load_bias(rows, cols, in_head, mods, CHECK: tl.constexpr):
    return load_modifier(in_head.bias, rows, cols, mods.bias_row, mods.bias_col, mods.bias_align, in_head, CHECK)


@triton.jit
def read_for_scores(rows, cols, in_head, mods, mode, CHECK: tl.constexpr):
    """What `score_tile` takes that is loaded an element at a time, in the shape of a tile of scores; without CHECK the
    columns lie inside the sequence.

    The forward kernel asks for it ahead of the product, as for what masks take, so that its latency hides theirs, and
    so that row maxima and sums get the layout of the product from Triton. They would get that of a load which comes
    after it: scores would be moved there, and all exponentials computed in both. (What is loaded in groups has been
    prefetched, and is waited for when it is needed.)"""
    bias, for_mod = 0, 0
    if mods.bias is not None and mods.bias_align == 1:
        bias = load_bias(rows, cols, in_head, mods, CHECK)
    if mode.score_reads is not None:
        row = rows_inside(rows, in_head)
        for_mod = mode.score_reads(in_head.batch, in_head.head, row, cols, in_head.captured, mode.exact)
    return bias, for_mod


@triton.jit
def score_tile(qk, read, rows, cols, origin, in_head, mods, mode, CHECK: tl.constexpr):
    """Scores (see `score_unit`), and what `uncap` and `unmodify` need. rows and cols broadcast to qk, either way round;
    origin: see `distance`; without CHECK the columns lie inside the sequence."""
    bias, for_mod = read
    s = qk
    capped = qk
    raw = qk
    if not mode.plain:
        if mods.softcap is not None:
            capped = tanh(qk * (mods.scale / mods.softcap), mode.exact)
            s = capped * mods.softcap
        else:
            s = qk * mods.scale
        if mods.alibi is not None:
            s -= in_head.slope * distance(rows, cols, origin, in_head)
        if mods.bias is not None:
            if mods.bias_align != 1:
                bias = load_bias(rows, cols, in_head, mods, CHECK)
            s += bias.to(tl.float32)
        if mode.score_mod is not None:
            raw = s
            row = rows_inside(rows, in_head)
            s = mode.score_mod(s, in_head.batch, in_head.head, row, cols, for_mod, in_head.captured, mode.exact)
    return s, capped, raw


@triton.jit
def unmodify(ds, p, raw, rows, cols, in_head, mode):
    """From the gradient of scores to that of what score_mod got; nothing flows where the probability is 0."""
    if mode.score_derivative is not None:
        row = rows_inside(rows, in_head)
        ds = mode.score_derivative(raw, in_head.batch, in_head.head, row, cols, ds, in_head.captured, mode.exact)
        return tl.where(p > 0.0, ds, 0.0)
    else:
        return ds


@triton.jit
def uncap(ds, capped, mods):
    """And on to that of q.k * scale."""
    if mods.softcap is not None:
        return ds * (1.0 - capped * capped)
    else:
        return ds
