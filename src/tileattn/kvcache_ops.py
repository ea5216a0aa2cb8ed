"""torch.library operators of attention with a cache, and which backend runs them.

`tileattn::kvcache_append` writes new keys and values into the caches, in place; `tileattn::kvcache_attend` reads them.
Both take a call flat, like those of `ops`. Neither has a gradient: a cache is for inference.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tileattn.backends import CacheAppender, CacheBackend, Tiles
from tileattn.dispatch import explained, in_words, passed_over
from tileattn.kvcache import Append, CacheInputs, CacheProblem
from tileattn.ops import may_be_observed, refuse_tangents
from tileattn.problem import Forward

BACKENDS = ("cpu", "hopper", "portable")  # in order of preference

_TAGS = (torch.Tag.pt2_compliant_tag,)

_lib = torch.library.Library("tileattn", "FRAGMENT")
_lib.define(
    "kvcache_append(Tensor(a!) k_cache, Tensor(b!)? v_cache, Tensor k, Tensor? v, Tensor? table, "
    "Tensor? cache_seqlens, Tensor? cu_seqlens_k, Tensor? rotary_cos, Tensor? rotary_sin, SymInt batch, "
    "SymInt seqlen_cache, bool rotary_interleaved) -> ()",
    tags=_TAGS,
)
_lib.define(
    "kvcache_attend(Tensor q, Tensor k_cache, Tensor v_cache, Tensor? table, Tensor? cache_seqlens, Tensor? leftpad, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? mask, "
    "Tensor? alibi_slopes, Tensor? sink, SymInt seqlen_q, SymInt seqlen_cache, SymInt seqlen_new, float scale, "
    "SymInt window_left, SymInt window_right, float softcap, bool rotary_interleaved, int split_size, str? backend)"
    " -> (Tensor out, Tensor lse)",
    tags=_TAGS,
)


def load(name: str) -> CacheBackend:
    """The backend's module, imported on first use; see `dispatch.load`."""
    if name == "cpu":
        from tileattn.backends.cpu import kvcache as cpu

        return cpu
    if name == "hopper":
        from tileattn.backends.hopper import kvcache as hopper

        return hopper
    from tileattn.backends.portable import kvcache as portable

    return portable


def load_appending(device: torch.device) -> CacheAppender:
    """Whose module appends to caches there, whoever attends: an append cannot tell what a backend would refuse."""
    if device.type == "cpu":
        from tileattn.backends.cpu import kvcache as cpu

        return cpu
    from tileattn.backends.portable import kvcache as portable

    return portable


@functools.lru_cache(maxsize=4096)
def choose(problem: CacheProblem, backend: str | None = None) -> str:
    """Name of the backend that serves `problem`; `backend` insists on one. Raises ValueError when none does. Sizes are
    numbers, as in `dispatch.choose`."""
    if backend is not None and backend not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise ValueError(
            f"backend={backend!r}: unknown to attention with a cache; use one of {known}, or None to choose"
        )
    refusals = {}
    for name in BACKENDS if backend is None else (backend,):
        reason = _refusal(name, problem)
        if reason is None:
            return name
        refusals[name] = reason
    raise ValueError("no backend serves this call (" + "; ".join(f"{n}: {why}" for n, why in refusals.items()) + ")")


def _refusal(name: str, problem: CacheProblem) -> str | None:
    try:
        return load(name).supports(problem)
    except ImportError as error:  # no Triton on this platform
        return f"needs Triton ({error})"


@dataclass(frozen=True)
class CacheExplanation:
    """What `tileattn.explain_with_kvcache` found: who serves a call, with which tiles, and how keys are shared out."""

    problem: CacheProblem
    backend: str
    tiles: Tiles
    refusals: dict[str, str]

    def __str__(self) -> str:
        p = self.problem
        pages = f" in pages of {p.page_size}" if p.page_size < p.capacity else ""
        return explained(
            self.refusals,
            f"problem   batch {p.batch}, {p.seqlen_q} tokens, a cache of {p.capacity}{pages}, {in_words(p)}",
            f"backend   {self.backend}",
            f"tiles     {self.tiles}",
        )


def explain(problem: CacheProblem, backend: str | None = None) -> CacheExplanation:
    name = choose(problem, backend)
    refusals = passed_over(name, BACKENDS, lambda other: _refusal(other, problem))
    return CacheExplanation(problem, name, load(name).tiles(problem), refusals)


