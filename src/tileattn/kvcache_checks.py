"""What the arguments of attention to a cache must be, as `checks` for those of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from tileattn.checks import (
    DTYPES,
    check_cu_seqlens,
    check_device,
    check_tensor,
)

_INTEGERS = (torch.int32, torch.int64)


def capacity_of(k_cache: Tensor, table: Tensor | None) -> int:
    """How many keys a sequence may have."""
    return k_cache.shape[1] * (1 if table is None else table.shape[1])


def readable(*tensors: object) -> bool:
    """Whether values can be looked at: on a GPU that would wait for the device."""
    return not torch.compiler.is_compiling() and all(
        x.device.type == "cpu" and not isinstance(x, torch._subclasses.FakeTensor)
        for x in tensors
        if isinstance(x, Tensor)
    )


def check_queries(q: Tensor, varlen: bool) -> None:
    check_tensor("q", q)
    rank, layout = (3, "(total_q, num_heads, head_dim)") if varlen else (4, "(batch, seqlen_q, num_heads, head_dim)")
    if q.dim() != rank:
        hint = "; packed queries need cu_seqlens_q" if q.dim() == 3 else ""
        raise ValueError(f"q: got {q.dim()} dims with shape {tuple(q.shape)}, expected {rank}: {layout}{hint}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: dtype {q.dtype} is not supported; use float16, bfloat16, float32 or float64")
    if q.shape[-1] == 0 or q.shape[-2] == 0:
        raise ValueError(f"q: heads and head_dim must be at least 1, got shape {tuple(q.shape)}")


def check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got {x.dim()} dims with shape {tuple(x.shape)}, expected 4: (batch, seqlen, heads, head_dim) "
                "or with block_table (pages, page_size, heads, head_dim)"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name}: dtype {x.dtype} differs from q's {q.dtype}; q and the caches must share one dtype"
            )
        check_device(name, x, q.device)
        if min(x.shape[1:]) == 0:
            raise ValueError(f"{name}: shape {tuple(x.shape)}; page_size (or seqlen), heads and head_dim must be >= 1")
        if x.stride(-1) != 1 and x.shape[-1] != 1:
            raise ValueError(
                f"{name}: last dim has stride {x.stride(-1)}; a cache is used in place and must have 1 there"
            )
    if k_cache.shape[-1] != q.shape[-1]:
        raise ValueError(f"k_cache: head_dim {k_cache.shape[-1]} differs from q's {q.shape[-1]}; they must be equal")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            f"v_cache: shape {tuple(v_cache.shape)} does not fit k_cache's {tuple(k_cache.shape)}; all but the last "
            "dim must be equal"
        )
    if q.shape[-2] % k_cache.shape[2]:
        raise ValueError(
            f"q: {q.shape[-2]} heads is not a multiple of k_cache's {k_cache.shape[2]} heads; grouped-query attention "
            "needs heads of q = group * heads of k_cache"
        )


def check_table(
    block_table: Tensor | None, cache_batch_idx: Tensor | None, k_cache: Tensor, batch: int
) -> Tensor | None:
    if batch and not len(k_cache):
        raise ValueError(f"k_cache: shape {tuple(k_cache.shape)} has no pages for a batch of {batch}")
    if cache_batch_idx is not None:
        check_indices("cache_batch_idx", cache_batch_idx, k_cache, (batch,))
        rows = k_cache.shape[0] if block_table is None else len(block_table)
        if readable(cache_batch_idx) and batch and (cache_batch_idx.min() < 0 or cache_batch_idx.max() >= rows):
            holder = "k_cache" if block_table is None else "block_table"
            raise ValueError(f"cache_batch_idx: {cache_batch_idx.tolist()}, but {holder} has {rows} sequences")
        if block_table is None:
            return cache_batch_idx[:, None]
    if block_table is None:
        if k_cache.shape[0] < batch:
            raise ValueError(
                f"k_cache: {k_cache.shape[0]} sequences for a batch of {batch}; without block_table or cache_batch_idx "
                "sequence b is k_cache[b]"
            )
        return None
    check_indices("block_table", block_table, k_cache, (batch if cache_batch_idx is None else None, None))
    if cache_batch_idx is not None:
        return block_table.index_select(0, cache_batch_idx.clamp(0, len(block_table) - 1))
    return block_table if block_table.stride(1) == 1 or block_table.shape[1] == 1 else block_table.contiguous()


def check_indices(name: str, x: Tensor, k_cache: Tensor, shape: tuple[int | None, ...]) -> None:
    """shape: None for any size from 1 on."""
    check_tensor(name, x)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.int32 or torch.int64")
    sizes_fit = x.dim() == len(shape) and all(
        have == want if want is not None else have > 0 for have, want in zip(x.shape, shape, strict=True)
    )
    if not sizes_fit:
        expected = f"(batch,) = {shape}" if name == "cache_batch_idx" else f"(batch, pages of a sequence) = {shape}"
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {expected}, None being any size")
    check_device(name, x, k_cache.device)


def check_pages(
    table: Tensor, lengths: int | Tensor, seqlen_new: int, cu_seqlens_k: Tensor | None, k_cache: Tensor
) -> None:
    """Entries in use must be pages; the others may hold anything."""
    if not readable(table, lengths, cu_seqlens_k):
        return
    num_pages, page_size = k_cache.shape[:2]
    ends = torch.as_tensor(lengths, device="cpu").expand(table.shape[0]) + new_lengths(seqlen_new, cu_seqlens_k)
    in_use = torch.arange(table.shape[1], device="cpu") * page_size < ends[:, None]
    outside = in_use & ((table < 0) | (table >= num_pages))
    if outside.any():
        b, i = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: entry {int(table[b, i])} of sequence {b} is outside the cache, which has {num_pages} pages"
        )


def new_lengths(seqlen_new: int, cu_seqlens_k: Tensor | None) -> int | Tensor:
    """How many keys are appended to each sequence."""
    return seqlen_new if cu_seqlens_k is None else cu_seqlens_k.diff()


def check_new(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    cache_seqlens: int | Tensor | None,
    batch: int,
) -> Tensor | None:
    """The cu_seqlens of what is appended."""
    if k is None:
        if v is not None:
            raise TypeError("k: got None, but v is given; both are appended together")
        if cu_seqlens_k is not None:
            raise TypeError("cu_seqlens_k: nothing is appended (k is None); it counts what is")
        return None
    if cache_seqlens is None:
        raise TypeError("cache_seqlens: got None; where k and v are appended must be said")
    if v is None and readable() and not within(v_cache, k_cache):
        raise TypeError("v: got None; it may be left out only where v_cache lives in k_cache's memory (MLA)")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is None:
            continue
        check_tensor(name, x)
        if x.dim() != q.dim() or x.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name}: shape {tuple(x.shape)} does not fit {name}_cache's {tuple(cache.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}; all must share one dtype")
        check_device(name, x, q.device)
        if x.shape[:-2] != k.shape[:-2]:
            raise ValueError(f"v: shape {tuple(x.shape)} does not fit k's {tuple(k.shape)}")
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise TypeError("cu_seqlens_k: k is packed only where q is; give cu_seqlens_q")
        if k.shape[0] != batch:
            raise ValueError(f"k: batch {k.shape[0]} differs from q's batch {batch}; they must be equal")
        return None
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k) != batch:
        raise ValueError(f"cu_seqlens_k: {cu_seqlens_k.shape[0] - 1} sequences where cu_seqlens_q has {batch}")
    return cu_seqlens_k


def within(v_cache: Tensor, k_cache: Tensor) -> bool:
    """Whether values are dims of the keys. Caches of both may share memory and lie side by side."""
    first = v_cache.storage_offset() - k_cache.storage_offset()
    return (
        v_cache.untyped_storage()._cdata == k_cache.untyped_storage()._cdata
        and v_cache.stride()[:3] == k_cache.stride()[:3]
        and 0 <= first <= k_cache.shape[3] - v_cache.shape[3]
    )


def check_lengths(
    cache_seqlens: int | Tensor | None,
    seqlen_new: int,
    cu_seqlens_k: Tensor | None,
    capacity: int,
    batch: int,
    device: torch.device,
) -> int | Tensor:
    if cache_seqlens is None:
        return capacity
    if not isinstance(cache_seqlens, Tensor):
        if isinstance(cache_seqlens, bool) or not isinstance(cache_seqlens, (int, torch.SymInt)):
            raise TypeError(f"cache_seqlens: got {type(cache_seqlens).__name__}, expected an int or a tensor (batch,)")
        if cache_seqlens < 0:
            raise ValueError(f"cache_seqlens={cache_seqlens}: must be 0 or more")
        longest = cache_seqlens + seqlen_new
        if readable(cu_seqlens_k) and cu_seqlens_k is not None and batch:
            longest = cache_seqlens + int(cu_seqlens_k.diff().max())
        if longest > capacity:
            raise ValueError(_beyond(f"cache_seqlens={cache_seqlens}", longest - cache_seqlens, capacity))
        return cache_seqlens
    if cache_seqlens.dtype not in _INTEGERS:
        raise TypeError(f"cache_seqlens: dtype {cache_seqlens.dtype}, expected torch.int32 or torch.int64")
    if tuple(cache_seqlens.shape) != (batch,):
        raise ValueError(f"cache_seqlens: shape {tuple(cache_seqlens.shape)}, expected (batch,) = ({batch},)")
    check_device("cache_seqlens", cache_seqlens, device)
    if readable(cache_seqlens, cu_seqlens_k) and batch:
        ends = cache_seqlens + new_lengths(seqlen_new, cu_seqlens_k)
        if cache_seqlens.min() < 0:
            raise ValueError(f"cache_seqlens: {int(cache_seqlens.min())} is negative")
        if ends.max() > capacity:
            b = int(ends.argmax())
            appended = int(ends[b] - cache_seqlens[b])
            raise ValueError(_beyond(f"cache_seqlens: {int(cache_seqlens[b])} of sequence {b}", appended, capacity))
    return cache_seqlens.contiguous()


def _beyond(what: str, new: int, capacity: int) -> str:
    appended = f" and {new} appended" if new else ""
    return f"{what}{appended} is beyond the cache's capacity of {capacity} a sequence"


def check_leftpad(
    leftpad: Tensor | None, lengths: int | Tensor, capacity: int, batch: int, device: torch.device
) -> None:
    if leftpad is None:
        return
    check_tensor("cache_leftpad", leftpad)
    if leftpad.dtype not in _INTEGERS or tuple(leftpad.shape) != (batch,):
        raise TypeError(
            f"cache_leftpad: {leftpad.dtype} of shape {tuple(leftpad.shape)}, expected int32 or int64 (batch,) = "
            f"({batch},)"
        )
    check_device("cache_leftpad", leftpad, device)
    if readable(leftpad, lengths) and ((leftpad < 0) | (leftpad > lengths)).any():
        raise ValueError(f"cache_leftpad: {leftpad.tolist()} must lie between 0 and cache_seqlens")


def check_rotary(
    cos: Tensor | None,
    sin: Tensor | None,
    q: Tensor,
    k: Tensor | None,
    lengths: int | Tensor,
    *rows: int | Tensor,
) -> None:
    """rows: how many of q and of k come after so many keys, or their cu_seqlens."""
    if cos is None and sin is None:
        return
    if k is None:
        raise TypeError("rotary_cos: nothing is appended (k is None); cached keys are turned already, turn q yourself")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x is None:
            raise TypeError(f"{name}: got None; both rotary_cos and rotary_sin are needed")
        check_tensor(name, x)
        if x.dim() != 2 or x.dtype not in DTYPES or not 0 < 2 * x.shape[1] <= q.shape[-1] or not len(x):
            raise ValueError(
                f"{name}: {x.dtype} of shape {tuple(x.shape)}, expected floating (positions, rotary_dim / 2) with "
                f"rotary_dim at most head_dim = {q.shape[-1]}"
            )
        check_device(name, x, q.device)
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin: shape {tuple(sin.shape)} differs from rotary_cos' {tuple(cos.shape)}")
    if not readable(lengths, *rows):
        return
    for each in rows:
        count = each.diff() if isinstance(each, Tensor) else each
        stops = torch.as_tensor((lengths + count) * (count > 0), device="cpu")
        if stops.numel() and stops.max() > cos.shape[0]:
            last = int(stops.max()) - 1
            raise ValueError(f"rotary_cos: {cos.shape[0]} positions, but the last of q or k is at position {last}")


def check_split_size(split_size: int | None) -> int:
    if split_size is None:
        return 0
    if isinstance(split_size, bool) or not isinstance(split_size, int):
        raise TypeError(f"split_size: got {type(split_size).__name__}, expected an int or None")
    if split_size < 128 or split_size % 128:
        raise ValueError(f"split_size={split_size}: must be a positive multiple of 128 (None: as suits the batch)")
    return split_size
