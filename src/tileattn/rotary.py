"""Rotary position embedding (Su et al. 2021, RoFormer): pairs of dims of q and k turn by an angle that grows with the
position, so that q.k depends on distances.

    (a, b) -> (a cos - b sin, a sin + b cos)

where the pair is dims (2i, 2i + 1) when interleaved (GPT-J), (i, i + rotary_dim / 2) otherwise (GPT-NeoX, Llama); dims
from rotary_dim on stay as they are. Computed in float32 (float64 for float64), rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, conjugate: bool = False) -> Tensor:
    """x (..., rows, heads, head_dim); cos, sin (..., rows, rotary_dim / 2), of each row's position. conjugate turns
    back."""
    computing = torch.float64 if x.dtype == torch.float64 else torch.float32
    half = cos.shape[-1]
    c, s = (t.unsqueeze(-2).to(computing) for t in (cos, sin))
    turned = x[..., : 2 * half].to(computing)
    a, b = turned.unflatten(-1, (half, 2)).unbind(-1) if interleaved else turned.chunk(2, -1)
    if conjugate:
        s = -s
    pair = a * c - b * s, a * s + b * c
    y = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([y.to(x.dtype), x[..., 2 * half :]], -1)


class _Rotary(torch.autograd.Function):
    """`rotate`, which needs no activation for its gradient: that turns back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, conjugate: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.how = interleaved, not conjugate
        return rotate(x, cos, sin, interleaved, conjugate)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return rotate(grads[0], *ctx.saved_tensors, *ctx.how), None, None, None, None


def rotate_differentiable(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, conjugate: bool = False
) -> Tensor:
    """`rotate`, with a gradient for x alone."""
    return _Rotary.apply(x, cos, sin, interleaved, conjugate)


def positions(x: Tensor, offsets: int | Tensor, cu_seqlens: Tensor | None, advancing: bool = True) -> Tensor:
    """Of each row, (batch or 1, seqlen) or, packed, (total,); all of a sequence at its offset when not advancing."""
    if cu_seqlens is None:
        start = offsets[:, None] if isinstance(offsets, Tensor) else offsets
        rows = torch.arange(x.shape[1], device=x.device)[None]
    else:
        rows = torch.arange(x.shape[0], device=x.device)
        sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), rows, right=True)
        start = offsets[sequence] if isinstance(offsets, Tensor) else offsets
        rows = rows - cu_seqlens[sequence]
    return (rows if advancing else rows * 0) + start
