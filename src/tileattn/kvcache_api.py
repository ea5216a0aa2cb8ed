"""What users call to attend to a cache."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

from torch import Tensor

from tileattn import kvcache_ops
from tileattn.api import AttentionOutput
from tileattn.kvcache import CacheProblem

if TYPE_CHECKING:
    from typing_extensions import Unpack


class CacheOptions(TypedDict, total=False):
    """Keywords of `attention_with_kvcache`, for type checkers."""

    cache_seqlens: int | Tensor | None
    block_table: Tensor | None
    cache_batch_idx: Tensor | None
    cache_leftpad: Tensor | None
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    max_seqlen_q: int | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    rotary_interleaved: bool
    causal: bool
    scale: float | None
    window: tuple[int, int]
    softcap: float
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    split_size: int | None
    backend: str | None


@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[CacheOptions],
) -> Tensor: ...
@overload
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[CacheOptions],
) -> AttentionOutput: ...
def attention_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    cache_seqlens: int | Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    split_size: int | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | AttentionOutput:
    """Append k and v to a cache, in place, and attend with q to all that the cache then holds.

    For inference, from one query a sequence (decoding) over a few (drafts) to thousands (prefill, in chunks or not). On
    a GPU nothing waits for lengths or tables, so a CUDA graph may be replayed with other values in them.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim), or with cu_seqlens_q (total_q, num_heads, head_dim).
        k_cache, v_cache: (batch, capacity, num_heads_k, head_dim) and (.., head_dim_v); with block_table pages (pages,
            page_size, num_heads_k, ..), of any size. The last dim has stride 1. v_cache may be a view of k_cache (MLA:
            `cache[..., :512]`).
        k, v: (batch, seqlen_new, num_heads_k, head_dim) and (.., head_dim_v), packed where q is; written to positions
            cache_seqlens[b] and after. v is left out where v_cache lives in k_cache's memory.
        cache_seqlens: int, or int32 or int64 (batch,): how long each sequence is before k and v come. Not changed.
            None: as long as the cache.
        block_table: int32 or int64 (batch, pages of a sequence): which pages hold a sequence, in order.
        cache_batch_idx: int32 or int64 (batch,): sequence b is k_cache[cache_batch_idx[b]] (None: k_cache[b]), or has
            the pages block_table[cache_batch_idx[b]].
        cache_leftpad: int32 or int64 (batch,): so many of a sequence's first positions hold nothing. Distances, and so
            windows and ALiBi, do not change by that.
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), of packed q and packed k; the same if only the first is given.
        max_seqlen_q: the longest of packed q; None reads it, which waits for a GPU.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): row i of q, and of k, of sequence b is turned by the angle
            of position cache_seqlens[b] + i (`tileattn.rotary`). rotary_dim may be less than head_dim.
        rotary_interleaved: pairs are dims (2i, 2i + 1) (GPT-J) rather than (i, i + rotary_dim / 2) (Llama).
        causal, scale, window, softcap, alibi_slopes, sink: as for `attention`; causality and windows align the last
            row of q with the last key.
        mask: bool, True where a score takes part, broadcasting to (batch, num_heads, seqlen_q, n): of the last n keys
            of each sequence; all earlier ones are visible. For drafts that are a tree: n = seqlen_new.
        split_size: keys are split into runs of so many, a multiple of 128, and the parts combined, so that a sequence's
            result does not depend on what else is in the batch. None splits as suits the batch.
        return_lse: also return the logsumexp.
        backend: name of the backend to use; None chooses.

    Returns:
        out, like q with head_dim_v, or AttentionOutput(out, lse) with return_lse. A row that sees nothing gives out 0,
        lse -inf (with a sink: the sink). There is no gradient.

    Raises:
        TypeError, ValueError: naming the argument, what came and what would do. Lengths and tables on a GPU are not
            looked at; the kernels stay inside the caches whatever they hold.
    """
    problem, inputs = CacheProblem.of(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        block_table=block_table,
        cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        rotary_cos=rotary_cos,
        rotary_sin=rotary_sin,
        rotary_interleaved=rotary_interleaved,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sink=sink,
        split_size=split_size,
    )
    out, lse = kvcache_ops.run(problem, inputs, backend)
    return AttentionOutput(out, lse) if return_lse else out


def explain_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    *tensors: Tensor,
    backend: str | None = None,
    return_lse: bool = False,
    **options: Any,
) -> kvcache_ops.CacheExplanation:
    """Say which backend would serve `attention_with_kvcache(q, k_cache, v_cache, *tensors, **options)` and why, with
    which tiles, and how keys would be shared out. Computes and appends nothing; return_lse changes nothing."""
    problem, _ = CacheProblem.of(q, k_cache, v_cache, *tensors, **options)
    return kvcache_ops.explain(problem, backend)
