"""Attention to a cache: one program a few rows of q, the query heads of a key head packed together, and a run of keys.

With mode.split the keys of a sequence are shared out among programs (see `device.cache`), each leaves what it found,
and `combine` brings it together.
"""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileattn.backends.portable.device.cache import (
    SIZES,
    Cache,
    Sizes,
    cached_length,
    keys_of,
    offsets_of,
    place_of_block,
    queries_of,
    share_of,
    split_of,
    visible_blocks,
)
from tileattn.backends.portable.device.pointwise import tanh
from tileattn.backends.portable.device.rotary import load_turned
from tileattn.backends.portable.device.softmax import add_sink, from_natural, logsumexp, online_softmax


class CacheMode(NamedTuple):
    """What the kernels of a cache are compiled for, every field a tl.constexpr.

    dim = block_a + block_b less padding: a head dim that is no power of two is taken in two parts; likewise dim_v.
    v_in_k: v is the first block_a dims of k. same_strides: rows are in the same places of both caches. page_size:
    positions of a page, 0 where a sequence has one. in_page: blocks of keys begin at multiples of block_n, and lie
    "whole" in a page, or have whole pages as "parts"; or neither ("").
    plain, exact, precision, left, right: as for `launch.Mode`. batch_block: the batch, padded to a power of two.
    one_walk: over all keys of a run, with masks; else those that all rows see whole have a loop without.
    """

    dim: Any
    dim_v: Any
    block_a: Any
    block_b: Any
    block_va: Any
    block_vb: Any
    v_in_k: Any
    same_strides: Any
    page_size: Any
    in_page: Any
    half: Any
    interleaved: Any
    plain: Any
    exact: Any
    precision: Any
    left: Any
    right: Any
    split: Any
    fixed_split: Any
    group: Any
    batch_block: Any
    one_walk: Any
    block_m: Any
    block_n: Any


class Changes(NamedTuple):
    """What happens to q.k; None for what a call does not have. Strides are 0 where a tensor broadcasts. mask_columns:
    how many of the last keys the mask is of."""

    scale: float
    softcap: float | None
    alibi: Any
    alibi_batch: int
    mask: Any
    mask_batch: int
    mask_head: int
    mask_row: int
    mask_col: int
    mask_columns: int
    sink: Any


class Rows(NamedTuple):
    """q or out as kernels take it. The last dim has stride 1; packed: stride_batch is 0."""

    ptr: Any
    stride_batch: int
    stride_row: int
    stride_head: int


@triton.jit
def _load_part(
    cache, offsets, inside, START: tl.constexpr, BLOCK: tl.constexpr, DIM: tl.constexpr, CHECK: tl.constexpr
):
    """Dims START to START + BLOCK of rows at offsets, [BLOCK_N, BLOCK]."""
    dims = START + tl.arange(0, BLOCK)[None, :]
    ptrs = cache.ptr + offsets[:, None] + dims
    if CHECK and START + BLOCK > DIM:
        return tl.load(ptrs, mask=inside[:, None] & (dims < DIM), other=0.0)
    elif CHECK:
        return tl.load(ptrs, mask=inside[:, None], other=0.0)
    elif START + BLOCK > DIM:
        return tl.load(ptrs, mask=dims < DIM, other=0.0)
    else:
        return tl.load(ptrs)


@triton.jit
def _score(qk, cols, here, changes, mode):
    """Scores in the base of `power`, but for the scale of plain ones, which folds into the exponent."""
    batch, head, row, seqlen_q, seqlen_k = here
    s = qk
    if not mode.plain:
        s = qk * changes.scale
        if changes.softcap is not None:
            s = tanh(s / changes.softcap, mode.exact) * changes.softcap
        if changes.alibi is not None:
            slope = tl.load(changes.alibi + batch * changes.alibi_batch + head).to(tl.float32)
            s -= slope[:, None] * tl.abs(cols[None, :] - (row + seqlen_k - seqlen_q)[:, None]).to(tl.float32)
        s = from_natural(s, mode)
    return s


