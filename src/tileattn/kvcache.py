"""CacheProblem: the one description of attention to keys and values that live in a cache, and its checks.

A cache is (pages, page_size, heads, head_dim), and a table says which pages hold a sequence, in order. A contiguous
cache (batch, seqlen, heads, head_dim) is the same with one page a sequence; `cache_batch_idx` is its table.

Sequence b has the keys at positions leftpad[b] to cache_seqlens[b] of its pages, and after them those that the call
appends. Column j of its scores is the j-th of these, counted from leftpad; causality and windows align its last row of
q with its last key.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileattn.problem import (
    DTYPES,
    MAX_CHECKED,
    Problem,
    _check_alibi_slopes,
    _check_cu_seqlens,
    _check_device,
    _check_mask,
    _check_max_seqlen,
    _check_scale,
    _check_sink,
    _check_softcap,
    _check_tensor,
    _check_window,
    _unit_last_stride,
)

_INTEGERS = (torch.int32, torch.int64)


class CacheInputs(NamedTuple):
    """The tensors of one call, in canonical form; the last dim of each has stride 1.

    q: (batch, seqlen_q, num_heads, head_dim), varlen (total_q, num_heads, head_dim).
    k_cache, v_cache: (pages, page_size, num_heads_k, head_dim) and (.., head_dim_v).
    table: int32 or int64 (batch, pages of a sequence); None: sequence b has page b.
    cache_seqlens: int32 or int64 (batch,), lengths before anything is appended; None: problem.seqlen_cache each.
    leftpad: int32 or int64 (batch,).
    k, v: what is appended, like q; varlen: packed by cu_seqlens_k. v is None where it lives in k's memory.
    rotary_cos, rotary_sin: (positions, rotary_dim / 2).
    mask: bool, four dims, each 1 or that of (batch, num_heads, seqlen_q, its own): of the last keys of a sequence.
    alibi_slopes: (1 or batch, num_heads); sink: (num_heads,).
    """

    q: Tensor
    k_cache: Tensor
    v_cache: Tensor
    table: Tensor | None = None
    cache_seqlens: Tensor | None = None
    leftpad: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    rotary_cos: Tensor | None = None
    rotary_sin: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None


class Append(NamedTuple):
    """What is written where: k and v (batch, seqlen_new, heads, dim), or packed by cu_seqlens_k, go to position
    cache_seqlens[b] (None: seqlen_cache) and after of sequence b; k is turned by the rotary embedding on the way. v and
    v_cache are None where v lives in k's memory."""

    k_cache: Tensor
    v_cache: Tensor | None
    k: Tensor
    v: Tensor | None
    table: Tensor | None
    cache_seqlens: Tensor | None
    cu_seqlens_k: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    batch: int
    seqlen_cache: int
    rotary_interleaved: bool


