"""The Hopper backend against the oracle, on a Hopper GPU: pytest -m gpu tests/test_hopper_gpu.py"""

import dataclasses
import random
import time
import types

import pytest
import torch
from oracle import Case, assert_rule, build, check, fresh_memory_is_nan

from tileattn.backends import hopper
from tileattn.reference import standard_attention

launch = pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper._is_hopper(torch.device("cuda", 0)), reason="needs a Hopper GPU"),
]

LENGTHS = (17, 400, 0, 128, 1, 90, 2000, 33, 256, 5, 700, 64, 129) * 3
CASES = {
    "one_tile": {"seqlen_q": 128, "seqlen_k": 128},
    "two_tiles": {"seqlen_q": 256, "seqlen_k": 256},
    "many_tiles": {"batch": 3, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads": 16, "num_heads_k": 16},
    "causal": {"seqlen_q": 512, "seqlen_k": 512, "causal": True},
    "causal_many": {"batch": 3, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads": 16, "num_heads_k": 16, "causal": True},
    "tails": {"seqlen_q": 333, "seqlen_k": 257},
    "causal_tails": {"seqlen_q": 333, "seqlen_k": 333, "causal": True},
    "more_keys": {"seqlen_q": 200, "seqlen_k": 777, "causal": True},
    "more_queries": {"seqlen_q": 777, "seqlen_k": 200, "causal": True},
    "one_key": {"seqlen_q": 64, "seqlen_k": 1},
    "right_window": {"seqlen_q": 300, "seqlen_k": 300, "window": (-1, 70)},
    "gqa": {"seqlen_q": 300, "seqlen_k": 400, "num_heads": 6, "num_heads_k": 2, "causal": True},
    "mqa": {"seqlen_q": 300, "seqlen_k": 400, "num_heads": 5, "num_heads_k": 1},
    "bhsd": {"seqlen_q": 300, "seqlen_k": 300, "layout": "bhsd", "causal": True},
    "sliced": {"seqlen_q": 300, "seqlen_k": 300, "layout": "sliced"},
    "few_queries": {"seqlen_q": 16, "seqlen_k": 500, "num_heads": 16, "num_heads_k": 2, "causal": True},
    "packed_heads": {"seqlen_q": 70, "seqlen_k": 500, "num_heads": 12, "num_heads_k": 2, "batch": 3},
    "varlen": {"lengths_q": (70, 0, 129, 1, 300), "lengths_k": (70, 65, 64, 0, 300)},
    "varlen_causal": {"lengths_q": (64, 1, 130, 700), "lengths_k": (100, 300, 65, 700), "causal": True},
    "varlen_long_tailed": {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "causal": True, "num_heads_k": 1},
    "varlen_window": {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "window": (150, 40)},
    "varlen_few_queries": {"lengths_q": (9, 16, 1), "lengths_k": (900, 33, 0), "num_heads": 16, "num_heads_k": 2},
    "scale": {"seqlen_q": 256, "seqlen_k": 256, "scale": 0.31},
    "sharp": {"seqlen_q": 1024, "seqlen_k": 1024, "magnitude": 30.0},
    "sharp_causal": {"seqlen_q": 1024, "seqlen_k": 1024, "magnitude": 30.0, "causal": True},
}
MODIFIERS = {
    "window": {"window": (100, 30)},
    "causal_window": {"causal": True, "window": (200, -1)},
    "window_far_left": {"window": (20, 0), "seqlen_k": 90},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi": True, "causal": True, "batch": 3},
    "sink": {"sink": True, "causal": True, "seqlen_k": 200},
    "sink_full": {"sink": True},
    "everything": {"causal": True, "window": (150, -1), "softcap": 5.0, "alibi": True, "sink": True, "num_heads": 4},
    "packed_heads": {"seqlen_q": 20, "num_heads": 8, "num_heads_k": 2, "causal": True, "alibi": True, "sink": True},
    "varlen": {
        "lengths_q": (70, 0, 129, 300),
        "lengths_k": (70, 65, 64, 400),
        "causal": True,
        "softcap": 5.0,
        "alibi": True,
        "sink": True,
    },
}
HEAD_DIMS = ((64, 64), (128, 128), (256, 256), (192, 128), (96, 96), (40, 72))


@pytest.fixture
def three_warpgroups(monkeypatch):
    """In tiles of 192 rows, which long sequences get, whatever their length."""
    monkeypatch.setattr(launch, "suits_three_warpgroups", lambda problem: True)
    launch.plan_for.cache_clear()
    yield
    launch.plan_for.cache_clear()


def expect_rule(problem, inputs) -> None:
    with fresh_memory_is_nan():
        found = hopper.forward(problem, inputs)
    exact = standard_attention(problem, inputs, torch.float64)
    low = standard_attention(problem, inputs)
    for name in ("out", "lse"):
        assert_rule(name, getattr(found, name), getattr(exact, name), getattr(low, name))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dims", HEAD_DIMS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_oracle_rule(name, dims, dtype):
    case = Case(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype).but(**CASES[name])
    problem, inputs, _, _ = build(case, "cuda")
    assert hopper.supports(problem) is None
    expect_rule(problem, inputs)


@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [(64, torch.bfloat16), (128, torch.bfloat16), (256, torch.bfloat16), (128, torch.float16)],
    ids=str,
)
@pytest.mark.parametrize("name", MODIFIERS)
def test_oracle_rule_with_each_modifier(name, head_dim, dtype):
    case = Case(seqlen_q=333, seqlen_k=400, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype)
    problem, inputs, _, _ = build(case.but(**MODIFIERS[name]), "cuda")
    assert hopper.supports(problem) is None
    expect_rule(problem, inputs)


def test_portable_differentiates_what_hopper_computed():
    from tileattn.backends import portable

    case = Case(seqlen_q=200, seqlen_k=300, num_heads=4, head_dim=64, head_dim_v=64, causal=True, dtype=torch.bfloat16)
    both = types.SimpleNamespace(forward=hopper.forward, backward=portable.backward)
    check(both, case, "cuda")


@pytest.mark.parametrize("head_dim", [64, 96, 128])
@pytest.mark.parametrize("name", [name for name in CASES if not name.startswith("varlen")])
def test_oracle_rule_of_three_warpgroups(name, head_dim, three_warpgroups):
    case = Case(head_dim=head_dim, head_dim_v=head_dim, dtype=torch.bfloat16).but(**CASES[name])
    problem, inputs, _, _ = build(case, "cuda")
    assert launch.mode_of(problem).WARPGROUPS == 3
    expect_rule(problem, inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("batch", "seqlen", "causal"), [(2, 2200, False), (1, 4100, True)])
def test_long_sequences(batch, seqlen, causal, head_dim, dtype):
    case = Case(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=16, num_heads_k=2, causal=causal, dtype=dtype)
    problem, inputs, _, _ = build(case.but(head_dim=head_dim, head_dim_v=head_dim), "cuda")
    assert launch.mode_of(problem).WARPGROUPS == 3
    found = hopper.forward(problem, inputs)
    heads = [0, 15]
    some = inputs._replace(q=inputs.q[-1:, :, heads], k=inputs.k[-1:], v=inputs.v[-1:])
    few = dataclasses.replace(problem, batch=1, num_heads=2)
    exact, low = standard_attention(few, some, torch.float64), standard_attention(few, some)
    assert_rule("out", found.out[-1:, :, heads], exact.out, low.out)
    assert_rule("lse", found.lse[-1:, heads], exact.lse, low.lse)


@pytest.mark.parametrize("three", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("growth", [1.0, 20.0, 300.0])
@pytest.mark.parametrize("causal", [False, True])
def test_logits_that_grow_from_block_to_block(growth, causal, dtype, three, request):
    """The last block is visited first, so every block raises the maximum."""
    if three:
        request.getfixturevalue("three_warpgroups")
    case = Case(seqlen_q=640, seqlen_k=640, head_dim=128, head_dim_v=128, dtype=dtype, causal=causal)
    problem, inputs, _, _ = build(case, "cuda")
    ramp = torch.linspace(growth, 0.01, 640, device="cuda", dtype=torch.float32)[None, :, None, None]
    expect_rule(problem, inputs._replace(k=(inputs.k * ramp).to(dtype)))


def test_an_outlier_key():
    problem, inputs, _, _ = build(
        Case(seqlen_q=640, seqlen_k=640, head_dim=128, head_dim_v=128, dtype=torch.bfloat16), "cuda"
    )
    inputs.k[:, 200] *= 30
    expect_rule(problem, inputs)


def test_tensors_that_start_between_multiples_of_16_bytes_are_copied():
    problem, inputs, _, _ = build(
        Case(seqlen_q=300, seqlen_k=300, head_dim=64, head_dim_v=64, dtype=torch.bfloat16), "cuda"
    )
    odd = torch.empty(inputs.k.numel() + 1, device="cuda", dtype=torch.bfloat16)[1:].view(inputs.k.shape)
    odd.copy_(inputs.k)
    expect_rule(problem, inputs._replace(k=odd))


def test_repeats_are_bitwise_equal():
    case = Case(batch=2, seqlen_q=1000, seqlen_k=1000, num_heads=16, num_heads_k=16, head_dim=128, head_dim_v=128)
    problem, inputs, _, _ = build(case.but(dtype=torch.bfloat16, causal=True), "cuda")
    first = hopper.forward(problem, inputs)
    for _ in range(250):
        again = hopper.forward(problem, inputs)
        assert torch.equal(again.out, first.out)
        assert torch.equal(again.lse, first.lse)


def test_streams_do_not_share_a_counter():
    case = Case(batch=2, seqlen_q=1024, seqlen_k=1024, num_heads=16, num_heads_k=16, head_dim=64, head_dim_v=64)
    problem, inputs, _, _ = build(case.but(dtype=torch.bfloat16), "cuda")
    expected = hopper.forward(problem, inputs).out
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(4)]
    outs = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                outs.append(hopper.forward(problem, inputs).out)
    torch.cuda.synchronize()
    assert all(torch.equal(out, expected) for out in outs)


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_do_not_touch(causal):
    lengths = (100, 60, 300)
    case = Case(lengths_q=lengths, lengths_k=lengths, head_dim=128, head_dim_v=128, causal=causal, dtype=torch.bfloat16)
    problem, inputs, _, _ = build(case, "cuda")
    expected = hopper.forward(problem, inputs)
    for x in inputs[:3]:
        x[100:160] = float("nan")
    found = hopper.forward(problem, inputs)
    for rows in (slice(0, 100), slice(160, None)):
        assert torch.equal(found.out[rows], expected.out[rows])
        assert torch.equal(found.lse[:, rows], expected.lse[:, rows])
    assert found.out[100:160].isnan().all()


def test_no_rows_or_no_keys_in_packed_sequences():
    for lengths_q, lengths_k in (((0, 0), (70, 5)), ((70, 5), (0, 0))):
        case = Case(lengths_q=lengths_q, lengths_k=lengths_k, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
        problem, inputs, _, _ = build(case, "cuda")
        out, lse = hopper.forward(problem, inputs)
        assert not out.any()
        assert torch.equal(lse, torch.full_like(lse, float("-inf")))


def test_a_captured_graph_replays():
    problem, inputs, _, _ = build(
        Case(seqlen_q=512, seqlen_k=512, head_dim=128, head_dim_v=128, dtype=torch.float16), "cuda"
    )
    expected = hopper.forward(problem, inputs).out
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = hopper.forward(problem, inputs).out
    for _ in range(3):
        captured.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, expected)


def test_ten_thousand_launches_of_mixed_shapes_end():
    shapes = (
        {"seqlen_q": 333, "seqlen_k": 257, "num_heads": 4, "num_heads_k": 2},
        {"seqlen_q": 1000, "seqlen_k": 1000, "num_heads": 16, "num_heads_k": 16, "causal": True},
        {"seqlen_q": 64, "seqlen_k": 1},
        {"lengths_q": (64, 1, 130, 700), "lengths_k": (100, 300, 65, 700), "causal": True},
    )
    cases = [
        Case(head_dim=head_dim, head_dim_v=head_dim, dtype=torch.bfloat16).but(**shape)
        for shape in shapes
        for head_dim in (64, 128, 256)
    ]
    calls = [build(case, "cuda")[:2] for case in cases]
    expected = [hopper.forward(*call).out for call in calls]
    differ = torch.zeros((), dtype=torch.bool, device="cuda")
    chosen = random.Random(0)
    for _ in range(20):
        for i in chosen.choices(range(len(calls)), k=500):  # fewer than the driver queues
            differ |= (hopper.forward(*calls[i]).out != expected[i]).any()
        end, limit = torch.cuda.Event(), time.monotonic() + 20
        end.record()
        while not end.query():
            assert time.monotonic() < limit, "a launch hangs"
            time.sleep(0.001)
    assert not differ
