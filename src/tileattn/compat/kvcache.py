"""flash_attn's calls with a cache, in the terms of `attention_with_kvcache`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tileattn.kvcache_api import attention_with_kvcache
from tileattn.kvcache_checks import capacity_of, check_rotary
from tileattn.rotary import positions, rotate


def without_wide(window: tuple[int, int], left: int, right: int) -> tuple[int, int]:
    """The window without bounds of `left` or `right` and more, which hide nothing: flash_attn takes a call with such
    for one that has no window, and its rotary embedding too."""
    return -1 if window[0] >= left else window[0], -1 if window[1] >= right else window[1]


@torch.no_grad()
def with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
    cache_seqlens: int | Tensor | None,
    num_splits: int,
    options: dict[str, Any],
    rotary_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """out and lse, in tileattn's convention. rotary_seqlens: where positions begin instead of cache_seqlens.

    flash_attn turns all rows of q by the angle of one position when neither causal nor windowed: such a call is turned
    here.
    """
    advancing = options["causal"] or options["window"] != (-1, -1)
    if cos is not None and sin is not None and k is not None and not (advancing and rotary_seqlens is None):
        start = rotary_seqlens if rotary_seqlens is not None else 0 if cache_seqlens is None else cache_seqlens
        cu_q = options.get("cu_seqlens_q")
        cu_k = options.get("cu_seqlens_k", cu_q)
        rows: tuple[Any, Any] = (q.shape[1], k.shape[1]) if cu_q is None else (cu_q, cu_k)
        check_rotary(cos, sin, q, k, start, rows[0] if advancing else 1, rows[1])
        last = cos.shape[0] - 1  # on a GPU positions are not looked at
        at = positions(q, start, cu_q, advancing).clamp(0, last)
        q = rotate(q, cos[at], sin[at], interleaved)
        at = positions(k, start, cu_k).clamp(0, last)
        k = rotate(k, cos[at], sin[at], interleaved)
        cos = sin = None
    if num_splits == 1:  # one run of keys, whatever else is in the batch
        capacity = capacity_of(k_cache, options.get("block_table"))
        options = options | {"split_size": max(-(-capacity // 128) * 128, 128)}
    return attention_with_kvcache(
        q,
        k_cache,
        v_cache,
        k,
        v,
        cache_seqlens=cache_seqlens,
        rotary_cos=cos,
        rotary_sin=sin,
        rotary_interleaved=interleaved,
        return_lse=True,
        **options,
    )
