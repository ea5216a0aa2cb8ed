"""From a Problem and its tensors to the arguments of a kernel."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileattn.backends.portable.device.rows import PAD, Rows, RowStats, Sequences, Workspace, sized
from tileattn.backends.portable.device.scores import Modifiers
from tileattn.backends.portable.tuning import Tile
from tileattn.philox import threshold
from tileattn.problem import Inputs, Problem


class Mode(NamedTuple):
    """What a kernel is compiled for, every field a tl.constexpr.

    plain: scores are q.k times a positive scale, so that the scale folds into the exponent. exact: float32 inputs.
    precision: of float32 products. tma: walk through tensor descriptors. pad: a head dim is smaller than its block.
    left, right: the window bounds that side.
    """

    dim: Any
    dim_v: Any
    block_dim: Any
    block_dim_v: Any
    plain: Any
    exact: Any
    precision: Any
    tma: Any
    pad: Any
    left: Any
    right: Any


@functools.lru_cache(maxsize=1024)
def _mode(*fields: Any) -> Mode:
    return Mode(*map(tl.constexpr, fields))


def mode_of(problem: Problem, tile: Tile, *tensors: Tensor) -> Mode:
    """tensors: those that the kernel loads in rows."""
    p = problem
    block_dim, block_dim_v = block_dim_of(p.head_dim), block_dim_of(p.head_dim_v)
    left, right = _window(p)
    return _mode(
        p.head_dim,
        p.head_dim_v,
        block_dim,
        block_dim_v,
        p.scale > 0.0 and not (p.softcap or p.has_bias or p.has_alibi),
        p.dtype == torch.float32,
        "tf32" if p.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee",
        tile.descriptors and all(map(_fits_descriptor, tensors)),
        (block_dim, block_dim_v) != (p.head_dim, p.head_dim_v),
        left >= 0,
        right >= 0,
    )


def block_dim_of(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), 16)


def _fits_descriptor(x: Tensor) -> bool:
    """A tensor descriptor wants all but the last dim at multiples of 16 bytes."""
    size = x.element_size()
    return x.data_ptr() % 16 == 0 and all(s * size % 16 == 0 for s in x.stride()[:-1])


def _window(problem: Problem) -> tuple[int, int]:
    """The window, -1 also where it is too wide to hide anything."""
    p = problem
    left = -1 if p.window_left >= p.seqlen_k else p.window_left
    return left, -1 if p.window_right >= p.seqlen_q else p.window_right


_ALIGN = {n: tl.constexpr(n) for n in (1, 2, 4, 8, 16)}


def rows_of(x: Tensor) -> Rows:
    strides = x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])
    align = math.gcd(*strides, 16)
    return Rows(x, *sized(*strides, align=align), _ALIGN[align])


def stats_of(x: Tensor) -> RowStats:
    return RowStats(x, *(sized(*x.stride()[:2]) if x.dim() == 3 else sized(0, x.stride(0))))


def workspace(problem: Problem, inputs: Inputs, fill: float) -> Tensor:
    """One float32 a row for kernels alone: (batch, heads, rows), varlen (heads, rows), room for every sequence padded.
    Kernels write what kernels read; fill is for what torch would read beside it."""
    p, q = problem, inputs.q
    if not p.varlen:
        return q.new_empty((p.batch, p.num_heads, triton.cdiv(p.seqlen_q, PAD.value) * PAD.value), dtype=torch.float32)
    shape = p.num_heads, (q.shape[0] // PAD.value + p.batch + 1) * PAD.value
    return q.new_full(shape, fill, dtype=torch.float32) if p.has_sink else q.new_empty(shape, dtype=torch.float32)


def workspace_of(x: Tensor) -> Workspace:
    return Workspace(x, *x.stride()[:2]) if x.dim() == 3 else Workspace(x, None, x.stride(0))


def sequences_of(problem: Problem, inputs: Inputs) -> Sequences:
    p = problem
    total_q, total_k = (inputs.q.shape[0], inputs.k.shape[0]) if p.varlen else (0, 0)
    return Sequences(
        p.seqlen_q,
        p.seqlen_k,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        total_q,
        total_k,
        p.num_heads,
        *_window(p),
    )


def modifiers_of(problem: Problem, inputs: Inputs) -> Modifiers:
    p = problem
    slopes, dropped = inputs.alibi_slopes, threshold(p.dropout_p)
    return Modifiers(
        scale=p.scale,
        softcap=p.softcap or None,
        alibi=slopes,
        bias=inputs.bias,
        mask=None if inputs.mask is None else inputs.mask.view(torch.uint8),
        seed=inputs.dropout_seed,
        threshold=dropped - 2**32 if dropped >= 2**31 else dropped,
        rescale=1.0 / (1.0 - p.dropout_p),
        alibi_batch=0 if slopes is None or slopes.shape[0] == 1 else sized(slopes.stride(0))[0],
        alibi_head=0 if slopes is None else slopes.stride(1),
        **_strides("bias", inputs.bias),
        **_strides("mask", inputs.mask),
    )


def _strides(name: str, x: Tensor | None) -> dict[str, Any]:
    """The fields of Modifiers that hold strides of a bias or mask: 0 along dims of size 1, so that they broadcast."""
    strides = [0] * 4 if x is None else [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    align = 8 if math.gcd(*strides[:3]) % 8 == 0 else 1
    batch, head, row = sized(*strides[:3], align=align)
    return {
        f"{name}_batch": batch,
        f"{name}_head": head,
        f"{name}_row": row,
        f"{name}_col": strides[3],
        f"{name}_align": _ALIGN[align],
    }


def launch(kernel: Any, device: torch.device, programs: int, tile: Tile, *args: Any) -> None:
    if programs == 0:
        return
    if device.type == "cpu":  # the interpreter
        kernel[(programs,)](*args)
        return
    triton.set_allocator(_allocate)
    with torch.cuda.device(device):
        kernel[(programs,)](*args, **compile_options(tile))


def compile_options(tile: Tile) -> dict[str, int]:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return options | {"maxnreg": tile.registers} if tile.registers else options


def _allocate(size: int, alignment: int, stream: int | None) -> Tensor:
    return torch.empty(size, dtype=torch.int8, device="cuda")
