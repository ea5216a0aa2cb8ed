"""FlashAttention-3's functions, in its conventions: no dropout, lse alone with return_attn_probs, -inf where a
row sees nothing.

What tileattn does not have is refused in words: fp8 descales and qv. num_splits, pack_gqa, sm_margin and
scheduler_metadata steer FlashAttention-3's scheduler and have no effect.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileattn.api import attention, attention_varlen
from tileattn.compat.chunks import chunked, chunked_cache
from tileattn.compat.flash_attn.flash_attn_interface import _options
from tileattn.compat.kvcache import with_kvcache, without_wide
from tileattn.compat.packing import Packed, used_rows
from tileattn.kvcache_checks import capacity_of


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q (batch, seqlen, nheads, headdim), k (batch, seqlen_k, nheads_k, headdim), v (.., headdim_v). Returns out, or
    (out, softmax_lse (batch, nheads, seqlen)) with return_attn_probs."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(softmax_scale, causal, window_size, softcap, None)
    if attention_chunk:
        chunked(options, attention_chunk, k.shape[1] - q.shape[1], q.shape[0], q.device)
    out, lse = attention(q, k, v, deterministic=deterministic or None, return_lse=True, **options)
    return (out, lse) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (batch, seqlen, 3, nheads, headdim), or (batch, seqlen, num_heads_q + 2 * nheads_k,
    headdim) with num_heads_q."""
    if qkv.dim() == 5:
        q, k, v = qkv.unbind(2)
    elif num_heads_q is None:
        raise TypeError(f"num_heads_q: got None, needed with qkv of 4 dims, shape {tuple(qkv.shape)}")
    else:
        num_heads_k = (qkv.shape[2] - num_heads_q) // 2
        q, k, v = qkv.split([num_heads_q, num_heads_k, num_heads_k], 2)
    return flash_attn_func(
        q,
        k,
        v,
        softmax_scale,
        causal,
        None,
        q_descale,
        k_descale,
        v_descale,
        window_size,
        attention_chunk,
        softcap,
        deterministic=deterministic,
        return_attn_probs=return_attn_probs,
    )


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """q (total_q, nheads, headdim), k (total_k, nheads_k, headdim), v (.., headdim_v). seqused_q, seqused_k int32
    (batch,): only so many rows of each sequence count; the other rows of out are 0, of softmax_lse -inf. softmax_lse is
    (nheads, total_q)."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    keys = Packed(k, v, cu_seqlens_k, int(max_seqlen_k))
    if seqused_k is not None:
        keys = used_rows(keys, None, seqused_k)
    queries, cu_used = q, cu_seqlens_q
    if seqused_q is not None:
        rows = torch.arange(q.shape[0], device=q.device)
        indexed = used_rows(Packed(q, rows, cu_seqlens_q, int(max_seqlen_q)), None, seqused_q)
        queries, rows, cu_used, _ = indexed
    options = _options(softmax_scale, causal, window_size, softcap, None)
    if attention_chunk:
        chunked(options, attention_chunk, keys.cu_seqlens.diff() - cu_used.diff(), len(cu_used) - 1, q.device)
    out, lse = attention_varlen(
        queries,
        keys.k,
        keys.v,
        cu_used,
        keys.cu_seqlens,
        int(max_seqlen_q),
        keys.max_seqlen,
        deterministic=deterministic or None,
        return_lse=True,
        **options,
    )
    if seqused_q is not None:
        out = out.new_zeros((q.shape[0], *out.shape[1:])).index_copy(0, rows, out)
        lse = lse.new_full((lse.shape[0], q.shape[0]), float("-inf")).index_copy(1, rows, lse)
    return (out, lse) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Tensor | None = None,
    k_descale: Tensor | None = None,
    v_descale: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`tileattn.attention_with_kvcache` in FlashAttention-3's terms; rotary_seqlens (batch,): where positions begin
    instead of cache_seqlens. Returns out, or (out, softmax_lse)."""
    _refuse(qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    options = _options(softmax_scale, causal, window_size, softcap, None) | {
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": page_table,
        "cu_seqlens_q": cu_seqlens_q,
        "max_seqlen_q": max_seqlen_q,
    }
    if cu_seqlens_k_new is not None:
        options["cu_seqlens_k"] = cu_seqlens_k_new
    capacity = capacity_of(k_cache, page_table)
    rows = q.shape[1] if cu_seqlens_q is None else max_seqlen_q
    options["window"] = without_wide(options["window"], capacity - 1, capacity if rows is None else rows - 1)
    if attention_chunk:
        batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
        cu_new = cu_seqlens_q if cu_seqlens_k_new is None else cu_seqlens_k_new
        lens_q, lens_new = _lengths(q, cu_seqlens_q, batch), 0 if k is None else _lengths(k, cu_new, batch)
        cached = capacity if cache_seqlens is None else cache_seqlens
        lens_k = torch.zeros_like(lens_q) + cached + lens_new - (0 if cache_leftpad is None else cache_leftpad)
        longest = int(lens_q.max()) if rows is None else rows
        chunked_cache(options, attention_chunk, longest, (lens_q, lens_k), capacity)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    pair = with_kvcache(q, k_cache, v_cache, k, v, *rotary, cache_seqlens, num_splits, options, rotary_seqlens)
    return pair if return_softmax_lse else pair[0]


def get_scheduler_metadata(*args: Any, **kwargs: Any) -> None:
    """What FlashAttention-3's kernels are told beforehand of the work; tileattn's find it out themselves."""


def flash_attn_combine(
    out_partial: Tensor, lse_partial: Tensor, out: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """Attention to all keys from attention to parts of them: out_partial (parts, batch, seqlen, nheads, headdim_v),
    lse_partial (parts, batch, seqlen, nheads). Returns out and its lse."""
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.masked_fill(lse == float("-inf"), 0.0)).exp()
    combined = (weights[..., None] * out_partial).sum(0).to(out_dtype or out_partial.dtype)
    return (combined if out is None else out.copy_(combined)), lse


def _lengths(x: Tensor, cu_seqlens: Tensor | None, batch: int) -> Tensor:
    """(batch,): how many rows of each sequence."""
    if cu_seqlens is not None:
        return cu_seqlens.diff()
    return torch.full((batch,), x.shape[1], dtype=torch.int32, device=x.device)


def _refuse(**given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise NotImplementedError(
                f"{name}: tileattn's flash_attn_interface has no {name}; leave it at its default, or use "
                "FlashAttention-3 itself"
            )
