"""Forward: FlashAttention-2, Algorithm 1 (Dao 2023), over tiles of transposed scores.

A block of rows goes through the tiles of its keys by the textbook step of online softmax, or, where nothing but the
window changes scores, by `steps.attend`. There the first tile takes the textbook step; from then on the running maximum
m changes little, so later tiles are computed already shifted by it (-m is the bias of the product) and only their
exponentials are taken and summed: no maximum, no subtraction, no rescaling. That is exact while nothing overflows,
since floating point is scale-free; when the row sums say that m has become too small, the tile is computed again by
the textbook step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.backends.cpu import tiling, workers
from tileattn.backends.cpu.gemm import linear, operand_dtype
from tileattn.backends.cpu.scores import LOG2E, Scores
from tileattn.backends.cpu.stacks import Stack, stacks
from tileattn.backends.cpu.steps import attend, finite, textbook_step, write
from tileattn.backends.cpu.tiling import Blocks, Tile, cuts
from tileattn.problem import Forward, Inputs, Problem


def forward(problem: Problem, inputs: Inputs) -> Forward:
    out, lse = Forward.unwritten(inputs.q, problem.head_dim_v, problem.lse_dtype)
    todo, threads = stacks(problem, inputs)
    blocks = balanced(todo, threads)
    splits = max(threads // max(count_blocks(todo, blocks), 1), 1)
    jobs = []
    for stack in todo:
        k, v = stack.keys(inputs.k), stack.keys(inputs.v)
        head = Head.of(stack, inputs, partial(_part_of, k, v), out, lse)
        # with causality the last rows have the most to do, so they come first
        last_first = reversed(row_blocks(stack, blocks))
        jobs += [head.job(rows, key_ranges(stack, rows, splits, blocks), blocks) for rows in last_first]
    workers.run(jobs, threads)
    return Forward(out, lse)


def _part_of(k: Tensor, v: Tensor, cols: range) -> tuple[Tensor, Tensor]:
    return k[..., cols.start : cols.stop, :], v[..., cols.start : cols.stop, :]


class Head(NamedTuple):
    """A stack, how it is scored, and its views of the tensors."""

    scores: Scores
    q: Tensor  # as `Stack.queries` says
    keys: Callable[[range], tuple[Tensor, Tensor]]  # k and v of some columns, as `Stack.keys` says
    v_dtype: torch.dtype
    out: Tensor
    lse: Tensor  # as `Stack.statistics` says

    @staticmethod
    def of(
        stack: Stack, inputs: Inputs, keys: Callable[[range], tuple[Tensor, Tensor]], out: Tensor, lse: Tensor
    ) -> Head:
        return Head(
            Scores(stack, inputs, stack.problem.lse_dtype),
            stack.queries(inputs.q),
            keys,
            operand_dtype(stack.problem.dtype),
            stack.queries(out),
            stack.statistics(lse),
        )

    def job(self, rows: range, ranges: list[range], blocks: Blocks) -> workers.Job:
        """Attention of a block of rows to ranges of keys, each of which may be computed on its own."""
        tasks = [partial(_attend, self, blocks, rows, cols) for cols in ranges]
        return workers.Job(tasks, partial(_finish, self, rows))


def balanced(todo: list[Stack], threads: int) -> Blocks:
    """Blocks with so many rows that all threads have work to the end."""
    blocks, count = tiling.BLOCKS, count_blocks(todo, tiling.BLOCKS)
    while (
        threads > 1
        and blocks.rows > tiling.MIN_ROWS
        and (count < 2 * threads or (count % threads and count < tiling.BALANCE * threads))
    ):
        blocks = blocks._replace(rows=blocks.rows // 2)
        count = count_blocks(todo, blocks)
    return blocks


def row_blocks(stack: Stack, blocks: Blocks) -> list[range]:
    return stack.cuts(range(stack.seqlen_q), blocks.positions(stack.problem.group), blocks.align)


def count_blocks(todo: list[Stack], blocks: Blocks) -> int:
    return sum(len(row_blocks(stack, blocks)) for stack in todo)


def key_ranges(stack: Stack, rows: range, splits: int, blocks: Blocks) -> list[range]:
    """Columns the rows see, in as many ranges as there are threads that would otherwise be idle."""
    window = tiling.Window.of(stack.problem, stack.seqlen_q, stack.seqlen_k)
    seen = tiling.overlap(range(stack.seqlen_k), window.columns(rows))
    size = -(-len(seen) // splits // blocks.cols) * blocks.cols
    return cuts(seen, max(size, blocks.cols), len(seen)) if splits > 1 and len(seen) else [seen]


def _attend(head: Head, blocks: Blocks, rows: range, cols: range) -> OnlineSoftmax:
    """Attention of a block of rows to a range of keys, not yet normalised."""
    scores, stack = head.scores, head.scores.stack
    columns = stack.cuts(cols, blocks.columns(math.prod(stack.lead) * len(rows) * stack.problem.group), blocks.align)
    tiles = [tile for block in columns for tile in scores.tiles(rows, block, blocks)]
    places = [stack.place(tile, rows.start, cols.start) for tile in tiles]
    k, v = head.keys(cols if tiles else range(cols.start, cols.start))
    if scores.plain:
        windows = [scores.windows(tile) for tile in tiles]
        where = head.q, scores.q_scale, rows.start, rows.stop
        return OnlineSoftmax(scores, *attend(*where, k, v, head.v_dtype, places, windows))
    q = stack.rows(head.q, rows, scores.dtype) * scores.q_scale
    softmax = OnlineSoftmax.empty(scores, q)
    for tile, (r0, r1, c0, c1) in zip(tiles, places, strict=True):
        some = range(c0, c1)
        softmax.step(tile, slice(r0, r1), q, stack.cols(k, some, scores.dtype), stack.cols(v, some, head.v_dtype))
    return softmax


def _finish(head: Head, rows: range, parts: list[OnlineSoftmax]) -> None:
    whole = parts[0]
    for part in parts[1:]:
        whole.merge(part)
    if head.scores.stack.problem.has_sink:
        whole.add_sink()
    r = slice(rows.start, rows.stop)
    write(head.out[..., r, :, :], head.lse[..., r, :], whole.m, whole.l, whole.acc)


class OnlineSoftmax:
    """The running maximum m, sum l (both [*, rows]) and output acc [*, head_dim_v, rows] of a block of rows."""

    def __init__(self, scores: Scores, m: Tensor, l: Tensor, acc: Tensor) -> None:
        self.scores, self.m, self.l, self.acc = scores, m, l, acc

    @staticmethod
    def empty(scores: Scores, q: Tensor) -> OnlineSoftmax:
        m = q.new_full(q.shape[:-1], float("-inf"))
        acc = q.new_zeros((*q.shape[:-2], scores.stack.problem.head_dim_v, q.shape[-2]))
        return OnlineSoftmax(scores, m, torch.zeros_like(m), acc)

    def step(self, tile: Tile, r: slice, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take in a tile, rows r of the block, with every modifier."""
        s = self.scores.modify(self.scores.raw(self.scores.product(k, q[..., r, :]), tile), tile)
        acc = self.acc[..., r]
        p = textbook_step(s, self.m[..., r], self.l[..., r], acc)
        keep = self.scores.keep(tile)
        if keep is not None:
            p = p * keep
        acc.add_(linear(v.transpose(-1, -2), p.to(v.dtype).transpose(-1, -2)))

    def merge(self, other: OnlineSoftmax) -> None:
        m = torch.maximum(self.m, other.m)
        ours, theirs = ((x.m - finite(m)).exp2_() for x in (self, other))
        self.l.mul_(ours).addcmul_(other.l, theirs)
        self.acc.mul_(ours[..., None, :]).addcmul_(other.acc, theirs[..., None, :])
        self.m = m

    def add_sink(self) -> None:
        """One more logit, without a value."""
        stack = self.scores.stack
        sink = stack.of_heads(self.scores.inputs.sink.to(self.m.dtype)[None])
        m_sink = stack.per_row(sink, self.m.shape[-1] // stack.problem.group) * LOG2E
        m = torch.maximum(self.m, m_sink)
        alpha = (self.m - finite(m)).exp2_()
        self.l.mul_(alpha).add_((m_sink - finite(m)).exp2_())
        self.acc.mul_(alpha[..., None, :])
        self.m = m
