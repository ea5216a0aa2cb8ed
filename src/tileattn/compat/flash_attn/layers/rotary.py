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
    return _turn_in_place(kv, interleaved, False, [_FIRST], cos[at], sin[at])


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
    return _turn_in_place(qkv, interleaved, False, parts, cos[at], sin[at], cos_k[at], sin_k[at])


def apply_rotary_emb_torch(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False) -> Tensor:
    """As `apply_rotary_emb`, with cos and sin (seqlen, rotary_dim / 2), or (batch, seqlen, ..), of each row of x."""
    return rotate_differentiable(x, cos, sin, interleaved)


class RotaryEmbedding(torch.nn.Module):
    """Turns queries and keys by angles of frequencies base ** (-2i / dim) (Su et al. 2021). scale_base: q and k are
    scaled too, so that q.k fades with distance (xPos, Sun et al. 2022). Keeps the cosines and sines of positions seen.
    """

    inv_freq: Tensor
    scale: Tensor | None

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        scale_base: float | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.dim, self.base, self.interleaved, self.scale_base = dim, float(base), interleaved, scale_base
        self.register_buffer("inv_freq", self._compute_inv_freq(device), persistent=False)
        i = torch.arange(0, dim, 2, device=device, dtype=torch.float32)
        self.register_buffer("scale", None if scale_base is None else (i + 0.4 * dim) / (1.4 * dim), persistent=False)
        self._seq_len_cached = 0
        self._cos_cached: Tensor | None = None
        self._sin_cached: Tensor | None = None
        self._cos_k_cached: Tensor | None = None
        self._sin_k_cached: Tensor | None = None

    def _compute_inv_freq(self, device: torch.device | str | None = None) -> Tensor:
        return self.base ** (-torch.arange(0, self.dim, 2, device=device, dtype=torch.float32) / self.dim)

    def _update_cos_sin_cache(
        self, seqlen: int, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        """Know the angles of positions up to seqlen. Computed in float32 whatever the module was cast to."""
        known = self._cos_cached
        if (
            known is not None
            and seqlen <= self._seq_len_cached
            and (known.device, known.dtype) == (device, dtype)
            and not (self.training and known.is_inference())
        ):
            return
        self._seq_len_cached = seqlen
        inv_freq = self.inv_freq if self.inv_freq.dtype == torch.float32 else self._compute_inv_freq(device)
        at = torch.arange(seqlen, device=device, dtype=torch.float32)
        angle = torch.outer(at, inv_freq.to(at.device))
        cos, sin = angle.cos(), angle.sin()
        if self.scale is None or self.scale_base is None:
            self._cos_cached, self._sin_cached = cos.to(dtype), sin.to(dtype)
            return
        scale = self.scale.to(at.device) ** ((at - seqlen // 2) / self.scale_base)[:, None]
        self._cos_cached, self._sin_cached = (cos * scale).to(dtype), (sin * scale).to(dtype)
        self._cos_k_cached, self._sin_k_cached = (cos / scale).to(dtype), (sin / scale).to(dtype)

    def forward(
        self,
        qkv: Tensor,
        kv: Tensor | None = None,
        seqlen_offset: int | Tensor = 0,
        max_seqlen: int | None = None,
        num_heads_q: int | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Turns qkv in place as `apply_rotary_emb_qkv_`; or, with kv (batch, seqlen, 2, nheads, headdim), q in its
        place and kv. seqlen_offset as a tensor needs max_seqlen, the longest with its offset."""
        if max_seqlen is None and not isinstance(seqlen_offset, Tensor):
            max_seqlen = qkv.shape[1] + seqlen_offset
        if max_seqlen is not None:
            self._update_cos_sin_cache(max_seqlen, qkv.device, qkv.dtype)
        cos, sin = self._cos_cached, self._sin_cached
        if cos is None or sin is None:
            raise ValueError("max_seqlen: got None with a tensor as seqlen_offset, before any positions were known")
        if kv is None:
            of_k = self._cos_k_cached, self._sin_k_cached
            return apply_rotary_emb_qkv_(qkv, cos, sin, *of_k, self.interleaved, seqlen_offset, num_heads_q)
        cos_k = cos if self._cos_k_cached is None else self._cos_k_cached
        sin_k = sin if self._sin_k_cached is None else self._sin_k_cached
        q = apply_rotary_emb(qkv, cos, sin, self.interleaved, True, seqlen_offset)
        return q, apply_rotary_emb_kv_(kv, cos_k, sin_k, self.interleaved, seqlen_offset)


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
        return _turn_in_place(x, interleaved, conjugate, [...], cos[at], sin[at])
    return rotate_differentiable(x, cos[at], sin[at], interleaved, conjugate)


_FIRST, _SECOND = (..., 0, slice(None), slice(None)), (..., 1, slice(None), slice(None))


def _turn_in_place(x: Tensor, interleaved: bool, conjugate: bool, parts: list[Any], *angles: Tensor) -> Tensor:
    """Turn parts of x, each by the next two of angles (cos, sin). What is compiled assigns: torch.compile loses the
    gradient of a Function that works in place."""
    if not torch.compiler.is_compiling():
        return _InPlace.apply(x, interleaved, conjugate, parts, *angles)
    for part, cos, sin in zip(parts, angles[::2], angles[1::2], strict=True):
        x[part] = rotate_differentiable(x[part], cos, sin, interleaved, conjugate)
    return x


class _InPlace(torch.autograd.Function):
    """As in flash_attn x may also be a leaf that requires a gradient, which is then that of what it held before."""

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
        angles = ctx.saved_tensors  # asked for once: checkpointing allows no more
        turned = _turn_parts(grads[0].clone(), interleaved, conjugate, parts, angles)
        return turned, *[None] * (3 + len(angles))


def _turn_parts(x: Tensor, interleaved: bool, conjugate: bool, parts: list[Any], angles: Any) -> Tensor:
    for part, cos, sin in zip(parts, angles[::2], angles[1::2], strict=True):
        x[part] = rotate(x[part], cos, sin, interleaved, conjugate)
    return x
