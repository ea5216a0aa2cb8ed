"""What a row sees: the range of tiles to visit, and the columns inside a tile."""

from __future__ import annotations

import triton
import triton.language as tl


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
def visible(rows, cols, in_head, seqs, mode):
    """Which columns the rows see; rows and cols broadcast against each other, either way round."""
    _, _, seqlen_q, seqlen_k, _, _, _ = in_head
    shift = seqlen_k - seqlen_q
    last = seqlen_k - 1
    if mode.right:
        last = tl.minimum(rows + shift + seqs.window_right, last)
    seen = cols <= last
    if mode.left:
        seen = seen & (cols >= rows + shift - seqs.window_left)
    return seen
