"""BlockMask: which blocks of scores to skip, which to compute without looking at a mask."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileattn.mods import MASK_INPUTS, Mod, Program, trace_mask_mod

SKIPPED, PARTIAL, FULL = 0, 1, 2
BLOCK_SIZE = (128, 128)
CHUNK = 2**24  # scores of a mask_mod that are held at once

BlockSize = int | tuple[int, int]


class BlockMask(NamedTuple):
    """A map of blocks of scores, made once and used in many calls, for `attention(..., block_mask=)`.

    blocks: uint8 (batch or 1, num_heads or 1, q_blocks, k_blocks): 0, the block is skipped; 1, mask or mask_mod decide
    inside it; 2, all of it is visible. block_size: rows and columns of a block. mask, mask_mod: what decides in partial
    blocks. seqlens: the lengths that it was made for, if any.
    """

    blocks: Tensor
    block_size: tuple[int, int] = BLOCK_SIZE
    mask: Tensor | None = None
    mask_mod: Mod | None = None
    seqlens: tuple[int, int] | None = None

    @staticmethod
    def from_blocks(blocks: Tensor, block_size: BlockSize = BLOCK_SIZE) -> BlockMask:
        """From a bool map (batch or 1, num_heads or 1, q_blocks, k_blocks), True where a block is visible; leading dims
        may be left out."""
        if not isinstance(blocks, Tensor) or blocks.dtype != torch.bool or not 2 <= blocks.dim() <= 4:
            raise TypeError(f"blocks: got {_what(blocks)}, expected torch.bool, 2 to 4 dims (..., q_blocks, k_blocks)")
        return BlockMask(_four(blocks).to(torch.uint8) * FULL, _block_size(block_size))

    @staticmethod
    def from_mask(mask: Tensor, block_size: BlockSize = BLOCK_SIZE) -> BlockMask:
        """From a bool mask (..., seqlen_q, seqlen_k), True where a score takes part: finds empty and full blocks."""
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not 2 <= mask.dim() <= 4:
            raise TypeError(f"mask: got {_what(mask)}, expected torch.bool, 2 to 4 dims (..., seqlen_q, seqlen_k)")
        mask, size = _four(mask), _block_size(block_size)
        return BlockMask(_classify(mask, size), size, mask=mask, seqlens=(mask.shape[2], mask.shape[3]))

    @staticmethod
    def from_mod(
        mask_mod: Callable[..., Tensor] | Mod,
        batch: int | None,
        num_heads: int | None,
        seqlen_q: int,
        seqlen_k: int,
        block_size: BlockSize = BLOCK_SIZE,
        device: torch.device | str = "cpu",
    ) -> BlockMask:
        """From mask_mod(b, h, row, col) -> bool, tried on every score once; batch, num_heads: None where it is the same
        for all."""
        mod, size = trace_mask_mod(mask_mod, device), _block_size(block_size)
        lead = (1 if batch is None else batch, 1 if num_heads is None else num_heads)
        rows_at_once = max(CHUNK // max(lead[0] * lead[1] * seqlen_k, 1) // size[0], 1) * size[0]
        found = [
            _classify(evaluate(mod, lead, range(i, min(i + rows_at_once, seqlen_q)), range(seqlen_k), device), size)
            for i in range(0, seqlen_q, rows_at_once)
        ]
        empty = torch.zeros((*lead, 0, -(-seqlen_k // size[1])), dtype=torch.uint8, device=device)
        return BlockMask(torch.cat([empty, *found], 2), size, mask_mod=mod, seqlens=(seqlen_q, seqlen_k))

    @staticmethod
    def from_flex(block_mask: Any) -> BlockMask:
        """From FlexAttention's BlockMask (torch.nn.attention.flex_attention.create_block_mask)."""
        flex = sys.modules["torch.nn.attention.flex_attention"]
        size = _block_size(block_mask.BLOCK_SIZE)
        blocks = _scatter(block_mask.kv_num_blocks, block_mask.kv_indices) * PARTIAL
        if block_mask.full_kv_num_blocks is not None:
            blocks += _scatter(block_mask.full_kv_num_blocks, block_mask.full_kv_indices) * FULL
        seqlens = int(block_mask.seq_lengths[0]), int(block_mask.seq_lengths[1])
        if block_mask.mask_mod is flex.noop_mask:
            return BlockMask((blocks > 0).to(torch.uint8) * FULL, size, seqlens=seqlens)
        return BlockMask(blocks, size, mask_mod=trace_mask_mod(block_mask.mask_mod, blocks.device), seqlens=seqlens)


