"""CacheProblem: the one description of attention to keys and values that live in a cache.

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

from tileattn.checks import (
    check_alibi_slopes,
    check_cu_seqlens,
    check_mask,
    check_max_seqlen,
    check_scale,
    check_sink,
    check_softcap,
    check_window,
    unit_last_stride,
)
from tileattn.kvcache_checks import (
    capacity_of,
    check_caches,
    check_leftpad,
    check_lengths,
    check_new,
    check_pages,
    check_queries,
    check_rotary,
    check_split_size,
    check_table,
    within,
)
from tileattn.problem import MAX_CHECKED, Problem, aligned_strides


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
    aligned: bool = True  # as Problem's, of q, k_cache and v_cache
    page_rows: int = 0  # see rows_between_pages
    has_rotary: bool = False
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
            aligned=self.aligned,
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
            aligned=aligned_strides(q, k_cache, v_cache),
            page_rows=rows_between_pages(k_cache, v_cache),
            has_rotary=inputs.rotary_cos is not None,
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
        check_queries(q, varlen)
        check_caches(q, k_cache, v_cache)
        if varlen:
            batch = check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
            seqlen_q = check_max_seqlen("max_seqlen_q", max_seqlen_q, "cu_seqlens_q", cu_seqlens_q)
        else:
            batch, seqlen_q = q.shape[:2]
        table = check_table(block_table, cache_batch_idx, k_cache, batch)
        capacity = capacity_of(k_cache, table)
        cu_seqlens_k = check_new(q, k, v, k_cache, v_cache, cu_seqlens_q, cu_seqlens_k, cache_seqlens, batch)
        seqlen_new = k.shape[1] if k is not None and not varlen else 0
        lengths = check_lengths(cache_seqlens, seqlen_new, cu_seqlens_k, capacity, batch, q.device)
        if block_table is not None and table is not None:
            check_pages(table, lengths, seqlen_new, cu_seqlens_k, k_cache)
        check_leftpad(cache_leftpad, lengths, capacity, batch, q.device)
        rows = (seqlen_q, seqlen_new) if cu_seqlens_k is None else (cu_seqlens_q, cu_seqlens_k)
        check_rotary(rotary_cos, rotary_sin, q, k, lengths, *rows)
        if key is not None and seqlen is not None:
            lengths = _filled(q, batch, seqlen)
            tensors = tensors._replace(cache_seqlens=lengths)
        left, right = check_window(window)
        scalars = {
            "seqlen_q": seqlen_q,
            "seqlen_cache": 0 if isinstance(lengths, Tensor) else lengths,
            "scale": check_scale(scale, q.shape[-1]),
            "seqlen_new": seqlen_new,
            "window_left": left,
            "window_right": 0 if causal else right,
            "softcap": check_softcap(softcap),
            "rotary_interleaved": bool(rotary_interleaved),
            "split_size": check_split_size(split_size),
        }
        columns = mask.shape[-1] if isinstance(mask, Tensor) and mask.dim() else 1
        num_heads = q.shape[-2]
        scores = (batch, num_heads, seqlen_q, columns)
        inputs = CacheInputs(
            q=unit_last_stride(q),
            k_cache=k_cache,
            v_cache=v_cache,
            table=table,
            cache_seqlens=lengths if isinstance(lengths, Tensor) else None,
            leftpad=None if cache_leftpad is None else cache_leftpad.contiguous(),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            k=None if k is None else unit_last_stride(k),
            v=None if v is None else unit_last_stride(v),
            rotary_cos=None if rotary_cos is None else unit_last_stride(rotary_cos),
            rotary_sin=None if rotary_sin is None else unit_last_stride(rotary_sin),
            mask=check_mask(mask, scores, q.device),
            alibi_slopes=check_alibi_slopes(alibi_slopes, batch, num_heads, q.device),
            sink=check_sink(sink, num_heads, q.device),
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


def rows_between_pages(k_cache: Tensor, v_cache: Tensor) -> int:
    """How many rows of a page's row stride there are from one page to the next, in both caches, so that all rows of
    all pages lie in one dim; 0 where there is no such number."""

    def of(x: Tensor) -> int:
        pages, page_size, _, _ = x.shape
        page, row, _, _ = x.stride()
        if pages <= 1:
            return page_size
        if page_size == 1:  # whose row stride means nothing
            return 0
        return page // row if row > 0 and page % row == 0 and pages * (page // row) < 2**31 else 0

    rows = of(k_cache)
    return rows if rows == of(v_cache) else 0


def _holds(problem: CacheProblem, seqlen: int, rotary_cos: Tensor | None) -> bool:
    """Whether each sequence may have seqlen keys before the call."""
    p = problem
    turned = rotary_cos is None or seqlen + max(p.seqlen_q, p.seqlen_new) <= rotary_cos.shape[0]
    return 0 <= seqlen <= p.capacity - p.seqlen_new and turned


def _filled(q: Tensor, batch: int, seqlen: int) -> Tensor:
    """Lengths in a tensor: calls with other lengths look alike, then."""
    return q.new_full((batch,), seqlen, dtype=torch.int32)


def _canonical(x: Tensor | None) -> Tensor | None:
    return None if x is None else unit_last_stride(x)


def _metadata(tensors: CacheInputs, max_seqlen_q: int | None, *scalars: Any) -> Any:
    """All that checks of a call look at; None where they look at values too, and where it has no hash."""
    x = tensors
    try:
        if x.q.device.type == "cpu" or (x.cu_seqlens_q is not None and max_seqlen_q is None):
            return None
        if x.sink is not None and x.sink.is_neg():
            return None
        of_tensors = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in tensors]
        key = *of_tensors, x.k is not None and x.v is None and within(x.v_cache, x.k_cache), max_seqlen_q, *scalars
        hash(key)
    except (AttributeError, TypeError):
        return None
    return key
