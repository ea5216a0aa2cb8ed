"""FlashAttention-3's attention_chunk: sequences are cut into chunks, and a row sees the keys of its own chunk.

The last row of q is at the last key, so a row is at its number plus what there are more keys than rows.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from tileattn.mods import Mod, trace_mask_mod


def chunked(options: dict[str, Any], chunk: int, ahead: int | Tensor, batch: int, device: torch.device) -> None:
    """Add chunks to the options of `attention`. ahead: how many more keys than rows there are, or (batch,)."""
    _narrow(options, chunk)
    shift = ahead if isinstance(ahead, Tensor) else torch.full((batch,), ahead, dtype=torch.int32, device=device)
    options["mask_mod"] = _same_chunk(device)._replace(tensors=(shift, torch.full_like(shift, chunk)))


def chunked_cache(
    options: dict[str, Any], chunk: int, rows: int, lengths: tuple[Tensor, Tensor], capacity: int
) -> None:
    """Add chunks to the options of `attention_with_kvcache`. rows: of the longest sequence. lengths: (batch,) of rows
    and of keys of each sequence. A mask tells of all keys that share a chunk with a row."""
    _narrow(options, chunk)
    lens_q, lens_k = (x[:, None, None, None] for x in lengths)
    n = min(chunk + rows, capacity)
    row = torch.arange(rows, device=lens_k.device)[:, None] + lens_k - lens_q
    col = torch.arange(n, device=lens_k.device) + lens_k - n
    options["mask"] = row // chunk == col // chunk


def _narrow(options: dict[str, Any], chunk: int) -> None:
    """The window, to what a chunk can reach: tiles outside of it are skipped."""
    options["window"] = tuple(chunk - 1 if bound < 0 else min(bound, chunk - 1) for bound in options["window"])


@functools.cache
def _same_chunk(device: torch.device) -> Mod:
    ahead, chunk = torch.zeros(2, dtype=torch.int32, device=device), torch.ones(2, dtype=torch.int32, device=device)

    def same_chunk(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
        return (row + ahead[b]) // chunk[b] == col // chunk[b]

    return trace_mask_mod(same_chunk, device)
