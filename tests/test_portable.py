"""The Triton backend against the oracle, in Triton's interpreter: TRITON_INTERPRET=1 pytest tests/test_portable.py

The interpreter's tiles are 32 x 32, so that small problems have whole, partial and hidden tiles. It gets bfloat16
products wrong, so that dtype is for the GPU (test_portable_gpu.py).
"""

import dataclasses
import itertools
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from oracle import (
    ALL_DIMS,
    MODIFIERS,
    MODS,
    SHAPES,
    Case,
    build,
    cases,
    check,
    check_call,
    fresh_memory_is_nan,
    wanted,
)

import tileattn
from tileattn.backends import portable
from tileattn.block_mask import FULL, SKIPPED, of_scores
from tileattn.problem import Problem, Wanted
from tileattn.reference import visible

pytest.importorskip("triton")

from tileattn.backends.portable.launch import Launcher
from tileattn.backends.portable.sparsity import list_tiles, with_found_blocks

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
]

SMALL = Case(seqlen_q=70, seqlen_k=90)
DTYPES = [torch.float16, torch.float32]


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, DTYPES[i % 2]) for i, name in enumerate(MODIFIERS | MODS)], ids=lambda x: str(x)
)
def test_oracle_rule_with_each_modifier(name, dtype):
    check(portable, SMALL.but(dtype=dtype).but(**(MODIFIERS | MODS)[name]))


@pytest.mark.parametrize("name", SHAPES)
def test_oracle_rule_for_odd_sizes(name):
    check(portable, SMALL.but(dtype=torch.float16).but(**SHAPES[name]))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cases(dtypes=(torch.float16,), max_seqlen=48, mods=True))
def test_oracle_rule_for_any_problem(case):
    check(portable, case)


def test_pointers_and_descriptors_give_the_same_bits(monkeypatch):
    call = build(SMALL.but(dtype=torch.float16, causal=True, num_heads=4, num_heads_k=2))
    results = []
    for descriptors in (True, False):
        tile = portable.tuning.Tile(32, 32, 1, 1, descriptors)
        monkeypatch.setattr(portable.tuning, "_lookup", lambda *_, tile=tile: tile)
        forward = portable.forward(call.problem, call.inputs)
        gradients = portable.backward(call.problem, call.inputs, forward, call.dout, call.dlse, Wanted())
        results.append((*forward, *gradients[:3]))
    for with_descriptors, with_pointers in zip(*results, strict=True):
        assert torch.equal(with_descriptors, with_pointers)


LISTED = {
    "blocks": {"block_size": (64, 32)},
    "small_blocks": {"block_size": (24, 7), "seqlen_q": 100},
    "blocks_of_mod": {"block_size": (32, 32), "mask_mod": "documents", "window": (40, 9)},
    "varlen": {"lengths_q": (70, 0, 129, 1), "lengths_k": (70, 65, 64, 0), "block_size": (32, 32), "causal": True},
}


