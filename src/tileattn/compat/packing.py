"""Packed keys of which only some rows count: those that a block table points to, or that are in use."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.kvcache_checks import check_pages, readable


class Packed(NamedTuple):
    """k and v (total, heads, head_dim); sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1], max_seqlen at most."""

    k: Tensor
    v: Tensor
    cu_seqlens: Tensor
    max_seqlen: int


def paged_rows(packed: Packed, block_table: Tensor) -> Packed:
    """k and v given as pages (num_pages, page_size, heads, head_dim), and which pages each sequence has, brought
    together in the order of the sequences. Copies them, and waits for a GPU."""
    k, v, cu_seqlens, _ = packed
    check_pages(block_table, cu_seqlens.diff(), 0, None, k)
    page_size = k.shape[1]
    sequence, position = _places(cu_seqlens)
    page = block_table[sequence, position // page_size].long()
    rows = page * page_size + position % page_size
    return packed._replace(k=k.flatten(0, 1)[rows], v=v.flatten(0, 1)[rows])


def used_rows(packed: Packed, leftpad: Tensor | None, seqused: Tensor | None) -> Packed:
    """Only rows leftpad[b] to seqused[b] of each sequence. Copies them, and waits for a GPU."""
    starts, stops = packed.cu_seqlens[:-1], packed.cu_seqlens[1:]
    if seqused is not None:
        stops = starts + seqused
    if leftpad is not None:
        starts = starts + leftpad
    if readable(starts, stops) and ((stops < starts) | (stops > packed.cu_seqlens[1:])).any():
        raise ValueError(
            f"seqused, leftpad: rows {starts.tolist()} to {stops.tolist()} are not within the sequences, whose rows "
            f"start and end at {packed.cu_seqlens.tolist()}"
        )
    cu_seqlens = torch.nn.functional.pad((stops - starts).cumsum(0), (1, 0)).int()
    sequence, position = _places(cu_seqlens)
    rows = starts[sequence] + position
    return Packed(packed.k[rows], packed.v[rows], cu_seqlens, packed.max_seqlen)


def _places(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """For each packed row its sequence and its position in it, int64."""
    rows = torch.arange(int(cu_seqlens[-1]), device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), rows, right=True)
    return sequence, rows - cu_seqlens[sequence]
