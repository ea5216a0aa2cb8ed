"""Attention to a cache in Triton: from a CacheProblem to the arguments of its kernels."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileattn.backends import Tiles
from tileattn.backends.portable import refusal
from tileattn.backends.portable.append import ROWS, AppendMode, append_kernel
from tileattn.backends.portable.combine import CombineMode, combine_kernel
from tileattn.backends.portable.decode import CacheMode, Changes, Rows, decode_kernel
from tileattn.backends.portable.device.cache import Cache, Where
from tileattn.backends.portable.device.rotary import Rotary
from tileattn.backends.portable.kept import Kept
from tileattn.backends.portable.launch import Launch, Launches
from tileattn.backends.portable.tuning import Tile
from tileattn.kvcache import Append, CacheInputs, CacheProblem
from tileattn.kvcache_checks import capacity_of
from tileattn.problem import Forward

MIN_SPLIT = 256  # keys that are worth a program of their own
SHORT_RUN = 4  # blocks of keys, at most, that are taken in one walk
MAX_BATCH = 4096  # a program looks at all lengths
MIN_BATCH_BLOCK = 128  # of lengths, one a thread: a smaller batch needs no kernel of its own


class CacheTile(NamedTuple):
    """At most block_m rows, block_n keys.

    paged_stages: num_stages where keys are found through a table, whose entries take stages of their own. together:
    programs that a multiprocessor runs at once.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    paged_stages: int
    together: int = 2


# head_dim at most -> tiles, for 16-bit dtypes: the first that holds all rows, or else the last. Guesses but for Hopper
Table = dict[int, tuple[CacheTile, ...]]
HOPPER: Table = {
    64: (CacheTile(32, 128, 4, 4, 6), CacheTile(64, 128, 4, 3, 5)),
    128: (
        CacheTile(32, 128, 4, 3, 5, 1),
        CacheTile(64, 64, 4, 3, 5),
        CacheTile(128, 64, 8, 3, 5, 1),
        CacheTile(64, 64, 4, 3, 5),
    ),
    256: (CacheTile(32, 64, 4, 3, 5, 1), CacheTile(64, 64, 8, 2, 3)),
    576: (CacheTile(32, 64, 8, 3, 3),),
    1024: (CacheTile(16, 16, 8, 1, 1),),
}
DEFAULT: Table = {
    64: (CacheTile(64, 64, 4, 2, 3),),
    128: (CacheTile(64, 32, 4, 2, 3),),
    256: (CacheTile(32, 32, 4, 1, 1),),
    576: (CacheTile(16, 16, 8, 1, 1),),
    1024: (CacheTile(16, 16, 8, 1, 1),),
}
FLOAT32: Table = {
    128: (CacheTile(16, 32, 4, 2, 3),),
    256: (CacheTile(16, 32, 4, 1, 1),),
    1024: (CacheTile(16, 16, 8, 1, 1),),
}
INTERPRETER: Table = {1024: (CacheTile(32, 32, 1, 1, 1),)}  # small, so that small problems have several tiles
INTERPRETER_SLOTS = 12
APPENDING = Tile(ROWS.value, 0, 4, 1)
COMBINERS = 16  # programs that bring parts together, a multiprocessor


def supports(problem: CacheProblem) -> str | None:
    reason = refusal(problem)
    if reason is None and problem.batch > MAX_BATCH:
        return f"a batch of {problem.batch} is above {MAX_BATCH}; split it"
    return reason


def tiles(problem: CacheProblem) -> Tiles:
    p, tile = problem, _tile_for(problem)
    split, runs = _split_for(p, tile), f"in runs of {p.split_size}" if p.split_size else "in runs"
    shared = f"of all sequences are {runs}, {split.items} at most" if split.items else "are not split"
    stages = tile.paged_stages if p.page_size < p.capacity else tile.num_stages
    return Tiles(tile.block_m, tile.block_n, f"{tile.num_warps} warps, {stages} tiles in flight; keys {shared}")


def append(append: Append) -> None:
    x = append
    packed = x.cu_seqlens_k is not None
    num_pages, _, num_heads_k, _ = x.k_cache.shape
    tokens, seqlen_new = x.k.shape[0] * (1 if packed else x.k.shape[1]), 1 if packed else x.k.shape[1]
    capacity = capacity_of(x.k_cache, x.table)
    sizes = x.batch, x.seqlen_cache, seqlen_new, num_pages, capacity, num_heads_k, tokens
    tensors = *x[:7], *_of_equal_strides(x.rotary_cos, x.rotary_sin)
    if tokens:
        scalars = sizes, x.rotary_interleaved
        addresses = [y.data_ptr() for y in tensors if y is not None]
        launches = Launches(x.k.device, _kept_for((x.k.device, *scalars), tensors), tensors, addresses)
        launches.launch(append_kernel, functools.partial(_appending, *scalars))


