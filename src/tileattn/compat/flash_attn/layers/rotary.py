"""Rotary embedding with flash_attn.layers.rotary's functions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileattn.rotary import positions, rotate, rotate_differentiable


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | None = None,
) -> Tensor:
    """Turn the first rotary_dim dims of x by cos and sin (seqlen_rotary, rotary_dim / 2) of each row's position, which
    counts from seqlen_offsets, an int or (batch,). x: (batch, seqlen, nheads, headdim), or with cu_seqlens (total,
    nheads, headdim). Differentiable in x. max_seqlen is not needed."""
    return turn(x, cos, sin, interleaved, inplace, seqlen_offsets, cu_seqlens)


apply_rotary_emb_func = apply_rotary_emb


def apply_rotary_emb_kv_(
    kv: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, seqlen_offsets: int | Tensor = 0
) -> Tensor:
    """Turn the keys of kv (batch, seqlen, 2, nheads, headdim) in place."""
    at = positions(kv, seqlen_offsets, None)
    return _InPlace.apply(kv, interleaved, False, [_FIRST], cos[at], sin[at])


def apply_rotary_emb_qkv_(
    qkv: Tensor,
    cos: Tensor,
    sin: Tensor,
    cos_k: Tensor | None = None,
    sin_k: Tensor | None = None,
    interleaved: bool = False,
    seqlen_offsets: int | Tensor = 0,
    num_heads_q: int | None = None,
) -> Tensor:
    """Turn the queries and keys of qkv in place: (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, num_heads_q +
    2 * num_heads_k, headdim) with num_heads_q given. cos_k and sin_k: other angles for the keys."""
    if qkv.dim() == 5:
        parts: list[Any] = [_FIRST, _SECOND]
    elif num_heads_q is None:
        raise TypeError(f"num_heads_q: got None, needed with qkv of 4 dims, shape {tuple(qkv.shape)}")
    else:
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        first, second = slice(num_heads_q), slice(num_heads_q, num_heads_q + num_heads_k)
        parts = [(..., first, slice(None)), (..., second, slice(None))]
    at = positions(qkv, seqlen_offsets, None)
    cos_k, sin_k = cos if cos_k is None else cos_k, sin if sin_k is None else sin_k
    return _InPlace.apply(qkv, interleaved, False, parts, cos[at], sin[at], cos_k[at], sin_k[at])


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As `apply_rotary_emb`, with cos and sin (seqlen, rotary_dim / 2), or (batch, seqlen, ..), of each row of x."""
    return rotate_differentiable(x, cos, sin, interleaved)


def turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    inplace: bool,
    seqlen_offsets: int | Tensor,
    cu_seqlens: Tensor | None,
    conjugate: bool = False,
) -> Tensor:
    at = positions(x, seqlen_offsets, cu_seqlens)
    if inplace:
        return _InPlace.apply(x, interleaved, conjugate, [...], cos[at], sin[at])
    return rotate_differentiable(x, cos[at], sin[at], interleaved, conjugate)


_FIRST, _SECOND = (..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None))


class _InPlace(torch.autograd.Function):
    """Turns parts of x, each by the next two of angles (cos, sin), in place; as in flash_attn also a leaf that requires
    a gradient, which is then that of what it held before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, interleaved: bool, conjugate: bool, parts: list[Any], *angles: Tensor) -> Tensor:
        ctx.how = interleaved, not conjugate, parts
        ctx.save_for_backward(*angles)
        if not (x.is_leaf and x.requires_grad):
            ctx.mark_dirty(x)
        return _turn_parts(x, interleaved, conjugate, parts, angles)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        interleaved, conjugate, parts = ctx.how
        turned = _turn_parts(grads[0].clone(), interleaved, conjugate, parts, ctx.saved_tensors)
        return turned, *[None] * (3 + len(ctx.saved_tensors))


def _turn_parts(x: Tensor, interleaved: bool, conjugate: bool, parts: list[Any], angles: Any) -> Tensor:
    for part, cos, sin in zip(parts, angles[::2], angles[1::2], strict=True):
        x[part] = rotate(x[part], cos, sin, interleaved, conjugate)
    return x