@triton.jit
def _read_mask(cols, here, changes):
    """The mask of keys, [BLOCK_M, BLOCK_N], ahead of the product: see `read_for_scores`."""
    batch, head, row, _, seqlen_k = here
    if changes.mask is not None:
        column = cols - (seqlen_k - changes.mask_columns)
        ptrs = (
            changes.mask
            + batch.to(tl.int64) * changes.mask_batch
            + (head.to(tl.int64) * changes.mask_head + row.to(tl.int64) * changes.mask_row)[:, None]
            + column.to(tl.int64)[None, :] * changes.mask_col
        )
        return tl.load(ptrs, mask=((column >= 0) & (cols < seqlen_k))[None, :], other=1)
    else:
        return 1


@triton.jit
def _seen(mask, cols, here, sizes, changes, mode):
    """Which keys the rows see, [BLOCK_M, BLOCK_N]."""
    _, _, row, seqlen_q, seqlen_k = here
    at = (row + seqlen_k - seqlen_q)[:, None]
    seen = (cols < seqlen_k)[None, :] & (row < seqlen_q)[:, None]
    if mode.right:
        seen = seen & (cols[None, :] <= at + sizes.window_right)
    if mode.left:
        seen = seen & (cols[None, :] >= at - sizes.window_left)
    if changes.mask is not None:
        seen = seen & (mask != 0)
    return seen


@triton.jit
def _attend(
    acc_a, acc_b, m_i, l_i, lo, hi, q_a, q_b, first, k, v, here, where, sizes, changes, mode, MASKED: tl.constexpr
):  # fmt: skip
    """Fold the keys [lo, hi) into the accumulators, the row maxima and the row sums."""
    batch, _, _, _, seqlen_k = here
    unit = from_natural(changes.scale, mode) if mode.plain else 1.0
    for start_n in tl.range(lo, hi, mode.block_n):
        cols = start_n + tl.arange(0, mode.block_n)
        inside = cols < seqlen_k
        page, row = place_of_block(where, sizes, batch, first, start_n, inside, mode, MASKED)
        k_offsets = offsets_of(k, page, row)
        if MASKED:
            mask = _read_mask(cols, here, changes)
        k_a = _load_part(k, k_offsets, inside, 0, mode.block_a, mode.dim, MASKED)
        qk = tl.dot(q_a, k_a.T, input_precision=mode.precision)  # [BLOCK_M, BLOCK_N]
        if mode.block_b > 0:
            k_b = _load_part(k, k_offsets, inside, mode.block_a, mode.block_b, mode.dim, MASKED)
            qk = tl.dot(q_b, k_b.T, qk, input_precision=mode.precision)
        s = _score(qk, cols, here, changes, mode)
        if MASKED:
            s = tl.where(_seen(mask, cols, here, sizes, changes, mode), s, float("-inf"))
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, unit, mode)
        p = p.to(k_a.dtype)
        acc_a = acc_a * alpha[:, None]
        if mode.v_in_k:
            acc_a = tl.dot(p, k_a, acc_a, input_precision=mode.precision)
        else:
            v_offsets = k_offsets if mode.same_strides else offsets_of(v, page, row)
            v_a = _load_part(v, v_offsets, inside, 0, mode.block_va, mode.dim_v, MASKED)
            acc_a = tl.dot(p, v_a, acc_a, input_precision=mode.precision)
            if mode.block_vb > 0:
                v_b = _load_part(v, v_offsets, inside, mode.block_va, mode.block_vb, mode.dim_v, MASKED)
                acc_b = tl.dot(p, v_b, acc_b * alpha[:, None], input_precision=mode.precision)
    return acc_a, acc_b, m_i, l_i


