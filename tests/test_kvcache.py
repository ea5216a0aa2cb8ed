"""Attention with a cache: the CPU backend against the oracle, and what callers of attention_with_kvcache get."""

import subprocess
import sys

import pytest
import torch
from cache_oracle import BASE, CASES, build, cache_cases, check
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

import tileattn
from tileattn import kvcache_ops
from tileattn.backends.cpu import kvcache as cpu
from tileattn.kvcache import Append, CacheProblem

APPEND, ATTEND = torch.ops.tileattn.kvcache_append.default, torch.ops.tileattn.kvcache_attend.default
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize(("name", "dtype"), [(n, DTYPES[i % 3]) for i, n in enumerate(CASES)], ids=lambda x: str(x))
def test_oracle_rule(name, dtype):
    check(cpu, BASE.but(dtype=dtype).but(**CASES[name]))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cache_cases(dtypes=(torch.float32, torch.bfloat16)))
def test_oracle_rule_for_any_call(case):
    check(cpu, case)


@pytest.mark.parametrize("page_size", [0, 16])
def test_oracle_rule_when_threads_share_the_keys(page_size, monkeypatch):
    monkeypatch.setattr(cpu.workers, "threads_for", lambda work: 4)
    monkeypatch.setattr(cpu, "GATHERED", 100)
    check(cpu, BASE.but(lengths=(1500,), capacity=1600, num_heads=1, num_heads_k=1, page_size=page_size))


def test_the_api_appends_and_attends():
    call = build(BASE.but(new=2, seqlen_q=2, causal=True, page_size=16))
    q, k_cache, v_cache, *_ = call.args
    before = k_cache.clone()
    pair = tileattn.attention_with_kvcache(*call.args, **call.options, return_lse=True)
    assert isinstance(pair, tileattn.AttentionOutput)
    changed = (before != k_cache) & ~(before.isnan() & k_cache.isnan())
    assert changed.any(-1).any(-1).sum() == 3 * 2
    later = call.options | {"cache_seqlens": call.options["cache_seqlens"] + 2}
    again = tileattn.attention_with_kvcache(q, k_cache, v_cache, **later)
    torch.testing.assert_close(again, pair.out)


@pytest.mark.parametrize("page_size", [0, 16])
def test_a_default_device_does_not_matter(page_size):
    """Tensors say where a call is computed: also with torch.set_default_device("cuda")."""
    case = BASE.but(new=2, seqlen_q=2, causal=True, page_size=page_size, rotary_dim=16, alibi=True)
    call, alike = build(case), build(case)
    with torch.device("meta"):
        got = tileattn.attention_with_kvcache(*call.args, **call.options)
    assert torch.equal(got, tileattn.attention_with_kvcache(*alike.args, **alike.options))


def test_sequences_may_be_chosen_from_a_table_of_more():
    (q, k_cache, v_cache, _, _), options = build(BASE.but(page_size=16))
    expected = tileattn.attention_with_kvcache(q, k_cache, v_cache, **options)
    more = torch.full((9, options["block_table"].shape[1]), -1, dtype=torch.int32)
    chosen = torch.tensor([7, 2, 4])
    more[chosen] = options["block_table"]
    options |= {"block_table": more, "cache_batch_idx": chosen}
    assert torch.equal(tileattn.attention_with_kvcache(q, k_cache, v_cache, **options), expected)


def test_an_int_and_a_tensor_of_lengths_are_the_same():
    (q, k_cache, v_cache, _, _), options = build(BASE.but(lengths=(40, 40)))
    as_int = tileattn.attention_with_kvcache(q, k_cache, v_cache, **(options | {"cache_seqlens": 40}))
    assert torch.equal(as_int, tileattn.attention_with_kvcache(q, k_cache, v_cache, **options))


