"""Calls with a cache that look alike: their checks and their launches are remembered, and are those of a fresh call."""

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from cache_oracle import BASE, CASES, build
from test_portable_launch import Launches, expect_repeats_as_fresh
from torch._subclasses import FakeTensorMode

from tileattn import kvcache as checks
from tileattn.backends.portable import kvcache as portable
from tileattn.backends.portable import launch
from tileattn.kvcache import Append, CacheProblem

UNLIKE = {"longer": {"capacity": 112}, "other lengths": {"lengths": (7, 8, 9)}, "float16": {"dtype": torch.float16}}


def calls():
    found = {name: build(BASE.but(**fields)) for name, fields in (CASES | UNLIKE).items()}
    q, k_cache, v_cache, *new = found["decode"].args
    unaligned = torch.zeros(k_cache.numel() + 1, dtype=k_cache.dtype)[1:].view_as(k_cache)
    one = k_cache[..., :32]
    for name, caches in {"unaligned": (unaligned, v_cache), "one": (one, one), "two like it": (one, v_cache)}.items():
        found[name] = found["decode"]._replace(args=(q, *caches, *new))
    return {name: call.problem() for name, call in found.items()}


def run(call, launches):
    """What is launched, with addresses in words but for those of inputs."""
    p, x = call
    launches.seen.clear()
    if x.k is not None:
        where = x.table, x.cache_seqlens, x.cu_seqlens_k, x.rotary_cos, x.rotary_sin
        v_cache = None if x.v is None else x.v_cache
        portable.append(Append(x.k_cache, v_cache, x.k, x.v, *where, p.batch, p.seqlen_cache, p.rotary_interleaved))
    out, lse = portable.attend(p, x)
    names = {t.data_ptr(): t.data_ptr() for t in x if t is not None} | {out.data_ptr(): "out", lse.data_ptr(): "lse"}

    def of(y):
        if isinstance(y, list):
            return [of(z) for z in y]
        return names.get(y, "workspace") if isinstance(y, int) and y > 2**32 else y

    return [(name, programs, of(args), compiled_for) for name, programs, args, compiled_for in launches.seen]


def test_repeated_launches_are_those_that_a_fresh_one_would_be(monkeypatch):
    launches = Launches()
    monkeypatch.setattr(launch, "start", launches.start)
    monkeypatch.setattr(portable, "_table_for", lambda device, dtype: portable.HOPPER)
    expect_repeats_as_fresh(calls(), run, launches, portable._kept.cache_clear)
    portable._kept.cache_clear()


def test_what_is_kept_of_appending_is_of_one_device(monkeypatch):
    kept = []
    monkeypatch.setattr(portable, "Launches", lambda device, of_device, *_: kept.append(of_device) or mock.Mock())
    for device in ("cpu", "meta", "cpu"):
        cache, new = torch.empty(2, 8, 2, 32, device=device), torch.empty(2, 1, 2, 32, device=device)
        portable.append(Append(cache, cache, new, new, None, None, None, None, None, 2, 3, False))
    assert kept[0] is kept[2]
    assert kept[0] is not kept[1]


def test_checks_of_a_call_are_remembered_by_all_that_they_look_at(monkeypatch):
    monkeypatch.setattr(checks, "_checked", {})
    with FakeTensorMode():
        q = torch.empty(2, 1, 4, 32, device="cuda")
        k_cache, v_cache = torch.empty(2, 9, 16, 2, 32, device="cuda").unbind(0)
        new = torch.empty(2, 1, 2, 32, device="cuda")
        table, lengths = (torch.empty(*shape, dtype=torch.int32, device="cuda") for shape in ((2, 4), (2,)))
        options = {"block_table": table, "cache_seqlens": lengths, "causal": True}
        problem, inputs = CacheProblem.of(q, k_cache, v_cache, new, new, **options)
        assert len(checks._checked) == 1
        with monkeypatch.context() as patched:
            patched.setattr(checks, "check_caches", lambda *_: pytest.fail("checked again"))
            again = CacheProblem.of(q + 1, k_cache, v_cache, new, new, **options)
        assert again[0] is problem
        assert [x is y for x, y in zip(again[1], inputs, strict=True)] == [False] + 14 * [True]
        for changed in (
            {"cache_seqlens": lengths.double()},
            {"cache_seqlens": torch.empty(1, dtype=torch.int32, device="cuda")},
            {"cache_seqlens": 64},
            {"block_table": torch.empty(1, 4, dtype=torch.int32, device="cuda")},
            {"scale": "1"},
            {"window": (-2, 0)},
        ):
            with pytest.raises((TypeError, ValueError)):
                CacheProblem.of(q, k_cache, v_cache, new, new, **(options | changed))
        with pytest.raises(TypeError, match="v: got None"):
            CacheProblem.of(q, k_cache, v_cache, new, None, **options)


def test_calls_with_other_ints_for_lengths_look_alike_on_a_gpu(monkeypatch):
    monkeypatch.setattr(checks, "_checked", {})
    with FakeTensorMode():
        q = torch.empty(2, 1, 4, 32, device="cuda")
        k_cache, v_cache, new = (torch.empty(2, n, 2, 32, device="cuda") for n in (64, 64, 1))
        cos = torch.empty(60, 8, device="cuda")
        for turned, most in (({}, 63), ({"rotary_cos": cos, "rotary_sin": cos}, 59)):
            problems = []
            for seqlen in (0, 5, most):
                problem, inputs = CacheProblem.of(q, k_cache, v_cache, new, new, cache_seqlens=seqlen, **turned)
                problems.append(problem)
                assert inputs.cache_seqlens.shape == (2,)
                assert inputs.cache_seqlens.dtype == torch.int32
            assert all(problem is problems[0] for problem in problems)
            for seqlen in (-1, most + 1, True, 2.0):
                with pytest.raises((TypeError, ValueError), match=r"cache_seqlens|rotary_cos"):
                    CacheProblem.of(q, k_cache, v_cache, new, new, cache_seqlens=seqlen, **turned)


def test_an_int_for_lengths_may_fill_the_cache(monkeypatch):
    monkeypatch.setattr(checks, "_checked", {})
    with FakeTensorMode():
        q = torch.empty(2, 3, 4, 32, device="cuda")
        k_cache, v_cache = (torch.empty(2, 64, 2, 32, device="cuda") for _ in range(2))
        problems = [CacheProblem.of(q, k_cache, v_cache, cache_seqlens=seqlen)[0] for seqlen in (5, 62, 64)]
        assert all(problem is problems[0] for problem in problems)
