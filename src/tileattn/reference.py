"""Standard attention, materialised: the semantics of tileattn in one sitting, and the oracle of every test.

    s = score_mod(softcap(q.k * scale) + alibi + bias);  s = -inf where hidden;  p = softmax([sink?, s]);
    out = dropout(p).v

It is differentiable by autograd in every input and it holds the (seqlen_q, seqlen_k) matrices, so it is slow and
hungry, and it is the baseline of every benchmark.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.block_mask import FULL, SKIPPED, of_scores
from tileattn.kvcache import CacheInputs, CacheProblem
from tileattn.mods import Program
from tileattn.philox import keep_mask
from tileattn.problem import Inputs, Problem
from tileattn.rotary import rotate


class Reference(NamedTuple):
    """out as the API returns it; lse (batch, num_heads, seqlen_q), varlen (num_heads, total_q); probabilities before
    dropout, (batch, num_heads, seqlen_q, seqlen_k), None for varlen."""

    out: Tensor
    lse: Tensor
    probs: Tensor | None


def standard_attention(problem: Problem, inputs: Inputs, dtype: torch.dtype | None = None) -> Reference:
    """Attention of `problem` in plain PyTorch.

    dtype: what to compute in; None computes as standard attention does, in the dtype of q with a float32 softmax.
    Outputs come in the computing dtype (lse: at least float32).
    """
    if not problem.varlen:
        return _dense(problem, inputs, dtype, first_batch=0)
    outs, lses = [], []
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    for b in range(problem.batch):
        rows, cols = slice(*starts_q[b : b + 2]), slice(*starts_k[b : b + 2])
        len_q, len_k = rows.stop - rows.start, cols.stop - cols.start
        one = inputs._replace(
            q=inputs.q[None, rows],
            k=inputs.k[None, cols],
            v=inputs.v[None, cols],
            bias=_of_sequence(inputs.bias, b, len_q, len_k),
            mask=_of_sequence(inputs.mask, b, len_q, len_k),
            alibi_slopes=None if inputs.alibi_slopes is None else _pick(inputs.alibi_slopes, b),
            block_mask=None if inputs.block_mask is None else _pick(inputs.block_mask, b),
        )
        ref = _dense(problem, one, dtype, first_batch=b)
        outs.append(ref.out[0])
        lses.append(ref.lse[0])
    if not outs:
        compute = dtype or problem.dtype
        out = inputs.q.new_zeros((0, problem.num_heads, problem.head_dim_v), dtype=compute)
        return Reference(out, inputs.q.new_zeros((problem.num_heads, 0), dtype=_softmax_dtype(compute)), None)
    return Reference(torch.cat(outs), torch.cat(lses, dim=-1), None)


def visible(problem: Problem, seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """Boolean (seqlen_q, seqlen_k): what the window (and so causality) lets each row see, bottom-right aligned."""
    distance = _distance(seqlen_q, seqlen_k, device)
    seen = torch.ones_like(distance, dtype=torch.bool)
    if problem.window_left >= 0:
        seen &= distance >= -problem.window_left
    if problem.window_right >= 0:
        seen &= distance <= problem.window_right
    return seen


def _allowed(problem: Problem, inputs: Inputs, at: tuple[Tensor, ...], seqlen_q: int, seqlen_k: int) -> Tensor:
    """Boolean, broadcasting to the scores: what mask, mask_mod and block_mask let each row see."""
    seen = torch.ones((), dtype=torch.bool, device=inputs.q.device)
    if inputs.mask is not None:
        seen = seen & inputs.mask
    if problem.mask_mod:
        seen = seen & Program.parse(problem.mask_mod).run(at, inputs.mask_mod_tensors, torch.float32).bool()
    if inputs.block_mask is not None:
        m, n = problem.block_size
        kind = of_scores(inputs.block_mask, (m, n), range(seqlen_q), range(seqlen_k))
        seen = (kind != SKIPPED) & (seen | (kind == FULL))
    return seen


def _indices(first_batch: int, shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, ...]:
    """b, h, row and col as mods take them, broadcasting to the scores."""
    b, h, row, col = (torch.arange(n, dtype=torch.int32, device=device) for n in shape)
    return (b + first_batch)[:, None, None, None], h[:, None, None], row[:, None], col


def _distance(seqlen_q: int, seqlen_k: int, device: torch.device) -> Tensor:
    """column - row, counted so that the last row stands on the last column."""
    rows = torch.arange(seqlen_q, device=device)[:, None] + (seqlen_k - seqlen_q)
    return torch.arange(seqlen_k, device=device)[None, :] - rows


def _softmax_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _dense(problem: Problem, inputs: Inputs, dtype: torch.dtype | None, first_batch: int) -> Reference:
    dtype = dtype or problem.dtype
    high = _softmax_dtype(dtype)
    # [batch, heads, seqlen, head_dim]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    k, v = (x.repeat_interleave(problem.group, dim=1) for x in (k, v))
    seqlen_q, seqlen_k = q.shape[2], k.shape[2]

    scores = (q @ k.transpose(-1, -2) * problem.scale).to(high)
    if problem.softcap:
        scores = problem.softcap * torch.tanh(scores / problem.softcap)
    if inputs.alibi_slopes is not None:
        distance = _distance(seqlen_q, seqlen_k, q.device).abs()
        scores = scores - inputs.alibi_slopes.to(high)[:, :, None, None] * distance
    if inputs.bias is not None:
        scores = scores + inputs.bias.to(high)
    at = _indices(first_batch, scores.shape, q.device)
    if problem.score_mod:
        modified = Program.parse(problem.score_mod).run((scores, *at), inputs.score_mod_tensors, high)
        scores = modified.to(high).expand(scores.shape)
    seen = visible(problem, seqlen_q, seqlen_k, q.device) & _allowed(problem, inputs, at, seqlen_q, seqlen_k)
    scores = scores.masked_fill(~seen, float("-inf"))
    if inputs.sink is not None:
        sink = inputs.sink.to(high)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([sink, scores], dim=-1)

    lse = _logsumexp(scores)
    probs = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    if inputs.sink is not None:
        probs = probs[..., 1:]
    dropped = probs
    if problem.dropout_p > 0.0:
        batch, heads = q.shape[:2]
        index = range(first_batch, first_batch + batch), range(heads), range(seqlen_q)
        b, h, r = (torch.arange(x.start, x.stop, device=q.device) for x in index)
        keep = keep_mask(
            int(inputs.dropout_seed.item()), problem.dropout_p, b[:, None, None], h[:, None], r, range(seqlen_k)
        )
        dropped = probs * keep / (1.0 - problem.dropout_p)
    out = dropped.to(dtype) @ v
    return Reference(out.transpose(1, 2), lse, probs)


def _logsumexp(scores: Tensor) -> Tensor:
    """torch.logsumexp over the last dim, also for no columns, with a zero gradient where everything is hidden."""
    if scores.shape[-1] == 0:
        return scores.new_full(scores.shape[:-1], float("-inf"))
    peak = scores.detach().amax(-1, keepdim=True)
    hidden = peak == float("-inf")
    total = torch.exp(scores - peak.masked_fill(hidden, 0.0)).sum(-1, keepdim=True)
    lse = torch.log(total.masked_fill(hidden, 1.0)) + peak
    return lse[..., 0]


def _pick(x: Tensor, b: int) -> Tensor:
    return x if x.shape[0] == 1 else x[b : b + 1]


def _of_sequence(x: Tensor | None, b: int, len_q: int, len_k: int) -> Tensor | None:
    if x is None:
        return None
    x = _pick(x, b)
    rows = x.shape[2] if x.shape[2] == 1 else len_q
    cols = x.shape[3] if x.shape[3] == 1 else len_k
    return x[:, :, :rows, :cols]


def standard_attention_with_kvcache(
    problem: CacheProblem, inputs: CacheInputs, dtype: torch.dtype | None = None
) -> Reference:
    """`standard_attention` of each sequence to its cached keys, brought together, and the new ones. Changes nothing."""
    outs, lses = [], []
    for b in range(problem.batch):
        q = _rows(inputs.q, inputs.cu_seqlens_q, b)
        k, v, cached = _cached_keys(problem, inputs, b)
        q = _turn(problem, inputs, q, cached)
        mask = inputs.mask
        if mask is not None:  # of the last keys
            mask = torch.nn.functional.pad(_pick(mask, b), (len(k) - mask.shape[-1], 0), value=True)
        one = Inputs(
            q[None],
            k[None],
            v[None],
            mask=_of_sequence(mask, 0, len(q), len(k)),
            alibi_slopes=None if inputs.alibi_slopes is None else _pick(inputs.alibi_slopes, b),
            sink=inputs.sink,
        )
        ref = _dense(problem.gathered(len(k)), one, dtype, first_batch=b)
        outs.append(ref.out)
        lses.append(ref.lse)
    if problem.varlen:
        return Reference(torch.cat(outs, dim=1)[0], torch.cat(lses, dim=-1)[0], None)
    return Reference(torch.cat(outs), torch.cat(lses), None)


def _rows(x: Tensor, cu_seqlens: Tensor | None, b: int) -> Tensor:
    return x[b] if cu_seqlens is None else x[int(cu_seqlens[b]) : int(cu_seqlens[b + 1])]


def _cached_keys(problem: CacheProblem, inputs: CacheInputs, b: int) -> tuple[Tensor, Tensor, int]:
    """k and v of a sequence, and how many positions were taken before the new ones."""
    pages = [b] if inputs.table is None else inputs.table[b].tolist()
    cached = problem.seqlen_cache if inputs.cache_seqlens is None else int(inputs.cache_seqlens[b])
    first = 0 if inputs.leftpad is None else int(inputs.leftpad[b])
    in_use = pages[: -(-cached // problem.page_size)]
    k, v = (cache[in_use].flatten(0, 1)[first:cached] for cache in (inputs.k_cache, inputs.v_cache))
    if inputs.k is not None:
        new = _turn(problem, inputs, _rows(inputs.k, inputs.cu_seqlens_k, b), cached)
        new_v = new[..., : problem.head_dim_v] if inputs.v is None else _rows(inputs.v, inputs.cu_seqlens_k, b)
        k, v = torch.cat([k, new]), torch.cat([v, new_v])
    return k, v, cached


def _turn(problem: CacheProblem, inputs: CacheInputs, x: Tensor, first: int) -> Tensor:
    """x at positions first and after, turned by the rotary embedding if there is one."""
    if inputs.rotary_cos is None or inputs.rotary_sin is None:
        return x
    at = slice(first, first + len(x))
    return rotate(x, inputs.rotary_cos[at], inputs.rotary_sin[at], problem.rotary_interleaved)
