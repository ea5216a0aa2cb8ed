"""Stack: the heads that are computed together, and views of the call's tensors that belong to them.

One large head is a stack alone, in two-dimensional tensors; many small ones share every operator, in three-dimensional
tensors. The query heads of a GQA group are folded into rows: row r of a stack is position r // group, query head
r % group of its key head.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from tileattn.backends.cpu import tiling, workers
from tileattn.backends.cpu.steps import rows_between
from tileattn.backends.cpu.tiling import Tile
from tileattn.problem import Inputs, Problem

SMALL_SCORES = 3 * 2**14  # a head with no more scores than this is stacked
STACK_SCORES = 2**19  # scores of a whole stack
MAX_STACKED_SEQLEN = 256  # sequences with more keys are not stacked, because stacking copies the keys


@dataclass(frozen=True)
class Stack:
    """Key heads `heads` of sequences `batches` (more than one sequence only where they have one length)."""

    problem: Problem
    batches: range
    heads: range
    seqlen_q: int
    seqlen_k: int
    start_q: int = 0
    start_k: int = 0

    @property
    def lead(self) -> tuple[int, ...]:
        """Leading dims of the stack's tensors, written * in shapes."""
        count = len(self.batches) * len(self.heads)
        return () if count == 1 else (count,)

    @property
    def scores(self) -> int:
        return len(self.batches) * len(self.heads) * self.problem.group * self.seqlen_q * self.seqlen_k

    def queries(self, x: Tensor) -> Tensor:
        """View of a tensor laid out like q: [seqlen_q, group, dim], or [batches, heads, seqlen_q, group, dim]."""
        group = self.problem.group
        x = self._sequences(x)[:, self.start_q : self.start_q + self.seqlen_q, self._query_heads]
        x = x.unflatten(2, (len(self.heads), group)).transpose(1, 2)
        return x if self.lead else x[0, 0]

    def rows(self, queries: Tensor, rows: range, dtype: torch.dtype) -> Tensor:
        """Some of what `queries` returned, [*, rows, dim]."""
        return rows_between(queries, rows.start, rows.stop).to(dtype)

    def keys(self, x: Tensor) -> Tensor:
        """View of a tensor laid out like k: [seqlen_k, dim], or [batches, heads, seqlen_k, dim]."""
        x = self._sequences(x)[:, self.start_k : self.start_k + self.seqlen_k, _slice(self.heads)].transpose(1, 2)
        return x if self.lead else x[0, 0]

    def cols(self, keys: Tensor, cols: range, dtype: torch.dtype) -> Tensor:
        """Some of what `keys` returned, [*, cols, dim]."""
        x = keys[..., cols.start : cols.stop, :].to(dtype)
        return x.flatten(0, 1) if self.lead else x.contiguous()

    def place(self, tile: Tile, first_row: int, first_col: int) -> tuple[int, int, int, int]:
        """First and last row and key of a tile within tensors that begin at position first_row and key first_col."""
        group = self.problem.group
        r0, r1 = tile.rows.start - first_row, tile.rows.stop - first_row
        return r0 * group, r1 * group, tile.cols.start - first_col, tile.cols.stop - first_col

    def statistics(self, x: Tensor) -> Tensor:
        """View of a tensor laid out like lse: [seqlen_q, group], or [batches, heads, seqlen_q, group]."""
        x = self._sequences(x)[:, self._query_heads, self.start_q : self.start_q + self.seqlen_q]
        x = x.unflatten(1, (len(self.heads), self.problem.group)).transpose(2, 3)
        return x if self.lead else x[0, 0]

    def of_heads(self, x: Tensor) -> Tensor:
        """View [batches or 1, heads or 1, group or 1, ...] of a tensor (batch or 1, num_heads or 1, ...)."""
        x = x if x.shape[0] == 1 else x[_slice(self.batches)]
        if x.shape[1] == 1:
            return x.unflatten(1, (1, 1))
        return x[:, self._query_heads].unflatten(1, (len(self.heads), self.problem.group))

    def per_row(self, x: Tensor, positions: int) -> Tensor:
        """[batches or 1, heads or 1, group or 1] repeated for every row, [*, positions * group]."""
        x = x.expand(len(self.batches), len(self.heads), self.problem.group)
        return x.reshape(*self.lead, -1).tile(positions)

    def cuts(self, whole: range, block: int, align: int) -> list[range]:
        """As `tiling.cuts`, but stacked products go to BLAS, which compiles nothing: no cuts for the sake of shapes."""
        return tiling.cuts(whole, block, 1 if self.lead else align)

    @property
    def _query_heads(self) -> slice:
        return slice(self.heads.start * self.problem.group, self.heads.stop * self.problem.group)

    def _sequences(self, x: Tensor) -> Tensor:
        return x[None] if self.problem.varlen else x[_slice(self.batches)]


def stacks(problem: Problem, inputs: Inputs) -> tuple[list[Stack], int]:
    """Every head in one stack, the largest stacks first, and the number of threads that they are for."""
    work = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    threads = workers.threads_for(work * (problem.head_dim + problem.head_dim_v))
    if not problem.varlen:
        return of_sequences(problem, range(problem.batch), problem.seqlen_q, problem.seqlen_k, 0, 0, threads), threads
    starts_q, starts_k = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    found = []
    for b in range(problem.batch):
        (start_q, stop_q), (start_k, stop_k) = starts_q[b : b + 2], starts_k[b : b + 2]
        found += of_sequences(problem, range(b, b + 1), stop_q - start_q, stop_k - start_k, start_q, start_k, threads)
    return sorted(found, key=lambda stack: -stack.scores), threads


def of_sequences(
    problem: Problem, batches: range, seqlen_q: int, seqlen_k: int, start_q: int, start_k: int, threads: int
) -> list[Stack]:
    """The heads of sequences of one length."""
    scores = problem.group * seqlen_q * seqlen_k
    count = len(batches) * problem.num_heads_k
    size = 1 if scores > SMALL_SCORES else min(STACK_SCORES // max(scores, 1), math.ceil(count / threads))
    num_batches = max(size // problem.num_heads_k, 1) if seqlen_k <= MAX_STACKED_SEQLEN else 1
    num_heads = max(min(size, problem.num_heads_k), 1)
    return [
        Stack(problem, b, h, seqlen_q, seqlen_k, start_q, start_k)
        for b in _split(batches, num_batches)
        for h in _split(range(problem.num_heads_k), num_heads)
    ]


def _split(whole: range, size: int) -> list[range]:
    return [whole[i : i + size] for i in range(0, len(whole), size)]


def _slice(r: range) -> slice:
    return slice(r.start, r.stop)
