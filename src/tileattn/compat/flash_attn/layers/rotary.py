"""Rotary embedding with flash_attn.layers.rotary's functions."""

from __future__ import annotations

from torch import Tensor

from tileattn.rotary import positions, rotate_differentiable


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
    apply_rotary_emb(kv[:, :, 0], cos, sin, interleaved, True, seqlen_offsets)
    return kv


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
        q, k = qkv[:, :, 0], qkv[:, :, 1]
    elif num_heads_q is None:
        raise TypeError(f"num_heads_q: got None, needed with qkv of 4 dims, shape {tuple(qkv.shape)}")
    else:
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k = qkv[:, :, :num_heads_q], qkv[:, :, num_heads_q : num_heads_q + num_heads_k]
    apply_rotary_emb(q, cos, sin, interleaved, True, seqlen_offsets)
    apply_rotary_emb(
        k, cos if cos_k is None else cos_k, sin if sin_k is None else sin_k, interleaved, True, seqlen_offsets
    )
    return qkv


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
    turned = rotate_differentiable(x, cos[at], sin[at], interleaved, conjugate)
    return x.copy_(turned) if inplace else turned