@settings(max_examples=25, deadline=None)
@given(data=st.data(), page_size=st.sampled_from([0, 1, 7, 16]), windowed=st.booleans())
def test_a_prompt_in_chunks_of_any_size_gives_what_it_gives_at_once(data, page_size, windowed):
    length = 60
    options = {"causal": True, "rotary_dim": 16, "window": (11, 0) if windowed else (-1, -1)}
    case = BASE.but(lengths=(0, 0), capacity=80, seqlen_q=length, new=length, page_size=page_size, **options)
    whole, parts = build(case), build(case)
    expected = tileattn.attention_with_kvcache(*whole.args, **whole.options)
    q, k_cache, v_cache, k, v = parts.args
    done, outs = 0, []
    while done < length:
        rows = slice(done, done + data.draw(st.integers(1, length - done)))
        options = parts.options | {"cache_seqlens": torch.full((2,), done, dtype=torch.int32)}
        outs.append(tileattn.attention_with_kvcache(q[:, rows], k_cache, v_cache, k[:, rows], v[:, rows], **options))
        done = rows.stop
    torch.testing.assert_close(torch.cat(outs, 1), expected)
    torch.testing.assert_close(k_cache, whole.args[1], equal_nan=True)


@pytest.mark.parametrize("lengths", [(500, 33, 250, 0), (500,), (7, 500)])
def test_a_fixed_split_makes_a_sequence_independent_of_its_batch(lengths):
    case = BASE.but(lengths=lengths, capacity=512, page_size=16, split_size=128, dtype=torch.bfloat16)
    (q, k_cache, v_cache, _, _), options = build(case)
    out, lse = tileattn.attention_with_kvcache(q, k_cache, v_cache, **options, return_lse=True)
    b = lengths.index(500)
    alone = options | {name: options[name][b : b + 1] for name in ("cache_seqlens", "block_table")}
    got = tileattn.attention_with_kvcache(q[b : b + 1], k_cache, v_cache, **alone, return_lse=True)
    assert torch.equal(got.out[0], out[b])
    assert torch.equal(got.lse[0], lse[b])


def test_a_fixed_split_does_not_depend_on_threads(monkeypatch):
    (q, k_cache, v_cache, _, _), options = build(BASE.but(num_heads=8, num_heads_k=8, split_size=128))
    alone = tileattn.attention_with_kvcache(q, k_cache, v_cache, **options)
    monkeypatch.setattr(cpu.workers, "threads_for", lambda work: 4)
    assert torch.equal(tileattn.attention_with_kvcache(q, k_cache, v_cache, **options), alone)


def test_packed_sequences_and_positions_of_the_rotary_embedding():
    case = BASE.but(lengths=(70, 0), lengths_q=(1, 10), new_lengths=(1, 10), rotary_dim=8)
    (q, k_cache, v_cache, k, v), options = build(case)
    cos, sin = options["rotary_cos"], options["rotary_sin"]
    expected = tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options)
    enough = options | {"rotary_cos": cos[:71], "rotary_sin": sin[:71]}
    assert torch.equal(tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **enough), expected)
    (q, k_cache, v_cache, k, v), options = build(case.but(new_lengths=(9, 2)))
    options |= {"rotary_cos": cos[:78], "rotary_sin": sin[:78]}
    with pytest.raises(ValueError, match="rotary_cos: 78 positions, but the last of q or k is at position 78"):
        tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **options)


def test_what_is_outside_of_the_cache_is_not_written():
    """In a compiled call lengths are not checked."""
    problem, inputs = build(BASE.but(new=3, page_size=16)).problem()
    inputs = inputs._replace(k_cache=inputs.k_cache.nan_to_num(), cache_seqlens=torch.tensor([-9, 96, 2000]))
    before = inputs.k_cache.clone()
    APPEND(*flat_append(problem, inputs))
    assert torch.equal(inputs.k_cache, before)


def flat_append(problem, inputs):
    x, v_cache = inputs, None if inputs.v is None else inputs.v_cache
    where = x.table, x.cache_seqlens, x.cu_seqlens_k, x.rotary_cos, x.rotary_sin
    return Append(x.k_cache, v_cache, x.k, x.v, *where, problem.batch, 0, problem.rotary_interleaved)


def flat_attend(problem, inputs):
    p, x = problem, inputs
    where = x.table, x.cache_seqlens, x.leftpad, x.cu_seqlens_q, x.cu_seqlens_k, x.rotary_cos, x.rotary_sin
    scalars = p.seqlen_q, p.seqlen_cache, p.seqlen_new, p.scale, p.window_left, p.window_right, p.softcap
    modifiers = x.mask, x.alibi_slopes, x.sink
    return (x.q, x.k_cache, x.v_cache, *where, *modifiers, *scalars, p.rotary_interleaved, p.split_size, "cpu")