@pytest.mark.parametrize("along", ["keys", "rows"])
@pytest.mark.parametrize("name", LISTED)
def test_lists_name_each_tile_that_is_seen_and_what_hides_parts_of_it(name, along):
    problem, inputs, *_ = build(SMALL.but(**LISTED[name]))
    tile = portable.tuning.Tile(32, 16, 1, 1)
    with fresh_memory_is_nan():
        lists = list_tiles(Launcher(problem, inputs), problem, inputs, tile, along)
    unwritten = torch.iinfo(lists.dtype).max
    lengths = [(problem.seqlen_q, problem.seqlen_k)] * len(lists)
    if problem.varlen:
        lengths = list(zip(inputs.cu_seqlens_q.diff().tolist(), inputs.cu_seqlens_k.diff().tolist(), strict=True))
    for (b, h), (rows, cols) in ((at, lengths[at[0]]) for at in itertools.product(*map(range, lists.shape[:2]))):
        in_window = visible(problem, rows, cols, "cpu")
        kinds = of_scores(
            inputs.block_mask[b if len(inputs.block_mask) > 1 else 0, h], problem.block_size, range(rows), range(cols)
        )
        found = {}
        for m, n in itertools.product(range(0, rows, 32), range(0, cols, 16)):
            part = slice(m, m + 32), slice(n, n + 16)
            if (in_window[part] & (kinds[part] != SKIPPED)).any():
                beyond = along == "keys" and n + 16 > cols
                full = bool((kinds[part] == FULL).all())
                whole = full and bool(in_window[part].all()) and not beyond
                block, place = (m // 32, n // 16) if along == "keys" else (n // 16, m // 32)
                found.setdefault(block, ([], []))[0 if whole else 1].append(2 * place + full)
        length = -(-cols // 16) if along == "keys" else -(-rows // 32)
        for block, row in enumerate(lists[b, h].tolist()):
            whole, partial = found.get(block, ([], []))
            assert row[:2] == [len(whole), len(partial)]
            assert row[2 : 2 + len(whole)] == whole
            assert row[2 : 2 + length][length - len(partial) :] == partial[::-1]
            assert unwritten not in (row[2 + len(whole)], row[2 + length]), "where kernels look that have seen all"


def test_bad_cu_seqlens_never_reach_outside_the_tensors():
    """On a GPU the values are not checked before the launch; the interpreter reads out of bounds as a crash or NaN."""
    case = SMALL.but(lengths_q=(40, 30), lengths_k=(50, 40), dtype=torch.float16)
    problem, inputs, dout, dlse = build(case)
    bad = torch.tensor([-7, 1000, 60], dtype=torch.int32)
    inputs = inputs._replace(cu_seqlens_q=bad, cu_seqlens_k=bad)
    forward = portable.forward(problem, inputs)
    portable.backward(problem, inputs, forward, dout, dlse, Wanted())


@pytest.mark.parametrize("lengths", [((70, 70), (88, 88)), ((70, 33), (88, 45))], ids=["full", "shorter"])
def test_a_bias_may_hold_anything_beyond_its_sequences(lengths):
    """88 columns: kernels load them in groups of 8, of which one reaches beyond the 45."""
    lengths_q, lengths_k = lengths
    call = build(SMALL.but(lengths_q=lengths_q, lengths_k=lengths_k, bias=ALL_DIMS, dtype=torch.float16))
    bias = call.inputs.bias.clone()
    for i, (rows, cols) in enumerate(zip(*lengths, strict=True)):
        bias[i, :, rows:] = bias[i, :, :, cols:] = float("nan")
    check_call(portable, call._replace(inputs=call.inputs._replace(bias=bias)))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bias_may_hide_with_the_lowest_number_there_is(dtype):
    """As models do that fill with torch.finfo(dtype).min; a sink keeps the maximum far above."""
    call = build(SMALL.but(bias=ALL_DIMS, sink=True, dtype=dtype))
    bias = call.inputs.bias.masked_fill(torch.arange(90) % 3 == 0, torch.finfo(dtype).min)
    bias[:, :, 40] = torch.finfo(dtype).min
    check_call(portable, call._replace(inputs=call.inputs._replace(bias=bias)))


@pytest.mark.parametrize("columns", [64, 88, 96])
def test_a_table_is_read_where_a_mod_says_though_it_is_loaded_in_groups(columns):
    """Of tables with as many columns as keys, the last tile whole or not, and with more of them."""
    call = build(SMALL.but(seqlen_k=min(columns, 88), dtype=torch.float16, causal=True))
    table, allowed = torch.randn(2, 70, columns).half(), torch.rand(70, columns) < 0.8
    problem, inputs = Problem.of(
        *call.inputs[:3],
        causal=True,
        score_mod=lambda score, b, h, row, col: score * table[h % 2, row, col] + table[0, row, col],
        mask_mod=lambda b, h, row, col: allowed[row, col],
    )
    check_call(portable, call._replace(problem=problem, inputs=inputs))


SHARED = {  # with blocks that are empty, full and neither
    "documents": torch.arange(150)[:, None] // 130 == torch.arange(300) // 130,
    "keys": torch.arange(300)[None, :] < 140,
}


@pytest.mark.parametrize("name", SHARED)
def test_a_mask_that_heads_share_is_looked_through_once_and_obeyed(name):
    call = build(SMALL.but(seqlen_q=150, seqlen_k=300, batch=1, num_heads=8, num_heads_k=8))
    problem, inputs = Problem.of(*call.inputs[:3], mask=SHARED[name])
    _, found = with_found_blocks(problem, inputs)
    assert set(found.block_mask.unique().tolist()) == {0, 1, 2}
    check_call(portable, call._replace(problem=problem, inputs=inputs))


def test_a_mask_of_each_head_is_not_looked_through():
    call = build(SMALL.but(mask=(True, True, True, True)))
    assert with_found_blocks(call.problem, call.inputs)[1].block_mask is None


@pytest.mark.parametrize("missing", ["dout", "dlse"])
def test_either_gradient_may_be_missing(missing):
    call = build(SMALL.but(dtype=torch.float32))
    forward = portable.forward(call.problem, call.inputs)
    both = {"dout": call.dout, "dlse": call.dlse}
    zero = both | {missing: torch.zeros_like(both[missing])}
    got = portable.backward(call.problem, call.inputs, forward, **(both | {missing: None}), wanted=Wanted())
    expected = portable.backward(call.problem, call.inputs, forward, **zero, wanted=Wanted())
    for name in ("dq", "dk", "dv"):
        torch.testing.assert_close(getattr(got, name), getattr(expected, name), rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("name", Wanted._fields)
def test_only_wanted_gradients_come_back(name):
    problem, inputs, dout, dlse = build(SMALL.but(bias=(True, True, True, True), alibi=True, sink=True))
    forward = portable.forward(problem, inputs)
    everything = portable.backward(problem, inputs, forward, dout, dlse, wanted(inputs))
    one = Wanted(**{field: field == name for field in Wanted._fields})
    got = portable.backward(problem, inputs, forward, dout, dlse, one)
    assert [field for field, x in got._asdict().items() if x is not None] == [f"d{name}"]
    assert torch.equal(getattr(got, f"d{name}"), getattr(everything, f"d{name}"))


def test_api_reaches_the_backend_and_differentiates():
    q, k, v = (torch.randn(1, 40, 2, 16, dtype=torch.float32, requires_grad=True) for _ in range(3))
    out = tileattn.attention(q, k, v, causal=True, backend="portable")
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (q, k, v)), is_causal=True
    ).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    for got, want in zip(grads, torch.autograd.grad(expected.sum(), (q, k, v)), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"dtype": torch.float64}, "float64"),
        ({"head_dim": 2048}, "head_dim 2048 is above 1024"),
        ({"device": torch.device("meta")}, "q is on meta"),
    ],
)
def test_refusals_say_why(change, words):
    problem = dataclasses.replace(build(SMALL).problem, **change)
    assert words in portable.supports(problem)
