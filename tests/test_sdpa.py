"""PyTorch's scaled_dot_product_attention and varlen_attn with tileattn active in torch.nn.attention's registry."""

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)
from torch.nn.attention.varlen import varlen_attn

import tileattn
from tileattn import ops
from tileattn.integrations import sdpa

B, H, SQ, SK, D = 2, 4, 40, 50, 16


@pytest.fixture
def active():
    activate_flash_attention_impl("tileattn")
    yield
    restore_flash_attention_impl()


@pytest.fixture
def calls(monkeypatch):
    """Problems that reach tileattn."""
    seen, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda problem, *rest: seen.append(problem) or run(problem, *rest))
    return seen


def qkv(layout="dense", dtype=torch.float32, seqlen_k=SK, heads_k=H, device="cpu"):
    """(batch, heads, seqlen, head_dim). "projected": views of (batch, seqlen, heads, head_dim); "sliced": of tensors
    that hold more."""
    tensors = []
    for seqlen, heads in ((SQ, H), (seqlen_k, heads_k), (seqlen_k, heads_k)):
        if layout == "dense":
            x = torch.randn(B, heads, seqlen, D, dtype=dtype, device=device)
        else:
            x = torch.randn(B, seqlen, heads + (layout == "sliced"), D, dtype=dtype, device=device)
            x = x[:, :, :heads].transpose(1, 2)
        tensors.append(x.requires_grad_())
    return tensors


def out_and_gradients(function, tensors):
    out = function(*tensors)
    return out, *torch.autograd.grad(out, tensors, torch.ones_like(out) * 0.1)


OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "bias": {"attn_mask": torch.randn(SQ, SK)},
    "mask": {"attn_mask": torch.rand(B, 1, SQ, SK) > 0.3},
    "scale": {"scale": 0.2},
    "gqa": {"enable_gqa": True},
}


@pytest.mark.parametrize("layout", ["dense", "projected", "sliced"])
@pytest.mark.parametrize("name", OPTIONS)
def test_sdpa_on_the_cpu_is_ours_and_gives_the_same(name, layout, calls):
    tensors = qkv(layout, heads_k=2 if name == "gqa" else H)

    def run(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **OPTIONS[name])

    expected = out_and_gradients(run, tensors)
    assert calls == []
    activate_flash_attention_impl("tileattn")
    try:
        got = out_and_gradients(run, tensors)
    finally:
        restore_flash_attention_impl()
    assert len(calls) == 1
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)
    out_and_gradients(run, tensors)
    assert len(calls) == 1, "restoring gives PyTorch's own back"


@pytest.mark.parametrize("seqlen_k", [SQ - 13, SQ, SQ + 13])
def test_sdpa_is_causal_from_the_top_left(seqlen_k, active, calls):
    q, k, v = tensors = qkv(seqlen_k=seqlen_k)
    seen = torch.ones(SQ, seqlen_k, dtype=torch.bool).tril()
    got = out_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), tensors)
    scores = (q @ k.transpose(-1, -2) * D**-0.5).masked_fill(~seen, float("-inf"))
    expected = scores.softmax(-1) @ v
    assert len(calls) == 1
    for g, e in zip(
        got, (expected, *torch.autograd.grad(expected, tensors, torch.ones_like(expected) * 0.1)), strict=True
    ):
        torch.testing.assert_close(g, e)


@pytest.mark.parametrize("layout", ["dense", "projected", "sliced"])
def test_compiled_sdpa_is_ours(layout, active, calls):
    torch._dynamo.reset()
    tensors = qkv(layout)

    def run(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2).sin()

    expected = out_and_gradients(run, tensors)
    got = out_and_gradients(torch.compile(run, fullgraph=True, backend="aot_eager"), tensors)
    assert len(calls) == 2
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def packed():
    tensors = [torch.randn(n, H, D, requires_grad=True) for n in (SQ, SK, SK)]
    return tensors, [torch.tensor(cu, dtype=torch.int32) for cu in ([0, 15, SQ], [0, 20, SK])]


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (7, 3)])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_varlen_attn_is_ours(window, compiled, active, calls):
    torch._dynamo.reset()
    tensors, (cu_q, cu_k) = packed()

    def run(q, k, v):
        return varlen_attn(q, k, v, cu_q, cu_k, 25, 30, window_size=window)

    got = out_and_gradients(torch.compile(run, fullgraph=True, backend="aot_eager") if compiled else run, tensors)
    assert len(calls) == 1
    expected = out_and_gradients(lambda q, k, v: tileattn.attention_varlen(q, k, v, cu_q, cu_k, window=window), tensors)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)


