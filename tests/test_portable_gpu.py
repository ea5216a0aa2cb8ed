"""The Triton backend against the oracle on a GPU: every modifier, size and dtype, and drawn problems. pytest -m gpu"""

import os
from concurrent.futures import ThreadPoolExecutor
from typing import get_args

import pytest
import torch
from oracle import (
    ALL_DIMS,
    FAMILY,
    FAMILY_OF_MODS,
    MODIFIERS,
    MODS,
    SHAPES,
    Case,
    build,
    check,
    check_call,
    draw_family,
    fresh_memory_is_nan,
    meet,
    members,
    wanted,
)

from tileattn.backends import portable
from tileattn.backends.portable import search
from tileattn.backends.portable.tuning import Tile
from tileattn.problem import Problem

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
BASE = Case(seqlen_q=260, seqlen_k=330)
EXAMPLES, FAMILIES = int(os.environ.get("TILEATTN_EXAMPLES", "1024")), 64
FAMILIES_OF = FAMILY | {
    "dtype": tuple(DTYPES),
    "head_dim": (*FAMILY["head_dim"], 80, 128),
    "head_dim_v": (*FAMILY["head_dim_v"], 80, 128),
    **FAMILY_OF_MODS,
}

# (head_dim, head_dim_v)
HEAD_DIMS = [(d, d) for d in (8, 16, 40, 64, 72, 80, 96, 112, 128, 160, 192, 224, 256, 512)]
HEAD_DIMS += [(64, 128), (128, 64), (192, 128), (576, 512), (1, 3)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MODIFIERS | MODS)
def test_oracle_rule_with_each_modifier(name, dtype):
    check(portable, BASE.but(dtype=dtype, head_dim=64, head_dim_v=64).but(**(MODIFIERS | MODS)[name]), "cuda")


