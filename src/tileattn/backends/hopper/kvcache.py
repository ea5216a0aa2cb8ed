"""Chunks of a prompt on a contiguous cache, by the kernel of packed sequences: where these have their keys is told by
its table, which a kernel makes of the cache's lengths and tables.

It attends only; another backend has appended.
"""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tileattn.backends import Tiles, hopper
from tileattn.kvcache import CacheInputs, CacheProblem
from tileattn.problem import Forward, Inputs, Problem

with contextlib.suppress(ImportError):  # of which hopper.supports tells
    from tileattn.backends.hopper import launch
    from tileattn.backends.hopper.launch import Plan, _kernel, _num_sms, _run, pack_for, plan_for, tile_for
    from tileattn.backends.hopper.ranking import RANKED, TABLE_FIELDS, rank_cached


def supports(problem: CacheProblem) -> str | None:
    p = problem
    if p.capacity > p.page_size:
        return f"a sequence's keys are in several pages, of {p.page_size}"
    if not p.page_rows:
        return "sequences' keys are not whole rows apart in both caches"
    if p.varlen:
        return "has no packed queries"
    if p.has_rotary:
        return "has no rotary embedding of q"
    if p.split_size:
        return "has no split_size"
    packed = as_packed(p)
    return hopper.supports(packed) or _idle(packed)


def _idle(packed: Problem) -> str | None:
    """Keys are not split here. Tiles that fill three fifths of the device take as long as splits that fill all of it do
    elsewhere. Any sequence may be much longer than the others, and must not be left to a few multiprocessors then."""
    p, rows, pack = packed, tile_for(packed).rows, pack_for(packed)
    tiles, device = -(-p.seqlen_q * pack // rows) * (p.num_heads // pack), _num_sms(p.device)
    if tiles * p.batch < 0.6 * device:
        return "its tiles leave the device idle"
    return "tiles of the longest sequence may leave the device idle" if tiles < 0.2 * device else None


def tiles(problem: CacheProblem) -> Tiles:
    of_packed = hopper.tiles(as_packed(problem))
    return of_packed._replace(why=f"{of_packed.why}; keys are not split")


def as_packed(problem: CacheProblem) -> Problem:
    return replace(problem.gathered(problem.capacity), varlen=True)


@functools.lru_cache(maxsize=1024)
def _plan(problem: CacheProblem) -> Plan:
    return plan_for(as_packed(problem))


def attend(problem: CacheProblem, inputs: CacheInputs) -> Forward:
    p, plan = problem, _plan(problem)
    rank = functools.partial(_rank, p, inputs, plan)
    return by_sequence(p, *launch.attend(plan, packed_inputs(p, inputs), rank))


def _rank(problem: CacheProblem, inputs: CacheInputs, plan: Plan, stream: int) -> Tensor:
    p = problem
    table = torch.empty((TABLE_FIELDS, p.batch + 1), dtype=torch.int32, device=p.device)
    args = ranking(p, inputs, plan, table)
    compiled = _kernel(p.device, *(None if x is None else x.dtype for x in args[:3]))
    _run(rank_cached, compiled, p.batch // RANKED.value + 1, args, stream)
    return table


def packed_inputs(problem: CacheProblem, inputs: CacheInputs) -> Inputs:
    """All rows of all sequences, and of all pages, in one dim. A cache that does not start at a multiple of 16 bytes is
    copied as it lies: rows in one dim may be in it several times, once for each head."""
    p, x = problem, inputs

    def in_one(cache: Tensor) -> Tensor:
        pages, page_size, heads, dim = cache.shape
        if cache.data_ptr() % 16:
            cache = cache.new_empty_strided(cache.shape, cache.stride()).copy_(cache)
        rows = (pages - 1) * p.page_rows + page_size
        return cache.as_strided((rows, heads, dim), cache.stride()[1:])

    return Inputs(x.q.flatten(0, 1), in_one(x.k_cache), in_one(x.v_cache), alibi_slopes=x.alibi_slopes, sink=x.sink)


def ranking(problem: CacheProblem, inputs: CacheInputs, plan: Plan, table: Tensor) -> tuple[Any, ...]:
    """What rank_cached takes."""
    p, x, mode = problem, inputs, plan.mode
    pages_stride = 0 if x.table is None else x.table.stride(0)
    tiles = p.batch, p.num_heads // mode.PACK.value, mode.BLOCK_M.value
    cache = pages_stride, p.seqlen_cache, p.seqlen_new, p.capacity, p.page_rows, x.k_cache.shape[0]
    return x.cache_seqlens, x.table, x.leftpad, table, *tiles, p.seqlen_q, *cache


def by_sequence(problem: CacheProblem, out: Tensor, lse: Tensor) -> Forward:
    """out and lse of packed sequences that are all of seqlen_q rows."""
    p = problem
    out = out.view(p.batch, p.seqlen_q, p.num_heads, p.head_dim_v)
    return Forward(out, lse.view(p.num_heads, p.batch, p.seqlen_q).transpose(0, 1).contiguous())
