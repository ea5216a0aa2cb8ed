"""Problem: the one description of one attention call, and the one way to it.

`Problem.of(...)` takes what a user passed, refuses what makes no sense with one sentence that names the argument,
what came and what would do, and returns a frozen Problem together with the Inputs in canonical form. Backends trust
both and never check again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileattn.block_mask import BlockMask, as_block_mask
from tileattn.checks import (
    check_alibi_slopes,
    check_bias,
    check_block_mask,
    check_cu_seqlens,
    check_dropout,
    check_dropout_seed,
    check_mask,
    check_max_seqlen,
    check_qkv,
    check_scale,
    check_sink,
    check_softcap,
    check_window,
    unit_last_stride,
)
from tileattn.mods import Mod, trace_mask_mod, trace_score_mod


class Inputs(NamedTuple):
    """The tensors of one attention call, in canonical form.

    q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_k, head_dim) and
    v (batch, seqlen_k, num_heads_k, head_dim_v); varlen: (total, heads, head_dim), sequence b owning rows
    cu_seqlens[b] to cu_seqlens[b + 1]. The last dim has stride 1.
    bias, mask: four dims, each either 1 or that of (batch, num_heads, seqlen_q, seqlen_k), any strides;
    varlen: the same with row and column counted inside each sequence.
    alibi_slopes: (1 or batch, num_heads); sink: (num_heads,), contiguous; both of any floating dtype.
    No tensor is negated lazily, as the imaginary part of x.conj() is: kernels read memory as it is.
    dropout_seed: int64, one element.
    block_mask: uint8 (1 or batch, 1 or num_heads, q_blocks, k_blocks), contiguous: 0 skipped, 1 partial, 2 full (mask
    and mask_mod do not apply).
    score_mod_tensors, mask_mod_tensors: what the Problem's programs read.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    block_mask: Tensor | None = None
    score_mod_tensors: tuple[Tensor, ...] = ()
    mask_mod_tensors: tuple[Tensor, ...] = ()


class Forward(NamedTuple):
    """out: like q with head_dim_v. lse: (batch, num_heads, seqlen_q) or, varlen, (num_heads, total_q)."""

    out: Tensor
    lse: Tensor

    @staticmethod
    def unwritten(q: Tensor, head_dim_v: int, lse_dtype: torch.dtype = torch.float32) -> Forward:
        """What forward returns for q, contiguous, with nothing in it."""
        *batch, rows, heads, head_dim = q.shape
        if head_dim == head_dim_v:  # half the time
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
        else:
            out = q.new_empty((*batch, rows, heads, head_dim_v))
        return Forward(out, q.new_empty((*batch, heads, rows), dtype=lse_dtype))


