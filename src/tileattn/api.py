"""What users call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, overload

import torch
from torch import Tensor

from tileattn import dispatch, ops
from tileattn.block_mask import BlockMask
from tileattn.mods import Mod
from tileattn.problem import Inputs, Problem

if TYPE_CHECKING:
    from typing_extensions import Unpack


class AttentionOutput(NamedTuple):
    """Result with return_lse=True. out as without; lse: logsumexp of each row's scores, natural log, float32 (float64
    for float64 inputs), (batch, num_heads, seqlen_q), varlen (num_heads, total_q)."""

    out: Tensor
    lse: Tensor


class Options(TypedDict, total=False):
    """Keywords that `attention` and `attention_varlen` share, for type checkers; `attention` documents them."""

    causal: bool
    scale: float | None
    window: tuple[int, int]
    softcap: float
    bias: Tensor | None
    mask: Tensor | None
    alibi_slopes: Tensor | None
    sink: Tensor | None
    dropout_p: float
    dropout_seed: int | Tensor | None
    deterministic: bool | None
    score_mod: Callable[..., Tensor] | Mod | None
    mask_mod: Callable[..., Tensor] | Mod | None
    block_mask: BlockMask | Any | None
    backend: str | None


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[False] = False, **options: Unpack[Options]
) -> Tensor: ...
@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, return_lse: Literal[True], **options: Unpack[Options]
) -> AttentionOutput: ...
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    score_mod: Callable[..., Tensor] | Mod | None = None,
    mask_mod: Callable[..., Tensor] | Mod | None = None,
    block_mask: BlockMask | Any | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | AttentionOutput:
    """Exact attention, softmax(q k^T * scale + bias) v, without ever holding the seqlen_q x seqlen_k matrix.

    FlashAttention (Dao et al. 2022, Algorithm 1; FlashAttention-2, Dao 2023). The score of row i and column j is

        s = softcap(q_i . k_j * scale) - alibi_slope * |j - i - (seqlen_k - seqlen_q)| + bias[i, j]

    then score_mod; hidden where causal, window, mask, mask_mod or block_mask say so; then softmax over the row (and the
    sink), dropout, product with v.

    Args:
        q: (batch, seqlen_q, num_heads, head_dim); float16, bfloat16, float32 or float64. Any strides; copied if its
            last dim is not contiguous, or, for a GPU, if heads do not begin and end at multiples of 16 bytes.
        k: (batch, seqlen_k, num_heads_k, head_dim), num_heads_k dividing num_heads (GQA, MQA): query head h reads key
            head h // (num_heads // num_heads_k).
        v: (batch, seqlen_k, num_heads_k, head_dim_v).
        causal: row i sees columns j <= i + seqlen_k - seqlen_q (bottom-right aligned).
        scale: multiplies q.k; None means 1/sqrt(head_dim).
        window: (left, right), inclusive: row i sees columns i + seqlen_k - seqlen_q - left to ... + right; -1 means
            unlimited.
        softcap: s -> softcap * tanh(s / softcap) (Gemma 2); 0.0 means none.
        bias: floating, added to the scores; broadcasts to (batch, num_heads, seqlen_q, seqlen_k). Differentiable.
        mask: bool, True where a score takes part; broadcasts likewise.
        alibi_slopes: (num_heads,) or (batch, num_heads) (Press et al. 2022). Differentiable.
        sink: (num_heads,), one more logit a head that takes part in the softmax and has no value (attention sink as in
            gpt-oss). Differentiable.
        dropout_p: probability of dropping a probability, in [0, 1); kept ones are scaled by 1 / (1 - dropout_p).
        dropout_seed: int or int64 tensor of one element; None draws one from torch's generator. The same seed drops the
            same scores on every backend (`tileattn.philox`).
        deterministic: insist on bitwise equal gradients from run to run; None follows
            torch.are_deterministic_algorithms_enabled().
        score_mod: score_mod(score, b, h, row, col) -> score, as for FlexAttention: pointwise PyTorch operations and
            indexing of tensors (by all of their dims at once); row and col count from the start of the sequence.
            Differentiable in the score; a tensor that it reads must not require a gradient. Tracing takes some 50 ms
            when a function is new: `tileattn.trace_score_mod` does it beforehand (under torch.compile it must).
        mask_mod: mask_mod(b, h, row, col) -> bool, True where a score takes part; likewise.
        block_mask: `tileattn.BlockMask` or FlexAttention's: blocks of scores that are skipped cost nothing.
        return_lse: also return the logsumexp; gradients flow through it.
        backend: name of the backend to use; None chooses (see `explain`).

    Returns:
        out, (batch, seqlen_q, num_heads, head_dim_v), in q's dtype, or AttentionOutput(out, lse) with return_lse.
        A row that sees nothing gives out 0, lse -inf (with a sink: the sink) and gradients 0. Under torch.autocast, q,
        k and v are cast to its dtype. Gradients are first-order only.

    Raises:
        TypeError, ValueError: naming the argument, what came and what would do.
    """
    q, k, v = _autocast(q, k, v)
    problem, inputs = Problem.of(
        q,
        k,
        v,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=_deterministic(deterministic),
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
    )
    return _run(problem, inputs, backend, return_lse)


@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[Options],
) -> Tensor: ...
@overload
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    return_lse: Literal[True],
    **options: Unpack[Options],
) -> AttentionOutput: ...
def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    sink: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    deterministic: bool | None = None,
    score_mod: Callable[..., Tensor] | Mod | None = None,
    mask_mod: Callable[..., Tensor] | Mod | None = None,
    block_mask: BlockMask | Any | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | AttentionOutput:
    """Attention over packed sequences of different lengths; each attends within itself. No padding is computed.

    Args:
        q: (total_q, num_heads, head_dim); k: (total_k, num_heads_k, head_dim); v: (total_k, num_heads_k, head_dim_v).
        cu_seqlens_q, cu_seqlens_k: int32, (batch + 1,), from 0 to the total, not decreasing: sequence b owns rows
            cu_seqlens[b] to cu_seqlens[b + 1]. Sequences may be empty. Values are checked on the CPU; on a GPU reading
            them would wait for the device, so there they are trusted.
        max_seqlen_q, max_seqlen_k: the longest lengths (or more); None reads them from cu_seqlens, which waits for a
            GPU.
        bias, mask: broadcast to (batch, num_heads, max_seqlen_q, max_seqlen_k); rows and columns count from the start
            of each sequence. So do those of score_mod, mask_mod and block_mask.

    The rest, and what is raised, is as for `attention`; lse is (num_heads, total_q).
    """
    q, k, v = _autocast(q, k, v)
    problem, inputs = Problem.of(
        q,
        k,
        v,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
        causal=causal,
        scale=scale,
        window=window,
        softcap=softcap,
        bias=bias,
        mask=mask,
        alibi_slopes=alibi_slopes,
        sink=sink,
        dropout_p=dropout_p,
        dropout_seed=dropout_seed,
        deterministic=_deterministic(deterministic),
        score_mod=score_mod,
        mask_mod=mask_mod,
        block_mask=block_mask,
    )
    return _run(problem, inputs, backend, return_lse)


def explain(
    q: Tensor, k: Tensor, v: Tensor, *, backend: str | None = None, return_lse: bool = False, **options
) -> dispatch.Explanation:
    """Say which backend would serve `attention(q, k, v, **options)` (or, with cu_seqlens_q, `attention_varlen`), with
    which tiles and why, how many bytes move, and what standard attention would move and hold. Computes nothing, so
    tensors of a FakeTensorMode do; return_lse changes nothing."""
    problem, inputs = Problem.of(*_autocast(q, k, v), **options)
    return dispatch.explain(problem, inputs, backend)


def _run(problem: Problem, inputs: Inputs, backend: str | None, return_lse: bool) -> Tensor | AttentionOutput:
    out, lse = ops.run(problem, inputs, backend)
    return AttentionOutput(out, lse) if return_lse else out


def _deterministic(deterministic: bool | None) -> bool:
    return torch.are_deterministic_algorithms_enabled() if deterministic is None else deterministic


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """q, k and v in the autocast dtype where autocast is on, as torch does for its own attention."""
    if not torch.compiler.is_compiling() and not torch._C._is_any_autocast_enabled():
        return tensors
    device = tensors[0].device.type if isinstance(tensors[0], Tensor) else "cpu"
    if device not in ("cpu", "cuda") or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    eligible = (torch.float16, torch.bfloat16, torch.float32)
    return tuple(x.to(dtype) if isinstance(x, Tensor) and x.dtype in eligible else x for x in tensors)