def test_varlen_attn_reads_pages_and_used_keys(active):
    (q, k, v), (cu_q, cu_k) = packed()
    used = torch.tensor([20, 30], dtype=torch.int32)
    table = torch.tensor([[3, 0, 0], [1, 4, 2]], dtype=torch.int32)
    pages = torch.zeros(2, 5, 12, H, D)
    for x, into in zip((k, v), pages, strict=True):
        for b, (start, stop) in enumerate([(0, 20), (20, SK)]):
            rows = (table[b].long()[:, None] * 12 + torch.arange(12)).flatten()[: stop - start]
            into.flatten(0, 1)[rows] = x[start:stop].detach()
    with torch.no_grad():
        got = varlen_attn(q, *pages, cu_q, None, 25, 30, seqused_k=used, block_table=table, window_size=(-1, 0))
        expected = varlen_attn(q, k, v, cu_q, cu_k, 25, 30, window_size=(-1, 0))
    torch.testing.assert_close(got, expected)


@pytest.fixture
def cuda_functions_on_the_cpu():
    """What is registered for CUDA's operators, under the CPU's key, where those have no kernel."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", sdpa._sdpa_forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", sdpa._sdpa_backward, "CPU")
    yield torch.ops.aten._scaled_dot_product_flash_attention
    library._destroy()


def test_the_operator_of_cuda_differentiates(cuda_functions_on_the_cpu):
    tensors = qkv("projected", seqlen_k=SQ)
    got = out_and_gradients(lambda *x: cuda_functions_on_the_cpu(*x, 0.0, True)[0], tensors)
    expected = out_and_gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), tensors)
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e)
        assert g.stride() == e.stride()


def test_the_operator_of_cuda_drops_in_backward_what_it_dropped_in_forward(cuda_functions_on_the_cpu):
    q, k, v = tensors = qkv(seqlen_k=SQ)
    out, lse, _, _, max_q, max_k, rng_state, _, _ = cuda_functions_on_the_cpu(q, k, v, 0.3)
    assert (max_q, max_k) == (SQ, SQ)
    seed = rng_state.view(torch.int64)[:1]
    ours = [x.transpose(1, 2) for x in tensors]
    expected, expected_lse = tileattn.attention(*ours, dropout_p=0.3, dropout_seed=seed, return_lse=True)
    torch.testing.assert_close(out, expected.transpose(1, 2))
    torch.testing.assert_close(lse, expected_lse)
    for g, e in zip(torch.autograd.grad(out.sum(), tensors), torch.autograd.grad(expected.sum(), tensors), strict=True):
        torch.testing.assert_close(g, e)


def test_a_row_that_sees_nothing_has_lse_plus_infinity(cuda_functions_on_the_cpu):
    q, k, v = qkv(seqlen_k=SQ - 4)
    out, lse, *_ = cuda_functions_on_the_cpu(q, k, v, 0.0, True)
    assert (lse[:, :, :4] == float("inf")).all()
    assert (out[:, :, :4] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_the_debug_mask_says_what_was_dropped(cuda_functions_on_the_cpu):
    q, k, v = qkv(seqlen_k=SQ)
    out, *_, mask = cuda_functions_on_the_cpu(q, k, v, 0.3, True, True)
    signed = mask[:, :, :SQ, :SQ]
    probs = signed.abs() / signed.abs().sum(-1, keepdim=True)
    torch.testing.assert_close(out, (probs * (signed > 0) / 0.7) @ v)
    assert 0.2 < (signed < 0).sum() / (signed != 0).sum() < 0.4


def test_nothing_is_active_after_import():
    code = """
import tileattn
from torch.nn.attention import current_flash_attention_impl, list_flash_attention_impls
assert "tileattn" in list_flash_attention_impls()
assert current_flash_attention_impl() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_registry_says_what_is_active(active):
    assert current_flash_attention_impl() == "tileattn"


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.2}], ids=["plain", "causal", "dropout"])
def test_sdpa_on_a_gpu_is_ours(options, compiled, calls):
    torch._dynamo.reset()
    tensors = qkv("projected", torch.bfloat16, seqlen_k=SQ, device="cuda")

    def run(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, **options)

    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        expected = out_and_gradients(run, tensors)
        activate_flash_attention_impl("tileattn")
        try:
            got = out_and_gradients(torch.compile(run, fullgraph=True) if compiled else run, tensors)
        finally:
            restore_flash_attention_impl()
    assert len(calls) == 1
    if "dropout_p" not in options:
        for g, e in zip(got, expected, strict=True):
            torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2)
