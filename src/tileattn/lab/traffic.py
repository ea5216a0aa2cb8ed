"""Bytes that attention moves between slow and fast memory, and bytes it holds (FlashAttention, 2022, section 3).

Counted, not measured: each operand once for every time the algorithm reads or writes it whole. Varlen problems are
counted as if every sequence had the longest length.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tileattn.problem import Problem

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


def tiled_traffic(problem: Problem, tiles: Tiles) -> Traffic:
    """Forward of FlashAttention: q and out once, each tile of k and v once for every block of rows that sees it."""
    p = problem
    size = p.dtype.itemsize
    full = p.seqlen_q * p.seqlen_k
    share = visible_scores(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right) / full if full else 0.0
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
