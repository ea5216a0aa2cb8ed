"""The Triton kernels of a cache on a GPU, against the oracle and under CUDA graphs."""

import pytest
import torch
from cache_oracle import BASE, build, check

import tileattn

pytest.importorskip("triton")

from tileattn import kvcache_ops
from tileattn.backends.hopper import _is_hopper
from tileattn.backends.portable import kvcache as portable
from tileattn.kvcache import CacheProblem

pytestmark = pytest.mark.gpu

WIDE = BASE.but(dtype=torch.bfloat16, head_dim=128, head_dim_v=128, num_heads=8, lengths=(700, 3, 450), capacity=1024)
CASES = {
    "decode": {},
    "pages of 16, append, rotary": {"page_size": 16, "new": 1, "causal": True, "rotary_dim": 128},
    "pages of 1": {"page_size": 1, "new": 2, "seqlen_q": 2, "causal": True},
    "pages of 64, int64": {"page_size": 64, "index": torch.int64, "new": 1},
    "chunk": {"seqlen_q": 200, "new": 200, "causal": True, "page_size": 16},
    "chunk, head_dim 64": {"seqlen_q": 130, "new": 130, "causal": True, "head_dim": 64, "head_dim_v": 64},
    "window, softcap, sink": {"window": (100, 0), "softcap": 5.0, "sink": True, "seqlen_q": 3, "new": 3},
    "alibi, left padding": {"alibi": True, "leftpad": (5, 0, 440), "seqlen_q": 4, "new": 4, "causal": True},
    "tree": {"mask": (False, False, True, 6), "seqlen_q": 6, "new": 6, "page_size": 32},
    "packed": {"lengths_q": (40, 0, 9), "new_lengths": (40, 0, 9), "causal": True, "page_size": 16},
    "latent": {
        "head_dim": 576, "head_dim_v": 512, "v_in_k": True, "num_heads_k": 1, "num_heads": 16, "new": 1, "page_size": 64
    },
    "head_dim 256": {"head_dim": 256, "head_dim_v": 256},
    "head_dim 80, interleaved": {"head_dim": 80, "head_dim_v": 80, "rotary_dim": 40, "interleaved": True, "new": 1},
    "float16": {"dtype": torch.float16, "page_size": 16},
    "float32": {"dtype": torch.float32, "head_dim": 64, "head_dim_v": 64, "new": 1},
    "fixed split": {"split_size": 256, "page_size": 16},
    "multi-query": {"num_heads": 64, "num_heads_k": 1, "lengths": (5000,), "capacity": 5120},
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_oracle_rule(name):
    check(portable, WIDE.but(**CASES[name]), "cuda")


def test_oracle_rule_of_chunks_that_fill_the_device_without_splits(monkeypatch):
    monkeypatch.setattr(portable, "_multiprocessors", lambda device: 1)
    monkeypatch.setattr(portable, "_plan", portable._plan.__wrapped__)
    monkeypatch.setattr(portable, "_kept", lambda *_: {})
    check(portable, WIDE.but(seqlen_q=200, new=200, causal=True, page_size=16), "cuda")


def test_calls_that_look_alike_are_each_served_with_their_own_tensors():
    calls = [
        build(WIDE.but(page_size=16, new=1, causal=True, lengths=(n, 3, 450), seed=n), "cuda") for n in (7, 70, 700)
    ]
    for _ in range(2):
        for (q, k_cache, v_cache, k, v), options in calls:
            caches = [k_cache.clone(), v_cache.clone()]
            expected = tileattn.attention_with_kvcache(
                *[x.cpu() for x in (q, *caches, k, v)],
                **{name: x.cpu() if isinstance(x, torch.Tensor) else x for name, x in options.items()},
            )
            out = tileattn.attention_with_kvcache(q, *caches, k, v, **options)
            torch.testing.assert_close(out.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_compile_gives_the_same_without_a_graph_break_and_with_other_lengths():
    (q, k_cache, v_cache, k, v), options = build(WIDE.but(page_size=16, new=1, causal=True), "cuda")
    lengths, table = options["cache_seqlens"], options["block_table"]
    fixed = {name: x for name, x in options.items() if name not in ("cache_seqlens", "block_table")}

    def step(q, k_cache, v_cache, lengths, table):
        tables = {"cache_seqlens": lengths, "block_table": table}
        return tileattn.attention_with_kvcache(q * 2, k_cache, v_cache, k, v, **tables, **fixed) + 1

    compiled = torch.compile(step, fullgraph=True)
    for change in range(2):
        caches, others = ([k_cache.clone(), v_cache.clone()] for _ in range(2))
        now = lengths - change
        out = compiled(q, *caches, now, table)
        torch.testing.assert_close(out, step(q, *others, now, table))
        for cache, other in zip(caches, others, strict=True):
            assert torch.equal(cache.nan_to_num(), other.nan_to_num())


HOPPER_CASES = {
    "causal": {"causal": True},
    "bidirectional": {"new": 0},
    "another order, int64": {"batch_idx": True, "causal": True, "index": torch.int64},
    "left padding": {"leftpad": (5, 0, 440), "causal": True},
    "more queries than keys": {"causal": True, "lengths": (20, 0, 69)},
    "whole cache": {"whole": True, "new": 0},
    "one sequence": {"lengths": (700,), "causal": True},
    "window, softcap, sink": {"window": (100, 0), "softcap": 5.0, "sink": True},
    "alibi": {"alibi": True, "causal": True},
    "packed heads": {"seqlen_q": 70, "new": 70, "num_heads_k": 1, "causal": True},
    "head_dim 64": {"head_dim": 64, "head_dim_v": 64, "causal": True},
    "head_dim 96": {"head_dim": 96, "head_dim_v": 96, "causal": True},
    "head_dim 256": {"head_dim": 256, "head_dim_v": 256, "causal": True},
    "float16": {"dtype": torch.float16, "causal": True},
}
CHUNK = WIDE.but(seqlen_q=200, new=200)
needs_hopper = pytest.mark.skipif(not _is_hopper(torch.device("cuda")), reason="needs a Hopper GPU")


class Hopper:
    """Attends by Hopper's kernel to what the Triton kernel has appended."""

    append = staticmethod(portable.append)

    @staticmethod
    def attend(problem, inputs):
        return kvcache_ops.load("hopper").attend(problem, inputs)


@needs_hopper
@pytest.mark.parametrize("name", HOPPER_CASES)
def test_oracle_rule_of_chunks_on_hopper(name):
    check(Hopper, CHUNK.but(**HOPPER_CASES[name]), "cuda")


@needs_hopper
def test_chunks_on_hopper_through_the_api_compiled_and_in_a_graph_replayed_with_other_lengths():
    (q, k_cache, v_cache, k, v), options = build(CHUNK.but(num_heads=48, causal=True), "cuda")
    lengths = options["cache_seqlens"]

    def step(q, k_cache, v_cache, lengths, backend=None):
        options_now = options | {"cache_seqlens": lengths, "backend": backend}
        return tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options_now, return_lse=True)

    problem, _ = CacheProblem.of(q, k_cache, v_cache, k, v, **options)
    assert kvcache_ops.choose(problem) == "hopper"
    compiled, graph = torch.compile(step, fullgraph=True), torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(q, k_cache, v_cache, lengths)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        of_graph = step(q, k_cache, v_cache, lengths)
    for change in range(3):
        lengths.copy_(torch.tensor([700 - 300 * change, 3, 450 + 10 * change], dtype=torch.int32))
        before = k_cache.clone(), v_cache.clone()
        graph.replay()
        for found in (of_graph, step(q, *before, lengths), compiled(q, *before, lengths)):
            expected = step(q, *before, lengths, "portable")
            torch.testing.assert_close(found.out, expected.out, rtol=2e-2, atol=2e-2)
            torch.testing.assert_close(found.lse, expected.lse, rtol=1e-3, atol=1e-3)


@needs_hopper
def test_chunks_on_hopper_of_caches_with_heads_outside():
    (q, k_cache, v_cache, k, v), options = build(CHUNK.but(num_heads=48, causal=True), "cuda")
    outside = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (k_cache, v_cache)]
    expected = tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options, backend="portable")
    found = tileattn.attention_with_kvcache(q, *outside, k, v, **options, backend="hopper")
    torch.testing.assert_close(found, expected, rtol=2e-2, atol=2e-2)
    assert torch.equal(outside[0].nan_to_num(), k_cache.nan_to_num())


