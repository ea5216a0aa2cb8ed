"""Where a sequence's keys are in a cache, how long it is, and how its keys are split among programs."""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Cache(NamedTuple):
    """A cache (pages, page_size, heads, dim) as kernels take it. The last dim has stride 1."""

    ptr: Any
    stride_page: int
    stride_row: int
    stride_head: int


class Where(NamedTuple):
    """Which pages and lengths sequences have, None for what a call does not have; as `kvcache.CacheInputs`."""

    table: Any
    table_stride: int
    cache_seqlens: Any
    leftpad: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any


class Sizes(NamedTuple):
    """Integers of a call. Made inside a kernel, from arguments of their own: Triton would specialise on integers in a
    tuple."""

    batch: Any
    seqlen_q: Any
    seqlen_cache: Any
    seqlen_new: Any
    num_pages: Any
    capacity: Any
    num_heads_k: Any
    total_q: Any
    window_left: Any
    window_right: Any
    items: Any  # what the keys of all sequences are divided into
    split_blocks: Any  # blocks of keys in a split, where that is fixed


SIZES = [
    "batch",
    "seqlen_q",
    "seqlen_cache",
    "seqlen_new",
    "num_pages",
    "capacity",
    "num_heads_k",
    "total_q",
    "window_left",
    "window_right",
    "items",
    "split_blocks",
]


@triton.jit
def cached_length(where, sizes, b, inside):
    """Keys of a sequence before anything is appended; b may be a vector, inside says which of it are sequences."""
    if where.cache_seqlens is None:
        return b * 0 + sizes.seqlen_cache
    else:
        return tl.load(where.cache_seqlens + b, mask=inside, other=0).to(tl.int32)


@triton.jit
def keys_of(where, sizes, b, inside):
    """(first position, number of keys) of a sequence; inside the cache whatever the lengths say."""
    end = cached_length(where, sizes, b, inside)
    if where.cu_seqlens_k is None:
        end += sizes.seqlen_new
    else:
        end += tl.load(where.cu_seqlens_k + b + 1, mask=inside, other=0) - tl.load(
            where.cu_seqlens_k + b, mask=inside, other=0
        )
    end = tl.minimum(tl.maximum(end, 0), sizes.capacity)
    first = b * 0
    if where.leftpad is not None:
        first = tl.minimum(tl.maximum(tl.load(where.leftpad + b, mask=inside, other=0).to(tl.int32), 0), end)
    return first, end - first


@triton.jit
def queries_of(where, sizes, b, inside):
    """(first row in q, number of rows) of a sequence; inside q whatever cu_seqlens_q holds."""
    if where.cu_seqlens_q is None:
        return b * 0, b * 0 + sizes.seqlen_q
    else:
        start = tl.load(where.cu_seqlens_q + b, mask=inside, other=0)
        stop = tl.minimum(tl.load(where.cu_seqlens_q + b + 1, mask=inside, other=0), sizes.total_q)
        start = tl.minimum(tl.maximum(start, 0), sizes.total_q)
        return start, tl.minimum(tl.maximum(stop - start, 0), sizes.seqlen_q)


@triton.jit
def _page_of(where, sizes, b, number):
    """The number-th page of a sequence; number may be a vector. A page of the cache whatever the table holds."""
    if where.table is None:
        page = b + number * 0
    else:
        page = tl.load(where.table + b.to(tl.int64) * where.table_stride + number).to(tl.int32)
    return tl.minimum(page.to(tl.uint32), sizes.num_pages - 1).to(tl.int64)  # as unsigned, what is negative is large