@dataclass(frozen=True)
class CacheProblem:
    """Sizes and scalars of one call. The window is that of `Problem`.

    alike: what backends keep for calls like one whose checks are remembered: these have the same scalars, and tensors
    of the same dtypes, shapes and strides.
    """

    batch: int
    seqlen_q: int  # varlen: the longest
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    page_size: int
    capacity: int  # positions that a sequence's pages have
    seqlen_cache: int  # length of every sequence where there are no cache_seqlens
    scale: float
    seqlen_new: int = 0  # appended to each sequence; varlen: cu_seqlens_k says
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    rotary_interleaved: bool = False
    split_size: int = 0  # keys of a sequence are split into runs of so many; 0: as suits the batch
    varlen: bool = False
    has_mask: bool = False
    has_alibi: bool = False
    has_sink: bool = False
    alike: dict[Any, Any] | None = field(default=None, compare=False, repr=False)

    @property
    def group(self) -> int:
        """Query heads that share one key head."""
        return self.num_heads // self.num_heads_k

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    def gathered(self, seqlen_k: int) -> Problem:
        """The same call on keys that are brought together, at most seqlen_k in each sequence."""
        return Problem(
            batch=self.batch,
            seqlen_q=self.seqlen_q,
            seqlen_k=seqlen_k,
            num_heads=self.num_heads,
            num_heads_k=self.num_heads_k,
            head_dim=self.head_dim,
            head_dim_v=self.head_dim_v,
            dtype=self.dtype,
            device=self.device,
            scale=self.scale,
            window_left=self.window_left,
            window_right=self.window_right,
            softcap=self.softcap,
            varlen=self.varlen,
            has_mask=self.has_mask,
            has_alibi=self.has_alibi,
            has_sink=self.has_sink,
        )

    @staticmethod
    def describing(inputs: CacheInputs, **scalars: Any) -> CacheProblem:
        """The call that checked inputs and the fields that no tensor tells make."""
        q, k_cache, v_cache, table = inputs[:4]
        cu_seqlens_q = inputs.cu_seqlens_q
        return CacheProblem(
            batch=cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0],
            num_heads=q.shape[-2],
            num_heads_k=k_cache.shape[2],
            head_dim=q.shape[-1],
            head_dim_v=v_cache.shape[3],
            dtype=q.dtype,
            device=q.device,
            page_size=k_cache.shape[1],
            capacity=capacity_of(k_cache, table),
            varlen=cu_seqlens_q is not None,
            has_mask=inputs.mask is not None,
            has_alibi=inputs.alibi_slopes is not None,
            has_sink=inputs.sink is not None,
            **scalars,
        )

    @staticmethod
    def of(
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        *,
        cache_seqlens: int | Tensor | None = None,
        block_table: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        rotary_interleaved: bool = False,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        split_size: int | None = None,
    ) -> tuple[CacheProblem, CacheInputs]:
        """Check everything that the host can know and return the call in canonical form. Raises TypeError or
        ValueError."""
        key = None
        if not torch.compiler.is_compiling() and cache_batch_idx is None and mask is None and alibi_slopes is None:
            seqlens, seqlen = (cache_seqlens, None) if isinstance(cache_seqlens, Tensor) else (None, cache_seqlens)
            cu_seqlens_new = cu_seqlens_q if k is not None and cu_seqlens_k is None else cu_seqlens_k
            where = block_table, seqlens, cache_leftpad, cu_seqlens_q, cu_seqlens_new
            tensors = CacheInputs(q, k_cache, v_cache, *where, k, v, rotary_cos, rotary_sin, sink=sink)
            options = rotary_interleaved, causal, scale, window, softcap, split_size
            key = _metadata(tensors, max_seqlen_q, type(seqlen), *options)
            found = _checked.get(key)
            if found is not None and (seqlen is None or _holds(found[0], seqlen, rotary_cos)):
                problem, canonical = found
                inputs = tensors if canonical else CacheInputs._make(map(_canonical, tensors))
                if seqlen is not None:
                    inputs = inputs._replace(cache_seqlens=_filled(q, problem.batch, seqlen))
                return problem, inputs
        varlen = cu_seqlens_q is not None
        _check_queries(q, varlen)
        _check_caches(q, k_cache, v_cache)
        if varlen:
            batch = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
            seqlen_q = _check_max_seqlen("max_seqlen_q", max_seqlen_q, "cu_seqlens_q", cu_seqlens_q)
        else:
            batch, seqlen_q = q.shape[:2]
        table = _check_table(block_table, cache_batch_idx, k_cache, batch)
        capacity = capacity_of(k_cache, table)
        cu_seqlens_k = _check_new(q, k, v, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, cache_seqlens, batch)
        seqlen_new = k.shape[1] if k is not None and not varlen else 0
        lengths = _check_lengths(cache_seqlens, seqlen_new, cu_seqlens_k, capacity, batch, q.device)
        if block_table is not None and table is not None:
            _check_pages(table, lengths, seqlen_new, cu_seqlens_k, k_cache)
        _check_leftpad(cache_leftpad, lengths, capacity, batch, q.device)
        rows = (seqlen_q, seqlen_new) if cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
        _check_rotary(rotary_cos, rotary_sin, q, k, lengths, *rows)
        if key is not None and seqlen is not None:
            lengths = _filled(q, batch, seqlen)
            tensors = tensors._replace(cache_seqlens=lengths)
        left, right = _check_window(window)
        scalars = {
            "seqlen_q": seqlen_q,
            "seqlen_cache": 0 if isinstance(lengths, Tensor) else lengths,
            "scale": _check_scale(scale, q.shape[-1]),
            "seqlen_new": seqlen_new,
            "window_left": left,
            "window_right": 0 if causal else right,
            "softcap": _check_softcap(softcap),
            "rotary_interleaved": bool(rotary_interleaved),
            "split_size": _check_split_size(split_size),
        }
        columns = mask.shape[-1] if isinstance(mask, Tensor) and mask.dim() else 1
        num_heads = q.shape[-2]
        scores = (batch, num_heads, seqlen_q, columns)
        inputs = CacheInputs(
            q=_unit_last_stride(q),
            k_cache=k_cache,
            v_cache=v_cache,
            table=table,
            cache_seqlens=lengths if isinstance(lengths, Tensor) else None,
            leftpad=None if cache_leftpad is None else cache_leftpad.contiguous(),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            k=None if k is None else _unit_last_stride(k),
            v=None if v is None else _unit_last_stride(v),
            rotary_cos=None if rotary_cos is None else _unit_last_stride(rotary_cos),
            rotary_sin=None if rotary_sin is None else _unit_last_stride(rotary_sin),
            mask=_check_mask(mask, scores, q.device),
            alibi_slopes=_check_alibi_slopes(alibi_slopes, batch, num_heads, q.device),
            sink=_check_sink(sink, num_heads, q.device),
        )
        problem = CacheProblem.describing(inputs, **scalars, alike=None if key is None else {})
        if key is not None:
            if len(_checked) >= MAX_CHECKED:
                _checked.clear()
            _checked[key] = problem, all(x is y for x, y in zip(tensors, inputs, strict=True))
        return problem, inputs


