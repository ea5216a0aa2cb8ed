"""Masks and the online softmax, for scores in registers.

m is each row's reference, in units of log2: p = 2^(s scale_log2 - m). The result is the same whatever m is, as long as
nothing overflows, so a block's row maxima are taken only where a mask may hide scores (a tile's first blocks) and where
a sum of p reaches LIMIT. That a running maximum, new in every block, costs a sixth of the speed is the reason.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tileattn.backends.hopper.ptx import narrow

# Of a row that has seen nothing: finite, so that hidden scores still give 2^(-inf - m) = 0.
NOTHING = gl.constexpr(-1.0e30)


@gluon.constexpr_function
def limit_of(dtype):
    """What a thread's partial sum of p may reach: P must fit its dtype, and float32 sums stay clear of infinity."""
    return 2.0**14 if dtype == gl.float16 else 2.0**60


@gluon.constexpr_function
def headroom_of(dtype):
    """How far above a row's maximum its reference is put, in log2: float16 has few exponents to grow into."""
    return 6.0 if dtype == gl.float16 else 0.0


@gluon.jit
def hide(s, rows, first_column, grid, mode, layout: gl.constexpr):
    """-inf where a row may not look; s: [rows, BLOCK_N]."""
    limit = gl.minimum(rows + grid.right, grid.seqlen_k) if mode.CAUSAL else rows * 0 + grid.seqlen_k
    columns = gl.arange(0, mode.BLOCK_N, gl.SliceLayout(0, layout))
    return gl.where(columns[None, :] < (limit - first_column)[:, None], s, float("-inf"))


@gluon.jit
def row_parts(p, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Sums over the columns that one thread holds, so without shuffles: [BLOCK_M, 4]."""
    return gl.sum(gl.sum(p.reshape([BLOCK_M, BLOCK_N // 8, 4, 2]), 3), 1)


@gluon.jit
def scale_rows(x, factor):
    return x * gl.convert_layout(factor, gl.SliceLayout(1, x.type.layout))[:, None]


@gluon.jit
def exponentials(s, m, scale_log2, dtype: gl.constexpr, p_layout: gl.constexpr):
    """p as the next product's operand, and its row parts."""
    p = gl.exp2(s * scale_log2 - m[:, None])
    parts = row_parts(p, s.shape[0], s.shape[1])
    return gl.convert_layout(narrow(p, dtype), p_layout), parts


@gluon.jit
def raised(m, s, scale_log2, dtype: gl.constexpr):
    """The reference that s asks for, at least m, and the factor for what was computed with m."""
    higher = gl.maximum(m, gl.max(s, 1) * scale_log2 + headroom_of(dtype))
    return higher, gl.exp2(m - higher)
