"""The online softmax (Milakov and Gimelshein, 2018; FlashAttention-2, Algorithm 1), in powers of two.

In float32 (mode.exact) powers are of e: the conversion of lse from one base to the other would cost its last digits.
"""
# ruff: noqa: RET505 (a return under a constexpr condition needs its else)

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LOG2E_REST = tl.constexpr(1.925963033e-08)  # log2(e) less its float32
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def exact_exp(x):
    """e^x: the hardware's 2^x, with what rounding x * log2(e) loses."""
    y = x * LOG2E
    lost = tl.fma(x, LOG2E, -y) + x * LOG2E_REST
    p = tl.exp2(y)
    return tl.where((p == 0.0) | (p == float("inf")), p, p + p * (lost * LN2))  # else inf - inf, or 0 * inf


@triton.jit
def power(x, mode):
    if mode.exact:
        return exact_exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def from_natural(x, mode):
    """A natural logarithm in the base of `power`."""
    if mode.exact:
        return x
    else:
        return x * LOG2E


@triton.jit
def logsumexp(m_i, l_i, mode):
    """Natural, from a maximum in the base of `power` and a sum: -inf for rows that have seen nothing."""
    if mode.exact:  # the hardware's log2 has a relative error: split off the exponent
        bits = l_i.to(tl.int32, bitcast=True)
        mantissa = ((bits & 0x7FFFFF) | 0x3F800000).to(tl.float32, bitcast=True)
        log_l = ((bits >> 23) - 127).to(tl.float32) * LN2 + tl.log(mantissa)
        return m_i + tl.where(l_i == 0.0, float("-inf"), log_l)
    else:
        return (m_i + tl.log2(l_i)) * LN2


@triton.jit
def _finite(m_i):
    """A maximum that can be subtracted: 0 for rows that have seen nothing."""
    return tl.where(m_i == float("-inf"), 0.0, m_i)


@triton.jit
def online_softmax(s, m_i, l_i, unit, mode):
    """One step: p = power(s * unit - maximum), by how much old sums shrink, the new maximum and row sum."""
    m_new = tl.maximum(m_i, tl.max(s, 1))
    peak = _finite(m_new * unit)
    p = power(s * unit - peak[:, None], mode)  # [BLOCK_M, BLOCK_N]
    alpha = power(m_i * unit - peak, mode)
    return p, alpha, m_new, l_i * alpha + tl.sum(p, 1)


@triton.jit
def add_sink(m_i, l_i, sink, mode):
    """The sink as one more score without a value, in the base of `power`. alpha rescales the accumulator."""
    m_new = tl.maximum(m_i, sink)
    peak = _finite(m_new)
    alpha = power(m_i - peak, mode)
    return alpha, m_new, l_i * alpha + power(sink - peak, mode)
