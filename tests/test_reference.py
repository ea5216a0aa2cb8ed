"""The oracle against PyTorch's own attention and against a loop that says the formula once more."""

import importlib
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from oracle import FAMILY, draw_family, meet, members

from tileattn.problem import Problem
from tileattn.reference import standard_attention

B, SQ, SK, H, HK, D, DV = 2, 9, 13, 4, 2, 8, 6


def qkv(seqlen_q=SQ, seqlen_k=SK):
    shapes = (B, seqlen_q, H, D), (B, seqlen_k, HK, D), (B, seqlen_k, HK, DV)
    return [torch.randn(shape, dtype=torch.float64) for shape in shapes]


def by_loops(problem, inputs):
    """Row by row, score by score."""
    p, offset = problem, problem.seqlen_k - problem.seqlen_q
    out = torch.zeros(p.batch, p.seqlen_q, p.num_heads, p.head_dim_v, dtype=torch.float64)
    lse = torch.full((p.batch, p.num_heads, p.seqlen_q), -math.inf, dtype=torch.float64)
    for b, h, i in itertools.product(range(p.batch), range(p.num_heads), range(p.seqlen_q)):
        scores = {}
        for j in range(p.seqlen_k):
            far = j - i - offset
            if (p.window_left >= 0 and far < -p.window_left) or (p.window_right >= 0 and far > p.window_right):
                continue
            if (
                inputs.mask is not None
                and not inputs.mask.expand(p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)[b, h, i, j]
            ):
                continue
            s = float(inputs.q[b, i, h] @ inputs.k[b, j, h // p.group]) * p.scale
            if p.softcap:
                s = p.softcap * math.tanh(s / p.softcap)
            if inputs.alibi_slopes is not None:
                s -= float(inputs.alibi_slopes.expand(p.batch, p.num_heads)[b, h]) * abs(far)
            if inputs.bias is not None:
                s += float(inputs.bias.expand(p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)[b, h, i, j])
            scores[j] = s
        sink = [] if inputs.sink is None else [float(inputs.sink[h])]
        total = sum(math.exp(s) for s in [*scores.values(), *sink])
        if total:
            lse[b, h, i] = math.log(total)
        for j, s in scores.items():
            out[b, i, h] += math.exp(s) / total * inputs.v[b, j, h // p.group]
    return out, lse


OPTIONS = [
    {},
    {"causal": True},
    {"window": (2, 1)},
    {"window": (0, 0), "scale": 0.5},
    {"softcap": 0.7},
    {"bias": torch.randn(H, 1, SK, dtype=torch.float64)},
    {"mask": torch.rand(B, 1, SQ, SK) > 0.7},
    {"alibi_slopes": torch.rand(H, dtype=torch.float64)},
    {"sink": torch.randn(H, dtype=torch.float64)},
    {
        "causal": True,
        "softcap": 1.5,
        "bias": torch.randn(SQ, SK, dtype=torch.float64),
        "mask": torch.rand(SQ, SK) > 0.3,
        "alibi_slopes": torch.rand(B, H, dtype=torch.float64),
        "sink": torch.randn(H, dtype=torch.float64),
    },
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda o: "+".join(o) or "plain")
def test_the_formula(options):
    problem, inputs = Problem.of(*qkv(), **options)
    out, lse = by_loops(problem, inputs)
    got = standard_attention(problem, inputs)
    torch.testing.assert_close(got.out, out, atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(got.lse, lse, atol=1e-12, rtol=1e-12)
    rows = got.probs.sum(-1)
    assert (rows < 1 + 1e-12).all()


@pytest.mark.parametrize("causal", [False, True])
def test_torch_agrees(causal):
    q, k, v = qkv(SK, SK)
    problem, inputs = Problem.of(q, k, v, causal=causal)
    theirs = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=causal, enable_gqa=True
    )
    torch.testing.assert_close(standard_attention(problem, inputs).out, theirs.transpose(1, 2))


def test_packed_sequences_equal_each_alone():
    lengths_q, lengths_k = (3, 0, 4, 2), (5, 2, 0, 6)
    q, k, v = torch.randn(9, H, D).double(), torch.randn(13, HK, D).double(), torch.randn(13, HK, DV).double()
    cu_q, cu_k = (torch.tensor([0, *itertools.accumulate(x)], dtype=torch.int32) for x in (lengths_q, lengths_k))
    options = {"causal": True, "bias": torch.randn(H, 4, 6).double(), "dropout_p": 0.3, "dropout_seed": 11}
    packed = standard_attention(*Problem.of(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options))
    for b, (nq, nk) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        rows, cols = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
        # Stand the sequence at batch index b, where its dropout bits live.
        one = [x[None, part].expand(b + 1, -1, -1, -1) for x, part in ((q, rows), (k, cols), (v, cols))]
        alone = standard_attention(*Problem.of(*one, **(options | {"bias": options["bias"][:, :nq, :nk]})))
        torch.testing.assert_close(packed.out[rows], alone.out[b])
        torch.testing.assert_close(packed.lse[:, rows], alone.lse[b])


def test_rows_that_see_nothing_are_zero_and_harmless():
    q, k, v = (x.requires_grad_() for x in qkv(SQ, 4))
    problem, inputs = Problem.of(q, k, v, causal=True)
    got = standard_attention(problem, inputs)
    hidden = SQ - 4
    assert (got.out[:, :hidden] == 0).all()
    assert (got.lse[..., :hidden] == -math.inf).all()
    grads = torch.autograd.grad(got.out.sum() + got.lse[..., hidden:].sum(), (q, k, v))
    assert all(g.isfinite().all() for g in grads)
    assert (grads[0][:, :hidden] == 0).all()


def test_dropout_keeps_the_mean():
    q, k, v = qkv(SQ, 4096)
    plain = standard_attention(*Problem.of(q, k, torch.ones_like(v))).out
    dropped = standard_attention(*Problem.of(q, k, torch.ones_like(v), dropout_p=0.25, dropout_seed=1)).out
    assert not torch.equal(plain, dropped)
    assert abs(dropped.mean() - 1) < 0.02


def test_the_same_problems_are_met_whatever_has_been_imported(tmp_path, monkeypatch):
    def met():
        found = []
        meet(members(draw_family(0, FAMILY), max_seqlen=300), 30, 0, found.append)
        return found

    before = met()
    (tmp_path / "full_of_numbers.py").write_text(f"NUMBERS = {list(range(300))}")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("full_of_numbers")
    assert met() == before