@pytest.mark.parametrize("name", ["pages of 3", "packed", "latent", "tree", "rotary"])
def test_opcheck(name):
    problem, inputs = build(BASE.but(**CASES[name])).problem()
    inputs = inputs._replace(k_cache=inputs.k_cache.nan_to_num(), v_cache=inputs.v_cache.nan_to_num())
    if inputs.v is None:
        inputs = inputs._replace(v_cache=inputs.k_cache[..., : problem.head_dim_v])
    torch.library.opcheck(APPEND, flat_append(problem, inputs))
    torch.library.opcheck(ATTEND, flat_attend(problem, inputs))


@pytest.mark.parametrize("name", ["speculation", "pages of 16", "rotary", "packed", "latent"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile_gives_the_same_without_a_graph_break(name, backend):
    torch._dynamo.reset()
    eager, compiled = (build(BASE.but(**CASES[name])) for _ in range(2))
    if name == "packed":
        for call in (eager, compiled):
            call.options["max_seqlen_q"] = 9

    def step(args, options):
        q, k_cache, v_cache, k, v = args
        out = tileattn.attention_with_kvcache(q * 2, k_cache, v_cache, k, v, **options)
        return out + 1, k_cache.nan_to_num().double().sum()  # a sum whose order does not show

    got = torch.compile(step, fullgraph=True, backend=backend)(*compiled)
    for g, e in zip(got, step(*eager), strict=True):
        torch.testing.assert_close(g, e)
    for g, e in zip(compiled.args[1:3], eager.args[1:3], strict=True):
        torch.testing.assert_close(g, e, equal_nan=True)


@pytest.mark.parametrize(
    ("changes", "scores"),
    [
        ({}, 70 + 3 + 45),
        ({"new": 2, "seqlen_q": 2, "causal": True}, 71 + 72 + 4 + 5 + 46 + 47),
        ({"leftpad": (5, 0, 44), "page_size": 16}, 65 + 3 + 1),
        ({"lengths_q": (2, 0, 1), "new_lengths": (2, 0, 1), "window": (9, 0)}, 10 + 10 + 10),
    ],
)
def test_flops_count_the_scores_that_are_seen(changes, scores):
    call = build(BASE.but(**changes))
    with FlopCounterMode(display=False) as counter:
        tileattn.attention_with_kvcache(*call.args, **call.options)
    assert counter.get_total_flops() == 2 * BASE.num_heads * scores * (BASE.head_dim + BASE.head_dim_v)


def test_backward_is_refused_in_words_and_forward_is_not():
    call = build(BASE.but(new=1))
    q, k_cache, v_cache, k, v = call.args
    version = k_cache._version
    out = tileattn.attention_with_kvcache(q.requires_grad_(), k_cache, v_cache, k, v, **call.options)
    assert k_cache._version > version
    with pytest.raises(NotImplementedError, match="attention_with_kvcache has no gradient"):
        out.sum().backward()


def test_forward_mode_is_refused_and_not_lost():
    call = build(BASE)
    q, *others = call.args
    with pytest.raises(NotImplementedError, match="forward-mode"):
        torch.func.jvp(lambda q: tileattn.attention_with_kvcache(q, *others, **call.options), (q,), (q,))


def test_inference_mode_may_have_inference_tensors_or_others():
    call = build(BASE.but(new=1))
    with torch.inference_mode():
        fresh = build(BASE.but(new=1))
        for one in (call, fresh):
            assert tileattn.attention_with_kvcache(*one.args, **one.options).isfinite().all()


B, H, HK, D = 3, 4, 2, 32
Q, KC, K = torch.zeros(B, 1, H, D), torch.zeros(B, 96, HK, D), torch.zeros(B, 1, HK, D)
PAGES, TABLE = torch.zeros(8, 16, HK, D), torch.zeros(B, 4, dtype=torch.int32)
LENGTHS = torch.tensor([70, 3, 45])
COS = torch.zeros(96, 8)
REFUSED = [
    ((Q[0], KC, KC), {}, "q: got 3 dims with shape (1, 4, 32), expected 4"),
    ((Q, KC[0], KC[0]), {}, "k_cache: got 3 dims with shape (96, 2, 32), expected 4: (batch, seqlen, heads, head_dim)"),
    ((Q, KC.half(), KC), {}, "k_cache: dtype torch.float16 differs from q's torch.float32"),
    ((Q, KC, KC[:, :4]), {}, "v_cache: shape (3, 4, 2, 32) does not fit k_cache's (3, 96, 2, 32)"),
    ((Q, KC[..., :16], KC), {}, "k_cache: head_dim 16 differs from q's 32"),
    ((Q[:, :, :3], KC, KC), {}, "q: 3 heads is not a multiple of k_cache's 2 heads"),
    ((Q, KC.transpose(1, 3), KC), {}, "k_cache: last dim has stride"),
    ((Q, KC[:2], KC[:2]), {}, "k_cache: 2 sequences for a batch of 3"),
    (
        (Q, PAGES[:0], PAGES[:0]),
        {"block_table": TABLE, "cache_seqlens": 0},
        "k_cache: shape (0, 16, 2, 32) has no pages",
    ),
    ((Q, KC, KC, K), {}, "cache_seqlens: got None; where k and v are appended must be said"),
    ((Q, KC, KC.clone(), K), {"cache_seqlens": 1}, "v: got None; it may be left out only where"),
    ((Q, *torch.stack([KC, KC]).unbind(0), K), {"cache_seqlens": 1}, "v: got None; it may be left out only where"),
    ((Q, KC, KC, None, K), {"cache_seqlens": 1}, "k: got None, but v is given"),
    ((Q, KC, KC, K.half(), K), {"cache_seqlens": 1}, "k: dtype torch.float16 differs from q's"),
    ((Q, KC, KC, K[..., :8], K), {"cache_seqlens": 1}, "k: shape (3, 1, 2, 8) does not fit k_cache's"),
    ((Q, KC, KC, K, K[:2]), {"cache_seqlens": 1}, "v: shape (2, 1, 2, 32) does not fit k's (3, 1, 2, 32)"),
    ((Q, KC, KC), {"cache_seqlens": 97}, "cache_seqlens=97 is beyond the cache's capacity of 96 a sequence"),
    ((Q, KC, KC, K, K), {"cache_seqlens": 96}, "cache_seqlens=96 and 1 appended is beyond the cache's capacity of 96"),
    ((Q, KC, KC), {"cache_seqlens": -1}, "cache_seqlens=-1: must be 0 or more"),
    ((Q, KC, KC), {"cache_seqlens": 2.0}, "cache_seqlens: got float"),
    ((Q, KC, KC), {"cache_seqlens": LENGTHS + 60}, "cache_seqlens: 130 of sequence 0 is beyond the cache's capacity"),
    ((Q, KC, KC), {"cache_seqlens": LENGTHS - 5}, "cache_seqlens: -2 is negative"),
    ((Q, KC, KC), {"cache_seqlens": LENGTHS.float()}, "cache_seqlens: dtype torch.float32"),
    ((Q, KC, KC), {"cache_seqlens": LENGTHS[:2]}, "cache_seqlens: shape (2,), expected (batch,) = (3,)"),
    (
        (Q, PAGES, PAGES),
        {"block_table": TABLE + 8, "cache_seqlens": 20},
        "block_table: entry 8 of sequence 0 is outside",
    ),
    (
        (Q, PAGES, PAGES),
        {"block_table": TABLE - 1, "cache_seqlens": 20},
        "block_table: entry -1 of sequence 0 is outside",
    ),
    ((Q, PAGES, PAGES), {"block_table": TABLE.float()}, "block_table: dtype torch.float32"),
    ((Q, PAGES, PAGES), {"block_table": TABLE[:2]}, "block_table: shape (2, 4), expected (batch, pages of a sequence)"),
    ((Q, PAGES, PAGES), {"block_table": TABLE, "cache_seqlens": 65}, "beyond the cache's capacity of 64"),
    ((Q, PAGES, PAGES), {"block_table": TABLE, "cache_batch_idx": TABLE[:, 0] + 3}, "but block_table has 3 sequences"),
    ((Q, KC, KC), {"cache_batch_idx": TABLE}, "cache_batch_idx: shape (3, 4), expected (batch,) = (3,)"),
    ((Q, KC, KC), {"cache_batch_idx": TABLE[:, 0] + 3}, "cache_batch_idx: [3, 3, 3], but k_cache has 3 sequences"),
    ((Q, KC, KC), {"cache_leftpad": LENGTHS, "cache_seqlens": 50}, "cache_leftpad: [70, 3, 45] must lie between 0 and"),
    ((Q, KC, KC), {"rotary_cos": COS, "rotary_sin": COS}, "rotary_cos: nothing is appended"),
    ((Q, KC, KC, K, K), {"cache_seqlens": 1, "rotary_cos": COS}, "rotary_sin: got None"),
    (
        (Q, KC, KC, K, K),
        {"cache_seqlens": 0, "rotary_cos": COS[:0], "rotary_sin": COS[:0]},
        "of shape (0, 8), expected",
    ),
    (
        (Q, KC, KC, K, K),
        {"cache_seqlens": 90, "rotary_cos": COS[:80], "rotary_sin": COS[:80]},
        "rotary_cos: 80 positions, but the last of q or k is at position 90",
    ),
    ((Q, KC, KC), {"split_size": 100}, "split_size=100: must be a positive multiple of 128"),
    ((Q, KC, KC), {"mask": torch.zeros(B, H, 1, 5)}, "mask: dtype torch.float32, expected torch.bool"),
    ((Q, KC, KC), {"mask": torch.zeros(B, H, 2, 5).bool()}, "mask: shape (3, 4, 2, 5) does not broadcast"),
    ((Q, KC, KC), {"backend": "cuda"}, "backend='cuda': unknown to attention with a cache"),
    ((Q, KC, KC), {"backend": "portable"}, "portable: needs a GPU"),
]


@pytest.mark.parametrize(("args", "options", "words"), REFUSED, ids=[words[:40] for *_, words in REFUSED])
def test_refusals_name_the_argument_and_what_would_do(args, options, words, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises((TypeError, ValueError)) as error:
        tileattn.attention_with_kvcache(*args, **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("name", "words"), [("cuda", "backend='cuda': unknown"), ("portable", "portable: needs a GPU")]
)
def test_a_compiled_call_that_appends_says_the_same_of_a_backend(name, words, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    torch._dynamo.reset()
    attend = torch.compile(tileattn.attention_with_kvcache, fullgraph=True, backend="aot_eager")
    with pytest.raises(ValueError, match=words):
        attend(Q, KC.clone(), KC.clone(), K, K, cache_seqlens=LENGTHS, backend=name)


def test_what_only_triton_could_serve_is_refused_in_words_where_there_is_none():
    code = """
import sys, torch
sys.modules["triton"] = None
import tileattn
x = torch.empty(2, 3, 2, 16, device="meta")
try:
    tileattn.attention_with_kvcache(x, x, x, cache_seqlens=2)
except ValueError as error:
    assert "portable: needs Triton" in str(error), error
else:
    raise AssertionError("served")
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_explain_says_who_serves_and_how_keys_are_split():
    options = {"block_table": TABLE, "cache_seqlens": 30}
    found = tileattn.explain_with_kvcache(Q, PAGES, PAGES, split_size=128, **options)
    assert found.backend == "cpu"
    for words in ("a cache of 64 in pages of 16", "backend   cpu", "keys are in runs of 128"):
        assert words in str(found)
    assert "shared out among threads" in str(tileattn.explain_with_kvcache(Q, PAGES, PAGES, **options, return_lse=True))


def test_explain_appends_nothing():
    cache = KC.clone()
    tileattn.explain_with_kvcache(Q, cache, cache, K + 1, K + 1, cache_seqlens=LENGTHS)
    assert torch.equal(cache, KC)


def test_entries_of_a_table_that_are_not_in_use_may_hold_anything():
    table = torch.tensor([[0, 1, -1, 99], [2, 99, 99, 99], [3, 4, 5, 6]])
    problem, _ = CacheProblem.of(Q, PAGES, PAGES, block_table=table, cache_seqlens=torch.tensor([32, 9, 64]))
    assert kvcache_ops.choose(problem) == "cpu"
