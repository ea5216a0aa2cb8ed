"""What a row sees: the range of tiles to visit, and the columns inside a tile."""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

import triton
import triton.language as tl

from tileattn import block_mask
from tileattn.backends.portable.device.scores import load_modifier, rows_inside

SKIPPED, FULL = tl.constexpr(block_mask.SKIPPED), tl.constexpr(block_mask.FULL)


@triton.jit
def tile_ranges(
    start,
    length,
    shift,
    before,
    after,
    BEFORE: tl.constexpr,
    AFTER: tl.constexpr,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
):
    """Tiles of STEP along the other axis that [start, start + BLOCK) sees, when x sees x + shift - before to
    x + shift + after. Returns (lo, full_lo, full_hi, hi): all pairs in
    [full_lo, full_hi) are visible, the rest of [lo, hi) needs a mask, nothing outside is visible. full_lo may lie
    beyond hi, full_hi not before full_lo."""
    lo = length * 0
    full_lo = length * 0
    hi = length
    full_hi = length
    if BEFORE:
        lo = tl.maximum(start + shift - before, 0) // STEP * STEP
        full_lo = tl.cdiv(tl.maximum(start + BLOCK - 1 + shift - before, 0), STEP) * STEP
    if AFTER:
        hi = tl.minimum(start + BLOCK + shift + after, length)
        full_hi = tl.minimum(start + shift + after + 1, length)
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // STEP * STEP, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def walk_of(
    block, start, length, shift, before, after, in_head, mode,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Three ranges to walk through, for `entry_at` and `tile_of`: (first, end) of tiles that need a mask, of those that
    are visible as a whole, of those that need one. And the list that they are places in, if mode.listed."""
    if mode.listed:
        zero = length * 0
        tiles = in_head.lists + block.to(tl.int64) * in_head.lists_row
        whole = tl.load(tiles)
        partial = tl.load(tiles + 1)
        end = tl.cdiv(length, STEP) * STEP
        return zero, zero, zero, whole * STEP, end - partial * STEP, end, tiles + 2
    else:
        lo, full_lo, full_hi, hi = tile_ranges(start, length, shift, before, after, BEFORE, AFTER, BLOCK, STEP)
        if mode.ranges:
            return lo, tl.minimum(full_lo, hi), full_lo, full_hi, full_hi, hi, length
        else:
            return lo, lo, lo, lo, lo, hi, length


@triton.jit
def entry_at(place, tiles, mode, STEP: tl.constexpr):
    """What a list holds at a place of a walk, for `tile_of`. To be asked a step ahead: a load from where another load
    of the same step says would not be pipelined."""
    if mode.listed:
        return tl.load(tiles + place // STEP)
    else:
        return place


@triton.jit
def tile_of(place, entry, mode, STEP: tl.constexpr):
    """(where the tile at a place of a walk begins, whether the block mask shows all of it)."""
    if mode.listed:
        return entry // 2 * STEP, entry % 2 == 1
    else:
        return place, False


@triton.jit
def read_for_mask(rows, cols, in_head, mods, mode):
    """What `visible` takes that is loaded in the shape of a tile of scores; see `read_for_scores`."""
    mask, kind, for_mod = 0, 0, 0
    row = rows_inside(rows, in_head)
    if mods.mask is not None:
        mask = load_modifier(in_head.mask, rows, cols, mods.mask_row, mods.mask_col, mods.mask_align, in_head, True)
    if mode.kinds == "of each score":
        kind = kind_at(row, tl.minimum(cols, in_head.seqlen_k - 1), in_head)
    if mode.mask_reads is not None:
        for_mod = mode.mask_reads(in_head.batch, in_head.head, row, cols, in_head.captured, mode.exact)
    return mask, kind, for_mod


@triton.jit
def visible(read, rows, cols, full, in_head, seqs, mods, mode):
    """Which columns the rows see; rows and cols broadcast against each other, either way round. full: the block mask,
    where its blocks hold whole tiles, shows all of this one, whatever mask and mask_mod say."""
    mask, kind, for_mod = read
    shift = in_head.seqlen_k - in_head.seqlen_q
    seen = cols < in_head.seqlen_k
    if mode.right:
        if rows.shape[0] == 1:
            seen = seen & (cols - (shift + seqs.window_right) <= rows)
        else:
            seen = cols <= tl.minimum(rows + shift + seqs.window_right, in_head.seqlen_k - 1)
    if mode.left:
        seen = seen & (cols - (shift - seqs.window_left) >= rows)
    allowed = seen
    if mods.mask is not None:
        allowed = allowed & (mask != 0)
    if mode.mask_mod is not None:
        row = rows_inside(rows, in_head)
        allowed = allowed & mode.mask_mod(in_head.batch, in_head.head, row, cols, for_mod, in_head.captured, mode.exact)
    if mode.kinds == "of a tile":
        return seen & (allowed | full)
    elif mode.kinds == "of each score":
        return seen & (kind != SKIPPED) & (allowed | (kind == FULL))
    else:
        return allowed


@triton.jit
def kind_at(row, col, in_head):
    """What the block mask says."""
    block = (row // in_head.size_q).to(tl.int64) * in_head.kinds_row + col // in_head.size_k
    return tl.load(in_head.kinds + block)