@pytest.mark.parametrize("head_dim_v", [64, 128])
@pytest.mark.parametrize("name", MODIFIERS | MODS)
def test_oracle_rule_with_each_modifier_and_larger_heads(name, head_dim_v):
    """Whose tiles hold what stays in registers."""
    case = BASE.but(dtype=torch.bfloat16).but(**(MODIFIERS | MODS)[name])
    check(portable, case.but(head_dim=128, head_dim_v=head_dim_v), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", SHAPES)
def test_oracle_rule_for_odd_sizes(name, dtype):
    check(portable, Case(dtype=dtype).but(**SHAPES[name]), "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(("head_dim", "head_dim_v"), HEAD_DIMS)
def test_oracle_rule_for_head_dims(head_dim, head_dim_v, causal, dtype):
    case = Case(seqlen_q=300, seqlen_k=300, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype, causal=causal)
    check(portable, case, "cuda")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("seqlen", [1024, 2048])
def test_oracle_rule_for_long_sequences(seqlen, head_dim, causal, dtype):
    case = Case(
        batch=1, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=head_dim, head_dim_v=head_dim, dtype=dtype, causal=causal
    )
    check(portable, case, "cuda")


@pytest.mark.parametrize("mask_mod", [None, "documents", "lengths"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_oracle_rule_for_long_block_masks(head_dim, mask_mod):
    """With block sizes of which kernels' tiles are parts."""
    case = Case(seqlen_q=1000, seqlen_k=1024, num_heads=4, head_dim=head_dim, head_dim_v=head_dim, dtype=torch.bfloat16)
    check(portable, case.but(block_size=(128, 128), mask_mod=mask_mod, causal=mask_mod == "lengths"), "cuda")


def test_oracle_rule_for_a_mask_that_heads_share():
    """One that is looked through for its empty and full blocks."""
    call = build(Case(batch=1, seqlen_q=600, seqlen_k=700, num_heads=8, num_heads_k=8, dtype=torch.bfloat16), "cuda")
    rows, cols = torch.arange(600, device="cuda"), torch.arange(700, device="cuda")
    problem, inputs = Problem.of(*call.inputs[:3], mask=rows[:, None] // 150 == cols // 150)
    check_call(portable, call._replace(problem=problem, inputs=inputs))


@pytest.mark.parametrize("family", range(FAMILIES))
def test_oracle_rule_for_any_problem(family):
    """Compiling takes much longer than running: a family is compiled for once and met by many problems."""
    problems = members(draw_family(family, FAMILIES_OF), max_seqlen=300)
    meet(problems, -(-EXAMPLES // FAMILIES), family, lambda case: check(portable, case, "cuda"))


MET = {  # drawn once, and wrong then
    "sigmoid_far_out": Case(
        batch=1, seqlen_q=2, seqlen_k=162, num_heads=2, num_heads_k=1, head_dim=8, head_dim_v=64, dtype=torch.float32,
        causal=True, softcap=2.0, mask=(True, True, True, False), alibi=True, score_mod="causal", mask_mod="lengths",
        block_size=(128, 128), layout="strided",
    ),
    "two_tiles_of_keys": Case(
        batch=1, seqlen_q=1, seqlen_k=65, num_heads=1, num_heads_k=1, head_dim=80, head_dim_v=64, dtype=torch.bfloat16,
        causal=True, window=(1, 0), softcap=2.0, mask=(True, True, False, True), alibi=True, sink=True, dropout_p=0.25,
        score_mod="tanh", layout="strided",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MET)
def test_oracle_rule_for_problems_met_before(name):
    check(portable, MET[name], "cuda")


def test_a_thread_in_which_cuda_has_done_nothing_yet_may_launch():
    """Autograd's is one, when all kernels were loaded in others: by tensors that were not seen before."""
    case = BASE.but(dtype=torch.bfloat16, head_dim=64, head_dim_v=64, alibi=True)
    problem, inputs, dout, dlse = build(case, "cuda")
    moved = inputs._replace(q=inputs.q.clone(), k=inputs.k.clone(), v=inputs.v.clone())

    def results(inputs):
        forward = portable.forward(problem, inputs)
        return (*forward, *portable.backward(problem, inputs, forward, dout, dlse, wanted(inputs)))

    for _ in range(2):  # launches are kept from the second on
        expected = results(inputs)
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(results, moved).result()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True) if x is not None)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_250_repeats_are_bitwise_equal(head_dim):
    case = Case(
        seqlen_q=1000,
        seqlen_k=1100,
        num_heads=8,
        num_heads_k=2,
        head_dim=head_dim,
        head_dim_v=head_dim,
        dtype=torch.bfloat16,
        causal=True,
        bias=(False, True, True, True),
        alibi=True,
        sink=True,
        dropout_p=0.1,
    )
    problem, inputs, dout, dlse = build(case, "cuda")

    def results():
        forward = portable.forward(problem, inputs)
        return (*forward, *portable.backward(problem, inputs, forward, dout, dlse, wanted(inputs)))

    first = results()
    for _ in range(249):
        for x, y in zip(results(), first, strict=True):
            assert torch.equal(x, y)


@pytest.mark.parametrize("mods", [{}, {"block_size": (64, 64), "mask_mod": "documents", "score_mod": "relative"}])
def test_cuda_graph_capture(mods):
    case = BASE.but(dtype=torch.bfloat16, head_dim=64, head_dim_v=64, causal=True).but(**mods)
    problem, inputs, dout, dlse = build(case, "cuda")

    def results():
        forward = portable.forward(problem, inputs)
        return (*forward, *portable.backward(problem, inputs, forward, dout, dlse, wanted(inputs))[:3])

    expected = results()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = results()
    for _ in range(3):
        graph.replay()
    for x, y in zip(captured, expected, strict=True):
        assert torch.equal(x, y)


def test_more_than_2_31_elements():
    """Offsets past 2^31 elements: the last sequence of a long batch must equal itself alone."""
    batch, seqlen, heads, head_dim = 3, 2**15, 16, 2048
    whole = torch.randn(batch, seqlen, heads, head_dim, dtype=torch.bfloat16, device="cuda")
    q, k, v = (whole[:, :256, :, i * 64 : (i + 1) * 64] for i in range(3))
    problem, inputs = tileattn_problem(q, k, v)
    alone = portable.forward(*tileattn_problem(*(x[-1:].contiguous() for x in (q, k, v))))
    assert torch.equal(portable.forward(problem, inputs).out[-1:], alone.out)


def tileattn_problem(q, k, v):
    return Problem.of(q, k, v, causal=True)


def test_every_element_is_written():
    problem, inputs, dout, dlse = build(BASE.but(dtype=torch.bfloat16, bias=ALL_DIMS), "cuda")
    with fresh_memory_is_nan():
        forward = portable.forward(problem, inputs)
        gradients = portable.backward(problem, inputs, forward, dout, dlse, wanted(inputs))
    for x in (*forward, *(g for g in gradients if g is not None)):
        assert not x.isnan().any()


def test_search_for_tiles_compiles_checks_and_times(monkeypatch):
    monkeypatch.setattr(search, "SIZES", (search.Size(512, True),))
    monkeypatch.setattr(search, "TOKENS", 1024)
    tile, too_large = Tile(64, 64, 4, 2), Tile(128, 128, 8, 8)
    trials = [search.Trial(work, 64, t) for work in get_args(search.Work) for t in (tile, too_large)]
    found = {timed.trial: timed for timed in search.search(trials, torch.bfloat16, 1)}
    for trial, timed in found.items():
        if trial.tile == tile:
            assert timed.fault is None
            assert 0 < timed.ms[0] < 100
        else:
            assert "OutOfResources" in timed.fault
            assert timed.ms == []
