"""Counter-based dropout: Philox4x32-7 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011).

The bits of score (batch, head, row, column) depend on the seed and on those four absolute indices alone, so every
backend, tile size and direction draws the same mask:

    word[column % 4] of philox(counter = (column // 4, row, head, batch), key = (seed low, seed high))

and a score is kept when its word is at least round(dropout_p * 2**32).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 7
_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85


def threshold(dropout_p: float) -> int:
    """Words below this 32-bit threshold are dropped."""
    return min(round(dropout_p * 2**32), _MASK)


def philox(seed: int | Tensor, counter: tuple[Tensor, Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Four 32-bit words (int64 tensors, broadcast together) for each counter. Products wrap in int64, which keeps
    their 64 bits."""
    k0, k1 = seed & _MASK, (seed >> 32) & _MASK
    c0, c1, c2, c3 = counter
    for _ in range(ROUNDS):
        p0, p1 = c0 * _M0, c2 * _M1
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def keep_mask(seed: int | Tensor, dropout_p: float, batch: Tensor, head: Tensor, row: Tensor, columns: range) -> Tensor:
    """Boolean (..., len(columns)), True where a score is kept.

    seed: a tensor is int64 of one element. batch, head, row: int64 tensors broadcasting together to the leading dims.
    columns: contiguous, step 1.
    """
    first, last = columns.start // 4, -(-columns.stop // 4)
    groups = torch.arange(first, last, dtype=torch.int64, device=row.device)
    counter = (groups, row[..., None], head[..., None], batch[..., None])
    words = torch.stack(torch.broadcast_tensors(*philox(seed, counter)), dim=-1).flatten(-2)
    skip = columns.start - 4 * first
    return words[..., skip : skip + len(columns)] >= threshold(dropout_p)
