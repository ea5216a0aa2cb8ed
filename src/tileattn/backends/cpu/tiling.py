"""Which tiles of scores are computed: sizes, cuts and what the window lets through. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

from tileattn.problem import Problem


class Blocks(NamedTuple):
    """Tile sizes: rows and cols of a tile. A partial tile is cut into strips of `strip` columns, each as high as the
    rows that see it. Sizes are rounded to `align` where possible, so that few shapes occur."""

    rows: int
    cols: int
    strip: int
    align: int

    def positions(self, group: int) -> int:
        """How many positions of q, each standing for a group of query heads, make a block of rows."""
        positions = max(self.rows // group, 1)
        return positions if positions < self.align else positions // self.align * self.align

    def columns(self, rows: int) -> int:
        """How many columns a tile has: more when it has few rows (decoding)."""
        cols = min(self.rows * self.cols // max(rows, 1), MAX_COLS) // self.align * self.align
        return max(cols, self.cols)


# A float32 tile of 1024 x 512 is 2 MiB and lives in the L2 and L3 caches. Smaller ones lose more to the cost of calls,
# 10 us a large product, than they gain in cache.
BLOCKS = Blocks(rows=1024, cols=512, strip=256, align=64)
MIN_ROWS = 256  # rows are halved down to this for the sake of balance between threads
BALANCE = 8  # so many pieces of work for each thread are balanced enough
MAX_COLS = 4096  # of a tile with few rows


class Window(NamedTuple):
    """Row i sees column j when -left <= j - i - shift <= right."""

    left: int
    right: int
    shift: int

    @staticmethod
    def of(problem: Problem, seqlen_q: int, seqlen_k: int) -> Window:
        unlimited = seqlen_q + seqlen_k
        left = unlimited if problem.window_left < 0 else problem.window_left
        right = unlimited if problem.window_right < 0 else problem.window_right
        return Window(left, right, seqlen_k - seqlen_q)

    def columns(self, rows: range) -> range:
        """Columns seen by any of the rows, before clipping to the sequence."""
        return range(rows.start + self.shift - self.left, rows.stop + self.shift + self.right)

    def rows(self, cols: range) -> range:
        """Rows that see any of the columns, before clipping to the sequence."""
        return range(cols.start - self.shift - self.right, cols.stop - self.shift + self.left)

    def rows_seeing_all(self, cols: range) -> range:
        """Rows that see every column, before clipping to the sequence."""
        return range(cols.stop - 1 - self.shift - self.right, cols.start - self.shift + self.left + 1)

    def hides_none(self, rows: range, cols: range) -> bool:
        seeing = self.rows_seeing_all(cols)
        return seeing.start <= rows.start and rows.stop <= seeing.stop


class Tile(NamedTuple):
    """rows are positions of q. partial: the window hides some of it. masked: mask, mask_mod or block_mask may."""

    rows: range
    cols: range
    partial: bool
    masked: bool = True


def cuts(whole: range, block: int, align: int) -> list[range]:
    """`whole` in blocks. A long last one is cut once more, so that every size is a multiple of `align` or short: each
    new shape of a large product costs a compilation."""
    if not len(whole):
        return []
    edges = [*range(whole.start, whole.stop, block), whole.stop]
    rest = edges[-1] - edges[-2]
    if rest > 2 * align and rest % align:
        edges.insert(-1, whole.stop - rest % align)
    return [range(a, b) for a, b in pairwise(edges)]


def visit(window: Window, rows: range, cols: range, blocks: Blocks) -> Iterator[Tile]:
    """The visible part of one rows x cols tile: nothing, all of it, or strips."""
    if not len(overlap(cols, window.columns(rows))):
        return
    if window.hides_none(rows, cols):
        yield Tile(rows, cols, partial=False)
        return
    for start in range(cols.start, cols.stop, blocks.strip):
        strip = range(start, min(start + blocks.strip, cols.stop))
        seeing = overlap(rows, window.rows(strip))
        if len(seeing):
            above = (seeing.start - rows.start) // blocks.align * blocks.align
            below = (rows.stop - seeing.stop) // blocks.align * blocks.align
            seeing = range(rows.start + above, rows.stop - below)
            yield Tile(seeing, strip, partial=not window.hides_none(seeing, strip))


def overlap(a: range, b: range) -> range:
    """The part of a that is in b; if none, an empty range inside a."""
    start = min(max(a.start, b.start), a.stop)
    return range(start, max(min(a.stop, b.stop), start))
