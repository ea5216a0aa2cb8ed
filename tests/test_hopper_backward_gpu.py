"""The Hopper backward against the oracle, on a Hopper GPU: pytest -m gpu tests/test_hopper_backward_gpu.py"""

import dataclasses

import pytest
import torch
from oracle import Case, assert_rule, build, check, check_call, run_reference

from tileattn.backends import hopper
from tileattn.backends.hopper import backward_launch
from tileattn.problem import Problem, Wanted

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not hopper._is_hopper(torch.device("cuda", 0)), reason="needs a Hopper GPU"),
]

LENGTHS = (1, 700, 3, 64, 0, 129, 1, 300, 5, 64, 64, 2, 90)  # most short, most rows in a few
CASES = {
    "one_tile": {"seqlen_q": 128, "seqlen_k": 128},
    "full": {"seqlen_q": 512, "seqlen_k": 512},
    "many_tiles": {"batch": 3, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads": 16, "num_heads_k": 16},
    "causal": {"seqlen_q": 512, "seqlen_k": 512, "causal": True},
    "causal_many": {"batch": 3, "seqlen_q": 1024, "seqlen_k": 1024, "num_heads": 16, "num_heads_k": 16, "causal": True},
    "tails": {"seqlen_q": 333, "seqlen_k": 257},
    "causal_tails": {"seqlen_q": 333, "seqlen_k": 333, "causal": True},
    "more_keys": {"seqlen_q": 200, "seqlen_k": 777, "causal": True},
    "more_queries": {"seqlen_q": 777, "seqlen_k": 200, "causal": True},
    "few_queries": {"seqlen_q": 64, "seqlen_k": 523, "causal": True},
    "one_key": {"seqlen_q": 64, "seqlen_k": 1},
    "gqa": {"seqlen_q": 300, "seqlen_k": 400, "num_heads": 6, "num_heads_k": 2, "causal": True},
    "gqa_many": {
        "batch": 4, "seqlen_q": 333, "seqlen_k": 300, "num_heads": 24, "num_heads_k": 12, "causal": True,
    },
    "mqa": {"seqlen_q": 300, "seqlen_k": 400, "num_heads": 5, "num_heads_k": 1},
    "bhsd": {"seqlen_q": 300, "seqlen_k": 300, "layout": "bhsd", "causal": True},
    "sliced": {"seqlen_q": 300, "seqlen_k": 300, "layout": "sliced"},
    "scale": {"seqlen_q": 256, "seqlen_k": 256, "scale": 0.31},
    "sharp": {"seqlen_q": 1000, "seqlen_k": 1000, "magnitude": 30.0, "causal": True},
    "sharp_full": {"seqlen_q": 1024, "seqlen_k": 1024, "magnitude": 30.0},
    "window": {"seqlen_q": 333, "seqlen_k": 400, "window": (100, 30)},
    "right_window": {"seqlen_q": 300, "seqlen_k": 300, "window": (-1, 70)},
    "causal_window": {"seqlen_q": 600, "seqlen_k": 600, "causal": True, "window": (200, -1)},
    "window_far_left": {"seqlen_q": 64, "seqlen_k": 523, "window": (20, 0)},
    "softcap": {"seqlen_q": 333, "seqlen_k": 400, "softcap": 3.0, "causal": True},
    "sink": {"seqlen_q": 333, "seqlen_k": 400, "sink": True, "causal": True},
    "everything": {
        "seqlen_q": 333, "seqlen_k": 400, "causal": True, "window": (150, -1), "softcap": 5.0, "sink": True,
        "num_heads": 4,
    },
    "varlen": {"lengths_q": (70, 0, 129, 1, 300), "lengths_k": (70, 65, 64, 0, 300)},
    "varlen_causal": {"lengths_q": (64, 1, 130, 700), "lengths_k": (100, 300, 65, 700), "causal": True},
    "varlen_long_tailed": {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "causal": True, "num_heads_k": 1},
    "varlen_window": {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "window": (150, 40)},
    "varlen_sink": {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "sink": True, "softcap": 4.0},
}  # fmt: skip
BF16, FP16 = torch.bfloat16, torch.float16
KINDS = (
    *((dims, BF16) for dims in ((64, 64), (128, 128), (40, 56), (96, 96), (192, 128), (256, 256))),
    *((dims, FP16) for dims in ((64, 64), (128, 128))),
)


def served(case: Case):
    call = build(case, "cuda")
    assert hopper.supports(call.problem, "backward") is None
    return call


@pytest.mark.parametrize(("dims", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_oracle_rule(name, dims, dtype):
    case = Case(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype).but(**CASES[name])
    check_call(hopper, served(case))


ALIBI = {
    "full": {"seqlen_q": 512, "seqlen_k": 600},
    "causal": {"seqlen_q": 333, "seqlen_k": 400, "causal": True, "num_heads": 6, "num_heads_k": 2},
    "window": {"seqlen_q": 333, "seqlen_k": 300, "window": (100, 30), "num_heads": 5, "num_heads_k": 1},
    "softcap": {"seqlen_q": 333, "seqlen_k": 400, "softcap": 3.0, "sink": True, "causal": True},
    "varlen": {"lengths_q": LENGTHS, "lengths_k": LENGTHS, "causal": True},
}


@pytest.mark.parametrize("deterministic", [False, True], ids=["default", "deterministic"])
@pytest.mark.parametrize(("dims", "dtype"), KINDS, ids=str)
@pytest.mark.parametrize("name", ALIBI)
def test_alibi_without_a_gradient_of_slopes(name, dims, dtype, deterministic):
    """Of the kernels themselves, which `supports` does not offer yet."""
    call = build(Case(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, alibi=True).but(**ALIBI[name]), "cuda")
    problem = dataclasses.replace(call.problem, deterministic=deterministic)
    forward = hopper.forward(problem, call.inputs)
    found = hopper.backward(problem, call.inputs, forward, call.dout, call.dlse, Wanted())
    exact, low = run_reference(call, torch.float64), run_reference(call, None)
    for name in ("dq", "dk", "dv"):
        assert_rule(name, getattr(found, name), exact[name], low[name])


@pytest.fixture
def few_programs(monkeypatch):
    """Two rounds and more at small sizes."""
    monkeypatch.setattr(backward_launch, "_num_sms", lambda device: 13)
    backward_launch.backward_plan_for.cache_clear()
    yield
    backward_launch.backward_plan_for.cache_clear()


SHARED = {
    "few_tiles": {"batch": 1, "seqlen_q": 2048, "seqlen_k": 1024, "num_heads": 1},
    "one_tile": {"batch": 1, "seqlen_q": 5000, "seqlen_k": 50, "num_heads": 1},
    "tails": {"batch": 3, "seqlen_q": 1333, "seqlen_k": 1111, "num_heads": 1},
    "sharp": {"batch": 1, "seqlen_q": 2048, "seqlen_k": 1024, "num_heads": 1, "magnitude": 30.0},
}


@pytest.mark.parametrize(("dims", "dtype"), [x for x in KINDS if x[0][0] == x[0][1]], ids=str)
@pytest.mark.parametrize("name", SHARED)
def test_programs_share_the_tiles_of_the_last_round(name, dims, dtype, few_programs):
    case = Case(head_dim=dims[0], head_dim_v=dims[1], dtype=dtype).but(**SHARED[name])
    call = served(case.but(num_heads_k=case.num_heads))
    assert backward_launch.backward_plan_for(call.problem).shared
    check_call(hopper, call)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_programs_share_tiles_call_after_call(head_dim):
    case = Case(batch=1, seqlen_q=4096, seqlen_k=2048, num_heads=9, num_heads_k=9, dtype=BF16)
    call = served(case.but(head_dim=head_dim, head_dim_v=head_dim))
    assert backward_launch.backward_plan_for(call.problem).shared
    forward = hopper.forward(call.problem, call.inputs)
    run = lambda: hopper.backward(call.problem, call.inputs, forward, call.dout, call.dlse, Wanted())  # noqa: E731
    first = run()
    for _ in range(100):
        dq, dk, dv = run()[:3]
        assert torch.allclose(dq, first.dq, rtol=2**-7, atol=2**-8 * first.dq.abs().max().item())
        assert torch.equal(dk, first.dk)
        assert torch.equal(dv, first.dv)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize(
    "name",
    ["many_tiles", "causal_many", "more_keys", "gqa_many", "causal_window", "few_queries", "varlen_long_tailed"],
)
def test_deterministic_calls_repeat_bit_for_bit(name, head_dim):
    call = served(Case(head_dim=head_dim, head_dim_v=head_dim, dtype=BF16).but(**CASES[name]))
    call = call._replace(problem=dataclasses.replace(call.problem, deterministic=True))
    check_call(hopper, call)
    forward = hopper.forward(call.problem, call.inputs)
    run = lambda: hopper.backward(call.problem, call.inputs, forward, call.dout, call.dlse, Wanted())  # noqa: E731
    first = run()
    for _ in range(250):
        assert all(map(torch.equal, run()[:3], first[:3]))


@pytest.mark.parametrize("causal", [False, True])
def test_sequences_do_not_touch(causal):
    lengths = (100, 60, 300)
    case = Case(lengths_q=lengths, lengths_k=lengths, head_dim=128, head_dim_v=128, causal=causal, dtype=BF16)
    problem, inputs, dout, dlse = served(case)
    problem = dataclasses.replace(problem, deterministic=True)
    forward = hopper.forward(problem, inputs)
    run = lambda: hopper.backward(problem, inputs, forward, dout, dlse, Wanted())[:3]  # noqa: E731
    expected = run()
    for x in (*inputs[:3], dout, forward.out):
        x[100:160] = float("nan")
    for found, x in zip(run(), expected, strict=True):
        assert torch.equal(found[:100], x[:100])
        assert torch.equal(found[160:], x[160:])
        assert found[100:160].isnan().all()


@pytest.mark.parametrize("lengths", [((0, 0), (70, 5)), ((70, 5), (0, 0))], ids=["no rows", "no keys"])
def test_nothing_to_see_in_packed_sequences(lengths):
    """max_seqlen, read on the host, may be more than there is."""
    case = Case(lengths_q=lengths[0], lengths_k=lengths[1], head_dim=64, head_dim_v=64, dtype=BF16)
    problem, inputs, dout, dlse = build(case, "cuda")
    problem = dataclasses.replace(problem, seqlen_q=70, seqlen_k=70)
    forward = hopper.forward(problem, inputs)
    for x in hopper.backward(problem, inputs, forward, dout, dlse, Wanted())[:3]:
        assert torch.equal(x, torch.zeros_like(x))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("num_heads", [1, 2])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_extra_memory_but_dq_in_float32_and_two_statistics_a_row(head_dim, num_heads, deterministic):
    """And, where programs share tiles, dK and dV in float32 of their parts, fewer than two for each program."""
    q, k, v, dout = (torch.randn(2, 4096, num_heads, head_dim, device="cuda", dtype=BF16) for _ in range(4))
    problem, inputs = Problem.of(q, k, v, deterministic=deterministic)
    forward = hopper.forward(problem, inputs)
    run = lambda: hopper.backward(problem, inputs, forward, dout, None, Wanted())  # noqa: E731
    run()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = run()
    extra = torch.cuda.max_memory_allocated() - before - sum(x.nbytes for x in gradients[:3])
    rows, blocks_of_64 = 2 * 4096 * num_heads, 2 * 64 * num_heads
    plan = backward_launch.backward_plan_for(problem)
    parts = plan.parts * 2 * plan.tile.block_n * head_dim * 4
    if parts:
        parts += 2**20  # torch gives a block of memory whole where less than this would be left of it
    assert plan.parts < 2 * backward_launch._most_programs(problem)
    assert extra <= rows * (4 * head_dim + 2 * 4) + deterministic * blocks_of_64 * 2 * 4 + parts


@pytest.mark.parametrize("missing", ["dout", "dlse"])
def test_a_missing_gradient_stands_for_zeros(missing):
    call = served(Case(seqlen_q=300, seqlen_k=300, head_dim=64, head_dim_v=64, dtype=BF16))
    zeros = call._replace(**{missing: torch.zeros_like(getattr(call, missing))})
    forward = hopper.forward(call.problem, call.inputs)
    problem = dataclasses.replace(call.problem, deterministic=True)
    found = hopper.backward(problem, call.inputs, forward, *call._replace(**{missing: None})[2:], Wanted())
    expected = hopper.backward(problem, call.inputs, forward, *zeros[2:], Wanted())
    assert all(map(torch.equal, found[:3], expected[:3]))


def test_a_dout_that_tma_cannot_address_is_copied():
    call = served(Case(seqlen_q=300, seqlen_k=300, head_dim=64, head_dim_v=64, dtype=BF16, causal=True))
    odd = torch.empty(call.dout.numel() + 1, device="cuda", dtype=BF16)[1:].view(call.dout.shape)
    odd.copy_(call.dout)
    for dout in (odd, call.dout[:, :, :1].expand(-1, -1, 2, -1), call.dout.repeat_interleave(2, -1)[..., ::2]):
        check_call(hopper, call._replace(dout=dout))


def test_only_what_is_wanted_comes_back():
    call = served(Case(seqlen_q=300, seqlen_k=300, head_dim=64, head_dim_v=64, dtype=BF16, causal=True))
    forward = hopper.forward(call.problem, call.inputs)
    both = hopper.backward(call.problem, call.inputs, forward, call.dout, call.dlse, Wanted())
    only = hopper.backward(call.problem, call.inputs, forward, call.dout, call.dlse, Wanted(q=False, v=False))
    assert only.dq is None
    assert only.dv is None
    assert torch.equal(only.dk, both.dk)


def test_a_captured_graph_replays():
    call = served(Case(seqlen_q=512, seqlen_k=512, head_dim=128, head_dim_v=128, dtype=FP16))
    problem = dataclasses.replace(call.problem, deterministic=True)
    forward = hopper.forward(problem, call.inputs)
    run = lambda: hopper.backward(problem, call.inputs, forward, call.dout, call.dlse, Wanted())  # noqa: E731
    expected = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        for x in captured[:3]:
            x.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, captured[:3], expected[:3]))


def test_the_public_call_goes_through_it():
    from tileattn import attention

    case = Case(seqlen_q=300, seqlen_k=300, head_dim=128, head_dim_v=128, dtype=BF16, causal=True)
    call = served(case)
    found = check(hopper, case, "cuda")
    q, k, v = (x.detach().requires_grad_() for x in call.inputs[:3])
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = torch.autograd.grad((out, lse), (q, k, v), (call.dout, call.dlse))
    assert torch.equal(dk, found["dk"])
    assert torch.equal(dv, found["dv"])
    assert torch.allclose(dq.float(), found["dq"].float(), atol=1e-2)
