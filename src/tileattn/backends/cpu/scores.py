"""The score pipeline of a stack of heads, tile by tile: softcap -> + alibi -> + bias -> score_mod -> mask -> window.

Tiles are transposed, [*, cols, rows], and in units of log2: statistics of rows then run along the last dim, as the
bias of a matrix product does, and exp2 is several times faster than exp.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tileattn.backends.cpu.gemm import linear
from tileattn.backends.cpu.sparsity import Sparsity
from tileattn.backends.cpu.stacks import Stack
from tileattn.backends.cpu.steps import add_windows
from tileattn.backends.cpu.tiling import Blocks, Tile, Window, overlap, visit
from tileattn.mods import Program
from tileattn.philox import keep_mask
from tileattn.problem import Inputs

LOG2E = 1.4426950408889634
# 0 - 1 has every bit set; these keep sign and exponent, the bits of -inf
_INFINITY_BITS = {torch.float32: (torch.int32, -(1 << 23)), torch.float64: (torch.int64, -(1 << 52))}


class ModifierGradients(NamedTuple):
    """Where gradients of additive modifiers gather, in the computing dtype; None where not wanted.

    bias: [batches or 1, heads or 1, group or 1, rows or 1, cols or 1]. slopes: [batches, heads, group].
    """

    bias: Tensor | None
    slopes: Tensor | None


class Scores:
    """Scores of one stack. q (or k) must have been multiplied with q_scale before the product."""

    def __init__(self, stack: Stack, inputs: Inputs, dtype: torch.dtype) -> None:
        problem = stack.problem
        self.stack, self.inputs, self.dtype = stack, inputs, dtype
        self.softcap = problem.softcap
        # turns q.k into scores in units of log2, or, with a softcap, into the argument of its tanh
        # (a score_mod takes natural scores)
        self.unit = 1.0 if problem.score_mod else LOG2E
        self.q_scale = problem.scale / problem.softcap if problem.softcap else problem.scale * self.unit
        self.window = Window.of(problem, stack.seqlen_q, stack.seqlen_k)
        self.masked = problem.has_mask or bool(problem.mask_mod)
        # nothing but the window: `steps` does it all, and shifts of the rows ride on the products
        self.plain = not (
            problem.softcap
            or problem.has_alibi
            or problem.has_bias
            or problem.score_mod
            or self.masked
            or problem.block_size
            or problem.dropout_p
        )
        self.bias = None if inputs.bias is None else stack.of_heads(inputs.bias)
        self.mask = None if inputs.mask is None else stack.of_heads(inputs.mask)
        blocks = inputs.block_mask
        self.sparsity = None if blocks is None else Sparsity(stack.of_heads(blocks), problem.block_size)
        slopes = inputs.alibi_slopes
        self.slopes = None if slopes is None else stack.of_heads(slopes.to(dtype))  # [batches or 1, heads, group]

    def tiles(self, rows: range, cols: range, blocks: Blocks) -> Iterator[Tile]:
        """The visible part of rows x cols."""
        whole = [(rows, cols, self.masked)] if self.sparsity is None else self.sparsity.runs(rows, cols)
        for some_rows, some_cols, masked in whole:
            for tile in visit(self.window, some_rows, some_cols, blocks):
                if not self._hidden(tile):
                    yield tile._replace(masked=masked)

    def _hidden(self, tile: Tile) -> bool:
        """Whether the mask hides the tile from every row."""
        if self.mask is None or self.sparsity is not None:
            return False
        part = _part(self.mask, tile)
        return part.numel() > 0 and not part.view(torch.uint8).amax().item()

    def product(self, k: Tensor, q: Tensor) -> Tensor:
        """q.k of a tile, [*, cols, rows]; with a softcap, its tanh."""
        return linear(k, q, None, "tanh" if self.softcap else "none")

    def raw(self, s: Tensor, tile: Tile) -> Tensor:
        """Turn the product into what score_mod takes, in place unless there is a softcap, whose tanh backward needs
        again."""
        if self.softcap:
            s = s * (self.softcap * self.unit)
        if self.slopes is not None:
            s.addcmul_(
                self._distance(tile), self.stack.per_row(self.slopes, len(tile.rows))[..., None, :], value=-self.unit
            )
        if self.bias is not None:
            s.add_(self._transposed(_part(self.bias, tile).to(self.dtype), tile), alpha=self.unit)
        return s

    def modify(self, s: Tensor, tile: Tile) -> Tensor:
        """Turn raw scores into scores, in place unless there is a score_mod, whose derivative needs them again."""
        problem = self.stack.problem
        if problem.score_mod:
            values = (self._five(s, tile), *self._indices(tile))
            modified = Program.parse(problem.score_mod).run(values, self.inputs.score_mod_tensors, self.dtype)
            s = torch.empty_like(s)
            torch.mul(modified.to(self.dtype).expand(values[0].shape), LOG2E, out=self._five(s, tile))
        if tile.masked and (problem.mask_mod or self.sparsity is not None):
            self._five(s, tile).masked_fill_(~self._allowed(tile), float("-inf"))
        elif tile.masked and self.mask is not None:
            integer, infinity = _INFINITY_BITS[self.dtype]
            hide = self._transposed(_part(self.mask, tile).to(integer), tile)
            s.add_((hide - 1).bitwise_and_(infinity).view(self.dtype))
        return add_windows(s, self.windows(tile))

    def windows(self, tile: Tile) -> list[tuple[int, int, Tensor]]:
        """What the window hides of a tile, as `add_windows` takes it."""
        if not tile.partial:
            return []
        group = self.stack.problem.group
        seeing_all = overlap(tile.rows, self.window.rows_seeing_all(tile.cols))
        return [
            ((rows.start - tile.rows.start) * group, (rows.stop - tile.rows.start) * group, self._window_of(rows, tile))
            for rows in (range(tile.rows.start, seeing_all.start), range(seeing_all.stop, tile.rows.stop))
            if len(rows)
        ]

    def _allowed(self, tile: Tile) -> Tensor:
        """Boolean, broadcasting to [batches, heads, cols, rows, group]: what masks and blocks let each row see."""
        seen = torch.ones((), dtype=torch.bool, device="cpu")
        if self.mask is not None:
            seen = _part(self.mask, tile).permute(0, 1, 4, 3, 2)
        if self.stack.problem.mask_mod:
            program = Program.parse(self.stack.problem.mask_mod)
            seen = seen & program.run(self._indices(tile), self.inputs.mask_mod_tensors, self.dtype).bool()
        return seen if self.sparsity is None else self.sparsity.apply(seen, tile)

    def _indices(self, tile: Tile) -> tuple[Tensor, ...]:
        """b, h, row and col of a tile as mods take them, broadcasting to [batches, heads, cols, rows, group]."""
        stack, group = self.stack, self.stack.problem.group
        heads = range(stack.heads.start * group, stack.heads.stop * group)
        of = [_indices(r, torch.int32) for r in (stack.batches, heads, tile.rows, tile.cols)]
        return of[0].view(-1, 1, 1, 1, 1), of[1].view(-1, 1, 1, group), of[2].view(-1, 1), of[3].view(-1, 1, 1)

    def _five(self, x: Tensor, tile: Tile) -> Tensor:
        """[*, cols, rows] -> [batches, heads, cols, rows, group]."""
        return x.view(len(self.stack.batches), len(self.stack.heads), len(tile.cols), len(tile.rows), -1)

    def chain(self, ds: Tensor, product: Tensor, raw: Tensor, tile: Tile, into: ModifierGradients) -> Tensor:
        """Gradient of the scores -> gradient of q.k * scale, in place; alibi's and bias' on the way."""
        stack, rows = self.stack, len(tile.rows)
        if stack.problem.score_mod:
            program = Program.parse(stack.problem.score_derivative)
            five = self._five(ds, tile)
            values = (self._five(raw, tile), *self._indices(tile), five)
            five.copy_(program.run(values, self.inputs.score_mod_tensors, self.dtype))
        if into.slopes is not None:
            of_rows = (ds * self._distance(tile)).sum(-2)
            into.slopes.sub_(of_rows.view(len(stack.batches), len(stack.heads), rows, -1).sum(2))
        if into.bias is not None:
            target = _part(into.bias, tile).transpose(2, 3)  # [batches, heads, rows, group, cols], each maybe 1
            untransposed = ds.transpose(-1, -2).contiguous()
            untransposed = untransposed.view(len(stack.batches), len(stack.heads), rows, -1, len(tile.cols))
            target.add_(untransposed.sum_to_size(target.shape))
        if self.softcap:
            ds.mul_(product.square_().neg_().add_(1.0))
        return ds

    def keep(self, tile: Tile) -> Tensor | None:
        """What dropout multiplies probabilities with: 0 or 1 / (1 - dropout_p)."""
        p = self.stack.problem.dropout_p
        if p == 0.0:
            return None
        stack = self.stack
        group = stack.problem.group
        heads = _indices(range(stack.heads.start * group, stack.heads.stop * group)).view(-1, 1, group)
        batch, rows = (_indices(r) for r in (stack.batches, tile.rows))
        seed = int(self.inputs.dropout_seed.item())
        kept = keep_mask(seed, p, batch[:, None, None, None], heads, rows[:, None], tile.cols)
        # [batches, heads, rows, group, cols]
        return (kept.to(self.dtype) / (1.0 - p)).reshape(*stack.lead, -1, len(tile.cols)).transpose(-1, -2)

    def _window_of(self, rows: range, tile: Tile) -> Tensor:
        offset = tile.cols.start - rows.start - self.window.shift
        left, right = self.window.left + offset, self.window.right - offset
        return _window_tile(len(rows), len(tile.cols), left, right, self.stack.problem.group, self.dtype)

    def _distance(self, tile: Tile) -> Tensor:
        offset = tile.cols.start - tile.rows.start - self.window.shift
        return _distance_tile(len(tile.rows), len(tile.cols), offset, self.stack.problem.group, self.dtype)

    def _transposed(self, x: Tensor, tile: Tile) -> Tensor:
        """[batches or 1, heads or 1, group or 1, rows or 1, cols or 1] -> [* or 1, cols or 1, rows or 1]."""
        batches, heads, group, rows, cols = x.shape
        x = x.transpose(2, 3)
        if group * rows > 1:
            x = x.expand(-1, -1, len(tile.rows), self.stack.problem.group, -1)
        if batches * heads > 1:
            x = x.expand(len(self.stack.batches), len(self.stack.heads), -1, -1, -1)
        x = x.reshape(*self.stack.lead and (-1,), x.shape[2] * x.shape[3], cols)
        # copying to dense rows, transposing and adding is faster than adding a transposed matrix
        return x.contiguous().transpose(-1, -2).contiguous()


def _part(x: Tensor, tile: Tile) -> Tensor:
    """The tile's part of [..., rows or 1, cols or 1]."""
    if x.shape[-2] > 1:
        x = x[..., tile.rows.start : tile.rows.stop, :]
    if x.shape[-1] > 1:
        x = x[..., tile.cols.start : tile.cols.stop]
    return x


def _indices(r: range, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.arange(r.start, r.stop, dtype=dtype, device="cpu")


@functools.lru_cache(maxsize=16)
def _window_tile(rows: int, cols: int, left: int, right: int, group: int, dtype: torch.dtype) -> Tensor:
    """[cols, rows * group]: 0 where -left <= col - row <= right, -inf elsewhere."""
    infinite = torch.full((cols, rows), float("-inf"), dtype=dtype, device="cpu")
    return (infinite.triu(left + 1) + infinite.tril(-right - 1)).repeat_interleave(group, 1)


@functools.lru_cache(maxsize=16)
def _distance_tile(rows: int, cols: int, offset: int, group: int, dtype: torch.dtype) -> Tensor:
    """[cols, rows * group]: |col - row + offset|."""
    distance = _indices(range(offset, offset + cols), dtype)[:, None] - _indices(range(rows), dtype)
    return distance.abs_().repeat_interleave(group, 1)