# Calls on a GPU that were found to be in order (checking one takes 15 microseconds), and whether their tensors were in
# canonical form already.
_checked: dict[Any, tuple[CacheProblem, bool]] = {}


def _holds(problem: CacheProblem, seqlen: int, rotary_cos: Tensor | None) -> bool:
    """Whether each sequence may have seqlen keys before the call."""
    p = problem
    turned = rotary_cos is None or seqlen + max(p.seqlen_q, p.seqlen_new) <= rotary_cos.shape[0]
    return 0 <= seqlen <= p.capacity - p.seqlen_new and turned


def _filled(q: Tensor, batch: int, seqlen: int) -> Tensor:
    """Lengths in a tensor: calls with other lengths look alike, then."""
    return q.new_full((batch,), seqlen, dtype=torch.int32)


def _canonical(x: Tensor | None) -> Tensor | None:
    return None if x is None else _unit_last_stride(x)


def _metadata(tensors: CacheInputs, max_seqlen_q: int | None, *scalars: Any) -> Any:
    """All that checks of a call look at; None where they look at values too, and where it has no hash."""
    x = tensors
    try:
        if x.q.device.type == "cpu" or (x.cu_seqlens_q is not None and max_seqlen_q is None):
            return None
        if x.sink is not None and x.sink.is_neg():
            return None
        of_tensors = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        key = *of_tensors, x.k is not None and x.v is None and _within(x.v_cache, x.k_cache), max_seqlen_q, *scalars
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key


def capacity_of(k_cache: Tensor, table: Tensor | None) -> int:
    """How many keys a sequence may have."""
    return k_cache.shape[1] * (1 if table is None else table.shape[1])


def _readable(*tensors: object) -> bool:
    """Whether values can be looked at: on a GPU that would wait for the device."""
    return not torch.compiler.is_compiling() and all(
        x.device.type == "cpu" and not isinstance(x, torch._subclasses.FakeTensor)
        for x in tensors
        if isinstance(x, Tensor)
    )


def _check_queries(q: Tensor, varlen: bool) -> None:
    _check_tensor("q", q)
    rank, layout = (3, "(total_q, num_heads, head_dim)") if varlen else (4, "(batch, seqlen_q, num_heads, head_dim)")
    if q.dim() != rank:
        hint = "; packed queries need cu_seqlens_q" if q.dim() == 3 else ""
        raise ValueError(f"q: got {q.dim()} dims with shape {tuple(q.shape)}, expected {rank}: {layout}{hint}")
    if q.dtype not in DTYPES:
        raise TypeError(f"q: dtype {q.dtype} is not supported; use float16, bfloat16, float32 or float64")
    if q.shape[-1] == 0 or q.shape[-2] == 0:
        raise ValueError(f"q: heads and head_dim must be at least 1, got shape {tuple(q.shape)}")