@triton.jit
def _ranges(start, stop, first_row, last_row, here, sizes, changes, mode):
    """The part of keys [start, stop) that rows from first_row to last_row see: (lo, full_lo, full_hi, hi); all see all
    of [full_lo, full_hi). All but hi are multiples of BLOCK_N."""
    _, _, _, seqlen_q, seqlen_k = here
    shift = seqlen_k - seqlen_q
    lo = start
    full_lo = start
    hi = stop
    full_hi = stop
    if mode.left:
        lo = tl.maximum(start, tl.maximum(first_row + shift - sizes.window_left, 0) // mode.block_n * mode.block_n)
        full_lo = tl.cdiv(tl.maximum(last_row + shift - sizes.window_left, 0), mode.block_n) * mode.block_n
        full_lo = tl.maximum(full_lo, lo)
    if mode.right:
        hi = tl.minimum(stop, last_row + shift + sizes.window_right + 1)
        full_hi = tl.minimum(stop, first_row + shift + sizes.window_right + 1)
    if changes.mask is not None:
        full_hi = tl.minimum(full_hi, seqlen_k - changes.mask_columns)
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // mode.block_n * mode.block_n, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def store_rows(out, lse, acc_a, acc_b, m_i, l_i, here, start_q, inside, where, sizes, sink, mode):
    """Normalise, take in the sink, and write rows of out and lse."""
    batch, head, row, _, _ = here
    if sink is not None:
        of_head = from_natural(tl.load(sink + head).to(tl.float32), mode)
        alpha, m_i, l_i = add_sink(m_i, l_i, of_head, mode)
        acc_a = acc_a * alpha[:, None]
        if mode.block_vb > 0:
            acc_b = acc_b * alpha[:, None]
    inverse = (1.0 / tl.where(l_i == 0.0, 1.0, l_i))[:, None]
    rows = batch.to(tl.int64) * out.stride_batch + (start_q + row).to(tl.int64) * out.stride_row
    ptrs = (out.ptr + rows + head.to(tl.int64) * out.stride_head)[:, None]
    dims = tl.arange(0, mode.block_va)[None, :]
    tl.store(ptrs + dims, (acc_a * inverse).to(out.ptr.dtype.element_ty), mask=inside[:, None] & (dims < mode.dim_v))
    if mode.block_vb > 0:
        dims = mode.block_va + tl.arange(0, mode.block_vb)[None, :]
        tl.store(
            ptrs + dims, (acc_b * inverse).to(out.ptr.dtype.element_ty), mask=inside[:, None] & (dims < mode.dim_v)
        )
    if where.cu_seqlens_q is None:
        stats = (batch.to(tl.int64) * sizes.num_heads_k * mode.group + head) * sizes.seqlen_q + row
    else:
        stats = head.to(tl.int64) * sizes.total_q + start_q + row
    tl.store(lse + stats, logsumexp(m_i, l_i, mode), mask=inside)


@triton.jit
def partial_rows(partial, item, head_k, rows, sizes, mode):
    """Where programs leave rows: pointers to dim_v of the accumulator, the maximum and the sum, float32."""
    row = (item.to(tl.int64) * sizes.num_heads_k + head_k) * (sizes.seqlen_q * mode.group) + rows
    return partial + row * (mode.dim_v + 4)


@triton.jit
def _leave(partial, acc_a, acc_b, m_i, l_i, item, head_k, rows, inside, sizes, mode):
    """Rows that are not finished, for `combine`."""
    ptrs = partial_rows(partial, item, head_k, rows, sizes, mode)
    tl.store(ptrs + mode.dim_v, m_i, mask=inside)
    tl.store(ptrs + (mode.dim_v + 1), l_i, mask=inside)
    dims = tl.arange(0, mode.block_va)[None, :]
    tl.store(ptrs[:, None] + dims, acc_a, mask=inside[:, None] & (dims < mode.dim_v))
    if mode.block_vb > 0:
        dims = mode.block_va + tl.arange(0, mode.block_vb)[None, :]
        tl.store(ptrs[:, None] + dims, acc_b, mask=inside[:, None] & (dims < mode.dim_v))


@triton.jit(do_not_specialize=SIZES)
def decode_kernel(
    q,
    k,
    v,
    out,
    lse,
    partial,
    where,
    rotary,
    changes,
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
    tiles = tl.cdiv(seqlen_q * mode.group, mode.block_m)
    tile = tl.program_id(0) % tiles
    head_k = tl.program_id(0) // tiles % num_heads_k
    item = tl.program_id(0) // tiles // num_heads_k
    if mode.split:
        b, split, total = split_of(item, where, sizes, mode)
        if b < 0:
            return
    else:
        b = item
    start_q, len_q = queries_of(where, sizes, b, True)
    rows = tile * mode.block_m + tl.arange(0, mode.block_m)
    row = rows // mode.group
    inside = row < len_q
    if tile * mode.block_m >= len_q * mode.group:
        return
    row = tl.where(inside, row, 0)
    head = head_k * mode.group + rows % mode.group
    first, seqlen_k = keys_of(where, sizes, b, True)
    first_block, seen_blocks = visible_blocks(where, sizes, b, True, mode)
    start = first_block * mode.block_n
    stop = seqlen_k
    if mode.split:
        splits, blocks = share_of(seen_blocks, total, sizes, mode)
        start += split * blocks * mode.block_n
        stop = tl.minimum(start + blocks * mode.block_n, seqlen_k)
    here = b, head, row, len_q, seqlen_k

    q_rows = b.to(tl.int64) * q.stride_batch + (start_q + row).to(tl.int64) * q.stride_row
    q_ptrs = (q.ptr + q_rows + head.to(tl.int64) * q.stride_head)[:, None]
    at = (cached_length(where, sizes, b, True) + row)[:, None]
    dims = tl.arange(0, mode.block_a)[None, :]
    q_a = load_turned(q_ptrs, dims, at, inside[:, None], rotary, mode.dim, mode.half, mode.interleaved)
    q_a = q_a.to(q.ptr.dtype.element_ty)
    q_b = q_a
    if mode.block_b > 0:
        dims = mode.block_a + tl.arange(0, mode.block_b)[None, :]
        q_b = load_turned(q_ptrs, dims, at, inside[:, None], rotary, mode.dim, mode.half, mode.interleaved)
        q_b = q_b.to(q.ptr.dtype.element_ty)
    k = Cache(k.ptr + head_k.to(tl.int64) * k.stride_head, k.stride_page, k.stride_row, 0)
    v = Cache(v.ptr + head_k.to(tl.int64) * v.stride_head, v.stride_page, v.stride_row, 0)

    acc_a = tl.zeros([mode.block_m, mode.block_va], tl.float32)
    m_i = tl.full([mode.block_m], float("-inf"), tl.float32)
    l_i = tl.zeros([mode.block_m], tl.float32)
    acc_b = l_i
    if mode.block_vb > 0:
        acc_b = tl.zeros([mode.block_m, mode.block_vb], tl.float32)
    last_row = tl.minimum(tile * mode.block_m + mode.block_m, len_q * mode.group) - 1
    lo, full_lo, full_hi, hi = _ranges(
        start, stop, tile * mode.block_m // mode.group, last_row // mode.group, here, sizes, changes, mode
    )
    if mode.one_walk:
        full_hi = lo
    else:
        if mode.left:
            acc_a, acc_b, m_i, l_i = _attend(
                acc_a, acc_b, m_i, l_i, lo, tl.minimum(full_lo, hi), q_a, q_b, first, k, v, here, where, sizes,
                changes, mode, True,
            )  # fmt: skip
        acc_a, acc_b, m_i, l_i = _attend(
            acc_a, acc_b, m_i, l_i, full_lo, tl.minimum(full_hi, hi), q_a, q_b, first, k, v, here, where, sizes,
            changes, mode, False,
        )  # fmt: skip
    acc_a, acc_b, m_i, l_i = _attend(
        acc_a, acc_b, m_i, l_i, full_hi, hi, q_a, q_b, first, k, v, here, where, sizes, changes, mode, True
    )
    if mode.plain:
        m_i *= from_natural(changes.scale, mode)
    if mode.split and splits > 1:
        _leave(partial, acc_a, acc_b, m_i, l_i, item, head_k, rows, inside, sizes, mode)
        return
    store_rows(out, lse, acc_a, acc_b, m_i, l_i, here, start_q, inside, where, sizes, changes.sink, mode)
