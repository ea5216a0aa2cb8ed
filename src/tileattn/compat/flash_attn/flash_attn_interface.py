"""FlashAttention-2's functions, public and private, in its conventions.

Where they differ from tileattn's: the logsumexp of a row that sees nothing is +inf (tileattn: -inf), any negative bound
of a window means unlimited, and dropout can be looked at (S_dmask). More than FlashAttention-2 takes is taken: float32,
any head_dim, other backends; and gradients flow through the logsumexp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tileattn import dispatch, ops
from tileattn.api import attention, attention_varlen
from tileattn.compat.kvcache import with_kvcache, without_wide
from tileattn.compat.packing import Packed, paged_rows, used_rows
from tileattn.kvcache_checks import capacity_of
from tileattn.philox import keep_mask
from tileattn.problem import Forward, Inputs, Problem, Wanted
from tileattn.reference import standard_attention

ROW_MULTIPLE = 128  # what FlashAttention-2 rounds lengths up to, in S_dmask and softmax_d


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """q (batch, seqlen, nheads, headdim), k and v (batch, seqlen_k, nheads_k, headdim). Returns out, or with
    return_attn_probs (out, softmax_lse, S_dmask): softmax_lse (batch, nheads, seqlen); S_dmask, for testing and only
    with dropout (empty without), (batch, nheads, seqlen and seqlen_k rounded up to 128): exp(score - row maximum),
    negative where dropped."""
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    seed = _draw_seed(q) if dropout_p > 0.0 else None
    out, lse = attention(
        q, k, v, dropout_p=dropout_p, dropout_seed=seed, deterministic=deterministic or None, return_lse=True, **options
    )
    if not return_attn_probs:
        return out
    problem, inputs = Problem.of(q, k, v, **options)
    return out, _infinite(lse), dropped_probabilities(problem, inputs, dropout_p, seed)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """q (total_q, nheads, headdim), k and v (total_k, nheads_k, headdim), or with block_table (batch, max_blocks)
    (num_blocks, page_size, nheads_k, headdim), cu_seqlens_k then giving lengths. softmax_lse is (nheads, total_q)."""
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes)
    packed = Packed(k, v, cu_seqlens_k, int(max_seqlen_k))
    if block_table is not None:
        differentiable = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        if not (differentiable or return_attn_probs or dropout_p > 0.0):
            where = {"block_table": block_table, "cu_seqlens_q": cu_seqlens_q, "max_seqlen_q": int(max_seqlen_q)}
            return with_kvcache(q, k, v, None, None, None, None, False, cu_seqlens_k.diff(), 0, options | where)[0]
        packed = paged_rows(packed, block_table)
    seed = _draw_seed(q) if dropout_p > 0.0 else None
    lengths = cu_seqlens_q, packed.cu_seqlens, int(max_seqlen_q), packed.max_seqlen
    out, lse = attention_varlen(
        q,
        packed.k,
        packed.v,
        *lengths,
        dropout_p=dropout_p,
        dropout_seed=seed,
        deterministic=deterministic or None,
        return_lse=True,
        **options,
    )
    if not return_attn_probs:
        return out
    problem, inputs = Problem.of(q, packed.k, packed.v, **_varlen(*lengths), **options)
    return out, _infinite(lse), dropped_probabilities(problem, inputs, dropout_p, seed)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of kv (batch, seqlen_k, 2, nheads_k, headdim)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_func` of qkv (batch, seqlen, 3, nheads, headdim)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(2)
    return flash_attn_func(q, k, v, *rest)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of kv (total_k, 2, nheads_k, headdim)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    k, v = kv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *rest)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """`flash_attn_varlen_func` of qkv (total, 3, nheads, headdim)."""
    rest = dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic, return_attn_probs
    q, k, v = qkv.unbind(1)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *rest)


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """`tileattn.attention_with_kvcache` in FlashAttention-2's terms: q (batch, seqlen, nheads, headdim), caches (batch,
    seqlen, nheads_k, headdim), or with block_table (num_blocks, page_size, nheads_k, headdim). Without causality and
    window rotary embedding turns all rows of q by the angle of position cache_seqlens. num_splits=1 does not split the
    keys; other values have no effect. Returns out, or (out, softmax_lse (batch, nheads, seqlen))."""
    options = _options(softmax_scale, causal, window_size, softcap, alibi_slopes) | {
        "cache_batch_idx": cache_batch_idx,
        "cache_leftpad": cache_leftpad,
        "block_table": block_table,
    }
    capacity = capacity_of(k_cache, block_table)
    options["window"] = without_wide(options["window"], capacity, capacity)
    rotary = rotary_cos, rotary_sin, rotary_interleaved
    out, lse = with_kvcache(q, k_cache, v_cache, k, v, *rotary, cache_seqlens, num_splits, options)
    return (out, _infinite(lse)) if return_softmax_lse else out


# What other packages (ring attention, mostly) call by keyword. No autograd: they have their own.


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    return_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, softmax_lse, S_dmask, rng_state: int64 (2,), the dropout seed first."""
    window = window_size_left, window_size_right
    options = _options(softmax_scale, causal, window, softcap, alibi_slopes)
    return _forward((q, k, v), options, dropout_p, return_softmax)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    return_softmax: bool = False,
    block_table: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    seqused_k: Tensor | None = None,
    zero_tensors: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `_flash_attn_forward`. zero_tensors has no effect: every element of the outputs is written."""
    packed = Packed(k, v, cu_seqlens_k, int(max_seqlen_k))
    if block_table is not None:
        packed = paged_rows(packed, block_table)
    if leftpad_k is not None or seqused_k is not None:
        packed = used_rows(packed, leftpad_k, seqused_k)
    window = window_size_left, window_size_right
    options = _options(softmax_scale, causal, window, softcap, alibi_slopes)
    options |= _varlen(cu_seqlens_q, packed.cu_seqlens, int(max_seqlen_q), packed.max_seqlen)
    return _forward((q, packed.k, packed.v), options, dropout_p, return_softmax)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
) -> Tensor:
    """Writes the gradients into dq, dk and dv. Returns softmax_d (batch, nheads, seqlen rounded up to 128), the row
    sums of dout * out."""
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    _backward((q, k, v), out, softmax_lse, dout, (dq, dk, dv), options, dropout_p, deterministic, rng_state)
    delta = (dout.float() * out.float()).sum(-1).transpose(1, 2)
    return torch.nn.functional.pad(delta, (0, -delta.shape[-1] % ROW_MULTIPLE))


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: float | None,
    causal: bool,
    window_size_left: int,
    window_size_right: int,
    softcap: float,
    alibi_slopes: Tensor | None,
    deterministic: bool,
    rng_state: Tensor | None = None,
    zero_tensors: bool = False,
) -> Tensor:
    """As `_flash_attn_backward`; softmax_d is (nheads, total_q)."""
    options = _options(softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes)
    options |= _varlen(cu_seqlens_q, cu_seqlens_k, int(max_seqlen_q), int(max_seqlen_k))
    _backward((q, k, v), out, softmax_lse, dout, (dq, dk, dv), options, dropout_p, deterministic, rng_state)
    return (dout.float() * out.float()).sum(-1).t().contiguous()


# FlashAttention-2's names for the same as operators
_wrapped_flash_attn_forward = _flash_attn_forward
_wrapped_flash_attn_backward = _flash_attn_backward
_wrapped_flash_attn_varlen_forward = _flash_attn_varlen_forward
_wrapped_flash_attn_varlen_backward = _flash_attn_varlen_backward


def _get_block_size_n(device: torch.device, head_dim: int, is_dropout: bool, is_causal: bool) -> int:
    """Columns between changes of the maximum that S_dmask is relative to. Here it is that of the whole row."""
    return 2**31 - 1


def _options(
    softmax_scale: float | None,
    causal: bool,
    window_size: tuple[int, int],
    softcap: float,
    alibi_slopes: Tensor | None,
) -> dict[str, Any]:
    """tileattn's keywords for FlashAttention-2's."""
    left, right = (int(bound) if isinstance(bound, Tensor) else bound for bound in window_size)
    return {
        "scale": softmax_scale,
        "causal": causal,
        "window": (max(left, -1), max(right, -1)),
        "softcap": max(softcap, 0.0),
        "alibi_slopes": alibi_slopes,
    }


def _varlen(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int) -> dict[str, Any]:
    return {
        "cu_seqlens_q": cu_seqlens_q,
        "cu_seqlens_k": cu_seqlens_k,
        "max_seqlen_q": max_seqlen_q,
        "max_seqlen_k": max_seqlen_k,
    }


def _draw_seed(q: Tensor) -> Tensor:
    """From torch's generator of q's device, without waiting for the device."""
    return torch.randint(-(2**63), 2**63 - 1, (1,), dtype=torch.int64, device=q.device)


@torch.no_grad()
def _forward(
    qkv: tuple[Tensor, Tensor, Tensor], options: dict[str, Any], dropout_p: float, return_softmax: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed = _draw_seed(qkv[0]) if dropout_p > 0.0 else None
    problem, inputs = Problem.of(*qkv, dropout_p=dropout_p, dropout_seed=seed, **options)
    out, lse = ops.run(problem, inputs)
    rng_state = torch.zeros(2, dtype=torch.int64, device=out.device)
    if seed is not None:
        rng_state[:1].copy_(seed)
    dropped = dropped_probabilities(problem, inputs, dropout_p if return_softmax else 0.0, seed)
    return out, _infinite(lse), dropped, rng_state


@torch.no_grad()
def _backward(
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    softmax_lse: Tensor,
    dout: Tensor,
    into: tuple[Tensor | None, ...],
    options: dict[str, Any],
    dropout_p: float,
    deterministic: bool,
    rng_state: Tensor | None,
) -> None:
    if dropout_p > 0.0 and rng_state is None:
        raise ValueError(f"rng_state: got None with dropout_p={dropout_p}; pass the one that forward returned")
    seed = None if rng_state is None else rng_state[:1]
    problem, inputs = Problem.of(
        *qkv, dropout_p=dropout_p, dropout_seed=seed, deterministic=bool(deterministic), **options
    )
    lse = softmax_lse.masked_fill(softmax_lse == float("inf"), float("-inf")).contiguous()
    backend = dispatch.load(dispatch.choose(problem, direction="backward"))
    gradients = backend.backward(problem, inputs, Forward(out, lse), dout, None, Wanted())
    for buffer, gradient in zip(into, gradients[:3], strict=True):
        if buffer is not None and gradient is not None:
            buffer.copy_(gradient)


def _infinite(lse: Tensor) -> Tensor:
    """FlashAttention-2's logsumexp of rows that see nothing is +inf."""
    return lse.masked_fill(lse == float("-inf"), float("inf"))


