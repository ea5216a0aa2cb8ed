"""Attention with a cache on a CPU: the forward's tiles, over views of a contiguous cache or over gathered pages.

Every block of rows goes through its keys in ranges that are computed on their own, so that all threads have work when
there is one row to decode, and so that only a range of a paged cache is gathered at a time.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.backends import Tiles, cpu
from tileattn.backends.cpu import tiling, workers
from tileattn.backends.cpu.forward import Head, balanced, count_blocks, key_ranges, row_blocks
from tileattn.backends.cpu.stacks import Stack, of_sequences
from tileattn.kvcache import Append, CacheInputs, CacheProblem
from tileattn.problem import Forward, Inputs, Problem
from tileattn.rotary import rotate

GATHERED = 2**13  # keys of a paged cache that a thread brings together at a time


def supports(problem: CacheProblem) -> str | None:
    if problem.device.type != "cpu":
        return f"it serves tensors on the CPU, these are on {problem.device}"
    return None


def tiles(problem: CacheProblem) -> Tiles:
    p = problem
    of_forward = cpu.tiles(p.gathered(p.capacity))
    shared = f"are in runs of {p.split_size}" if p.split_size else "are shared out among threads that have no rows"
    return of_forward._replace(why=f"{of_forward.why}; keys {shared}")


def append(append: Append) -> None:
    x = append
    sequence, row = _tokens(x.k, x.cu_seqlens_k)
    position = row + (x.seqlen_cache if x.cache_seqlens is None else x.cache_seqlens[sequence])
    k = x.k.flatten(0, -3)
    if x.rotary_cos is not None and x.rotary_sin is not None:
        k = _turned(k, position, x.rotary_cos, x.rotary_sin, x.rotary_interleaved)
    page_size = x.k_cache.shape[1]
    inside = (position >= 0) & (position < page_size * (1 if x.table is None else x.table.shape[1]))
    where = _place(x.k_cache, x.table, sequence[inside], position[inside])
    x.k_cache[where] = k[inside]
    if x.v is not None and x.v_cache is not None:
        x.v_cache[where] = x.v.flatten(0, -3)[inside]


def attend(problem: CacheProblem, inputs: CacheInputs) -> Forward:
    p, q = problem, _queries(problem, inputs)
    out, lse = Forward.unwritten(q, p.head_dim_v, p.lse_dtype)
    sequences = _sequences(p, inputs)
    work = sum(s.seqlen_q * len(s.positions) for s in sequences) * p.num_heads
    threads = workers.threads_for(work * (p.head_dim + p.head_dim_v))
    # where the split is fixed, results do not depend on what else is in the batch, and so not on threads
    stacked = 1 if p.split_size else threads
    todo = [(s, stack) for s in sequences for stack in s.stacks(p.gathered(p.capacity), stacked)]
    stacks = [stack for _, stack in todo]
    blocks = tiling.BLOCKS if p.split_size else balanced(stacks, threads)
    splits = 1 if p.split_size else max(threads // max(count_blocks(stacks, blocks), 1), 1)
    most = p.split_size or (p.capacity if p.page_size == p.capacity else GATHERED)
    jobs = []
    for sequence, stack in todo:
        tensors = Inputs(
            q, inputs.k_cache, inputs.v_cache, None, sequence.mask(inputs.mask), inputs.alibi_slopes, inputs.sink
        )
        head = Head.of(stack, tensors, partial(_keys, inputs, sequence, stack), out, lse)
        for rows in reversed(row_blocks(stack, blocks)):
            ranges = [part for r in key_ranges(stack, rows, splits, blocks) for part in _cut(r, most)]
            jobs.append(head.job(rows, ranges, blocks))
    workers.run(jobs, threads)
    return Forward(out, lse)


class _Sequence(NamedTuple):
    """Which rows of q a sequence has, from start_q of its batch entry (varlen: of all rows), and at which positions of
    its pages its keys are."""

    batch: int
    start_q: int
    seqlen_q: int
    positions: range

    def stacks(self, problem: Problem, threads: int) -> list[Stack]:
        batch = range(self.batch, self.batch + 1)
        return of_sequences(problem, batch, self.seqlen_q, len(self.positions), self.start_q, 0, threads)

    def mask(self, mask: Tensor | None) -> Tensor | None:
        """The mask of the last keys as one of all keys."""
        if mask is None:
            return None
        mask = mask if mask.shape[0] == 1 else mask[self.batch : self.batch + 1]
        return torch.nn.functional.pad(mask, (len(self.positions) - mask.shape[-1], 0), value=True)


def _sequences(problem: CacheProblem, inputs: CacheInputs) -> list[_Sequence]:
    p, x = problem, inputs
    starts = [0] * (p.batch + 1) if x.cu_seqlens_q is None else x.cu_seqlens_q.tolist()
    cached = [p.seqlen_cache] * p.batch if x.cache_seqlens is None else x.cache_seqlens.tolist()
    new = [p.seqlen_new] * p.batch if x.cu_seqlens_k is None else x.cu_seqlens_k.diff().tolist()
    first = [0] * p.batch if x.leftpad is None else x.leftpad.tolist()
    found = []
    for b in range(p.batch):
        stop = min(max(cached[b] + new[b], 0), p.capacity)
        seqlen_q = starts[b + 1] - starts[b] if p.varlen else p.seqlen_q
        found.append(_Sequence(b, starts[b], seqlen_q, range(min(max(first[b], 0), stop), stop)))
    return found


def _keys(inputs: CacheInputs, sequence: _Sequence, stack: Stack, cols: range) -> tuple[Tensor, Tensor]:
    """k and v of some columns, as `Stack.keys` gives them."""
    heads = slice(stack.heads.start, stack.heads.stop)
    positions = sequence.positions[cols.start : cols.stop]
    found = []
    for cache in (inputs.k_cache, inputs.v_cache):
        of_heads = cache[:, :, heads]
        if inputs.table is None or inputs.table.shape[1] == 1:
            page = sequence.batch if inputs.table is None else int(inputs.table[sequence.batch, 0])
            rows = of_heads[min(max(page, 0), len(cache) - 1), positions.start : positions.stop]
        else:
            position = torch.arange(positions.start, positions.stop, device="cpu")
            rows = of_heads[_place(cache, inputs.table, torch.full_like(position, sequence.batch), position)]
        found.append(rows.transpose(0, 1)[None] if stack.lead else rows[:, 0])
    return found[0], found[1]


def _place(cache: Tensor, table: Tensor | None, sequence: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
    """Page and row of a position; inside the cache whatever the table holds."""
    num_pages, page_size = cache.shape[:2]
    page = sequence if table is None else table[sequence, position // page_size].long()
    return page.clamp(0, num_pages - 1), position % page_size


def _cut(cols: range, size: int) -> list[range]:
    return [cols[i : i + size] for i in range(0, len(cols), size)] or [cols]


def _tokens(x: Tensor, cu_seqlens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sequence, and row in it, of every token of (batch, rows, ..) or, with cu_seqlens, (total, ..)."""
    if cu_seqlens is None:
        index = torch.arange(x.shape[0] * x.shape[1], device="cpu")
        return index // max(x.shape[1], 1), index % max(x.shape[1], 1)
    index = torch.arange(x.shape[0], device="cpu")
    sequence = torch.searchsorted(cu_seqlens[1:-1].contiguous(), index, right=True)
    return sequence, index - cu_seqlens[sequence]


def _queries(problem: CacheProblem, inputs: CacheInputs) -> Tensor:
    """q, turned to its positions, which go on from those in the cache."""
    p, x = problem, inputs
    if x.rotary_cos is None or x.rotary_sin is None:
        return x.q
    sequence, row = _tokens(x.q, x.cu_seqlens_q)
    position = row + (p.seqlen_cache if x.cache_seqlens is None else x.cache_seqlens[sequence])
    return _turned(x.q.flatten(0, -3), position, x.rotary_cos, x.rotary_sin, p.rotary_interleaved).view(x.q.shape)


def _turned(x: Tensor, position: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    at = position.clamp(0, cos.shape[0] - 1)
    return rotate(x, cos[at], sin[at], interleaved)
