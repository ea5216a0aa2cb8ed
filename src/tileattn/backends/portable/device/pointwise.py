"""What mods compute with, where Triton has no function with PyTorch's meaning. EXACT: to the last digits of float32."""

from __future__ import annotations

import triton
import triton.language as tl

from tileattn.backends.portable.device.softmax import LOG2E, exact_exp


@triton.jit
def exp(x, EXACT: tl.constexpr):
    return exact_exp(x) if EXACT else tl.exp2(x * LOG2E)


@triton.jit
def tanh(x, EXACT: tl.constexpr):
    if EXACT:  # 1 - e cancels for small x: the series there
        e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
        y = (1.0 - e) / (1.0 + e)
        y = tl.where(x < 0.0, -y, y)
        x2 = x * x
        tail = -17 / 315 + x2 * (62 / 2835 + x2 * (-1382 / 155925 + x2 * (21844 / 6081075)))
        y = tl.where(x2 < 0.1, x * (1.0 + x2 * (-1 / 3 + x2 * (2 / 15 + x2 * tail))), y)
    else:
        r = tl.rsqrt(1.0 + tl.exp2(x * (2.0 * LOG2E)))
        y = 1.0 - 2.0 * (r * r)  # no division, which takes five instructions
    return y


@triton.jit
def sigmoid(x, EXACT: tl.constexpr):
    return 1.0 / (1.0 + exp(-x, EXACT))


@triton.jit
def log1p(x):
    """log(1 + x), with what rounding 1 + x loses (Kahan)."""
    y = 1.0 + x
    return tl.where(y == 1.0, x, tl.where(y == float("inf"), y, tl.log(y) * (x / (y - 1.0))))


@triton.jit
def sign(x):
    return (x > 0).to(x.dtype) - (x < 0).to(x.dtype)


@triton.jit
def int_remainder(x, y):
    """With the sign of y."""
    r = x % y
    return tl.where((r != 0) & ((r ^ y) < 0), r + y, r)


@triton.jit
def int_floordiv(x, y):
    q = x // y
    r = x - q * y
    return tl.where((r != 0) & ((r ^ y) < 0), q - 1, q)


@triton.jit
def _divide(x, y):
    """Rounded down quotient and remainder of floats; the quotient may come out one off, the remainder tells."""
    q = tl.floor(x / y)
    r = tl.fma(-q, y, x)
    below = ((r < 0.0) & (y > 0.0)) | ((r > 0.0) & (y < 0.0))
    beyond = ((r >= y) & (y > 0.0)) | ((r <= y) & (y < 0.0))
    q = tl.where(below, q - 1.0, tl.where(beyond, q + 1.0, q))
    return q, tl.where(below, r + y, tl.where(beyond, r - y, r))


@triton.jit
def float_remainder(x, y):
    _, r = _divide(x, y)
    return r


@triton.jit
def float_floordiv(x, y):
    q, _ = _divide(x, y)
    return q


@triton.jit
def power_of(x, y):
    """x ** y of floats that are not constants."""
    whole = tl.floor(y) == y
    odd = whole & (tl.floor(y * 0.5) * 2.0 != y)
    magnitude = tl.exp2(y * tl.log2(tl.abs(x)))
    signed = tl.where(x < 0.0, tl.where(whole, tl.where(odd, -magnitude, magnitude), float("nan")), magnitude)
    return tl.where((y == 0.0) | (x == 1.0), 1.0, signed)