@needs_hopper
def test_bad_lengths_and_tables_are_survived_by_chunks_on_hopper():
    (q, k_cache, v_cache, k, v), options = build(CHUNK.but(num_heads=48, batch_idx=True), "cuda")
    for cache in (k_cache, v_cache):
        cache.zero_()
    options["cache_batch_idx"].copy_(torch.tensor([10**6, -7, 1], dtype=torch.int32))
    options["cache_seqlens"].copy_(torch.tensor([10**6, -5, 1023], dtype=torch.int32))
    out = tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options, backend="hopper")
    torch.cuda.synchronize()
    assert out.isfinite().all()


def test_a_fixed_split_makes_a_sequence_independent_of_its_batch():
    (q, k_cache, v_cache, _, _), options = build(WIDE.but(split_size=256, page_size=16), "cuda")
    out = tileattn.attention_with_kvcache(q, k_cache, v_cache, **options)
    alone = options | {name: options[name][:1] for name in ("cache_seqlens", "block_table")}
    assert torch.equal(tileattn.attention_with_kvcache(q[:1], k_cache, v_cache, **alone)[0], out[0])


def test_a_cuda_graph_may_be_replayed_with_other_lengths_and_tables():
    call = build(WIDE.but(page_size=16, new=1, causal=True), "cuda")
    (q, k_cache, v_cache, k, v), options = call
    lengths, table = options["cache_seqlens"], options["block_table"]

    def step():
        return tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for change in range(3):
        lengths.copy_(torch.tensor([700 - 300 * change, 3, 450 - 10 * change], dtype=torch.int32))
        table.copy_(table.roll(change, 0))
        k_cache.normal_()
        v_cache.normal_()
        before = k_cache.clone(), v_cache.clone()
        graph.replay()
        got = out.clone()
        expected = tileattn.attention_with_kvcache(q, *before, k, v, **options)
        assert torch.equal(got, expected)
        assert torch.equal(k_cache, before[0])


def test_bad_lengths_and_tables_are_survived():
    (q, k_cache, v_cache, k, v), options = build(WIDE.but(page_size=16, new=1), "cuda")
    for cache in (k_cache, v_cache):
        cache.zero_()
    options["block_table"].fill_(10**6)
    options["cache_seqlens"].copy_(torch.tensor([10**6, -5, 1023], dtype=torch.int32))
    out = tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options)
    torch.cuda.synchronize()
    assert out.isfinite().all()
