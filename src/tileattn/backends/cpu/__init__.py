"""Attention on a CPU: FlashAttention's algorithm in tiles of PyTorch sized to the cache."""

from __future__ import annotations

from typing import Any

from tileattn.backends import Direction, Tiles
from tileattn.backends.cpu import tiling
from tileattn.backends.cpu.backward import backward
from tileattn.backends.cpu.forward import forward
from tileattn.problem import Problem

__all__ = ["anticipate", "backward", "forward", "supports", "tiles"]


def supports(problem: Problem, direction: Direction = "forward") -> str | None:
    if problem.device.type != "cpu":
        return f"it serves tensors on the CPU, these are on {problem.device}"
    return None


def anticipate(*_call: Any) -> None:
    """Nothing is compiled."""


def tiles(problem: Problem, direction: Direction = "forward") -> Tiles:
    blocks = tiling.BLOCKS
    rows = max(min(blocks.positions(problem.group), problem.seqlen_q) * problem.group, 1)
    cols = blocks.cols if direction == "backward" else blocks.columns(rows)
    return Tiles(
        block_m=rows,
        block_n=max(min(cols, problem.seqlen_k), 1),
        why="each tile is one large matrix product, and its exponentials stay in a core's cache",
    )
