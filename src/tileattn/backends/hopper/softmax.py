"""From the product q.k to probabilities, in registers: modifiers, masks and the online softmax.

m is each row's reference, in units of log2: p = 2^(s unit - m). The result is the same whatever m is, as long as
nothing overflows, so a block's row maxima are taken only where a mask may hide scores (a tile's first blocks) and where
a sum of p reaches limit_of(dtype). A running maximum, new in every block, would cost a sixth of the speed.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.ptx import boundary, narrow, reciprocal

LOG2_E = gl.constexpr(1.4426950408889634)
# Of a row that has seen nothing: finite, so that hidden scores still give 2^(-inf - m) = 0.
NOTHING = gl.constexpr(-1.0e30)


class Modifiers(NamedTuple):
    """scale and softcap, both times log2(e). slopes_ptr: ALiBi's, (batch, num_heads); sink_ptr: (num_heads,); float32
    or None."""

    scale: Any
    softcap: Any
    slopes_ptr: Any
    sink_ptr: Any


class Rows(NamedTuple):
    """Of each row that a warpgroup has: its position in the sequence, its head, the column on its diagonal, the column
    before which the sequence ends, and its slope (ALiBi's, times log2(e)); of all the tile's rows together: the column
    from which on none of them hides any to its left."""

    position: Any
    head: Any
    diagonal: Any
    limit: Any
    slope: Any
    inside: Any


@gluon.constexpr_function
def limit_of(dtype):
    """What a thread's partial sum of p may reach: P must fit float16; in bfloat16, p times v must fit float32."""
    return 2.0**14 if dtype == gl.float16 else 2.0**30


@gluon.constexpr_function
def headroom_of(dtype):
    """How far above a row's maximum its reference is put, in log2, so that later blocks may be that much larger. Less
    is left at the other end: float16 has few exponents, and in bfloat16 p times v must not vanish from float32."""
    return 6.0 if dtype == gl.float16 else 40.0


@gluon.jit
def rows_of(work, offs, grid, modifiers, mode):
    """The Rows at offs of a tile's rows; PACK heads take turns."""
    position = work.row + offs // mode.PACK
    head = work.head + offs % mode.PACK
    diagonal = position + (work.seqlen_k - work.seqlen_q)
    limit = position * 0 + work.seqlen_k
    if mode.CAUSAL:
        limit = gl.minimum(diagonal + grid.right, limit)
    slope = (position * 0).to(gl.float32)
    if mode.ALIBI:
        slope = gl.load(modifiers.slopes_ptr + (work.batch * grid.num_heads + head)) * LOG2_E
    inside = work.row
    if mode.LEFT:
        inside += (mode.BLOCK_M - 1) + (work.seqlen_k - work.seqlen_q) + grid.left
    return Rows(position, head, diagonal, limit, slope, inside)


@gluon.jit
def modify(s, rows, first_column, modifiers, mode, layout: gl.constexpr):
    """Softcap and ALiBi. Returns s and its unit: s times unit is in log2."""
    unit = modifiers.scale
    if mode.SOFTCAP:
        # tanh x = 1 - 2 / (2^(2 x log2(e)) + 1)
        power = gl.exp2(s * (2.0 * LOG2_E * modifiers.scale / modifiers.softcap))
        s = modifiers.softcap - (2.0 * modifiers.softcap) * reciprocal(power + 1.0)
        unit = 1.0
    if mode.ALIBI:
        columns = first_column + gl.arange(0, mode.BLOCK_N, gl.SliceLayout(0, layout))
        distance = columns[None, :] - rows.diagonal[:, None]
        s = s * unit - rows.slope[:, None] * gl.abs(distance.to(gl.float32))
        unit = 1.0
    return s, unit


@gluon.jit
def hide(s, rows, first_column, mode, layout: gl.constexpr):
    """-inf where a row has come to its end; s: [rows, BLOCK_N]."""
    columns = gl.arange(0, mode.BLOCK_N, gl.SliceLayout(0, layout))
    return gl.where(columns[None, :] < (rows.limit - first_column)[:, None], s, float("-inf"))


@gluon.jit
def hide_left(s, rows, first_column, grid, mode, layout: gl.constexpr):
    """-inf where a row's window has not begun: in the blocks, a tile's last ones, that its left edge crosses."""
    if mode.LEFT:  # noqa: SIM102  (one is of the compiler, the other of the kernel)
        if first_column < rows.inside:
            columns = gl.arange(0, mode.BLOCK_N, gl.SliceLayout(0, layout))
            begun = columns[None, :] >= (rows.diagonal + (grid.left - first_column))[:, None]
            s = gl.where(begun, s, float("-inf"))
    return s


@gluon.jit
def row_parts(p):
    """Sums over the columns that one thread holds, so without shuffles: [BLOCK_M, 4]."""
    return gl.sum(gl.sum(p.reshape([p.shape[0], p.shape[1] // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x, factor):
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def exponentials(s, m, unit, dtype: gl.constexpr, p_layout: gl.constexpr):
    """p as the next product's operand, and its row parts.

    Sums stand among the exponentials, which leave room for them: a run of them would hold up the other warps.
    Conversions stand behind a boundary: among exponentials they slow these.
    """
    p = gl.exp2(s * unit - m[:, None])
    parts = boundary(row_parts(p))
    return gl.convert_layout(narrow(p, dtype), p_layout), parts


@gluon.jit
def raised(m, s, unit, dtype: gl.constexpr):
    """The reference that s asks for, at least m, and the factor for what was computed with m."""
    higher = gl.maximum(m, gl.max(s, 1) * unit + headroom_of(dtype))
    return higher, gl.exp2(m - higher)


@gluon.jit
def with_sink(m, total, rows, modifiers, mode):
    """The sink's term: returns the new reference, the row sums and the factor for what was computed with m."""
    factor = m * 0.0 + 1.0
    if mode.SINK:
        sink = gl.load(modifiers.sink_ptr + rows.head) * LOG2_E
        higher = gl.maximum(m, sink)
        factor = gl.exp2(m - higher)
        total = total * factor + gl.exp2(sink - higher)
        m = higher
    return m, total, factor
