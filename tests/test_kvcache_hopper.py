"""Chunks of a prompt on a cache by the Hopper kernel: its source in the simulator, what it serves, and what is kept."""

import dataclasses
import importlib
import sys

import pytest
import torch
from cache_oracle import BASE, CacheCall, build, check

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
import triton
from hopper_compiling import CompileDriver
from hopper_simulator import Kernel
from test_hopper_launch import Launches
from torch._dynamo.testing import CompileCounter

import tileattn
from tileattn import kvcache_ops
from tileattn.backends import hopper
from tileattn.backends.cpu import kvcache as cpu
from tileattn.backends.hopper import kvcache as chunks
from tileattn.backends.hopper import launch
from tileattn.backends.portable import kvcache as portable
from tileattn.kvcache import rows_between_pages

WIDE = BASE.but(dtype=torch.bfloat16, head_dim=64, head_dim_v=64, lengths=(300, 3, 170), capacity=400, seqlen_q=70)
CASES = {
    "chunk": {"new": 70, "causal": True},
    "nothing new": {"causal": True},
    "bidirectional": {"new": 70},
    "more queries than keys": {"causal": True, "lengths": (20, 0, 69)},
    "another order": {"batch_idx": True, "new": 70, "causal": True, "index": torch.int64},
    "left padding": {"leftpad": (5, 0, 160), "new": 70, "causal": True},
    "whole cache": {"whole": True, "lengths": (0, 0)},
    "window, softcap, sink": {"window": (100, 0), "softcap": 5.0, "sink": True, "new": 70},
    "alibi": {"alibi": True, "new": 70, "causal": True},
    "packed heads": {"seqlen_q": 20, "new": 20, "num_heads": 8, "causal": True},
    "multi-query, two dims": {"num_heads_k": 1, "head_dim": 96, "head_dim_v": 96, "causal": True, "new": 70},
}


class Simulated:
    """The Hopper backend, in the simulator."""

    append = staticmethod(cpu.append)

    @staticmethod
    def attend(problem, inputs):
        return Kernel().attend(problem, inputs)


@pytest.mark.parametrize("name", CASES)
def test_oracle_rule(name):
    check(Simulated, WIDE.but(**CASES[name]))


def test_pages_may_be_apart_and_heads_outside():
    """Caches that are part of more, and ones of (batch, heads, positions, dim)."""
    (q, k_cache, v_cache, *_), options = build(WIDE.but(new=70, causal=True))
    more = torch.full((5, 450, 2, 64), float("nan"), dtype=torch.bfloat16)
    outside = torch.full((5, 2, 450, 64), float("nan"), dtype=torch.bfloat16).transpose(1, 2)
    expected, _ = cpu.attend(*CacheCall((q, k_cache, v_cache), options).problem())
    for like in (more, outside):
        caches = [like.clone(memory_format=torch.preserve_format)[:, 20:420] for _ in range(2)]
        for part, cache in zip(caches, (k_cache, v_cache), strict=True):
            part.copy_(cache)
        problem, inputs = CacheCall((q, *caches), options).problem()
        assert problem.page_rows == (450 if like is more else 900)
        out, _ = Kernel().attend(problem, inputs)
        torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


def test_a_cache_that_is_not_aligned_is_copied_once():
    """Heads outside, in one dim of rows each is there four times."""
    shape = 3, 4, 50, 64  # batch, heads, positions, dim
    size = torch.Size(shape).numel()
    k_cache, v_cache = (torch.zeros(4 + size, dtype=torch.bfloat16)[4:].view(shape).transpose(1, 2) for _ in range(2))
    k_cache.normal_()
    q = torch.randn(3, 70, 4, 64, dtype=torch.bfloat16)
    problem, inputs = CacheCall((q, k_cache, v_cache), {}).problem()
    packed = chunks.packed_inputs(problem, inputs)
    assert problem.page_rows == 200
    for x in (packed.k, packed.v):
        assert x.data_ptr() % 16 == 0
        assert x.untyped_storage().nbytes() == 2 * size
    assert torch.equal(packed.k[200:250], k_cache[1])


def test_bad_lengths_and_tables_never_reach_outside_the_cache():
    """The simulator tells of rows that are not there."""
    problem, inputs = build(WIDE.but(batch_idx=True, leftpad=(1, 2, 3), new=70)).problem()
    bad = {
        "k_cache": torch.zeros_like(inputs.k_cache),
        "v_cache": torch.zeros_like(inputs.v_cache),
        "table": torch.tensor([[10**9], [-7], [4]], dtype=torch.int32),
        "cache_seqlens": torch.tensor([2**31 - 1, -(2**31), 395], dtype=torch.int32),
        "leftpad": torch.tensor([-3, 7, 10**9], dtype=torch.int32),
    }
    out, lse = Kernel().attend(problem, inputs._replace(**bad))
    assert out.isfinite().all()
    assert not lse.isnan().any()


