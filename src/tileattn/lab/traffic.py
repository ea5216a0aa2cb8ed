"""Bytes that attention moves between slow and fast memory, and bytes it holds (FlashAttention, 2022, section 3).

Counted, not measured: each operand once for every time the algorithm reads or writes it whole. Varlen problems are
counted as if every sequence had the longest length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tileattn.kvcache import CacheInputs, CacheProblem
from tileattn.problem import Inputs, Problem

if TYPE_CHECKING:
    from tileattn.backends import Tiles


class Traffic(NamedTuple):
    """moved: bytes read and written. held: bytes of intermediates alive at once, beside inputs and outputs."""

    moved: int
    held: int


def visible_scores(seqlen_q: int, seqlen_k: int, window_left: int, window_right: int) -> int:
    """How many (row, column) pairs of one head the window lets through, in closed form.

    Row i sees columns max(0, i + offset - left) to min(seqlen_k - 1, i + offset + right), offset = seqlen_k - seqlen_q.
    """
    offset = seqlen_k - seqlen_q
    upto_right = seqlen_q * seqlen_k if window_right < 0 else _ramp(offset + window_right + 1, seqlen_q, seqlen_k)
    before_left = 0 if window_left < 0 else _ramp(offset - window_left, seqlen_q, seqlen_k)
    return max(upto_right - before_left, 0)


def _ramp(start: int, count: int, top: int) -> int:
    """Sum of clamp(start + i, 0, top) for i in range(count)."""
    low = min(max(-start, 0), count)  # rows clamped to 0
    high = min(max(top - start, low), count)  # first row clamped to top
    between = high - low
    return between * (start + low) + between * (between - 1) // 2 + (count - high) * top


def count_scores(problem: Problem, inputs: Inputs) -> int:
    """Scores of all heads and sequences that the window shows and a block mask does not skip."""
    lengths, blocks = _lengths(problem, inputs), inputs.block_mask
    if blocks is not None and _readable(blocks):
        return sum(_scores_in_blocks(problem, blocks, b, *of_sequence) for b, of_sequence in enumerate(lengths))
    window = problem.window_left, problem.window_right
    return problem.num_heads * sum(visible_scores(*of_sequence, *window) for of_sequence in lengths)


def count_cached_scores(problem: CacheProblem, inputs: CacheInputs) -> int:
    """The same of a call with a cache; as if all were full where lengths cannot be read."""
    p, x = problem, inputs
    told = [y for y in (x.cache_seqlens, x.leftpad, x.cu_seqlens_q, x.cu_seqlens_k) if y is not None]
    if not all(map(_readable, told)):
        return p.batch * p.num_heads * visible_scores(p.seqlen_q, p.capacity, p.window_left, p.window_right)
    cached = [p.seqlen_cache] * p.batch if x.cache_seqlens is None else x.cache_seqlens.tolist()
    padding = [0] * p.batch if x.leftpad is None else x.leftpad.tolist()
    new = [p.seqlen_new] * p.batch if x.cu_seqlens_k is None else x.cu_seqlens_k.diff().tolist()
    rows = [p.seqlen_q] * p.batch if x.cu_seqlens_q is None else x.cu_seqlens_q.diff().tolist()
    return p.num_heads * sum(
        visible_scores(seqlen_q, seqlen + seqlen_new - first, p.window_left, p.window_right)
        for seqlen_q, seqlen, seqlen_new, first in zip(rows, cached, new, padding, strict=True)
    )


def _lengths(problem: Problem, inputs: Inputs) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) of each sequence; the longest for all where cu_seqlens cannot be read."""
    if problem.varlen and _readable(inputs.cu_seqlens_q):
        return list(zip(inputs.cu_seqlens_q.diff().tolist(), inputs.cu_seqlens_k.diff().tolist(), strict=True))
    return [(problem.seqlen_q, problem.seqlen_k)] * problem.batch


def _readable(x: Tensor | None) -> bool:
    return type(x) is Tensor and x.device.type != "meta"


def _scores_in_blocks(problem: Problem, blocks: Tensor, b: int, seqlen_q: int, seqlen_k: int) -> int:
    """Scores of one sequence, all heads, that the window shows and the block mask does not skip."""
    m, n = problem.block_size
    blocks = blocks[min(b, blocks.shape[0] - 1)].cpu()  # [num_heads or 1, q_blocks, k_blocks]
    rows, starts = torch.arange(seqlen_q, device="cpu"), torch.arange(blocks.shape[2], device="cpu") * n
    first = rows + (seqlen_k - seqlen_q) - (problem.window_left if problem.window_left >= 0 else seqlen_q + seqlen_k)
    last = rows + (seqlen_k - seqlen_q) + (problem.window_right if problem.window_right >= 0 else seqlen_q + seqlen_k)
    begin = torch.maximum(first.clamp(min=0)[:, None], starts)
    end = torch.minimum((last + 1).clamp(max=seqlen_k)[:, None], starts + n)
    shown = torch.zeros(blocks.shape[1:], dtype=torch.int64, device="cpu")
    shown.index_add_(0, rows // m, (end - begin).clamp(min=0))
    return int(((blocks > 0) * shown).expand(problem.num_heads, -1, -1).sum())


def tiled_traffic(problem: Problem, tiles: Tiles, scores: int | None = None) -> Traffic:
    """Forward of FlashAttention: q and out once, each tile of k and v once for every block of rows that sees it.
    scores: how many of all are seen (`count_scores`); those in the window, if not given."""
    p = problem
    size = p.dtype.itemsize
    every = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k
    if scores is None:
        in_window = visible_scores(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right)
        scores = p.batch * p.num_heads * in_window
    share = scores / every if every else 0.0
    row_blocks = -(-p.seqlen_q * p.group // tiles.block_m)
    once = p.batch * p.num_heads * p.seqlen_q * ((p.head_dim + p.head_dim_v) * size + p.lse_dtype.itemsize)
    again = p.batch * p.num_heads_k * p.seqlen_k * (p.head_dim + p.head_dim_v) * size * row_blocks * share
    held = tiles.block_m * (tiles.block_n + p.head_dim_v) * 4
    return Traffic(once + int(again) + _score_modifier_bytes(problem, share), held)


def standard_traffic(problem: Problem) -> Traffic:
    """Forward of standard attention: it also writes and reads the scores and the probabilities, hidden ones too."""
    p = problem
    size = p.dtype.itemsize
    matrix = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k * size
    q_and_out = p.batch * p.num_heads * p.seqlen_q * (p.head_dim + p.head_dim_v) * size
    k_and_v = p.batch * p.num_heads_k * p.seqlen_k * (p.head_dim + p.head_dim_v) * size
    return Traffic(q_and_out + k_and_v + 4 * matrix + _score_modifier_bytes(problem, 1.0), 2 * matrix)


def _score_modifier_bytes(problem: Problem, share: float) -> int:
    scores = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k * share
    return int(scores * (problem.has_bias * problem.dtype.itemsize + problem.has_mask))
