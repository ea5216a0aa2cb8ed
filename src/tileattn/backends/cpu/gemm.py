"""Matrix products: the one function through which every FLOP of the CPU backend goes.

oneDNN's float32 kernels are up to twice as fast as the BLAS behind torch.mm (which, on AMD, does not use AVX-512), but
they cost about 10 us a call and compile once for every new shape. So large products of regular shape go to oneDNN, and
small or odd ones to BLAS.
"""

from __future__ import annotations

import torch
from torch import Tensor

ONEDNN_MIN_WORK = 2**20  # multiply-adds
ONEDNN_MULTIPLE = 8  # of every dim

_onednn = getattr(torch.ops.mkldnn, "_linear_pointwise", None) if torch.backends.mkldnn.is_available() else None


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x w^T + bias): x [*, m, k], w [*, n, k], bias [*, n], activation "none" or "tanh"."""
    if x.dim() == 2 and _suits_onednn(x, w):
        return _onednn.default(x, _dense(w), bias, activation, [], "")
    if x.dim() == 2:
        y = torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
    elif w.shape[-2] < 8:  # BLAS is slow at many rows by few columns, fast at few rows by many columns
        y = torch.bmm(w, x.transpose(-1, -2)).transpose(-1, -2)
        y = y if bias is None else y.add_(bias[..., None, :])
    elif bias is None:
        y = torch.bmm(x, w.transpose(-1, -2))
    else:
        y = torch.baddbmm(bias[..., None, :], x, w.transpose(-1, -2))
    return y.tanh_() if activation == "tanh" else y


def _suits_onednn(x: Tensor, w: Tensor) -> bool:
    (m, k), n = x.shape, w.shape[0]
    return (
        _onednn is not None
        and x.dtype == torch.float32
        and m * n * k >= ONEDNN_MIN_WORK
        and not (m | n | k) % ONEDNN_MULTIPLE
        and bool(torch.backends.mkldnn.enabled)
    )


def _dense(w: Tensor) -> Tensor:
    """oneDNN falls back to a reference kernel, a thousand times slower, when w has gaps between its rows."""
    return w if w.stride() in ((w.shape[1], 1), (1, w.shape[0])) else w.contiguous()
