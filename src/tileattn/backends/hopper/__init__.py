"""Attention on Hopper GPUs (sm_90a), in Gluon: TMA, asynchronous wgmma and specialised warps.

It serves what the fast kernels were written for and says what it does not; another backend serves that.
"""

from __future__ import annotations

import torch

from tileattn.backends import Direction, Tiles
from tileattn.problem import Problem

try:
    from tileattn.backends.hopper.backward_launch import BACKWARD_TILES, anticipate, backward, backward_tile_for
    from tileattn.backends.hopper.launch import TILES, forward, pack_for, tile_for
except ImportError as error:  # no Triton, or one without what gluon_names.py names
    _import_error: str | None = str(error)
else:
    _import_error = None

__all__ = ["anticipate", "backward", "forward", "supports", "tiles"]

MIN_ROWS = 64  # of a tile, below which it stands empty


def supports(problem: Problem, direction: Direction = "forward") -> str | None:
    p = problem
    if not _is_hopper(p.device):
        return "needs a Hopper GPU (H100, H200)"
    if _import_error is not None:
        return f"needs Triton's Gluon ({_import_error})"
    if p.dtype not in (torch.float16, torch.bfloat16):
        return f"needs float16 or bfloat16, not {p.dtype}"
    if p.head_dim % 8 or p.head_dim_v % 8:
        return f"head_dim {p.head_dim}/{p.head_dim_v} is not a multiple of 8 (rows of 16 bytes)"
    if not any(p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v for t in TILES):
        return f"head_dim {p.head_dim}/{p.head_dim_v} is above 256"
    if not p.aligned:
        return "needs strides of q, k and v that are positive multiples of 16 bytes (TMA)"
    if p.seqlen_q * pack_for(p) < MIN_ROWS:
        return f"seqlen_q fills less than {MIN_ROWS} rows of a tile"
    if p.seqlen_k == 0 or p.batch == 0:
        return "has nothing to do: no keys, or no sequences"
    if p.scale <= 0.0:
        return f"scale {p.scale} is not positive"
    return _modifiers(p) or (_backward(p) if direction == "backward" else None)


def _backward(p: Problem) -> str | None:
    if p.has_alibi:
        return "has no backward through ALiBi"
    if not any(p.head_dim <= t.block_dim and p.head_dim_v <= t.block_dim_v for t in BACKWARD_TILES):
        return f"head_dim {p.head_dim}/{p.head_dim_v} is above what its backward holds in registers"
    return f"seqlen_q is below {MIN_ROWS}: its tiles would stand empty" if p.seqlen_q < MIN_ROWS else None


def _modifiers(p: Problem) -> str | None:
    present = {
        "bias": p.has_bias,
        "mask": p.has_mask,
        "dropout": p.dropout_p > 0.0,
        "score_mod": bool(p.score_mod),
        "mask_mod": bool(p.mask_mod),
        "block_mask": bool(p.block_size),
    }
    names = [name for name, there in present.items() if there]
    return f"has no {', '.join(names)}" if names else None


def _is_hopper(device: torch.device) -> bool:
    """False where there is no such device (a fake tensor may still name it)."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return False
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor) == (9, 0)


def tiles(problem: Problem, direction: Direction = "forward") -> Tiles:
    if direction == "backward":
        of_keys = backward_tile_for(problem)
        groups = "one warpgroup, two programs a multiprocessor" if of_keys.alone else "two warpgroups"
        return Tiles(of_keys.block_m, of_keys.block_n, f"{groups}, 2 blocks of queries in flight")
    tile = tile_for(problem)
    return Tiles(tile.rows, tile.block_n, f"{tile.warpgroups} warpgroups, {tile.stages} blocks of keys in flight")
