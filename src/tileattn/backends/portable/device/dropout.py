"""Dropout with the bits of `tileattn.philox`, the same in every tile shape and direction."""

from __future__ import annotations

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)


@triton.jit
def keep_tile(offs_m, start_n, in_head, mods, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Where a score is kept, [BLOCK_M, BLOCK_N]. start_n is a multiple of 4."""
    groups = start_n // 4 + tl.arange(0, BLOCK_N // 4)
    zero = tl.zeros([BLOCK_M, BLOCK_N // 4], tl.int32)
    w0, w1, w2, w3 = tl.philox(
        tl.load(mods.seed),
        zero + groups[None, :],
        zero + offs_m[:, None],
        zero + in_head.head,
        zero + in_head.batch,
        n_rounds=ROUNDS,
    )
    words = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
    return words >= mods.threshold.to(tl.uint32, bitcast=True)