def _appending(sizes: tuple[int, ...], interleaved: bool, *tensors: Any) -> Launch:
    k_cache, v_cache, k, v, table, cache_seqlens, cu_seqlens_k, cos, sin = tensors
    batch, _, _, _, capacity, num_heads_k, tokens = sizes
    _, page_size, _, head_dim = k_cache.shape
    half, head_dim_v = 0 if cos is None else cos.shape[1], 1 if v is None else v.shape[-1]
    args = (
        Cache(k_cache, *k_cache.stride()[:3]),
        None if v_cache is None else Cache(v_cache, *v_cache.stride()[:3]),
        _rows_of(k),
        None if v is None else _rows_of(v),
        _where_of(table, cache_seqlens, None, None, cu_seqlens_k),
        _rotary_of(cos, sin),
        *sizes,
        _append_mode(head_dim, head_dim_v, _page_size(page_size, capacity), half, interleaved, batch),
    )
    return Launch(triton.cdiv(tokens, ROWS.value) * num_heads_k, APPENDING, args)


@functools.lru_cache(maxsize=1024)
def _append_mode(
    head_dim: int, head_dim_v: int, page_size: int, half: int, interleaved: bool, batch: int
) -> AppendMode:
    blocks = triton.next_power_of_2(head_dim), triton.next_power_of_2(head_dim_v), _batch_block(batch)
    return _constants(AppendMode, head_dim, blocks[0], head_dim_v, blocks[1], page_size, half, interleaved, blocks[2])


def attend(problem: CacheProblem, inputs: CacheInputs) -> Forward:
    p, x = problem, _as_read(inputs)
    addresses = [tensor.data_ptr() for tensor in x if tensor is not None]
    kept, plan = _known(p, x, addresses)
    out, lse = Forward.unwritten(x.q, p.head_dim_v)
    if plan.programs == 0:
        return Forward(out, lse)
    partial = x.q.new_empty(plan.partial_shape, dtype=torch.float32) if plan.partial_shape else None
    launches = Launches(p.device, kept, (x,), addresses)
    launches.launch(decode_kernel, functools.partial(_decoding, p, plan), out, lse, partial)
    if partial is not None:
        launches.launch(combine_kernel, functools.partial(_combining, p, plan), out, lse, partial)
    return Forward(out, lse)


def _known(problem: CacheProblem, inputs: CacheInputs, addresses: list[int]) -> tuple[dict[Any, Kept | None], Plan]:
    """What is kept for calls like this one."""
    p, x = problem, inputs
    tf32 = p.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    unaligned = 0
    for address in addresses:
        unaligned |= address
    same_memory = addresses[1] == addresses[2]  # of both caches
    if p.alike is None or unaligned % 16:
        return _made(p, x, same_memory, tf32)
    found = p.alike.get((same_memory, tf32))
    if found is None:
        found = p.alike[same_memory, tf32] = _made(p, x, same_memory, tf32)
    return found


def _made(
    problem: CacheProblem, inputs: CacheInputs, same_memory: bool, tf32: bool
) -> tuple[dict[Any, Kept | None], Plan]:
    p, x = problem, inputs
    half = 0 if x.rotary_cos is None else x.rotary_cos.shape[1]
    same_strides = x.k_cache.stride() == x.v_cache.stride()
    total_q = x.q.shape[0] if p.varlen else 0
    of_caches = same_strides, same_strides and same_memory
    plan = _plan(p, x.k_cache.shape[0], total_q, half, x.leftpad is not None, *of_caches, tf32)
    return _kept_for((p, same_memory, tf32), x), plan


def _decoding(
    problem: CacheProblem, plan: Plan, inputs: CacheInputs, out: Tensor, lse: Tensor, partial: Tensor | None
) -> Launch:
    x = inputs
    caches = [Cache(cache, *cache.stride()[:3]) for cache in (x.k_cache, x.v_cache)]
    rest = partial, _where_of(*x[3:8]), _rotary_of(x.rotary_cos, x.rotary_sin), _changes_of(problem, x)
    args = _rows_of(x.q), *caches, _rows_of(out), lse, *rest, *plan.sizes, plan.mode
    return Launch(plan.programs, plan.tile, args)


