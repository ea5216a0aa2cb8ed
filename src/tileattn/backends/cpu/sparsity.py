"""Block sparsity of a stack of heads: which runs of blocks to skip, to mask, to compute as they are."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby, pairwise

from torch import Tensor

from tileattn.backends.cpu.tiling import Tile
from tileattn.block_mask import FULL, PARTIAL, SKIPPED, of_scores

MIN_ROWS = 128  # of a run: fewer cost more in calls than skipping saves


class Sparsity:
    """blocks: uint8 [batches or 1, heads or 1, group or 1, q_blocks, k_blocks], as Inputs.block_mask."""

    def __init__(self, blocks: Tensor, block_size: tuple[int, ...]) -> None:
        self.blocks, (self.block_m, self.block_n) = blocks, block_size

    def runs(self, rows: range, cols: range) -> Iterator[tuple[range, range, bool]]:
        """(rows, cols, masked): the parts of rows x cols that some head of the stack sees; without masked, all see all
        of it."""
        step = self.block_m * max(MIN_ROWS // self.block_m, 1)
        edges = [rows.start, *range((rows.start // step + 1) * step, rows.stop, step), rows.stop]
        parts = [range(a, b) for a, b in pairwise(edges) if b > a]
        first = cols.start // self.block_n
        for kinds, alike in groupby(parts, lambda part: self._kinds(part, cols)):
            same = list(alike)
            for kind, run in groupby(enumerate(kinds, first), lambda place: place[1]):
                if kind != SKIPPED:
                    places = [place for place, _ in run]
                    start, stop = places[0] * self.block_n, (places[-1] + 1) * self.block_n
                    some_cols = range(max(start, cols.start), min(stop, cols.stop))
                    yield range(same[0].start, same[-1].stop), some_cols, kind == PARTIAL

    def _kinds(self, rows: range, cols: range) -> list[int]:
        """For each block of columns what it is to all of the rows and heads."""
        m, n = self.block_m, self.block_n
        some = self.blocks[..., rows.start // m : -(-rows.stop // m), cols.start // n : -(-cols.stop // n)]
        if some.numel() == 0:
            return []
        dims = (0, 1, 2, 3)
        full, skipped = some.amin(dims) == FULL, some.amax(dims) == SKIPPED
        return (full * FULL + ~(full | skipped) * PARTIAL).tolist()

    def apply(self, seen: Tensor, tile: Tile) -> Tensor:
        """seen, what masks allow in [batches, heads, cols, rows, group], with what the blocks say."""
        kinds = of_scores(self.blocks, (self.block_m, self.block_n), tile.rows, tile.cols).permute(0, 1, 4, 3, 2)
        return (kinds != SKIPPED) & (seen | (kinds == FULL))
