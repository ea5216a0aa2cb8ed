"""New keys and values into a cache: one program a few tokens of one head."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from tileattn.backends.portable.device.cache import Sizes, cached_length, offsets_of, place_of
from tileattn.backends.portable.device.rotary import load_turned

ROWS = tl.constexpr(8)  # tokens of a program
SIZES = ["batch", "seqlen_cache", "seqlen_new", "num_pages", "capacity", "num_heads_k", "tokens"]


class AppendMode(NamedTuple):
    """What the kernel is compiled for, as in `decode.CacheMode`. block_dim: dim, padded to a power of two."""

    dim: Any
    block_dim: Any
    dim_v: Any
    block_dim_v: Any
    page_size: Any
    half: Any
    interleaved: Any
    batch_block: Any


@triton.jit
def _locate_tokens(token, where, sizes, tokens, mode):
    """Sequence and row in it of tokens, and which of them there are."""
    inside = token < tokens
    if where.cu_seqlens_k is None:
        sequence = token // sizes.seqlen_new
        row = token % sizes.seqlen_new
    else:
        b = tl.arange(0, mode.batch_block)
        stops = tl.load(where.cu_seqlens_k + b + 1, mask=b < sizes.batch, other=2**31 - 1)
        sequence = tl.sum((stops[None, :] <= token[:, None]).to(tl.int32), 1)
        inside = inside & (sequence < sizes.batch)
        row = token - tl.load(where.cu_seqlens_k + sequence, mask=inside, other=0)
    return tl.where(inside, sequence, 0), tl.where(inside, row, 0), inside


@triton.jit(do_not_specialize=SIZES)
def append_kernel(
    k_cache,
    v_cache,
    k,
    v,
    where,
    rotary,
    batch,
    seqlen_cache,
    seqlen_new,
    num_pages,
    capacity,
    num_heads_k,
    tokens,
    mode,
):
    sizes = Sizes(
        batch, 0, seqlen_cache, seqlen_new, num_pages, capacity, num_heads_k, 0, 0, 0, 0, 0
    )  # fmt: skip
    pid = tl.program_id(0)
    head = (pid % num_heads_k).to(tl.int64)
    token = pid // num_heads_k * ROWS + tl.arange(0, ROWS)
    sequence, new_row, inside = _locate_tokens(token, where, sizes, tokens, mode)
    position = new_row + cached_length(where, sizes, sequence, inside)
    inside = inside & (position >= 0) & (position < capacity)
    position = tl.where(inside, position, 0)
    if where.cu_seqlens_k is not None:  # packed: rows count from the first token
        new_row = token

    source = sequence.to(tl.int64) * k.stride_batch + new_row.to(tl.int64) * k.stride_row + head * k.stride_head
    page, row = place_of(where, sizes, sequence, position, mode)
    target = offsets_of(k_cache, page, row) + head * k_cache.stride_head
    dims = tl.arange(0, mode.block_dim)[None, :]
    new = load_turned(
        k.ptr + source[:, None], dims, position[:, None], inside[:, None], rotary, mode.dim, mode.half, mode.interleaved
    )
    ptrs = k_cache.ptr + target[:, None] + dims
    tl.store(ptrs, new.to(k_cache.ptr.dtype.element_ty), mask=inside[:, None] & (dims < mode.dim))
    if v is not None:
        source = sequence.to(tl.int64) * v.stride_batch + new_row.to(tl.int64) * v.stride_row + head * v.stride_head
        target = offsets_of(v_cache, page, row) + head * v_cache.stride_head
        dims_v = tl.arange(0, mode.block_dim_v)[None, :]
        copied = inside[:, None] & (dims_v < mode.dim_v)
        tl.store(
            v_cache.ptr + target[:, None] + dims_v, tl.load(v.ptr + source[:, None] + dims_v, mask=copied), mask=copied
        )
