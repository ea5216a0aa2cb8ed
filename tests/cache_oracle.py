"""Calls of attention with a cache that every backend is tested on, and the rule that it is held to.

Caches are NaN wherever no sequence has a key, so reading there shows. A backend's append must write the new keys,
turned by the rotary embedding, and nothing else; out and lse are held to the oracle rule (`oracle.assert_rule`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from oracle import _largest, assert_rule, fresh_memory_is_nan
from torch import Tensor

from tileattn.backends import CacheBackend
from tileattn.kvcache import Append, CacheInputs, CacheProblem
from tileattn.reference import standard_attention_with_kvcache
from tileattn.rotary import rotate


@dataclass(frozen=True)
class CacheCase:
    """lengths: of the sequences before anything is appended. lengths_q and new_lengths make packed calls."""

    lengths: tuple[int, ...] = (70, 3, 45)
    capacity: int = 96
    seqlen_q: int = 1
    new: int = 0
    lengths_q: tuple[int, ...] | None = None
    new_lengths: tuple[int, ...] | None = None
    page_size: int = 0  # 0: contiguous
    batch_idx: bool = False  # contiguous, sequences in another order
    leftpad: tuple[int, ...] | None = None
    num_heads: int = 4
    num_heads_k: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    v_in_k: bool = False  # v_cache is a view of k_cache
    dtype: torch.dtype = torch.float32
    index: torch.dtype = torch.int32  # of tables and lengths
    rotary_dim: int = 0
    interleaved: bool = False
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    mask: tuple[bool, bool, bool, int] | None = None  # which of batch, heads, rows are there in full; columns
    alibi: bool = False
    sink: bool = False
    split_size: int | None = None
    whole: bool = False  # no cache_seqlens: all of the capacity
    seed: int = 0

    def but(self, **changes: object) -> CacheCase:
        return replace(self, **changes)  # type: ignore[arg-type]


class CacheCall(NamedTuple):
    args: tuple[Any, ...]  # of attention_with_kvcache
    options: dict[str, Any]

    def problem(self) -> tuple[CacheProblem, CacheInputs]:
        return CacheProblem.of(*self.args, **self.options)


def build(case: CacheCase, device: torch.device | str = "cpu") -> CacheCall:
    """The same tensors on every device."""
    g = torch.Generator().manual_seed(case.seed)
    c, batch = case, len(case.lengths)
    lengths = (c.capacity,) * batch if c.whole else c.lengths

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(c.dtype).to(device)

    def ints(values: Any) -> Tensor:
        return torch.as_tensor(values, dtype=c.index).to(device)

    def tokens(rows: int, packed: tuple[int, ...] | None, heads: int, dim: int) -> Tensor:
        return draw(batch, rows, heads, dim) if packed is None else draw(sum(packed), heads, dim)

    page_size = c.page_size or c.capacity
    per_sequence = -(-c.capacity // page_size)
    num_pages = batch * per_sequence + 2
    order = torch.randperm(num_pages, generator=g)[: batch * per_sequence].view(batch, per_sequence)
    if not (c.page_size or c.batch_idx):
        order = torch.arange(batch)[:, None]
    k_cache = torch.full((num_pages, page_size, c.num_heads_k, c.head_dim), float("nan"), dtype=c.dtype, device=device)
    v_cache = k_cache.new_full((*k_cache.shape[:3], c.head_dim_v), float("nan"))
    if c.v_in_k:
        v_cache = k_cache[..., : c.head_dim_v]
    for b, length in enumerate(lengths):
        first = c.leftpad[b] if c.leftpad else 0
        for position in range(first, length):
            page = order[b, position // page_size]
            if not c.v_in_k:
                v_cache[page, position % page_size] = draw(c.num_heads_k, c.head_dim_v)
            k_cache[page, position % page_size] = draw(c.num_heads_k, c.head_dim)

    q = tokens(c.seqlen_q, c.lengths_q, c.num_heads, c.head_dim)
    k = v = None
    if c.new or c.new_lengths:
        k = tokens(c.new, c.new_lengths, c.num_heads_k, c.head_dim)
        v = None if c.v_in_k else tokens(c.new, c.new_lengths, c.num_heads_k, c.head_dim_v)
    seqlen_q = max(c.lengths_q) if c.lengths_q else c.seqlen_q
    options: dict[str, Any] = {
        "cache_seqlens": None if c.whole else ints(lengths),
        # parts of larger tensors, as engines have them
        "block_table": ints(torch.nn.functional.pad(order, (0, 3), value=-9))[:, :per_sequence]
        if c.page_size
        else None,
        "cache_batch_idx": ints(order.repeat(1, 2))[:, 0] if c.batch_idx else None,
        "cache_leftpad": ints(c.leftpad) if c.leftpad else None,
        "causal": c.causal,
        "window": c.window,
        "softcap": c.softcap,
        "rotary_interleaved": c.interleaved,
        "split_size": c.split_size,
    }
    if c.lengths_q is not None:
        options["cu_seqlens_q"] = _cumulative(c.lengths_q, device)
        if c.new_lengths is not None:
            options["cu_seqlens_k"] = _cumulative(c.new_lengths, device)
    if c.rotary_dim:
        angle = torch.rand(c.capacity + seqlen_q, c.rotary_dim // 2, generator=g) * 6.28
        options["rotary_cos"], options["rotary_sin"] = (x.to(c.dtype).to(device) for x in (angle.cos(), angle.sin()))
    if c.mask is not None:
        *full, columns = c.mask
        sizes = [n if f else 1 for f, n in zip(full, (batch, c.num_heads, seqlen_q), strict=True)]
        options["mask"] = (torch.rand(*sizes, columns, generator=g) < 0.7).to(device)
    if c.alibi:
        options["alibi_slopes"] = torch.rand(batch, c.num_heads, generator=g).to(device)
    if c.sink:
        options["sink"] = torch.randn(c.num_heads, generator=g).to(device)
    return CacheCall((q, k_cache, v_cache, k, v), options)


def check(backend: CacheBackend, case: CacheCase, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """Run a backend on a case and assert the rule. Returns out and lse."""
    problem, inputs = build(case, device).problem()
    exact = standard_attention_with_kvcache(problem, inputs, torch.float64)
    low = standard_attention_with_kvcache(problem, inputs)
    if inputs.k is not None:
        check_append(backend, problem, inputs)
    with fresh_memory_is_nan():
        out, lse = backend.attend(problem, inputs)
    assert out.dtype == case.dtype
    assert lse.dtype == problem.lse_dtype
    assert out.shape == exact.out.shape
    assert lse.shape == exact.lse.shape
    # the score q.k rounded once, as in `oracle`
    of_qk = _largest(inputs.q.double().norm(dim=-1)) * _largest(inputs.k_cache.double().nan_to_num().norm(dim=-1))
    of_s = torch.finfo(problem.lse_dtype).eps * problem.scale * of_qk
    assert_rule("lse", lse, exact.lse, low.lse, of_s)
    assert_rule("out", out, exact.out, low.out, of_s * _largest(exact.out))
    return out, lse


def check_append(backend: CacheBackend, problem: CacheProblem, inputs: CacheInputs) -> None:
    """The new keys and values come where they belong and nothing else changes."""
    p, x = problem, inputs
    expected_k = x.k_cache.clone()
    expected_v = expected_k[..., : p.head_dim_v] if x.v is None else x.v_cache.clone()
    for b in range(p.batch):
        rows = slice(None) if x.cu_seqlens_k is None else slice(*x.cu_seqlens_k[b : b + 2].tolist())
        k, v = (None if y is None else y[b] if x.cu_seqlens_k is None else y[rows] for y in (x.k, x.v))
        first = p.seqlen_cache if x.cache_seqlens is None else int(x.cache_seqlens[b])
        if x.rotary_cos is not None:
            at = slice(first, first + len(k))
            k = rotate(k, x.rotary_cos[at], x.rotary_sin[at], p.rotary_interleaved)
        for i in range(len(k)):
            page = b if x.table is None else int(x.table[b, (first + i) // p.page_size])
            expected_k[page, (first + i) % p.page_size] = k[i]
            if v is not None:
                expected_v[page, (first + i) % p.page_size] = v[i]
    v_cache = None if x.v is None else x.v_cache
    where = x.table, x.cache_seqlens, x.cu_seqlens_k, x.rotary_cos, x.rotary_sin
    backend.append(Append(x.k_cache, v_cache, x.k, x.v, *where, p.batch, p.seqlen_cache, p.rotary_interleaved))
    rounding = (
        0.0 if x.rotary_cos is None else 2 * torch.finfo(x.k.dtype).eps
    )  # a fused multiply-add may round elsewhere
    torch.testing.assert_close(x.k_cache, expected_k, rtol=rounding, atol=rounding, equal_nan=True)
    rounding = 0.0 if x.v is not None else rounding
    torch.testing.assert_close(x.v_cache, expected_v, rtol=rounding, atol=rounding, equal_nan=True)


def _cumulative(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int().to(device)


BASE = CacheCase()
CASES = {
    "decode": {},
    "multi-head": {"num_heads": 2},
    "multi-query": {"num_heads": 8, "num_heads_k": 1},
    "whole cache": {"whole": True},
    "append": {"new": 1, "causal": True},
    "speculation": {"seqlen_q": 5, "new": 5, "causal": True},
    "more queries than new keys": {"seqlen_q": 6, "new": 2, "causal": True},
    "chunk": {"seqlen_q": 40, "new": 40, "causal": True, "capacity": 120},
    "bidirectional": {"seqlen_q": 7, "new": 7},
    "pages of 1": {"page_size": 1, "new": 2, "seqlen_q": 2, "causal": True},
    "pages of 3": {"page_size": 3, "new": 4, "seqlen_q": 4, "causal": True},
    "pages of 16": {"page_size": 16, "new": 1, "index": torch.int64},
    "pages of 64": {"page_size": 64, "capacity": 128, "new": 40, "seqlen_q": 40, "causal": True},
    "another order": {"batch_idx": True, "new": 3, "seqlen_q": 3, "causal": True},
    "left padding": {"leftpad": (5, 0, 44), "new": 2, "seqlen_q": 2, "causal": True},
    "left padding, pages, window": {"leftpad": (5, 3, 30), "page_size": 8, "window": (9, 0), "new": 1},
    "rotary": {"rotary_dim": 32, "new": 3, "seqlen_q": 3, "causal": True},
    "rotary, partial, interleaved": {"rotary_dim": 12, "interleaved": True, "new": 2, "seqlen_q": 2, "page_size": 5},
    "window": {"window": (17, 0), "seqlen_q": 3, "new": 3},
    "window on both sides": {"window": (6, 2), "seqlen_q": 9, "new": 9},
    "softcap, sink": {"softcap": 2.0, "sink": True, "seqlen_q": 2, "new": 2, "causal": True},
    "alibi": {"alibi": True, "seqlen_q": 4, "new": 4, "causal": True},
    "tree": {"mask": (False, False, True, 6), "seqlen_q": 6, "new": 6, "causal": True},
    "mask of all, each head": {"mask": (True, True, True, 110), "seqlen_q": 3, "page_size": 16},
    "packed": {"lengths_q": (4, 0, 9), "new_lengths": (4, 0, 9), "causal": True},
    "packed, other new lengths": {"lengths_q": (3, 1, 2), "new_lengths": (5, 0, 2), "page_size": 4, "rotary_dim": 16},
    "packed, nothing new": {"lengths_q": (3, 0, 2), "sink": True},
    "empty sequences": {"lengths": (0, 7, 0), "seqlen_q": 2},
    "empty, append, sink": {"lengths": (0, 0, 9), "new": 1, "sink": True, "rotary_dim": 8},
    "latent": {"head_dim": 48, "head_dim_v": 32, "v_in_k": True, "num_heads_k": 1, "new": 1, "page_size": 16},
    "odd dims": {"head_dim": 40, "head_dim_v": 24, "new": 1},
    "split": {"lengths": (300, 128, 7), "capacity": 320, "split_size": 128, "page_size": 16},
    "split, chunk, window": {
        "lengths": (300, 128),
        "capacity": 340,
        "split_size": 128,
        "seqlen_q": 20,
        "new": 20,
        "window": (140, 0),
    },
    "long": {"lengths": (1000, 37), "capacity": 1024, "page_size": 32, "new": 1, "num_heads": 8},
}


@st.composite
def cache_cases(draw: Any, dtypes: tuple[torch.dtype, ...], max_length: int = 80) -> CacheCase:
    """Any call."""
    batch = draw(st.integers(1, 4))
    group, num_heads_k = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    packed = draw(st.booleans())
    appends = draw(st.booleans())
    capacity = draw(st.integers(1, max_length))
    news = tuple(draw(st.integers(0, min(6, capacity))) for _ in range(batch)) if packed else ()
    new = draw(st.integers(1, min(6, capacity)))
    most = [capacity - (0 if not appends else news[b] if packed else new) for b in range(batch)]
    lengths = tuple(draw(st.integers(0, m)) for m in most)
    head_dim = draw(st.sampled_from([8, 16, 40]))
    has_leftpad = draw(st.booleans())
    rows = draw(st.integers(1, 9))
    return CacheCase(
        lengths=lengths,
        capacity=capacity,
        seqlen_q=rows,
        new=new if appends and not packed else 0,
        lengths_q=tuple(draw(st.integers(0, 9)) for _ in range(batch)) if packed else None,
        new_lengths=news if packed and appends and sum(news) else None,
        page_size=draw(st.sampled_from([0, 1, 4, 16, 33])),
        leftpad=tuple(draw(st.integers(0, n)) for n in lengths) if has_leftpad else None,
        num_heads=group * num_heads_k,
        num_heads_k=num_heads_k,
        head_dim=head_dim,
        head_dim_v=draw(st.sampled_from([8, 16])),
        dtype=draw(st.sampled_from(dtypes)),
        index=draw(st.sampled_from([torch.int32, torch.int64])),
        rotary_dim=draw(st.sampled_from([0, 4, 8])) if appends and (not packed or sum(news)) else 0,
        interleaved=draw(st.booleans()),
        causal=draw(st.booleans()),
        window=draw(st.sampled_from([(-1, -1), (5, -1), (-1, 3), (20, 1)])),
        softcap=draw(st.sampled_from([0.0, 1.5])),
        mask=draw(st.sampled_from([None, (False, False, True, 4), (True, True, False, 9)])),
        alibi=draw(st.booleans()),
        sink=draw(st.booleans()),
        split_size=draw(st.sampled_from([None, 128])),
        seed=draw(st.integers(0, 100)),
    )