def _check_caches(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        _check_tensor(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name}: got {x.dim()} dims with shape {tuple(x.shape)}, expected 4: (batch, seqlen, heads, head_dim) "
                "or with block_table (pages, page_size, heads, head_dim)"
            )
        if x.dtype != q.dtype:
            raise TypeError(
                f"{name}: dtype {x.dtype} differs from q's {q.dtype}; q and the caches must share one dtype"
            )
        _check_device(name, x, q.device)
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


def _check_table(
    block_table: Tensor | None, cache_batch_idx: Tensor | None, k_cache: Tensor, batch: int
) -> Tensor | None:
    if batch and not len(k_cache):
        raise ValueError(f"k_cache: shape {tuple(k_cache.shape)} has no pages for a batch of {batch}")
    if cache_batch_idx is not None:
        _check_indices("cache_batch_idx", cache_batch_idx, k_cache, (batch,))
        rows = k_cache.shape[0] if block_table is None else len(block_table)
        if _readable(cache_batch_idx) and batch and (cache_batch_idx.min() < 0 or cache_batch_idx.max() >= rows):
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
    _check_indices("block_table", block_table, k_cache, (batch if cache_batch_idx is None else None, None))
    if cache_batch_idx is not None:
        return block_table.index_select(0, cache_batch_idx.clamp(0, len(block_table) - 1))
    return block_table if block_table.stride(1) == 1 or block_table.shape[1] == 1 else block_table.contiguous()


def _check_indices(name: str, x: Tensor, k_cache: Tensor, shape: tuple[int | None, ...]) -> None:
    """shape: None for any size from 1 on."""
    _check_tensor(name, x)
    if x.dtype not in _INTEGERS:
        raise TypeError(f"{name}: dtype {x.dtype}, expected torch.int32 or torch.int64")
    sizes_fit = x.dim() == len(shape) and all(
        have == want if want is not None else have > 0 for have, want in zip(x.shape, shape, strict=True)
    )
    if not sizes_fit:
        expected = f"(batch,) = {shape}" if name == "cache_batch_idx" else f"(batch, pages of a sequence) = {shape}"
        raise ValueError(f"{name}: shape {tuple(x.shape)}, expected {expected}, None being any size")
    _check_device(name, x, k_cache.device)


def _check_pages(
    table: Tensor, lengths: int | Tensor, seqlen_new: int, cu_seqlens_k: Tensor | None, k_cache: Tensor
) -> None:
    """Entries in use must be pages; the others may hold anything."""
    if not _readable(table, lengths, cu_seqlens_k):
        return
    num_pages, page_size = k_cache.shape[:2]
    ends = torch.as_tensor(lengths).expand(table.shape[0]) + _new_lengths(seqlen_new, cu_seqlens_k)
    in_use = torch.arange(table.shape[1]) * page_size < ends[:, None]
    outside = in_use & ((table < 0) | (table >= num_pages))
    if outside.any():
        b, i = outside.nonzero()[0].tolist()
        raise ValueError(
            f"block_table: entry {int(table[b, i])} of sequence {b} is outside the cache, which has {num_pages} pages"
        )


def _new_lengths(seqlen_new: int, cu_seqlens_k: Tensor | None) -> int | Tensor:
    """How many keys are appended to each sequence."""
    return seqlen_new if cu_seqlens_k is None else cu_seqlens_k.diff()


def _check_new(
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
    if v is None and _readable() and not _within(v_cache, k_cache):
        raise TypeError("v: got None; it may be left out only where v_cache lives in k_cache's memory (MLA)")
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if x is None:
            continue
        _check_tensor(name, x)
        if x.dim() != q.dim() or x.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name}: shape {tuple(x.shape)} does not fit {name}_cache's {tuple(cache.shape)}")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}; all must share one dtype")
        _check_device(name, x, q.device)
        if x.shape[:-2] != k.shape[:-2]:
            raise ValueError(f"v: shape {tuple(x.shape)} does not fit k's {tuple(k.shape)}")
    if cu_seqlens_q is None:
        if cu_seqlens_k is not None:
            raise TypeError("cu_seqlens_k: k is packed only where q is; give cu_seqlens_q")
        if k.shape[0] != batch:
            raise ValueError(f"k: batch {k.shape[0]} differs from q's batch {batch}; they must be equal")
        return None
    cu_seqlens_k = cu_seqlens_q if cu_seqlens_k is None else cu_seqlens_k
    if _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k) != batch:
        raise ValueError(f"cu_seqlens_k: {cu_seqlens_k.shape[0] - 1} sequences where cu_seqlens_q has {batch}")
    return cu_seqlens_k


