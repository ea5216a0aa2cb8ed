"""What callers get back from the public functions."""

import pytest
import torch

import tileattn
from tileattn import BlockMask
from tileattn.problem import Problem
from tileattn.reference import standard_attention


def qkv(dtype=torch.float32):
    return [torch.randn(2, s, h, d, dtype=dtype) for s, h, d in ((5, 4, 8), (7, 2, 8), (7, 2, 6))]


def test_the_result_is_out_or_a_named_pair():
    q, k, v = qkv(torch.bfloat16)
    out = tileattn.attention(q, k, v)
    assert isinstance(out, torch.Tensor)
    pair = tileattn.attention(q, k, v, return_lse=True)
    assert isinstance(pair, tileattn.AttentionOutput)
    assert torch.equal(pair.out, out)
    assert out.shape == (2, 5, 4, 6)
    assert out.dtype == torch.bfloat16
    assert pair.lse.shape == (2, 4, 5)
    assert pair.lse.dtype == torch.float32
    assert tileattn.attention(*qkv(torch.float64), return_lse=True).lse.dtype == torch.float64


def test_packed_results_are_packed():
    q, k, v = (x[0] for x in qkv())
    cu_q, cu_k = (torch.tensor(x, dtype=torch.int32) for x in ([0, 2, 5], [0, 7, 7]))
    out, lse = tileattn.attention_varlen(q, k, v, cu_q, cu_k, return_lse=True)
    assert out.shape == (5, 4, 6)
    assert lse.shape == (4, 5)
    assert (out[2:] == 0).all()
    assert (lse[:, 2:] == -torch.inf).all()


def test_the_same_seed_drops_the_same():
    q, k, v = qkv()
    first, second = (tileattn.attention(q, k, v, dropout_p=0.5, dropout_seed=7) for _ in range(2))
    assert torch.equal(first, second)
    as_tensor = tileattn.attention(q, k, v, dropout_p=0.5, dropout_seed=torch.tensor(7))
    assert torch.equal(first, as_tensor)
    assert not torch.equal(first, tileattn.attention(q, k, v, dropout_p=0.5, dropout_seed=8))
    torch.manual_seed(3)
    drawn = tileattn.attention(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(drawn, tileattn.attention(q, k, v, dropout_p=0.5))


def test_backward_drops_what_forward_dropped():
    q, k, v = (x.double().requires_grad_() for x in qkv())
    out = tileattn.attention(q, k, v, dropout_p=0.5, dropout_seed=7)
    problem, inputs = Problem.of(q, k, v, dropout_p=0.5, dropout_seed=7)
    expected = torch.autograd.grad(standard_attention(problem, inputs).out.sum(), (q, k, v))
    for got, want in zip(torch.autograd.grad(out.sum(), (q, k, v)), expected, strict=True):
        torch.testing.assert_close(got, want)


def test_explain_says_who_and_how_much():
    q = torch.randn(1, 512, 8, 64)
    full, causal = tileattn.explain(q, q, q), tileattn.explain(q, q, q, causal=True, return_lse=True)
    assert full.backend == "cpu"
    assert full.standard.held == 2 * 8 * 512 * 512 * 4
    assert full.tiled.held < full.standard.held
    assert causal.tiled.moved < full.tiled.moved < full.standard.moved
    for word in ("backend   cpu", "tiles", "moves", "holds", "standard attention"):
        assert word in str(full)
    diagonal = tileattn.explain(q, q, q, block_mask=BlockMask.from_blocks(torch.eye(4).bool()))
    q_and_out, k_and_v = 2 * q.nbytes + 8 * 512 * 4, 2 * q.nbytes  # lse is float32
    assert (diagonal.tiled.moved - q_and_out) * 4 == full.tiled.moved - q_and_out >= k_and_v


def test_a_named_backend_that_cannot_serve_says_why():
    q = torch.empty(1, 4, 2, 8, device="meta")
    with pytest.raises(ValueError, match="backend='cpu': "):
        tileattn.attention(q, q, q, backend="cpu")
