"""Tiles by chip, head dim, dtype and direction. Data, not code: `tile_for` only looks them up.

TILEATTN_TILES=FILE adds those of a file that `tileattn tune` wrote, on GPUs of the name that it was written on.
"""

from __future__ import annotations

import functools
import os
from typing import Literal, NamedTuple

import torch
import triton

from tileattn.mods import Program
from tileattn.problem import Problem

Kernel = Literal["forward", "backward_kv", "backward_q"]


class Tile(NamedTuple):
    """block_m query rows by block_n key rows.

    descriptors: load through tensor descriptors where tensors allow. registers: the most a thread may hold, so that
    more programs fit on a multiprocessor; 0 leaves it to the compiler. ranges: tiles that need no mask get a loop of
    their own. dv: backward_kv computes dk alone, and a second launch dv with this tile. masked_registers: registers
    with something that takes a few more, and nothing that takes many (see REGISTERS). held: q, and dout, which stay
    with a program, are operands in registers, so that tensor cores read less shared memory (not of backward_kv, whose
    sums leave no registers; nor where `wrong_if_held`).
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    descriptors: bool = False
    registers: int = 0
    ranges: bool = True
    dv: Tile | None = None
    masked_registers: int = 0
    held: bool = False


# head_dim at most -> tile, for 16-bit dtypes
Table = dict[Kernel, dict[int, Tile]]
HOPPER: Table = {
    "forward": {
        64: Tile(64, 128, 4, 2, True, masked_registers=168),
        128: Tile(64, 64, 4, 3, True, held=True),
        256: Tile(128, 64, 8, 2, True),
        512: Tile(64, 32, 8, 1),
        1024: Tile(16, 32, 8, 1),
    },
    "backward_kv": {
        64: Tile(64, 64, 4, 3, True, masked_registers=168),
        128: Tile(64, 64, 4, 2, True),
        256: Tile(32, 128, 8, 3, True, ranges=False, dv=Tile(64, 128, 8, 2, True)),
        512: Tile(16, 64, 8, 1),
        1024: Tile(16, 16, 8, 1),
    },
    "backward_q": {
        64: Tile(64, 64, 4, 2, True),
        128: Tile(64, 64, 4, 3, True, held=True),
        256: Tile(128, 32, 8, 3, True),
        512: Tile(64, 16, 8, 1),
        1024: Tile(16, 16, 8, 1),
    },
}
# for any chip with 64 KiB of shared memory
DEFAULT: Table = {
    "forward": {
        64: Tile(128, 64, 4, 2),
        128: Tile(64, 32, 4, 2),
        256: Tile(32, 32, 4, 1),
        512: Tile(16, 16, 4, 1),
        1024: Tile(16, 16, 8, 1),
    },
    "backward_kv": {
        64: Tile(32, 64, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(16, 32, 4, 1),
        512: Tile(16, 16, 4, 1),
        1024: Tile(16, 16, 8, 1),
    },
    "backward_q": {
        64: Tile(64, 32, 4, 2),
        128: Tile(32, 32, 4, 2),
        256: Tile(32, 16, 4, 1),
        512: Tile(16, 16, 4, 1),
        1024: Tile(16, 16, 8, 1),
    },
}
# float32 in full precision runs on the plain arithmetic units, operands in registers
FLOAT32: Table = {
    kernel: {
        64: Tile(32, 32, 4, 1),
        128: Tile(32, 32, 4, 1),
        256: Tile(16, 16, 4, 1),
        512: Tile(16, 16, 4, 1),
        1024: Tile(16, 16, 8, 1),
    }
    for kernel in DEFAULT
}
# the interpreter: small, so that small problems have several tiles
INTERPRETER: Table = {kernel: {1024: Tile(32, 32, 1, 1, True, held=True)} for kernel in DEFAULT}


class Room(NamedTuple):
    """What takes registers of a kernel beside q.k: a few, or many. The rest takes none."""

    few: frozenset[str]
    many: frozenset[str]


_MANY = frozenset({"softcap", "score_mod", "mask", "dropout"})
REGISTERS: dict[Kernel, Room] = {
    "forward": Room(frozenset({"mask_mod", "left", "alibi"}), _MANY | {"bias", "small blocks", "left and alibi"}),
    "backward_kv": Room(frozenset({"bias"}), _MANY | {"mask_mod", "alibi", "left", "right", "blocks"}),
    "backward_q": Room(frozenset(), frozenset()),
}
# What takes shared memory, most of it for tiles that are prefetched: two stages leave room for a second program, or,
# beside heads of more than 128, for one.
_TILES = frozenset({"bias", "mask", "columns of score_mod"})
PREFETCHED: dict[Kernel, frozenset[str]] = {
    "forward": _TILES | {"columns of mask_mod", "dropout", "small blocks"},
    "backward_kv": _TILES | {"dropout or small blocks beside large heads"},
    "backward_q": _TILES | {"dropout or small blocks beside large heads"},
}


def block_dim_of(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), 16)


def tile_for(problem: Problem, kernel: Kernel) -> Tile:
    p = problem
    return _beside(_lookup(p.device, p.dtype, max(p.head_dim, p.head_dim_v), kernel), p, kernel)


@functools.lru_cache(maxsize=4096)
def _beside(tile: Tile, problem: Problem, kernel: Kernel) -> Tile:
    """The tile, of a call whose scores take more than q.k."""
    if tile.held and wrong_if_held(tile, problem.head_dim_v if kernel == "forward" else problem.head_dim):
        tile = tile._replace(held=False)
    traits, (few, many) = _traits(problem, tile), REGISTERS[kernel]
    if traits & PREFETCHED[kernel] and not tile.held:
        tile = tile._replace(num_stages=min(tile.num_stages, 2))
    if tile.masked_registers and traits & few and not traits & many:
        tile = tile._replace(registers=tile.masked_registers)
    return tile


def wrong_if_held(tile: Tile, summed_dim: int) -> bool:
    """Whether ptxas may put P, or dS, over q in the loop, which is wrong from its second turn on. Versions 12.8 to 13.0
    do, with some modifiers, if both products have one shape: scores as wide as what they are multiplied into."""
    return tile.block_n == block_dim_of(summed_dim)


def _traits(problem: Problem, tile: Tile) -> set[str]:
    """small blocks: a tile reaches into several, so that each score looks up its own."""
    p, large = problem, max(problem.head_dim, problem.head_dim_v) > 128
    small_blocks = any(size % step for size, step in zip(p.block_size, tile[:2], strict=False))
    there = {
        "softcap": p.softcap,
        "alibi": p.has_alibi,
        "bias": p.has_bias,
        "score_mod": p.score_mod,
        "left": p.window_left >= 0,
        "right": p.window_right >= 0,
        "left and alibi": p.window_left >= 0 and p.has_alibi,
        "mask": p.has_mask,
        "mask_mod": p.mask_mod,
        "columns of score_mod": _reads_columns(p.score_mod),
        "columns of mask_mod": _reads_columns(p.mask_mod),
        "blocks": p.block_size,
        "small blocks": small_blocks,
        "dropout": p.dropout_p,
        "dropout or small blocks beside large heads": large and (p.dropout_p or small_blocks),
    }
    return {name for name, x in there.items() if x}


def _reads_columns(program: str) -> bool:
    return bool(program) and Program.parse(program).reads_by("col")


@functools.lru_cache(maxsize=1024)
def _lookup(device: torch.device, dtype: torch.dtype, head_dim: int, kernel: Kernel) -> Tile:
    by_dim = table_for(device, dtype)[kernel]
    return by_dim[min(limit for limit in by_dim if limit >= head_dim)]


def table_for(device: torch.device, dtype: torch.dtype) -> Table:
    if device.type == "cpu":
        return INTERPRETER
    table = DEFAULT
    if dtype == torch.float32:
        table = FLOAT32
    elif torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9:
        table = HOPPER
    found = _tuned(torch.cuda.get_device_name(device), dtype)
    return {kernel: by_dim | found.get(kernel, {}) for kernel, by_dim in table.items()}


def _tuned(device: str, dtype: torch.dtype) -> Table:
    path = os.environ.get("TILEATTN_TILES")
    if not path:
        return {}
    from tileattn.backends.portable import tuned

    file = tuned.read(path)
    return file.table_for(str(dtype).removeprefix("torch.")) if file.device == device else {}
