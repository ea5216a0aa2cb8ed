"""Rotary embedding of rows on their way into registers (see `tileattn.rotary`)."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rotary(NamedTuple):
    """cos and sin (positions, half), rows at stride; None for calls without."""

    cos: Any
    sin: Any
    stride: int
    positions: int


@triton.jit
def load_turned(
    ptrs, dims, positions, inside, rotary, DIM: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr
):
    """Rows at ptrs [M, 1], dims [1, D] of them, turned by the angle of positions [M, 1]; zeros outside. float32."""
    x = tl.load(ptrs + dims, mask=inside & (dims < DIM), other=0.0).to(tl.float32)
    if rotary.cos is not None:
        if INTERLEAVED:
            angle = dims // 2
            first = dims % 2 == 0
            partner = tl.where(first, dims + 1, dims - 1)
        else:
            first = dims < HALF
            angle = tl.where(first, dims, dims - HALF)
            partner = tl.where(first, dims + HALF, dims - HALF)
        turned = inside & (dims < 2 * HALF)
        at = tl.minimum(tl.maximum(positions, 0), rotary.positions - 1).to(tl.int64) * rotary.stride + angle
        y = tl.load(ptrs + partner, mask=turned, other=0.0).to(tl.float32)
        c = tl.load(rotary.cos + at, mask=turned, other=1.0).to(tl.float32)
        s = tl.load(rotary.sin + at, mask=turned, other=0.0).to(tl.float32)
        x = x * c + tl.where(first, -y, y) * s
    return x