def run(problem: CacheProblem, inputs: CacheInputs, backend: str | None = None) -> Forward:
    """Append what there is to append, then attend. Like `ops.run`, past the operators where nobody would see them."""
    p, x = problem, inputs
    straight = not may_be_observed(x) and not (torch.is_grad_enabled() and _any_requires_grad(x))
    if straight:
        refuse_tangents(x)
        serving = load(choose(p, backend))
    if x.k is not None:
        v_cache = None if x.v is None else x.v_cache
        where = x.table, x.cache_seqlens, x.cu_seqlens_k, x.rotary_cos, x.rotary_sin
        append = Append(x.k_cache, v_cache, x.k, x.v, *where, p.batch, p.seqlen_cache, p.rotary_interleaved)
        if straight:
            load_appending(p.device).append(append)
            _increment_versions(append.k_cache, append.v_cache)
        else:
            torch.ops.tileattn.kvcache_append.default(*append)
    if straight:
        return serving.attend(p, x)
    out, lse = torch.ops.tileattn.kvcache_attend.default(
        x.q,
        x.k_cache,
        x.v_cache,
        x.table,
        x.cache_seqlens,
        x.leftpad,
        x.cu_seqlens_q,
        x.cu_seqlens_k,
        x.rotary_cos,
        x.rotary_sin,
        x.mask,
        x.alibi_slopes,
        x.sink,
        p.seqlen_q,
        p.seqlen_cache,
        p.seqlen_new,
        p.scale,
        p.window_left,
        p.window_right,
        p.softcap,
        p.rotary_interleaved,
        p.split_size,
        backend,
    )
    return Forward(out, lse)


def split(args: tuple[Any, ...]) -> tuple[CacheProblem, CacheInputs, str | None]:
    """What the flat arguments of `kvcache_attend` stand for."""
    q, k_cache, v_cache, table, cache_seqlens, leftpad, cu_q, cu_k, cos, sin, mask, slopes, sink, *scalars = args
    seqlen_q, seqlen_cache, seqlen_new, scale, left, right, softcap, interleaved, split_size, backend = scalars
    where = table, cache_seqlens, leftpad, cu_q, cu_k
    inputs = CacheInputs(
        q, k_cache, v_cache, *where, rotary_cos=cos, rotary_sin=sin, mask=mask, alibi_slopes=slopes, sink=sink
    )
    problem = CacheProblem.describing(
        inputs,
        seqlen_q=seqlen_q,
        seqlen_cache=seqlen_cache,
        scale=scale,
        seqlen_new=seqlen_new,
        window_left=left,
        window_right=right,
        softcap=softcap,
        rotary_interleaved=interleaved,
        split_size=split_size,
    )
    return problem, inputs, backend


def _append(*args: Any) -> None:
    append = Append(*args)
    load_appending(append.k.device).append(append)


def _attend(*args: Any) -> Forward:
    problem, inputs, backend = split(args)
    return load(choose(problem, backend)).attend(problem, inputs)


def _append_fake(*args: Any) -> None:
    """Writes; returns nothing."""


def _attend_fake(*args: Any) -> Forward:
    problem, inputs, _ = split(args)
    return Forward.unwritten(inputs.q, problem.head_dim_v, problem.lse_dtype)


class _Attend(torch.autograd.Function):
    """Autograd of `kvcache_attend`: forward works, there is no backward."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tileattn.kvcache_attend.default(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "tileattn: attention_with_kvcache has no gradient (a cache is for inference); use attention or "
            "attention_varlen to train"
        )


def _attend_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    refuse_tangents(args)
    if torch.is_grad_enabled() and _any_requires_grad(args):
        return _Attend.apply(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.tileattn.kvcache_attend.default(*args)


def _append_autograd(*args: Any) -> None:
    """What is appended carries no gradient; the caches' versions tell autograd that they changed."""
    with torch._C._AutoDispatchBelowAutograd():
        torch.ops.tileattn.kvcache_append.default(*args)
    _increment_versions(*args[:2])


def _increment_versions(*caches: Tensor | None) -> None:
    torch.autograd.graph.increment_version([x for x in caches if x is not None and not x.is_inference()])


def _any_requires_grad(args: Iterable[Any]) -> bool:
    return any(isinstance(x, Tensor) and x.requires_grad for x in args)


_lib.impl("kvcache_append", _append, "CompositeExplicitAutograd")
_lib.impl("kvcache_attend", _attend, "CompositeExplicitAutograd")
_lib.impl("kvcache_append", _append_autograd, "Autograd")
_lib.impl("kvcache_attend", _attend_autograd, "Autograd")
torch.library.register_fake("tileattn::kvcache_append", _append_fake, lib=_lib)
torch.library.register_fake("tileattn::kvcache_attend", _attend_fake, lib=_lib)