@torch.no_grad()
def dropped_probabilities(problem: Problem, inputs: Inputs, dropout_p: float, seed: Tensor | None) -> Tensor:
    """S_dmask: exp(score - row maximum), negative where dropped, (batch, num_heads, seqlen_q, seqlen_k), both rounded
    up. Materialised: it is for testing."""
    q = inputs.q
    if seed is None or dropout_p == 0.0:
        return q.new_empty(0)
    p = problem
    rows, cols = (-(-n // ROW_MULTIPLE) * ROW_MULTIPLE for n in (p.seqlen_q, p.seqlen_k))
    found = q.new_zeros((p.batch, p.num_heads, rows, cols))
    for batch, one, tensors in _dense_calls(problem, inputs):
        probs = standard_attention(one, tensors, torch.float32).probs
        if probs is not None and probs.numel():
            peak = probs.amax(-1, keepdim=True)
            found[batch, :, : probs.shape[2], : probs.shape[3]] = probs / peak.clamp(min=1e-37)
    index = [torch.arange(n, device=q.device) for n in (p.batch, p.num_heads, rows)]
    keep = keep_mask(seed, dropout_p, index[0][:, None, None], index[1][:, None], index[2], range(cols))
    return torch.where(keep, found, -found)


def _dense_calls(problem: Problem, inputs: Inputs) -> Iterator[tuple[slice, Problem, Inputs]]:
    """The call without dropout, packed sequences one at a time, and which of the batch each call holds."""
    p, slopes = problem, inputs.alibi_slopes
    options: dict[str, Any] = {"scale": p.scale, "window": (p.window_left, p.window_right), "softcap": p.softcap}
    cu_q, cu_k = inputs.cu_seqlens_q, inputs.cu_seqlens_k
    if cu_q is None or cu_k is None:
        yield slice(None), *Problem.of(*inputs[:3], alibi_slopes=slopes, **options)
        return
    for b in range(p.batch):
        rows, cols = (slice(*cu[b : b + 2].tolist()) for cu in (cu_q, cu_k))
        qkv = inputs.q[None, rows], inputs.k[None, cols], inputs.v[None, cols]
        of_batch = slopes if slopes is None or slopes.shape[0] == 1 else slopes[b : b + 1]
        yield slice(b, b + 1), *Problem.of(*qkv, alibi_slopes=of_batch, **options)
