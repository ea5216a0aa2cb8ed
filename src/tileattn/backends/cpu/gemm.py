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

ONEDNN = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")
_capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
_bfloat16_is_fast = any(_capabilities.get(name, False) for name in ("avx512_bf16", "amx_bf16"))


def operand_dtype(dtype: torch.dtype) -> torch.dtype:
    """What to hand operands in to products that may round them to the dtype of the inputs: bfloat16 products are twice
    as fast where the processor has them. Their sums over tiles stay in float32."""
    if dtype == torch.bfloat16 and _bfloat16_is_fast:
        return torch.bfloat16
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None, activation: str = "none", onednn: bool = ONEDNN) -> Tensor:
    """activation(x w^T + bias): x [*, m, k], w [*, n, k], bias [*, n], activation "none" or "tanh".

    bfloat16 operands take neither bias nor activation; the result may be bfloat16 or float32.
    """
    large = x.dim() == 2 and _is_large(x, w)
    if x.dtype == torch.bfloat16:
        if large:
            return torch.mm(x, w.t())
        x, w = x.float(), w.float()
    elif large and onednn and x.dtype == torch.float32:
        scalars: list[number | None] = []  # noqa: F821  (what TorchScript calls a Scalar)
        return torch.ops.mkldnn._linear_pointwise(x, _dense(w), bias, activation, scalars, "")
    y = _blas(x, w, bias)
    return y.tanh_() if activation == "tanh" else y


def _blas(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    if x.dim() == 2:
        return torch.mm(x, w.t()) if bias is None else torch.addmm(bias, x, w.t())
    if w.size(-2) < 8:  # BLAS is slow at many rows by few columns, fast at few rows by many columns
        y = torch.bmm(w, x.transpose(-1, -2)).transpose(-1, -2)
        return y if bias is None else y.add_(bias.unsqueeze(-2))
    if bias is None:
        return torch.bmm(x, w.transpose(-1, -2))
    return torch.baddbmm(bias.unsqueeze(-2), x, w.transpose(-1, -2))


def _is_large(x: Tensor, w: Tensor, min_work: int = ONEDNN_MIN_WORK, multiple: int = ONEDNN_MULTIPLE) -> bool:
    m, k, n = x.size(0), x.size(1), w.size(0)
    return m * n * k >= min_work and (m | n | k) % multiple == 0


def _dense(w: Tensor) -> Tensor:
    """oneDNN falls back to a reference kernel, a thousand times slower, when w has gaps between its rows."""
    row_major = w.stride(0) == w.size(1) and w.stride(1) == 1
    column_major = w.stride(0) == 1 and w.stride(1) == w.size(0)
    return w if row_major or column_major else w.contiguous()