class Wanted(NamedTuple):
    """Which gradients a backward call must return."""

    q: bool = True
    k: bool = True
    v: bool = True
    bias: bool = False
    alibi_slopes: bool = False
    sink: bool = False


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their inputs; None for those not wanted."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dalibi_slopes: Tensor | None = None
    dsink: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """Sizes and scalars of one attention call. Score (i, j) of a sequence with lengths sq and sk is visible when
    -window_left <= j - i - (sk - sq) <= window_right, a negative bound meaning unlimited; causal is window_right = 0.
    """

    batch: int
    seqlen_q: int  # varlen: the longest sequence
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    varlen: bool = False
    aligned: bool = True  # strides of q, k and v are multiples of 16 bytes, see aligned_strides
    has_bias: bool = False
    has_mask: bool = False
    has_alibi: bool = False
    has_sink: bool = False
    score_mod: str = ""  # text of a mods.Program; of (score, b, h, row, col)
    score_derivative: str = ""  # of (score, b, h, row, col, grad): grad times the derivative of score_mod by its score
    mask_mod: str = ""  # of (b, h, row, col)
    block_size: tuple[int, ...] = ()  # rows and columns of a block of block_mask; () without one

    @property
    def group(self) -> int:
        """Query heads that share one key head (1: MHA, num_heads: MQA)."""
        return self.num_heads // self.num_heads_k

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @staticmethod
    def describing(inputs: Inputs, **scalars: Any) -> Problem:
        """The call that checked inputs and the fields that no tensor tells make."""
        q, k, v = inputs[:3]
        cu_seqlens_q = inputs.cu_seqlens_q
        return Problem(
            batch=cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0],
            num_heads=q.shape[-2],
            num_heads_k=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            device=q.device,
            varlen=cu_seqlens_q is not None,
            aligned=aligned_strides(q, k, v),
            has_bias=inputs.bias is not None,
            has_mask=inputs.mask is not None,
            has_alibi=inputs.alibi_slopes is not None,
            has_sink=inputs.sink is not None,
            **scalars,
        )

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
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
        deterministic: bool = False,
        score_mod: Callable[..., Tensor] | Mod | None = None,
        mask_mod: Callable[..., Tensor] | Mod | None = None,
        block_mask: Any = None,
    ) -> tuple[Problem, Inputs]:
        """Check everything and return the call in canonical form. Raises TypeError or ValueError."""
        optional = cu_seqlens_q, cu_seqlens_k, bias, mask, alibi_slopes, sink, dropout_seed
        key = None
        if not torch.compiler.is_compiling() and _all_none(*optional, score_mod, mask_mod, block_mask):
            key, found = _lookup(q, k, v, causal, scale, window, softcap, dropout_p, deterministic)
            if found is not None:
                return found, Inputs(unit_last_stride(q), unit_last_stride(k), unit_last_stride(v))
        varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
        check_qkv(q, k, v, varlen)
        num_heads = q.shape[-2]
        if varlen:
            batch = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
            batch_k = check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k)
            if batch != batch_k:
                raise ValueError(
                    f"cu_seqlens_k: {batch_k} sequences where cu_seqlens_q has {batch}; both need batch + 1 entries"
                )
            seqlen_q = check_max_seqlen("max_seqlen_q", max_seqlen_q, "cu_seqlens_q", cu_seqlens_q)
            seqlen_k = check_max_seqlen("max_seqlen_k", max_seqlen_k, "cu_seqlens_k", cu_seqlens_k)
        else:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        left, right = check_window(window)
        scores = (batch, num_heads, seqlen_q, seqlen_k)
        blocks: Tensor | None = None
        block_size: tuple[int, ...] = ()
        if block_mask is not None:
            block_mask = as_block_mask(block_mask)
            blocks, block_size = check_block_mask(block_mask, scores, q.device), block_mask.block_size
            mask, mask_mod, blocks = _with_block_mask(block_mask, mask, mask_mod, blocks)
        of_score = None if score_mod is None else trace_score_mod(score_mod, q.device)
        of_mask = None if mask_mod is None else trace_mask_mod(mask_mod, q.device)
        q, k, v = unit_last_stride(q), unit_last_stride(k), unit_last_stride(v)
        scalars = {
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "scale": check_scale(scale, q.shape[-1]),
            "window_left": left,
            "window_right": 0 if causal else right,
            "softcap": check_softcap(softcap),
            "dropout_p": check_dropout(dropout_p),
            "deterministic": bool(deterministic),
            "score_mod": "" if of_score is None else of_score.program,
            "score_derivative": "" if of_score is None else of_score.derivative,
            "mask_mod": "" if of_mask is None else of_mask.program,
            "block_size": block_size,
        }
        inputs = Inputs(
            q=q,
            k=k,
            v=v,
            bias=check_bias(bias, scores, q.device),
            mask=check_mask(mask, scores, q.device),
            alibi_slopes=check_alibi_slopes(alibi_slopes, batch, num_heads, q.device),
            sink=check_sink(sink, num_heads, q.device),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout_seed=check_dropout_seed(dropout_seed, dropout_p, q.device),
            block_mask=blocks,
            score_mod_tensors=() if of_score is None else _as_read(of_score.tensors),
            mask_mod_tensors=() if of_mask is None else _as_read(of_mask.tensors),
        )
        problem = Problem.describing(inputs, **scalars)
        if key is not None and not problem.dropout_p and not isinstance(causal, Tensor):  # with dropout a seed is drawn
            if len(_checked) >= MAX_CHECKED:  # more, if threads come together
                _checked.clear()
            _checked[key] = problem
        return problem, inputs


# Calls of q, k, v and scalars that were found to be in order: checking one takes 10 microseconds.
_checked: dict[Any, Problem] = {}
MAX_CHECKED = 4096


def _all_none(*arguments: Any) -> bool:
    return set(map(type, arguments)) == {type(None)}


def _lookup(q: Tensor, k: Tensor, v: Tensor, *scalars: Any) -> tuple[Any, Problem | None]:
    """All that checks of such a call look at, and what they found; None where there is none (a sparse tensor has no
    strides), or it has no hash (symbolic sizes, a window in a list)."""
    try:
        strides = (q.stride(), k.stride(), v.stride())
        key = (q.shape, k.shape, v.shape, strides, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, scalars)
        return key, _checked.get(key)
    except (AttributeError, TypeError, RuntimeError):
        return None, None


def aligned_strides(*tensors: Tensor) -> bool:
    """Whether every dim but the last is a positive multiple of 16 bytes apart (one of size 1 does not matter)."""
    return not any(
        size != 1 and (stride == 0 or stride * x.element_size() % 16)
        for x in tensors
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def _as_read(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().resolve_neg() for t in tensors)


def _with_block_mask(block_mask: BlockMask, mask: Any, mask_mod: Any, blocks: Tensor) -> tuple[Any, Any, Tensor]:
    """mask, mask_mod and the map of a call: the block mask's, or the caller's, which decide in full blocks too."""
    for name, own, given in (("mask", block_mask.mask, mask), ("mask_mod", block_mask.mask_mod, mask_mod)):
        if own is not None and given is not None:
            raise ValueError(f"{name}: block_mask has one already; combine the two, and make the BlockMask of that")
    if mask is not None or mask_mod is not None:
        blocks = blocks.clamp(max=1)
    mask = block_mask.mask if mask is None else mask
    return mask, block_mask.mask_mod if mask_mod is None else mask_mod, blocks
