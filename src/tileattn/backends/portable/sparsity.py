"""Block masks: for every block of a kernel, the list of tiles that it visits.

A row of `lists` is one block of rows (or, to walk the other way, of keys): how many tiles are visible as a whole, how
many need a mask, then the former from the front and the latter from the back. A tile is twice its place, and 1 more if
the block mask shows all of it. The window is worked in, so that nothing outside it is listed. A bool mask that many
heads share becomes a block mask first.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileattn import block_mask
from tileattn.backends.portable.device.rows import SIZES, Sequences, locate, size, sized, span, stride
from tileattn.backends.portable.device.scores import Blocks
from tileattn.backends.portable.launch import (
    DENSE,
    Launch,
    Launcher,
    Sparsity,
    modifiers_of,
    sequences_of,
    window_of,
)
from tileattn.backends.portable.tuning import Tile
from tileattn.problem import Inputs, Problem

FULL = tl.constexpr(block_mask.FULL)
Along = Literal["keys", "rows"]
WORTH = 8  # scores that an element of a mask must serve
CHUNK = 128  # tiles that a program of list_kernel looks at together


@triton.jit(do_not_specialize=SIZES)
def list_kernel(
    blocks, seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, ALONG_KEYS: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One row of lists. num_heads: that lists has."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    rows = tl.cdiv(seqs.seqlen_q, BLOCK_M) if ALONG_KEYS else tl.cdiv(seqs.seqlen_k, BLOCK_N)
    block, head, batch = locate(tl.program_id(0), rows, seqs.num_heads)
    _, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    _, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
    shift = seqlen_k - seqlen_q
    length = tl.cdiv(seqlen_k, BLOCK_N) if ALONG_KEYS else tl.cdiv(seqlen_q, BLOCK_M)
    row = blocks.lists + batch.to(tl.int64) * size(blocks.lists_batch) + head.to(tl.int64) * size(blocks.lists_head)
    row += block.to(tl.int64) * size(blocks.lists_row)
    kinds = blocks.kinds + batch.to(tl.int64) * size(blocks.kinds_batch) + head.to(tl.int64) * size(blocks.kinds_head)
    whole = length * 0
    partial = length * 0
    for first in tl.range(0, length, CHUNK):
        tiles = first + tl.arange(0, CHUNK)
        start_m = (block if ALONG_KEYS else tiles) * BLOCK_M + tiles * 0
        start_n = (tiles if ALONG_KEYS else block) * BLOCK_N + tiles * 0
        end_m = tl.minimum(start_m + BLOCK_M, seqlen_q)
        end_n = tl.minimum(start_n + BLOCK_N, seqlen_k)
        seen = (start_m < end_m) & (start_n < end_n)
        if ALONG_KEYS:  # keys beyond the sequence need a mask; rows beyond it do not count
            unmasked = start_n + BLOCK_N <= seqlen_k
        else:
            unmasked = seen
        if RIGHT:
            seen = seen & (start_n <= end_m - 1 + shift + seqs.window_right)
            unmasked = unmasked & (end_n - 1 <= start_m + shift + seqs.window_right)
        if LEFT:
            seen = seen & (end_n - 1 >= start_m + shift - seqs.window_left)
            unmasked = unmasked & (start_n >= end_m - 1 + shift - seqs.window_left)
        least = tl.full([CHUNK], FULL, tl.int32)
        most = tl.zeros([CHUNK], tl.int32)
        block_q, block_k = start_m // blocks.size_q, start_n // blocks.size_k
        for i in tl.range(0, (BLOCK_M - 2) // blocks.size_q + 2):  # blocks that a tile may touch
            for j in tl.range(0, (BLOCK_N - 2) // blocks.size_k + 2):
                touched = ((block_q + i) * blocks.size_q < end_m) & ((block_k + j) * blocks.size_k < end_n)
                place = (block_q + i).to(tl.int64) * size(blocks.kinds_row) + block_k + j
                kind = tl.load(kinds + place, mask=seen & touched, other=0).to(tl.int32)
                least = tl.where(touched, tl.minimum(least, kind), least)
                most = tl.maximum(most, kind)
        unmasked = (seen & unmasked & (least == FULL)).to(tl.int32)
        masked = (seen & (most > 0)).to(tl.int32) - unmasked
        at_front = whole + tl.cumsum(unmasked, 0) - unmasked
        at_back = length - partial - tl.cumsum(masked, 0)
        entries = tiles * 2 + (least == FULL).to(tl.int32)
        tl.store(row + 2 + at_front, entries, mask=unmasked > 0)
        tl.store(row + 2 + at_back, entries, mask=masked > 0)
        whole += tl.sum(unmasked, 0)
        partial += tl.sum(masked, 0)
    tl.store(row, whole)
    tl.store(row + 1, partial)
    # what kernels that look one place ahead read behind the last of either kind
    tl.store(row + 2 + whole, 0, mask=whole + partial < length)
    tl.store(row + 2 + length, 0)


@triton.jit(do_not_specialize=["rows", "cols", "num_heads"])
def find_kernel(
    mods, blocks, rows, cols, num_heads, SIZE_Q: tl.constexpr, SIZE_K: tl.constexpr, STEP: tl.constexpr
):  # fmt: skip
    """The kind of one block of a bool mask of rows x cols."""
    block_k, block_q, pair = locate(tl.program_id(0), tl.cdiv(cols, SIZE_K), tl.cdiv(rows, SIZE_Q))
    batch, head = pair // num_heads, pair % num_heads
    mask = mods.mask + batch.to(tl.int64) * stride(mods.mask_batch, mods.mask_align)
    mask += head.to(tl.int64) * stride(mods.mask_head, mods.mask_align)
    c = (block_k * SIZE_K + tl.arange(0, SIZE_K))[None, :]
    some = tl.zeros([STEP, SIZE_K], tl.int32)
    every = tl.full([STEP, SIZE_K], 1, tl.int32)
    for first in tl.range(block_q * SIZE_Q, tl.minimum((block_q + 1) * SIZE_Q, rows), STEP):
        r = (first + tl.arange(0, STEP))[:, None]
        ptrs = mask + (r.to(tl.int64) * stride(mods.mask_row, mods.mask_align) + c.to(tl.int64) * mods.mask_col)
        inside = (r < rows) & (c < cols // mods.mask_align * mods.mask_align)  # known to be in steps of align
        seen = tl.load(ptrs, mask=inside, other=0).to(tl.int32)
        some = tl.maximum(some, seen)
        every = tl.minimum(every, tl.where(inside, seen, 1))
    kind = tl.max(tl.max(some, 1), 0) + tl.min(tl.min(every, 1), 0)  # SKIPPED, PARTIAL or FULL
    kinds = blocks.kinds + batch.to(tl.int64) * size(blocks.kinds_batch) + head.to(tl.int64) * size(blocks.kinds_head)
    tl.store(kinds + block_q.to(tl.int64) * size(blocks.kinds_row) + block_k, kind.to(tl.uint8))


def with_found_blocks(problem: Problem, inputs: Inputs, launcher: type[Launcher] = Launcher) -> tuple[Problem, Inputs]:
    """A call with a bool mask as one with a block mask as well, if the mask is worth looking through: if each of its
    elements serves so many scores that reading them once more is little beside reading them for each score."""
    p, mask = problem, inputs.mask
    scores = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k
    if mask is None or p.block_size or mask.shape[3] == 1 or mask.numel() * WORTH > scores or scores == 0:
        return problem, inputs
    batch, heads, rows, cols = mask.shape
    size_q, size_k = block_mask.BLOCK_SIZE
    kinds = mask.new_empty((batch, heads, triton.cdiv(rows, size_q), triton.cdiv(cols, size_k)), dtype=torch.uint8)

    def describe(inputs: Inputs, kinds: Tensor) -> Launch:
        blocks = Blocks(None, 0, 0, 0, kinds, *_sized_strides(kinds), size_q, size_k)
        tile = Tile(size_q, size_k, 4, 1)
        return Launch(kinds.numel(), tile, (modifiers_of(p, inputs), blocks, rows, cols, heads, size_q, size_k, 32))

    launcher(p, inputs).launch(find_kernel, describe, kinds)
    return replace(p, block_size=block_mask.BLOCK_SIZE), inputs._replace(block_mask=kinds)


def list_tiles(launcher: Launcher, problem: Problem, inputs: Inputs, tile: Tile, along: Along) -> Tensor:
    """The lists of a kernel of such tiles that walks along the keys, or along the rows, through a block mask."""
    p, kinds = problem, inputs.block_mask
    assert kinds is not None
    blocks_m, blocks_n = triton.cdiv(p.seqlen_q, tile.block_m), triton.cdiv(p.seqlen_k, tile.block_n)
    rows, length = (blocks_m, blocks_n) if along == "keys" else (blocks_n, blocks_m)
    batch, heads = p.batch if p.varlen else kinds.shape[0], kinds.shape[1]

    def describe(inputs: Inputs, *others: Tensor) -> Launch:
        left, right = window_of(p)
        return Launch(
            batch * heads * rows,
            Tile(tile.block_m, tile.block_n, 4, 1),
            (
                sparsity_of(p, inputs, tile, others[-1]).blocks,
                *sequences_of(replace(p, num_heads=heads), inputs),
                left >= 0,
                right >= 0,
                along == "keys",
                CHUNK,
                tile.block_m,
                tile.block_n,
            ),
        )

    lists = kinds.new_empty((batch, heads, rows, 3 + length), dtype=torch.int32)  # kernels look one place ahead
    launcher.launch(list_kernel, describe, lists, role=(along, tile))
    return lists


def sparsity_of(problem: Problem, inputs: Inputs, tile: Tile, lists: Tensor | None) -> Sparsity:
    p, kinds = problem, inputs.block_mask
    if kinds is None:
        return DENSE
    size_q, size_k = p.block_size
    inside_one = size_q % tile.block_m == 0 and size_k % tile.block_n == 0
    lookup = "of a tile" if inside_one else "of each score"
    if lists is not None and inside_one and not (p.has_mask or p.mask_mod):
        lookup = "nothing"  # what needs a mask needs it for the window
    of_lists = (0, 0, 0) if lists is None else _sized_strides(lists)
    blocks = Blocks(lists, *of_lists, kinds, *_sized_strides(kinds), size_q, size_k)
    return Sparsity(blocks, lists is not None, lookup)


def _sized_strides(x: Tensor) -> tuple[int, int, int]:
    """Of batch, head and row: 0 along dims of size 1, so that they broadcast."""
    batch, head, row = (
        0 if length == 1 else stride for length, stride in zip(x.shape[:3], x.stride()[:3], strict=True)
    )
    return sized(batch)[0], sized(head)[0], sized(row)[0]
