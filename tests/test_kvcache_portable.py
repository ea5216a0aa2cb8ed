"""The Triton kernels of a cache against the oracle, in the interpreter: TRITON_INTERPRET=1 pytest
tests/test_kvcache_portable.py"""

import os

import pytest
import torch
from cache_oracle import BASE, CASES, build, cache_cases, check
from hypothesis import HealthCheck, given, settings

import tileattn
from tileattn.backends.portable import kvcache as portable
from tileattn.kvcache_ops import run

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"),
    pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array:DeprecationWarning"),
]
DTYPES = [torch.float16, torch.float32]
LONG = BASE.but(lengths=(500, 33, 250, 0), capacity=512, page_size=16, dtype=torch.float16)


@pytest.mark.parametrize(("name", "dtype"), [(n, DTYPES[i % 2]) for i, n in enumerate(CASES)], ids=lambda x: str(x))
def test_oracle_rule(name, dtype):
    check(portable, BASE.but(dtype=dtype).but(**CASES[name]))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(case=cache_cases(dtypes=(torch.float16, torch.float32), max_length=70))
def test_oracle_rule_for_any_call(case):
    check(portable, case)


@pytest.mark.parametrize("multiprocessors", [1, 4, 50])
@pytest.mark.parametrize("changes", [{}, {"seqlen_q": 20, "window": (300, 0)}, {"sink": True, "softcap": 2.0}])
def test_oracle_rule_however_keys_are_split(multiprocessors, changes, monkeypatch):
    monkeypatch.setattr(portable, "_multiprocessors", lambda device: multiprocessors)
    monkeypatch.setattr(portable, "MIN_SPLIT", 32)
    monkeypatch.setattr(portable, "_plan", portable._plan.__wrapped__)
    check(portable, LONG.but(**changes))


@pytest.mark.parametrize("lengths", [(500, 33, 250, 0), (500,), (7, 500)])
def test_a_fixed_split_makes_a_sequence_independent_of_its_batch(lengths):
    case = LONG.but(lengths=lengths, split_size=128)
    (q, k_cache, v_cache, _, _), options = build(case)
    out, lse = tileattn.attention_with_kvcache(q, k_cache, v_cache, **options, return_lse=True, backend="portable")
    b = lengths.index(500)
    alone = options | {name: options[name][b : b + 1] for name in ("cache_seqlens", "block_table")}
    got = tileattn.attention_with_kvcache(q[b : b + 1], k_cache, v_cache, **alone, return_lse=True, backend="portable")
    assert torch.equal(got.out[0], out[b])
    assert torch.equal(got.lse[0], lse[b])


def test_bad_lengths_and_tables_never_reach_outside_the_cache():
    """On a GPU values are not checked before the launch; the interpreter reads out of bounds as a crash or NaN."""
    problem, inputs = build(BASE.but(page_size=16, new=3, seqlen_q=3, dtype=torch.float16)).problem()
    caches = {name: torch.zeros_like(getattr(inputs, name)) for name in ("k_cache", "v_cache")}
    bad = {
        "table": torch.full_like(inputs.table, 10**6),
        "cache_seqlens": torch.tensor([10**6, -5, 95], dtype=torch.int32),
        "leftpad": torch.tensor([-3, 7, 10**6], dtype=torch.int32),
    }
    out, lse = run(problem, inputs._replace(**caches, **bad), "portable")
    assert out.isfinite().all()
    assert not lse.isnan().any()
    bad_rows = torch.tensor([-7, 1000, 4, 2], dtype=torch.int32)
    packed = BASE.but(lengths_q=(4, 0, 9), new_lengths=(4, 0, 9), dtype=torch.float16)
    problem, inputs = build(packed).problem()
    inputs = inputs._replace(cu_seqlens_q=bad_rows, cu_seqlens_k=bad_rows)
    run(problem, inputs, "portable")


def test_refusals_say_why():
    problem, _ = build(BASE).problem()
    change = {"dtype": (torch.float64, "float64"), "head_dim": (2048, "above 1024"), "batch": (5000, "above 4096")}
    for name, (value, words) in change.items():
        changed = type(problem)(**{**vars(problem), name: value})
        assert words in portable.supports(changed)
