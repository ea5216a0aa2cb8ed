"""Tiles of rows of a (batch, seqlen, heads, head_dim) tensor, and which rows belong to which program."""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Triton compiles anew for an integer that is 1 or a multiple of 16, and do_not_specialize does not reach into tuples.
# Strides come multiplied by 16, so that one kernel serves all of them, after division by a constant that divides them.
SIZE_UNIT = tl.constexpr(16)


def sized(*sizes: int, align: int = 1) -> tuple[int, ...]:
    return tuple(size // align * 16 for size in sizes)


class Rows(NamedTuple):
    """A tensor as kernels take it, strides `sized` with align, a tl.constexpr: the power of two up to 16 that divides
    them all. The last dim has stride 1; varlen: stride_batch is 0."""

    ptr: Any
    stride_batch: int
    stride_row: int
    stride_head: int
    align: Any


class RowStats(NamedTuple):
    """One float32 a row of every head: (batch, heads, seqlen), varlen (heads, total). Rows have stride 1, the other
    strides are `sized`."""

    ptr: Any
    stride_batch: int
    stride_head: int


class Workspace(NamedTuple):
    """Like RowStats, for kernels alone: rows of a sequence are padded to a multiple of PAD, and so are strides.
    stride_batch is None for varlen."""

    ptr: Any
    stride_batch: int | None
    stride_head: int


class Sequences(NamedTuple):
    """Lengths (varlen: the longest), where sequences begin (None unless varlen), query heads, and the window. Made
    inside a kernel, from arguments of their own: Triton would specialise on integers in a tuple."""

    seqlen_q: Any
    seqlen_k: Any
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    total_q: Any
    total_k: Any
    num_heads: Any
    window_left: Any
    window_right: Any


SIZES = ["seqlen_q", "seqlen_k", "total_q", "total_k", "num_heads", "window_left", "window_right"]


PAD = tl.constexpr(128)


@triton.jit
def size(x):
    """The value of a `sized` integer."""
    return x // SIZE_UNIT


@triton.jit
def stride(x, ALIGN: tl.constexpr):
    """The value of a stride that is `sized` with an align. A product: tl.multiple_of does not outlive inlining."""
    return size(x) * ALIGN


@triton.jit
def locate(pid, num_blocks, num_heads):
    """(block, head, batch) of a program: blocks of one head are neighbours, so that they share its k and v in L2."""
    block = pid % num_blocks
    pair = pid // num_blocks
    return block, pair % num_heads, pair // num_heads


@triton.jit
def span(cu_seqlens, batch, total, longest):
    """(first row, length) of a sequence; inside the tensor whatever cu_seqlens holds."""
    if cu_seqlens is None:
        return longest * 0, longest
    else:
        start = tl.minimum(tl.maximum(tl.load(cu_seqlens + batch), 0), total)
        end = tl.minimum(tl.load(cu_seqlens + batch + 1), total)
        return start, tl.minimum(tl.maximum(end - start, 0), longest)


@triton.jit
def base_of(x, batch, head, start):
    """Pointer to the first row of one head of one sequence."""
    base = x.ptr + batch.to(tl.int64) * stride(x.stride_batch, x.align)
    base += head.to(tl.int64) * stride(x.stride_head, x.align)
    return base + start.to(tl.int64) * stride(x.stride_row, x.align)


@triton.jit
def open_rows(x, batch, head, start, length, mode, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr):
    """One head of one sequence, to be walked through with `load_rows`: a tensor descriptor, or pointers."""
    if mode.tma == "host":
        return x, batch, head
    else:
        base = base_of(x, batch, head, start)
        stride_row = stride(x.stride_row, x.align)
        if mode.tma == "device":
            return tl.make_tensor_descriptor(base, [tl.maximum(length, 1), DIM], [stride_row, 1], [BLOCK, BLOCK_DIM])
        else:
            offs = tl.arange(0, BLOCK)[:, None]
            dims = tl.arange(0, BLOCK_DIM)[None, :]
            stride_row = stride_row.to(tl.int64)
            return base + offs * stride_row + dims, offs, dims < DIM, stride_row, length


@triton.jit
def load_rows(rows, first, mode, CHECK: tl.constexpr):
    """Rows first to first + BLOCK, [BLOCK, BLOCK_DIM]; zeros beyond head_dim and, with CHECK, beyond the sequence."""
    if mode.tma == "host":
        descriptor, batch, head = rows
        block = descriptor.load([batch, head, first, 0])
        return block.reshape(block.shape[2], block.shape[3])
    elif mode.tma == "device":
        return rows.load([first, 0])
    else:
        ptrs, offs, in_dims, stride_row, length = rows
        ptrs += first * stride_row
        if CHECK:
            return tl.load(ptrs, mask=(first + offs < length) & in_dims, other=0.0)
        elif mode.pad:
            return tl.load(ptrs, mask=in_dims, other=0.0)
        else:
            return tl.load(ptrs)


@triton.jit
def load_block(
    x, batch, head, start, first, length, mode, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """A block that is loaded once, [BLOCK, BLOCK_DIM]; zeros beyond head_dim and the sequence."""
    return load_rows(open_rows(x, batch, head, start, length, mode, DIM, BLOCK_DIM, BLOCK), first, mode, True)


@triton.jit
def held(block, mode):
    """A block that stays, as an operand of products. Those that were loaded are read from shared memory, those that
    were computed from registers; the sum only makes 0 of -0."""
    if mode.held:
        return block + 0.0
    else:
        return block


@triton.jit
def store_block(
    x, block, batch, head, start, first, length, DIM: tl.constexpr, BLOCK_DIM: tl.constexpr, BLOCK: tl.constexpr
):
    """Write the part of a block that lies inside head_dim and the sequence. Through pointers: making a descriptor takes
    longer than it saves."""
    rows = first + tl.arange(0, BLOCK)[:, None]
    dims = tl.arange(0, BLOCK_DIM)[None, :]
    ptrs = base_of(x, batch, head, start) + rows.to(tl.int64) * stride(x.stride_row, x.align) + dims
    tl.store(ptrs, block.to(x.ptr.dtype.element_ty), mask=(rows < length) & (dims < DIM))


@triton.jit
def stats_at(stats, batch, head, start):
    """Pointer to the first row of one head of one sequence."""
    return (
        stats.ptr + batch.to(tl.int64) * size(stats.stride_batch) + head.to(tl.int64) * size(stats.stride_head) + start
    )


@triton.jit
def workspace_at(x, batch, head, start):
    """Pointer to the first row of one head of one sequence in a workspace: there they begin at multiples of PAD."""
    begin = start // PAD * PAD
    if x.stride_batch is None:  # varlen: a gap of up to PAD rows before each sequence
        begin += batch * PAD
    else:
        begin += batch.to(tl.int64) * x.stride_batch
    return x.ptr + tl.multiple_of(begin + head.to(tl.int64) * x.stride_head, PAD)
