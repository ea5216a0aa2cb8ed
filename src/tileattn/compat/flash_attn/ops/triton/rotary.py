"""The rotary embedding under flash_attn's other name; like that one it has no gradient."""

from __future__ import annotations

import torch
from torch import Tensor

from tileattn.compat.flash_attn.layers.rotary import turn


@torch.no_grad()
def apply_rotary(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
    interleaved: bool = False,
    inplace: bool = False,
    conjugate: bool = False,
) -> Tensor:
    """As `flash_attn.layers.rotary.apply_rotary_emb`; conjugate turns back."""
    return turn(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens, conjugate)