def _within(v_cache: Tensor, k_cache: Tensor) -> bool:
    """Whether values are dims of the keys. Caches of both may share memory and lie side by side."""
    first = v_cache.storage_offset() - k_cache.storage_offset()
    return (
        v_cache.untyped_storage()._cdata == k_cache.untyped_storage()._cdata
        and v_cache.stride()[:3] == k_cache.stride()[:3]
        and 0 <= first <= k_cache.shape[3] - v_cache.shape[3]
    )


def _check_lengths(
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
        if _readable(cu_seqlens_k) and cu_seqlens_k is not None and batch:
            longest = cache_seqlens + int(cu_seqlens_k.diff().max())
        if longest > capacity:
            raise ValueError(_beyond(f"cache_seqlens={cache_seqlens}", longest - cache_seqlens, capacity))
        return cache_seqlens
    if cache_seqlens.dtype not in _INTEGERS:
        raise TypeError(f"cache_seqlens: dtype {cache_seqlens.dtype}, expected torch.int32 or torch.int64")
    if tuple(cache_seqlens.shape) != (batch,):
        raise ValueError(f"cache_seqlens: shape {tuple(cache_seqlens.shape)}, expected (batch,) = ({batch},)")
    _check_device("cache_seqlens", cache_seqlens, device)
    if _readable(cache_seqlens, cu_seqlens_k) and batch:
        ends = cache_seqlens + _new_lengths(seqlen_new, cu_seqlens_k)
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


def _check_leftpad(
    leftpad: Tensor | None, lengths: int | Tensor, capacity: int, batch: int, device: torch.device
) -> None:
    if leftpad is None:
        return
    _check_tensor("cache_leftpad", leftpad)
    if leftpad.dtype not in _INTEGERS or tuple(leftpad.shape) != (batch,):
        raise TypeError(
            f"cache_leftpad: {leftpad.dtype} of shape {tuple(leftpad.shape)}, expected int32 or int64 (batch,) = "
            f"({batch},)"
        )
    _check_device("cache_leftpad", leftpad, device)
    if _readable(leftpad, lengths) and ((leftpad < 0) | (leftpad > lengths)).any():
        raise ValueError(f"cache_leftpad: {leftpad.tolist()} must lie between 0 and cache_seqlens")


def _check_rotary(
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
        _check_tensor(name, x)
        if x.dim() != 2 or x.dtype not in DTYPES or not 0 < 2 * x.shape[1] <= q.shape[-1] or not len(x):
            raise ValueError(
                f"{name}: {x.dtype} of shape {tuple(x.shape)}, expected floating (positions, rotary_dim / 2) with "
                f"rotary_dim at most head_dim = {q.shape[-1]}"
            )
        _check_device(name, x, q.device)
    if cos.shape != sin.shape:
        raise ValueError(f"rotary_sin: shape {tuple(sin.shape)} differs from rotary_cos' {tuple(cos.shape)}")
    if not _readable(lengths, *rows):
        return
    for each in rows:
        count = each.diff() if isinstance(each, Tensor) else each
        stops = torch.as_tensor((lengths + count) * (count > 0))
        if stops.numel() and stops.max() > cos.shape[0]:
            last = int(stops.max()) - 1
            raise ValueError(f"rotary_cos: {cos.shape[0]} positions, but the last of q or k is at position {last}")


def _check_split_size(split_size: int | None) -> int:
    if split_size is None:
        return 0
    if isinstance(split_size, bool) or not isinstance(split_size, int):
        raise TypeError(f"split_size: got {type(split_size).__name__}, expected an int or None")
    if split_size < 128 or split_size % 128:
        raise ValueError(f"split_size={split_size}: must be a positive multiple of 128 (None: as suits the batch)")
    return split_size
