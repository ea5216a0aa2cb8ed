"""Backward: FlashAttention-2, Algorithm 2 (Dao 2023): probabilities are computed again, tile by tile, from lse.

    P = exp(S - lse);  dV = P^T dO;  dP = dO V^T;  dS = P (dP - delta);  dQ = dS K scale;  dK = dS^T Q scale

with delta = rowsum(dO out) - dlse. Tiles are transposed, so -lse and -delta are the biases of two products. A task owns
some keys of a stack of heads: dK and dV are its own, dQ is summed over tasks in their order.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.backends.cpu import tiling, workers
from tileattn.backends.cpu.gemm import linear, operand_dtype
from tileattn.backends.cpu.scores import LOG2E, ModifierGradients, Scores
from tileattn.backends.cpu.stacks import Stack, stacks
from tileattn.backends.cpu.steps import differentiate
from tileattn.backends.cpu.tiling import Blocks, Tile, cuts, overlap
from tileattn.problem import Forward, Gradients, Inputs, Problem, Wanted


class _Call(NamedTuple):
    """One backward call. Gradients of modifiers gather in the computing dtype; slopes and sink have a row for every
    sequence."""

    problem: Problem
    inputs: Inputs
    forward: Forward
    dout: Tensor
    dlse: Tensor | None
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None
    dbias: Tensor | None
    dslopes: Tensor | None
    dsink: Tensor | None

    @staticmethod
    def of(
        problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
    ) -> _Call:
        lse = forward.lse
        per_head = (problem.batch, problem.num_heads)
        return _Call(
            problem,
            inputs,
            forward,
            forward.out.new_zeros(()).expand(forward.out.shape) if dout is None else dout,
            dlse,
            dq=inputs.q.new_empty(inputs.q.shape) if wanted.q else None,
            dk=inputs.k.new_empty(inputs.k.shape) if wanted.k else None,
            dv=inputs.v.new_empty(inputs.v.shape) if wanted.v else None,
            dbias=lse.new_zeros(inputs.bias.shape) if wanted.bias else None,
            dslopes=lse.new_zeros(per_head) if wanted.alibi_slopes else None,
            dsink=lse.new_zeros(per_head) if wanted.sink else None,
        )


class _Heads(NamedTuple):
    """A stack with the statistics of its rows, [*, rows]: -lse in units of log2 and -delta."""

    stack: Stack
    neg_lse: Tensor
    neg_delta: Tensor


class _Part(NamedTuple):
    """What a task adds to gradients that others add to as well. dq and dslopes: one for each stack."""

    dq: list[Tensor]  # [*, head_dim, rows]
    dslopes: list[Tensor]  # [batches, heads, group]
    dbias: Tensor | None  # of a bias that is the same for all columns


def backward(
    problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    call = _Call.of(problem, inputs, forward, dout, dlse, wanted)
    todo, threads = stacks(problem, inputs)
    heads = [_heads(stack, forward.lse) for stack in todo]
    statistics = [workers.Job([partial(_row_statistics, call, h)], lambda _: None) for h in heads]
    workers.run(statistics, workers.threads_for(forward.out.numel()))
    # heads may share elements of dbias, columns do not: with dbias, tasks divide the columns alone
    families = [[h] for h in heads] if call.dbias is None else [heads]
    jobs = []
    for family, splits in zip(families, _splits(families, threads), strict=True):
        ranges = _key_ranges(max((h.stack.seqlen_k for h in family), default=0), splits, tiling.BLOCKS)
        tasks = [partial(_differentiate, call, tiling.BLOCKS, family, cols) for cols in ranges]
        jobs.append(workers.Job(tasks, partial(_write, call, family)))
    workers.run(jobs, threads)
    gathered = {"bias": call.dbias, "alibi_slopes": call.dslopes, "sink": call.dsink}
    return Gradients(
        call.dq,
        call.dk,
        call.dv,
        **{f"d{name}": _like(getattr(inputs, name), grad) for name, grad in gathered.items() if grad is not None},
    )


def _like(x: Tensor, grad: Tensor) -> Tensor:
    return grad.sum_to_size(x.shape).to(x.dtype)


def _heads(stack: Stack, lse: Tensor) -> _Heads:
    shape = (*stack.lead, stack.seqlen_q * stack.problem.group)
    return _Heads(stack, lse.new_empty(shape), lse.new_empty(shape))


def _row_statistics(call: _Call, heads: _Heads) -> None:
    """Fill in neg_lse and neg_delta, and the gradient of the sink, which needs nothing else."""
    stack, neg_lse, neg_delta = heads
    group, dtype = stack.problem.group, neg_lse.dtype
    out, dout = stack.queries(call.forward.out), stack.queries(call.dout)
    lse = stack.statistics(call.forward.lse)
    torch.mul(lse.reshape(neg_lse.shape), -LOG2E, out=neg_lse)
    for rows in cuts(range(stack.seqlen_q), tiling.MAX_COLS, 1):
        delta = (stack.rows(out, rows, dtype) * stack.rows(dout, rows, dtype)).sum(-1)
        neg_delta[..., rows.start * group : rows.stop * group] = delta.neg_()
    if call.dlse is not None:
        neg_delta.add_(stack.statistics(call.dlse).reshape(neg_delta.shape))
    if call.dsink is not None:
        sink = stack.of_heads(call.inputs.sink.to(dtype)[None])
        share = (neg_lse + stack.per_row(sink, stack.seqlen_q) * LOG2E).exp2_()
        target = stack.of_heads(call.dsink)
        target.copy_((share * neg_delta).view(*target.shape[:2], stack.seqlen_q, group).sum(2))
    empty = neg_lse == float("inf")  # rows that see nothing: P is to be 0
    neg_lse.masked_fill_(empty, float("-inf"))
    neg_delta.masked_fill_(empty, 0.0)


def _splits(families: list[list[_Heads]], threads: int) -> list[int]:
    """Into how many ranges of keys each family is split, so that all threads have work to the end."""
    sizes = [sum(h.stack.scores for h in family) for family in families]
    total = max(sum(sizes), 1)
    if threads == 1 or (len(families) % threads == 0 and len(set(sizes)) == 1):
        return [1] * len(families)
    return [-(-tiling.BALANCE * threads * size // total) for size in sizes]


def _key_ranges(seqlen_k: int, splits: int, blocks: Blocks) -> list[range]:
    """At least one, since a task also writes the zeros of a stack without keys."""
    size = -(-seqlen_k // max(splits, 1) // blocks.strip) * blocks.strip
    return cuts(range(seqlen_k), max(size, blocks.strip), seqlen_k) or [range(0)]


def _differentiate(call: _Call, blocks: Blocks, family: list[_Heads], cols: range) -> _Part:
    """All that these columns contribute: dk and dv are written, the rest is returned or gathers in call.dbias."""
    dbias = call.dbias
    if dbias is not None and dbias.shape[3] == 1:
        dbias = torch.zeros_like(dbias)
    part = _Part([], [], None if dbias is call.dbias else dbias)
    for heads in family:
        stack, new_zeros = heads.stack, heads.neg_lse.new_zeros
        dq = new_zeros((*stack.lead, call.problem.head_dim, stack.seqlen_q * call.problem.group))
        dslopes = new_zeros((len(stack.batches), len(stack.heads), call.problem.group))
        modifiers = ModifierGradients(
            None if dbias is None else stack.of_heads(dbias), None if call.dslopes is None else dslopes
        )
        for block in stack.cuts(overlap(cols, range(stack.seqlen_k)), blocks.cols, blocks.align):
            _KeyBlock(call, heads, block, dq, modifiers).run(blocks)
        part.dq.append(dq)
        part.dslopes.append(dslopes)
    return part


class _Rows(NamedTuple):
    """Some rows of a stack, as the products take them; low: in `operand_dtype`."""

    q: Tensor  # [*, rows, head_dim], scaled
    dout: Tensor  # [*, rows, head_dim_v]
    low_q: Tensor
    low_dout: Tensor
    neg_lse: Tensor  # [*, rows]
    neg_delta: Tensor
    dq: Tensor  # [*, head_dim, rows]

    def part(self, r: slice) -> _Rows:
        return _Rows(*(x[..., r, :] for x in self[:4]), *(x[..., r] for x in self[4:]))


class _KeyBlock:
    """Some keys of a stack, their dk and dv, and the rows that see them."""

    def __init__(self, call: _Call, heads: _Heads, cols: range, dq: Tensor, modifiers: ModifierGradients) -> None:
        self.call, self.heads, self.cols, self.dq, self.modifiers = call, heads, cols, dq, modifiers
        stack, self.dtype = heads.stack, heads.neg_lse.dtype
        self.low = operand_dtype(call.problem.dtype)
        self.scores = Scores(stack, call.inputs, self.dtype)
        self.q, self.dout = stack.queries(call.inputs.q), stack.queries(call.dout)
        k, v = stack.keys(call.inputs.k), stack.keys(call.inputs.v)
        self.low_k = stack.cols(k, cols, self.low)
        self.k, self.v = self.low_k.to(self.dtype), stack.cols(v, cols, self.dtype)
        self.dk, self.dv = torch.zeros_like(self.k), torch.zeros_like(self.v)

    def run(self, blocks: Blocks) -> None:
        stack = self.heads.stack
        visits: list[tuple[range, list[Tile]]] = []
        for rows in stack.cuts(range(stack.seqlen_q), blocks.positions(stack.problem.group), blocks.align):
            tiles = list(self.scores.tiles(rows, self.cols, blocks))
            if tiles:
                visits.append((rows, tiles))
        if self.scores.plain:
            self._differentiate(visits)
        else:
            for rows, tiles in visits:
                loaded = self._load(rows)
                for tile in tiles:
                    r0, r1, c0, c1 = stack.place(tile, rows.start, self.cols.start)
                    self._tile(tile, loaded.part(slice(r0, r1)), slice(c0, c1))
        for x, acc in ((self.call.dk, self.dk.mul_(self.call.problem.scale)), (self.call.dv, self.dv)):
            if x is not None:
                target = stack.keys(x)[..., self.cols.start : self.cols.stop, :]
                target.copy_(acc.view(target.shape))

    def _differentiate(self, visits: list[tuple[range, list[Tile]]]) -> None:
        """All the tiles at once, where nothing but the window changes scores."""
        stack, call = self.heads.stack, self.call
        differentiate(
            self.q,
            self.dout,
            self.low,
            self.scores.q_scale,
            self.heads.neg_lse,
            self.heads.neg_delta,
            self.k,
            self.v,
            self.low_k,
            None if call.dq is None else self.dq,
            None if call.dk is None else self.dk,
            None if call.dv is None else self.dv,
            [(rows.start, rows.stop) for rows, _ in visits],
            [[stack.place(tile, rows.start, self.cols.start) for tile in tiles] for rows, tiles in visits],
            [[self.scores.windows(tile) for tile in tiles] for _, tiles in visits],
        )

    def _load(self, rows: range) -> _Rows:
        stack, group = self.heads.stack, self.call.problem.group
        low_q, low_dout = stack.rows(self.q, rows, self.low), stack.rows(self.dout, rows, self.low)
        q, dout = low_q.to(self.dtype) * self.scores.q_scale, low_dout.to(self.dtype)
        r = slice(rows.start * group, rows.stop * group)
        return _Rows(
            q, dout, low_q, low_dout, self.heads.neg_lse[..., r], self.heads.neg_delta[..., r], self.dq[..., r]
        )

    def _tile(self, tile: Tile, rows: _Rows, c: slice) -> None:
        k, v, low_k = self.k[..., c, :], self.v[..., c, :], self.low_k[..., c, :]
        product = self.scores.product(k, rows.q)  # its tanh, with a softcap
        raw = self.scores.raw(product, tile)
        p = self.scores.modify(raw, tile).add_(rows.neg_lse[..., None, :]).exp2_()
        keep = self.scores.keep(tile)
        if keep is None:
            dropped, ds = p, linear(v, rows.dout, rows.neg_delta).mul_(p)
        else:
            dropped = p * keep
            ds = linear(v, rows.dout).mul_(keep).add_(rows.neg_delta[..., None, :]).mul_(p)
        if self.call.dv is not None:
            self.dv[..., c, :].add_(linear(dropped.to(self.low), rows.low_dout.transpose(-1, -2)))
        ds = self.scores.chain(ds, product, raw, tile, self.modifiers).to(self.low)
        if self.call.dk is not None:
            self.dk[..., c, :].add_(linear(ds, rows.low_q.transpose(-1, -2)))
        if self.call.dq is not None:
            rows.dq.add_(linear(low_k.transpose(-1, -2), ds.transpose(-1, -2)))


def _write(call: _Call, family: list[_Heads], parts: list[_Part]) -> None:
    for i, heads in enumerate(family):
        stack = heads.stack
        if call.dq is not None:
            dq = _sum([part.dq[i] for part in parts]).mul_(call.problem.scale)
            target = stack.queries(call.dq)
            target.copy_(dq.transpose(-1, -2).contiguous().view(target.shape))
        if call.dslopes is not None:
            stack.of_heads(call.dslopes).copy_(_sum([part.dslopes[i] for part in parts]))
    dbias = [part.dbias for part in parts if part.dbias is not None]
    if dbias:
        call.dbias.copy_(_sum(dbias))


def _sum(parts: list[Tensor]) -> Tensor:
    total = parts[0]
    for part in parts[1:]:
        total.add_(part)
    return total
