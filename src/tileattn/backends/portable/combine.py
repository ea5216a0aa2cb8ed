"""Brings together what the programs of `decode` left of a row whose keys were split among them; exact, in one order."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileattn.backends.portable.decode import partial_rows, store_rows
from tileattn.backends.portable.device.cache import SIZES, Sizes, all_splits, first_items, queries_of
from tileattn.backends.portable.device.softmax import power

PARTS = tl.constexpr(16)  # taken in at a time


class CombineMode(NamedTuple):
    """What of a `CacheMode` parts and their number depend on."""

    dim_v: Any
    block_va: Any
    block_vb: Any
    exact: Any
    left: Any
    fixed_split: Any
    group: Any
    batch_block: Any
    block_n: Any


@triton.jit
def _take_in(acc, parts, weight, there, START: tl.constexpr, BLOCK: tl.constexpr, mode):
    """acc [1, BLOCK] plus dims START to START + BLOCK of parts, each times its weight."""
    dims = START + tl.arange(0, BLOCK)[None, :]
    part = tl.load(parts[:, None] + dims, mask=there[:, None] & (dims < mode.dim_v), other=0.0)
    return acc + tl.sum(part * weight[:, None], 0)[None, :]


@triton.jit
def _combine_row(out, lse, partial, where, sink, sizes, b, head_k, rows, first, splits, mode):
    """rows: one row of q of the query heads of head_k. first: the first work item of its sequence."""
    start_q, len_q = queries_of(where, sizes, b, True)
    row = rows // mode.group
    m_i = tl.full([1], float("-inf"), tl.float32)
    l_i = tl.zeros([1], tl.float32)
    acc_a = tl.zeros([1, mode.block_va], tl.float32)
    acc_b = l_i
    if mode.block_vb > 0:
        acc_b = tl.zeros([1, mode.block_vb], tl.float32)
    for begin in tl.range(0, tl.where(row < len_q, splits, 0), PARTS):
        split = begin + tl.arange(0, PARTS)
        there = split < splits
        parts = partial_rows(partial, first + split, head_k, rows, sizes, mode)
        m = tl.load(parts + mode.dim_v, mask=there, other=float("-inf"))
        m_new = tl.maximum(m_i, tl.max(m, 0))
        peak = tl.where(m_new == float("-inf"), 0.0, m_new)
        weight = power(m - peak, mode)
        alpha = power(m_i - peak, mode)
        l_i = l_i * alpha + tl.sum(tl.load(parts + (mode.dim_v + 1), mask=there, other=0.0) * weight, 0)
        acc_a = _take_in(acc_a * alpha[:, None], parts, weight, there, 0, mode.block_va, mode)
        if mode.block_vb > 0:
            acc_b = _take_in(acc_b * alpha[:, None], parts, weight, there, mode.block_va, mode.block_vb, mode)
        m_i = m_new
    one = tl.zeros([1], tl.int32)
    here = b, one + head_k * mode.group + rows % mode.group, one + row, len_q, 0
    store_rows(out, lse, acc_a, acc_b, m_i, l_i, here, start_q, one + row < len_q, where, sizes, sink, mode)


@triton.jit(do_not_specialize=SIZES)
def combine_kernel(
    out,
    lse,
    partial,
    where,
    sink,
    batch,
    seqlen_q,
    seqlen_cache,
    seqlen_new,
    num_pages,
    capacity,
    num_heads_k,
    total_q,
    window_left,
    window_right,
    items,
    split_blocks,
    mode,
):
    sizes = Sizes(
        batch, seqlen_q, seqlen_cache, seqlen_new, num_pages, capacity, num_heads_k, total_q, window_left,
        window_right, items, split_blocks,
    )  # fmt: skip
    each, all_splits_of, size, total = all_splits(where, sizes, mode)
    if tl.max(all_splits_of, 0) <= 1:  # as often in a large batch
        return
    all_first = first_items(all_splits_of, size, total, sizes, mode)
    rows_of_head = seqlen_q * mode.group
    for i in tl.range(tl.program_id(0), rows_of_head * num_heads_k * batch, tl.num_programs(0)):
        b = i // rows_of_head // num_heads_k
        splits = tl.sum(tl.where(each == b, all_splits_of, 0), 0)
        if splits > 1:
            first = tl.sum(tl.where(each == b, all_first, 0), 0)
            head_k = i // rows_of_head % num_heads_k
            _combine_row(out, lse, partial, where, sink, sizes, b, head_k, i % rows_of_head, first, splits, mode)
