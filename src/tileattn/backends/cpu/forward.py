"""Forward: FlashAttention-2, Algorithm 1 (Dao 2023), over tiles of transposed scores.

A block of rows goes through the tiles of its keys. The first tile takes the textbook step of online softmax. From then
on the running maximum m changes little, so later tiles are computed already shifted by it (-m is the bias of the
product) and only their exponentials are taken and summed: no maximum, no subtraction, no rescaling. That is exact while
nothing overflows, since floating point is scale-free; when the row sums say that m has become too small, the tile is
computed again by the textbook step.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from tileattn.backends.cpu import tiling, workers
from tileattn.backends.cpu.gemm import linear, operand_dtype
from tileattn.backends.cpu.scores import LN2, LOG2E, Scores
from tileattn.backends.cpu.stacks import Stack, stacks
from tileattn.backends.cpu.tiling import Blocks, Tile, cuts
from tileattn.problem import Forward, Inputs, Problem

MAX_ROW_SUM = 2.0**24  # beyond it m is too small to stand for the maximum
MAX_RETRIES = 3  # of a block of rows; after so many it stays with the textbook step


def forward(problem: Problem, inputs: Inputs) -> Forward:
    q = inputs.q
    out = q.new_empty((*q.shape[:-1], problem.head_dim_v))
    shape = (problem.num_heads, q.shape[0]) if problem.varlen else (q.shape[0], problem.num_heads, q.shape[1])
    lse = q.new_empty(shape, dtype=problem.lse_dtype)
    todo, threads = stacks(problem, inputs)
    blocks = _balanced(todo, threads)
    splits = max(threads // max(_count(todo, blocks), 1), 1)
    jobs = []
    for stack in todo:
        # with causality the last rows have the most to do, so they come first
        for rows in reversed(_row_blocks(stack, blocks)):
            ranges = _key_ranges(stack, rows, splits, blocks)
            tasks = [partial(_attend, inputs, stack, blocks, rows, cols) for cols in ranges]
            jobs.append(workers.Job(tasks, partial(_write, out, lse, stack, rows)))
    workers.run(jobs, threads)
    return Forward(out, lse)


def _balanced(todo: list[Stack], threads: int) -> Blocks:
    """Blocks with so many rows that all threads have work to the end."""
    blocks, count = tiling.BLOCKS, _count(todo, tiling.BLOCKS)
    while (
        threads > 1
        and blocks.rows > tiling.MIN_ROWS
        and (count < 2 * threads or (count % threads and count < tiling.BALANCE * threads))
    ):
        blocks = blocks._replace(rows=blocks.rows // 2)
        count = _count(todo, blocks)
    return blocks


def _row_blocks(stack: Stack, blocks: Blocks) -> list[range]:
    return stack.cuts(range(stack.seqlen_q), blocks.positions(stack.problem.group), blocks.align)


def _count(todo: list[Stack], blocks: Blocks) -> int:
    return sum(len(_row_blocks(stack, blocks)) for stack in todo)


def _key_ranges(stack: Stack, rows: range, splits: int, blocks: Blocks) -> list[range]:
    """Columns the rows see, in as many ranges as there are threads that would otherwise be idle."""
    window = tiling.Window.of(stack.problem, stack.seqlen_q, stack.seqlen_k)
    seen = tiling.overlap(range(stack.seqlen_k), window.columns(rows))
    size = -(-len(seen) // splits // blocks.cols) * blocks.cols
    return cuts(seen, max(size, blocks.cols), len(seen)) if splits > 1 and len(seen) else [seen]


def _attend(inputs: Inputs, stack: Stack, blocks: Blocks, rows: range, cols: range) -> OnlineSoftmax:
    """Attention of a block of rows to a range of keys, not yet normalised."""
    dtype = stack.problem.lse_dtype
    scores = Scores(stack, inputs, dtype)
    q = stack.rows(stack.queries(inputs.q), rows, dtype) * scores.q_scale
    k, v, v_dtype = stack.keys(inputs.k), stack.keys(inputs.v), operand_dtype(stack.problem.dtype)
    softmax = OnlineSoftmax(scores, rows, q)
    for block in stack.cuts(cols, blocks.columns(q.shape[:-1].numel()), blocks.align):
        for tile in scores.tiles(rows, block, blocks):
            softmax.step(tile, stack.cols(k, tile.cols, dtype), stack.cols(v, tile.cols, v_dtype))
    return softmax


def _write(out: Tensor, lse: Tensor, stack: Stack, rows: range, parts: list[OnlineSoftmax]) -> None:
    whole = parts[0]
    for part in parts[1:]:
        whole.merge(part)
    if stack.problem.has_sink:
        whole.add_sink()
    r = slice(rows.start, rows.stop)
    target = stack.queries(out)[..., r, :, :]
    target.copy_(whole.normalised().reshape(target.shape))
    target = stack.statistics(lse)[..., r, :]
    target.copy_(whole.logsumexp().reshape(target.shape))


class OnlineSoftmax:
    """The running maximum m, sum l (both [*, rows]) and output acc [*, head_dim_v, rows] of a block of rows."""

    def __init__(self, scores: Scores, rows: range, q: Tensor) -> None:
        self.scores, self.first, self.q = scores, rows.start, q
        self.m = q.new_full(q.shape[:-1], float("-inf"))
        self.neg_m = -self.m
        self.l = torch.zeros_like(self.m)
        self.acc = q.new_zeros((*q.shape[:-2], scores.stack.problem.head_dim_v, q.shape[-2]))
        self.settled = False  # every row has a finite m
        self.retries = 0

    def step(self, tile: Tile, k: Tensor, v: Tensor) -> None:
        group = self.scores.stack.problem.group
        r = slice((tile.rows.start - self.first) * group, (tile.rows.stop - self.first) * group)
        shifts = self.scores.plain and self.settled and self.retries < MAX_RETRIES
        if not (shifts and self._shifted_step(r, tile, k, v)):
            self._textbook_step(r, tile, k, v)

    def _shifted_step(self, r: slice, tile: Tile, k: Tensor, v: Tensor) -> bool:
        """False, and nothing has changed, when m is too small."""
        s = self.scores.product(k, self.q[..., r, :], self.neg_m[..., r])
        p = self.scores.add_window(s, tile).exp2_()
        l = p.sum(-2).add_(self.l[..., r])
        if not l.amax().item() <= MAX_ROW_SUM:  # also when it is NaN
            self.retries += 1
            return False
        self.l[..., r] = l
        self.acc[..., r].add_(self._values(p, tile, v))
        return True

    def _textbook_step(self, r: slice, tile: Tile, k: Tensor, v: Tensor) -> None:
        m, l, acc = self.m[..., r], self.l[..., r], self.acc[..., r]
        s = self.scores.modify(self.scores.raw(self.scores.product(k, self.q[..., r, :]), tile), tile)
        m_new = torch.maximum(m, s.amax(-2))
        shift = _finite(m_new)
        alpha = (m - shift).exp2_()
        p = s.sub_(shift[..., None, :]).exp2_()
        l.mul_(alpha).add_(p.sum(-2))
        acc.mul_(alpha[..., None, :]).add_(self._values(p, tile, v))
        m.copy_(m_new)
        torch.neg(self.m, out=self.neg_m)
        self.settled = self.settled or self.m.amin().item() > float("-inf")

    def _values(self, p: Tensor, tile: Tile, v: Tensor) -> Tensor:
        """[*, head_dim_v, rows]."""
        keep = self.scores.keep(tile)
        if keep is not None:
            p = p * keep
        return linear(v.transpose(-1, -2), p.to(v.dtype).transpose(-1, -2))

    def merge(self, other: OnlineSoftmax) -> None:
        m = torch.maximum(self.m, other.m)
        ours, theirs = ((x.m - _finite(m)).exp2_() for x in (self, other))
        self.l.mul_(ours).addcmul_(other.l, theirs)
        self.acc.mul_(ours[..., None, :]).addcmul_(other.acc, theirs[..., None, :])
        self.m = m

    def add_sink(self) -> None:
        """One more logit, without a value."""
        stack = self.scores.stack
        sink = stack.of_heads(self.scores.inputs.sink.to(self.m.dtype)[None])
        m_sink = stack.per_row(sink, self.m.shape[-1] // stack.problem.group) * LOG2E
        m = torch.maximum(self.m, m_sink)
        alpha = (self.m - _finite(m)).exp2_()
        self.l.mul_(alpha).add_((m_sink - _finite(m)).exp2_())
        self.acc.mul_(alpha[..., None, :])
        self.m = m

    def normalised(self) -> Tensor:
        """[*, rows, head_dim_v]; 0 where nothing was seen."""
        out = self.acc / self.l.clamp(min=torch.finfo(self.l.dtype).tiny)[..., None, :]
        return out.transpose(-1, -2).contiguous()

    def logsumexp(self) -> Tensor:
        return (self.m + self.l.log2()) * LN2


def _finite(m: Tensor) -> Tensor:
    """m to subtract: -inf would give NaN."""
    return m.clamp(min=torch.finfo(m.dtype).min)
