"""FlashAttention-2 in Triton: one source for every GPU that Triton compiles for, and for its interpreter."""

from __future__ import annotations

import os

import torch

from tileattn.backends import Direction, Tiles
from tileattn.kvcache import CacheProblem
from tileattn.problem import Problem

try:
    from tileattn.backends.portable.backward import anticipate, backward
    from tileattn.backends.portable.forward import forward
    from tileattn.backends.portable.tuning import tile_for
except ImportError as error:  # no Triton on this platform
    _import_error: str | None = str(error)
else:
    _import_error = None

__all__ = ["anticipate", "backward", "forward", "supports", "tiles"]

MAX_HEAD_DIM = 1024


def supports(problem: Problem, direction: Direction = "forward") -> str | None:
    reason = refusal(problem)
    if reason is None and _import_error is not None:
        return f"needs Triton ({_import_error})"
    return reason


def refusal(problem: Problem | CacheProblem) -> str | None:
    """Why no kernel here serves the tensors of a call; None where they do."""
    device, head_dim = problem.device, max(problem.head_dim, problem.head_dim_v)
    if device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return "needs a GPU; q is on the CPU (Triton's interpreter, TRITON_INTERPRET=1, takes CPU tensors)"
    if device.type not in ("cpu", "cuda"):
        return f"needs a CUDA or ROCm device; q is on {device}"
    if problem.dtype == torch.float64:
        return "float64 is not supported; use float32, or move the tensors to the CPU"
    if head_dim > MAX_HEAD_DIM:
        return f"head_dim {head_dim} is above {MAX_HEAD_DIM}"
    return None


def tiles(problem: Problem, direction: Direction = "forward") -> Tiles:
    tile = tile_for(problem, "forward" if direction == "forward" else "backward_kv")
    return Tiles(tile.block_m, tile.block_n, f"{tile.num_warps} warps, {tile.num_stages} tiles in flight")