@triton.jit
def place_of(where, sizes, b, positions, mode):
    """(page, row in it) of positions of a sequence, below its capacity."""
    if mode.page_size > 0:
        return _page_of(where, sizes, b, positions // mode.page_size), positions % mode.page_size
    else:
        return _page_of(where, sizes, b, b * 0), positions


@triton.jit
def place_of_block(where, sizes, b, first, start_n, inside, mode, MASKED: tl.constexpr):
    """(page, row in it) of BLOCK_N keys from start_n on, a multiple of BLOCK_N. MASKED: some are not inside, and are
    anywhere in a page of the sequence."""
    n = tl.arange(0, mode.block_n)
    if mode.in_page == "whole":  # blocks are in one page
        number = start_n // mode.page_size
        return _page_of(where, sizes, b, number), start_n - number * mode.page_size + n
    else:
        if mode.in_page == "parts":  # rows do not change from block to block
            number = start_n // mode.page_size + n // mode.page_size
            return _page_of(where, sizes, b, tl.where(inside, number, 0) if MASKED else number), n % mode.page_size
        else:
            key = tl.where(inside, start_n + n, 0) if MASKED else start_n + n
            return place_of(where, sizes, b, first + key, mode)


@triton.jit
def offsets_of(cache, page, row):
    """Offsets in a cache, int64."""
    return page * cache.stride_page + row.to(tl.int64) * cache.stride_row


@triton.jit
def visible_blocks(where, sizes, b, inside, mode):
    """(first block, number of blocks) of BLOCK_N keys that some row of a sequence sees."""
    _, seqlen_k = keys_of(where, sizes, b, inside)
    first = seqlen_k * 0
    if mode.left:
        _, seqlen_q = queries_of(where, sizes, b, inside)
        first = tl.maximum(seqlen_k - seqlen_q - sizes.window_left, 0) // mode.block_n
    return first, tl.where(inside, tl.cdiv(seqlen_k, mode.block_n) - first, 0)


@triton.jit
def share_of(blocks, total, sizes, mode):
    """(number of splits, blocks in each) of a sequence that has `blocks` of all `total`; or of several.

    split_blocks fixes the latter. Otherwise a sequence gets a share of sizes.items that is in proportion to its keys,
    rounded up from a quarter, so that no split is much longer than others, and at least one."""
    if mode.fixed_split:
        size = blocks * 0 + sizes.split_blocks
    else:
        size = tl.cdiv(blocks, tl.maximum((blocks * sizes.items + total // 4 * 3) // total, 1))
    size = tl.maximum(size, 1)
    return tl.maximum(tl.cdiv(blocks, size), 1), size


@triton.jit
def all_splits(where, sizes, mode):
    """Of all sequences (vectors, padded to a power of two): which they are, and their splits as share_of has them; and
    the blocks of all."""
    b = tl.arange(0, mode.batch_block)
    inside = b < sizes.batch
    _, blocks = visible_blocks(where, sizes, b, inside, mode)
    total = tl.maximum(tl.sum(blocks, 0), 1)
    splits, size = share_of(blocks, total, sizes, mode)
    return b, tl.where(inside, splits, 0), size, total


@triton.jit
def first_items(splits, size, total, sizes, mode):
    """The first work item of every sequence. Programs start in the order of items, so those that have less than half of
    what is usual come last: they fill the time that others take to end."""
    if mode.fixed_split:
        return tl.cumsum(splits, 0) - splits
    else:
        late = size * (2 * sizes.items) < total
        splits = splits.to(tl.int64)
        counted = tl.cumsum(tl.where(late, splits << 32, splits), 0)  # of both kinds, in one sum
        from_end = sizes.items + sizes.batch - (counted >> 32)
        return tl.where(late, from_end, (counted & 0xFFFFFFFF) - splits).to(tl.int32)


@triton.jit
def split_of(item, where, sizes, mode):
    """(sequence, split, blocks of all) of a work item; sequence is -1 for an item that none has."""
    b, splits, size, total = all_splits(where, sizes, mode)
    first = first_items(splits, size, total, sizes, mode)
    here = (first <= item) & (item < first + splits)
    found = tl.sum(tl.where(here, ((b + 1).to(tl.int64) << 32) + first, 0), 0)
    return (found >> 32).to(tl.int32) - 1, item - found.to(tl.int32), total