def as_block_mask(block_mask: Any) -> BlockMask:
    """A BlockMask from what a user passed."""
    if isinstance(block_mask, BlockMask):
        return block_mask
    flex = sys.modules.get("torch.nn.attention.flex_attention")
    if flex is not None and isinstance(block_mask, flex.BlockMask):
        if torch.compiler.is_compiling():
            raise ValueError("block_mask: under torch.compile, pass tileattn.BlockMask.from_flex(...), made outside")
        return BlockMask.from_flex(block_mask)
    raise TypeError(
        f"block_mask: got {_what(block_mask)}, expected a tileattn.BlockMask (see from_blocks, from_mask, from_mod) or "
        f"FlexAttention's"
    )


def evaluate(mod: Mod, lead: tuple[int, int], rows: range, cols: range, device: torch.device | str) -> Tensor:
    """A mask_mod on (batch, num_heads, rows, cols): bool."""
    b, h = (torch.arange(n, device=device, dtype=torch.int32) for n in lead)
    r, c = (torch.arange(x.start, x.stop, device=device, dtype=torch.int32) for x in (rows, cols))
    at = (b.view(-1, 1, 1, 1), h.view(-1, 1, 1), r.view(-1, 1), c)
    assert len(at) == len(MASK_INPUTS)
    seen = Program.parse(mod.program).run(at, mod.tensors, torch.float32).to(torch.bool)
    return seen.expand(*lead, len(rows), len(cols))


def of_scores(blocks: Tensor, block_size: tuple[int, int], rows: range, cols: range) -> Tensor:
    """The class of every score of rows x cols, (..., rows, cols), from a map (..., q_blocks, k_blocks)."""
    m, n = block_size
    r = torch.arange(rows.start, rows.stop, device=blocks.device) // m
    c = torch.arange(cols.start, cols.stop, device=blocks.device) // n
    return blocks[..., r[:, None], c]


def _classify(mask: Tensor, size: tuple[int, int]) -> Tensor:
    """uint8 map of a bool mask (batch, num_heads, seqlen_q, seqlen_k)."""
    rows, cols = mask.shape[2:]
    padding = (0, -cols % size[1], 0, -rows % size[0])

    def blocks(fill: bool) -> Tensor:
        padded = torch.nn.functional.pad(mask, padding, value=fill)
        return padded.unflatten(3, (-1, size[1])).unflatten(2, (-1, size[0]))

    if mask.numel() == 0:
        return mask.new_zeros((*mask.shape[:2], -(-rows // size[0]), -(-cols // size[1])), dtype=torch.uint8)
    return blocks(False).any(5).any(3).to(torch.uint8) + blocks(True).all(5).all(3).to(torch.uint8)


def _scatter(counts: Tensor, indices: Tensor) -> Tensor:
    """uint8 (batch, num_heads, q_blocks, k_blocks), 1 at the first counts of the indices of each row."""
    listed = torch.arange(indices.shape[-1], device=indices.device) < counts[..., None]
    return torch.zeros_like(indices, dtype=torch.uint8).scatter_add_(-1, indices.long(), listed.to(torch.uint8))


def _four(x: Tensor) -> Tensor:
    return x.reshape((1,) * (4 - x.dim()) + tuple(x.shape))


def _block_size(size: BlockSize) -> tuple[int, int]:
    m, n = (size, size) if isinstance(size, int) else size
    if isinstance(m, bool) or not isinstance(m, int) or not isinstance(n, int) or m < 1 or n < 1:
        raise ValueError(f"block_size={size!r}: expected a positive int, or two, for rows and columns")
    return m, n


def _what(x: object) -> str:
    return f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