def test_what_it_serves_and_what_not(monkeypatch):
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    large = WIDE.but(seqlen_q=700, num_heads=16)  # 6 x 3 x 16 tiles
    assert chunks.supports(build(large).problem()[0]) is None
    for changes, words in (
        ({"page_size": 100}, "several pages, of 100"),
        ({"lengths_q": (700, 0, 20)}, "packed queries"),
        ({"rotary_dim": 32, "new": 1}, "rotary"),
        ({"split_size": 128}, "split_size"),
        ({"mask": (False, False, False, 9)}, "mask"),
        ({"seqlen_q": 1}, "fills less than 64 rows"),
        ({"seqlen_q": 128, "num_heads": 8}, "its tiles leave the device idle"),
        ({"seqlen_q": 1, "num_heads": 128, "num_heads_k": 1, "lengths": (5,) * 64}, "tiles of the longest sequence"),
        ({"seqlen_q": 8, "num_heads": 64, "num_heads_k": 8, "lengths": (5,) * 64}, "tiles of the longest sequence"),
        ({"head_dim": 60, "head_dim_v": 60}, "not a multiple of 8"),
        ({"dtype": torch.float32}, "float16 or bfloat16"),
    ):
        assert words in chunks.supports(build(large.but(**changes)).problem()[0])
    problem, inputs = build(large).problem()
    assert rows_between_pages(inputs.k_cache, inputs.v_cache[:, ::2]) == 0
    one = torch.zeros(3, 1, 2, 64).as_strided((3, 1, 2, 64), (128, 1, 64, 1))
    assert rows_between_pages(one, one) == 0
    assert "whole rows apart" in chunks.supports(dataclasses.replace(problem, page_rows=0))


def test_one_compiled_graph_serves_chunks_of_any_length(monkeypatch):
    """Those that it serves, and those that are too short for it."""
    torch._dynamo.reset()
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    monkeypatch.setattr(cpu, "supports", lambda problem: "not here")
    for backend in (chunks, portable):
        monkeypatch.setattr(backend, "attend", cpu.attend)
    monkeypatch.setattr(portable, "supports", lambda problem: None)
    counter, chosen = CompileCounter(), []
    choose = kvcache_ops.choose
    monkeypatch.setattr(kvcache_ops, "choose", lambda *call: chosen.append(choose.__wrapped__(*call)) or chosen[-1])
    attend = torch.compile(tileattn.attention_with_kvcache, fullgraph=True, dynamic=True, backend=counter)
    cache = torch.randn(9, 400, 4, 64, dtype=torch.bfloat16)
    for batch, seqlen_q in ((7, 190), (8, 20), (9, 128), (5, 200)):
        attend(torch.randn(batch, seqlen_q, 32, 64, dtype=torch.bfloat16), cache, cache)
    assert counter.frame_count == 1
    assert chosen == ["hopper", "portable", "hopper", "hopper"]


def test_explain_says_why_it_does_not_serve(monkeypatch):
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    monkeypatch.setattr(cpu, "supports", lambda problem: "not here")
    monkeypatch.setattr(portable, "supports", lambda problem: None)
    kvcache_ops.choose.cache_clear()
    cache, (few, many) = torch.empty(9, 400, 4, 64).half(), (torch.empty(9, n, 32, 64).half() for n in (2, 200))
    found = tileattn.explain_with_kvcache(few, cache, cache)
    assert (found.backend, list(found.refusals)) == ("portable", ["cpu", "hopper"])
    assert "not used  hopper: seqlen_q fills less than 64 rows" in str(found)
    assert "keys of all sequences are in runs, " in str(found)
    assert "keys are not split" in str(tileattn.explain_with_kvcache(many, cache, cache))
    assert "hopper: backend='portable' was asked for" in str(
        tileattn.explain_with_kvcache(many, cache, cache, backend="portable")
    )
    kvcache_ops.choose.cache_clear()


def test_a_triton_that_it_does_not_know_is_a_reason_and_no_error(monkeypatch):
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)
    monkeypatch.setattr(hopper, "_import_error", "Triton 9.9")
    monkeypatch.setattr(hopper, "kvcache", chunks)  # to have it back
    monkeypatch.delitem(sys.modules, chunks.__name__)
    monkeypatch.setitem(sys.modules, "tileattn.backends.hopper.forward", None)
    reason = importlib.import_module(chunks.__name__).supports(build(WIDE).problem()[0])
    assert reason == "needs Triton's Gluon (Triton 9.9)"


def test_a_kept_kernel_is_the_one_that_triton_would_compile_for_other_sizes(monkeypatch):
    launches = Launches()
    for module in (chunks, launch):
        monkeypatch.setattr(module, "_run", launches.run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton.runtime.driver, "_active", CompileDriver())
    for lengths, capacity, seqlen_q in (((70,), 96, 80), ((1, 2, 3), 400, 64), ((5,) * 16, 512, 128), ((1,), 64, 70)):
        sizes = WIDE.but(lengths=lengths, capacity=capacity, seqlen_q=seqlen_q, causal=True, batch_idx=True)
        for case in (sizes, sizes.but(new=1), sizes.but(num_heads=2)):
            chunks.attend(*build(case).problem())
    assert all(len(kernels) == 1 for kernels in launches.compiled_for.values())
    assert launches.count("rank_cached") == 1
    assert launches.count("attention_forward") == 2  # heads packed into a tile, and not