def _combining(
    problem: CacheProblem, plan: Plan, inputs: CacheInputs, out: Tensor, lse: Tensor, partial: Tensor
) -> Launch:
    p, x = problem, inputs
    where = _where_of(None, x.cache_seqlens, x.leftpad, x.cu_seqlens_q, x.cu_seqlens_k)
    mode = CombineMode(*(getattr(plan.mode, name) for name in CombineMode._fields))
    args = _rows_of(out), lse, partial, where, x.sink, *plan.sizes, mode
    programs = min(p.batch * p.num_heads * p.seqlen_q, COMBINERS * _multiprocessors(p.device))
    return Launch(programs, Tile(1, 0, max(plan.mode.block_va.value // 128, 1), 1), args)


def _as_read(inputs: CacheInputs) -> CacheInputs:
    """Tensors as kernels read them. What was appended is not read."""
    cos, sin, mask, slopes, sink = inputs[10:]
    return CacheInputs(
        *inputs[:8],
        None,
        None,
        *_of_equal_strides(cos, sin),
        None if mask is None else mask.view(torch.uint8),
        None if slopes is None else slopes.contiguous(),
        None if sink is None else sink.contiguous(),
    )


def _of_equal_strides(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    if cos is None or sin is None or cos.stride() == sin.stride():
        return cos, sin
    return cos.contiguous(), sin.contiguous()


def _kept_for(scalars: tuple[Any, ...], tensors: Iterable[Tensor | None]) -> dict[Any, Kept | None]:
    """Launches of calls with such tensors, and scalars, which tell the device: a compiled kernel is of one."""
    return _kept(scalars, *[None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() % 16) for x in tensors])


@functools.lru_cache(maxsize=4096)
def _kept(*_alike: Any) -> dict[Any, Kept | None]:
    return {}


class Split(NamedTuple):
    """How keys are shared out. items: programs a head and tile of rows, at most (0: no splits); wanted: what lengths
    divide between them, or, with a fixed split, blocks of keys in each."""

    items: int
    wanted: int
    blocks: int


def _split_for(problem: CacheProblem, tile: CacheTile) -> Split:
    p = problem
    if p.split_size:
        return Split(p.batch * triton.cdiv(p.capacity, p.split_size), 0, p.split_size // tile.block_n)
    tiles = triton.cdiv(p.seqlen_q * p.group, tile.block_m)
    programs, slots = p.batch * p.num_heads_k * tiles, tile.together * _multiprocessors(p.device)
    if programs == 0 or (tiles > 1 and programs >= 4 * slots):
        return Split(0, 0, 0)
    wanted = p.batch * _splits_each(programs, slots, triton.cdiv(p.capacity, MIN_SPLIT))
    # each sequence gets one at least, however short, beside those that are divided
    return Split(wanted + p.batch, wanted, 0)


def _suits_one_walk(problem: CacheProblem, tile: CacheTile, split: Split) -> bool:
    """Whether runs are so short that beginning a second walk takes longer than masks in the first. Not where the split
    is fixed: the batch must not choose."""
    p = problem
    if p.split_size or p.seqlen_q * p.group > tile.block_m:
        return False
    return p.batch * p.capacity <= SHORT_RUN * tile.block_n * split.wanted


def _splits_each(programs: int, slots: int, most: int) -> int:
    """Splits a sequence, as few as leave little of the last wave of programs idle."""
    best, best_use = 1, 0.0
    for splits in range(1, max(min(most, 8 * slots // programs + 1), 1) + 1):
        waves = splits * programs / slots
        use = waves / math.ceil(waves)
        if use > best_use + 0.05:
            best, best_use = splits, use
    return best


@functools.lru_cache
def _multiprocessors(device: torch.device) -> int:
    if device.type == "cpu":
        return INTERPRETER_SLOTS
    return torch.cuda.get_device_properties(device).multi_processor_count


def _tile_for(problem: CacheProblem) -> CacheTile:
    p = problem
    by_dim = _table_for(p.device, p.dtype)
    tiles = by_dim[min(limit for limit in by_dim if limit >= max(p.head_dim, p.head_dim_v))]
    if p.split_size and p.varlen:  # the longest sequence must not choose for the others
        return tiles[-1]
    rows = max(triton.next_power_of_2(p.seqlen_q * p.group), 16)
    tile = next((tile for tile in tiles if rows <= tile.block_m), tiles[-1])
    return tile._replace(block_m=min(tile.block_m, rows))


def _in_page(page_size: int, block_n: int, has_leftpad: bool) -> str:
    """See CacheMode."""
    if page_size == 0 or has_leftpad:
        return ""
    return "whole" if page_size % block_n == 0 else "parts" if block_n % page_size == 0 else ""


@functools.lru_cache
def _table_for(device: torch.device, dtype: torch.dtype) -> Table:
    if device.type == "cpu":
        return INTERPRETER
    if dtype == torch.float32:
        return FLOAT32
    if torch.version.hip is None and torch.cuda.get_device_capability(device)[0] == 9:
        return HOPPER
    return DEFAULT


def _blocks_of(dim: int) -> tuple[int, int]:
    """A head dim as one power of two, or as two that come closer."""
    whole = max(triton.next_power_of_2(dim), 16)
    half = whole // 2
    rest = max(triton.next_power_of_2(dim - half), 16)
    return (whole, 0) if whole == 16 or rest == half else (half, rest)


class Plan(NamedTuple):
    """What follows from a problem. sizes: as the kernels take them.

    partial_shape: of what programs leave, the accumulator, maximum and sum of each row of the longest sequence; a row
    is a multiple of 16 bytes. () where no keys are split.
    """

    tile: Tile
    programs: int
    sizes: tuple[int, ...]
    mode: CacheMode
    partial_shape: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def _plan(
    problem: CacheProblem,
    num_pages: int,
    total_q: int,
    half: int,
    has_leftpad: bool,
    same_strides: bool,
    same_memory: bool,
    tf32: bool,
) -> Plan:
    """half: of the rotary dims. same_memory: v_cache begins where k_cache does, with the same strides."""
    p = problem
    tile, page_size = _tile_for(p), _page_size(p.page_size, p.capacity)
    num_stages = tile.paged_stages if page_size else tile.num_stages
    split = _split_for(p, tile)
    left, right = _window(p)
    sizes = (
        *(p.batch, p.seqlen_q, p.seqlen_cache, p.seqlen_new, num_pages, p.capacity, p.num_heads_k, total_q),
        *(left, right, split.wanted, split.blocks),
    )
    (block_a, block_b), (block_va, block_vb) = _blocks_of(p.head_dim), _blocks_of(p.head_dim_v)
    mode = _constants(
        CacheMode,
        p.head_dim,
        p.head_dim_v,
        block_a,
        block_b,
        block_va,
        block_vb,
        same_memory and p.head_dim_v == block_a,
        same_strides,
        page_size,
        _in_page(page_size, tile.block_n, has_leftpad),
        half,
        p.rotary_interleaved,
        p.scale > 0.0 and not (p.softcap or p.has_alibi),
        p.dtype == torch.float32,
        "tf32" if tf32 else "ieee",
        left >= 0,
        right >= 0,
        split.items > 0,
        p.split_size > 0,
        p.group,
        _batch_block(p.batch),
        _suits_one_walk(p, tile, split),
        tile.block_m,
        tile.block_n,
    )
    rows = p.seqlen_q * p.group
    programs = triton.cdiv(rows, tile.block_m) * p.num_heads_k * (split.items or p.batch)
    partial_shape = (split.items, p.num_heads_k, rows, p.head_dim_v + 4) if split.items else ()
    return Plan(Tile(*tile[:3], num_stages), programs, sizes, mode, partial_shape)


def _batch_block(batch: int) -> int:
    return max(triton.next_power_of_2(batch), MIN_BATCH_BLOCK)


def _page_size(page_size: int, capacity: int) -> int:
    """0 where a sequence has one page, whatever that holds."""
    return page_size if capacity > page_size else 0


def _constants(kind: Any, *fields: Any) -> Any:
    return kind(*map(tl.constexpr, fields))


def _window(problem: CacheProblem) -> tuple[int, int]:
    """The window, -1 also where it is too wide to hide anything."""
    p = problem
    left = -1 if p.window_left >= p.capacity else p.window_left
    return left, -1 if p.window_right >= p.seqlen_q - 1 else p.window_right


def _changes_of(problem: CacheProblem, inputs: CacheInputs) -> Changes:
    x, mask = inputs, inputs.mask
    sizes = () if mask is None else zip(mask.shape, mask.stride(), strict=True)
    of_batch, of_head, of_row, of_col = (stride if size > 1 else 0 for size, stride in sizes) if sizes else (0,) * 4
    slopes = x.alibi_slopes
    return Changes(
        problem.scale,
        problem.softcap or None,
        slopes,
        0 if slopes is None or slopes.shape[0] == 1 else slopes.shape[1],
        mask,
        of_batch,
        of_head,
        of_row,
        of_col,
        0 if mask is None else mask.shape[-1],
        x.sink,
    )


def _where_of(
    table: Tensor | None,
    cache_seqlens: Tensor | None,
    leftpad: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Where:
    return Where(table, 0 if table is None else table.stride(0), cache_seqlens, leftpad, cu_seqlens_q, cu_seqlens_k)


def _rows_of(x: Tensor) -> Rows:
    return Rows(x, *x.stride()[:3]) if x.dim() == 4 else Rows(x, 0, *x.stride()[:2])


def _rotary_of(cos: Tensor | None, sin: Tensor | None) -> Rotary:
    return Rotary(None, None, 0, 0) if cos is None else Rotary(cos, sin, cos.stride(0), cos.shape[0])
