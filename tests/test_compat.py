"""tileattn.compat: flash_attn's functions keep flash_attn's signatures, returns and conventions."""

import inspect
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import tileattn
from tileattn.compat import flash_attn, flash_attn_interface
from tileattn.compat.flash_attn import bert_padding
from tileattn.compat.flash_attn import flash_attn_interface as private
from tileattn.compat.flash_attn.layers import rotary
from tileattn.compat.flash_attn.ops.triton.rotary import apply_rotary

B, SQ, SK, H, HK, D = 2, 21, 30, 4, 2, 16
COMMON = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
LENGTHS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
SIGNATURES = {
    "flash_attn_func": f"q, k, v, {COMMON}",
    "flash_attn_kvpacked_func": f"q, kv, {COMMON}",
    "flash_attn_qkvpacked_func": f"qkv, {COMMON}",
    "flash_attn_varlen_func": f"q, k, v, {LENGTHS}, {COMMON}, block_table=None",
    "flash_attn_varlen_kvpacked_func": f"q, kv, {LENGTHS}, {COMMON}",
    "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {COMMON}",
    "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
    "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, "
    "window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
    "return_softmax_lse=False",
    "_flash_attn_forward": "q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, "
    "alibi_slopes, return_softmax",
    "_flash_attn_varlen_forward": f"q, k, v, {LENGTHS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
    "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
    "seqused_k=None, zero_tensors=False",
    "_flash_attn_backward": "dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, "
    "window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None",
    "_flash_attn_varlen_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {LENGTHS}, dropout_p, softmax_scale, "
    "causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, "
    "zero_tensors=False",
}


def qkv(dtype=torch.float32, seqlen_q=SQ, seqlen_k=SK):
    shapes = (B, seqlen_q, H, D), (B, seqlen_k, HK, D), (B, seqlen_k, HK, D)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def packed():
    q, k, v = (torch.randn(n, h, D, requires_grad=True) for n, h in ((SQ, H), (SK, HK), (SK, HK)))
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32) for cu in ([0, 8, SQ], [0, 20, SK]))
    return (q, k, v), (cu_q, cu_k, 13, 20)


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_flash_attn_2(name):
    parameters = inspect.signature(getattr(private, name)).parameters.values()
    shown = ", ".join(p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in parameters)
    assert shown == SIGNATURES[name]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({}, {}),
        ({"causal": True, "softmax_scale": 0.3}, {"causal": True, "scale": 0.3}),
        ({"window_size": (5, -7)}, {"window": (5, -1)}),
        ({"window_size": torch.tensor([3, 2]), "softcap": 2.0}, {"window": (3, 2), "softcap": 2.0}),
        ({"alibi_slopes": torch.rand(B, H), "causal": True}, None),
    ],
)
def test_options_mean_the_same(theirs, ours):
    ours = {"alibi_slopes": theirs["alibi_slopes"], "causal": True} if ours is None else ours
    q, k, v = qkv()
    out, lse, dropped = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **theirs)
    expected = tileattn.attention(q, k, v, return_lse=True, **ours)
    assert torch.equal(out, expected.out)
    assert torch.equal(lse, expected.lse)
    assert dropped.shape == (0,)


def test_packed_tensors_are_views_of_q_k_and_v():
    kv = torch.randn(B, SK, 2, HK, D, requires_grad=True)
    q = torch.randn(B, SQ, H, D)
    out = flash_attn.flash_attn_kvpacked_func(q, kv, causal=True)
    assert torch.equal(out, flash_attn.flash_attn_func(q, kv[:, :, 0], kv[:, :, 1], causal=True))
    out.sum().backward()
    assert kv.grad.abs().amax((0, 1, 3, 4)).min() > 0
    stacked = torch.randn(B, SQ, 3, H, D)
    out = flash_attn.flash_attn_qkvpacked_func(stacked, 0.0, None, True)
    assert torch.equal(out, flash_attn.flash_attn_func(*stacked.unbind(2), causal=True))
    cu = torch.tensor([0, 4, SQ], dtype=torch.int32)
    out = flash_attn.flash_attn_varlen_qkvpacked_func(stacked[0], cu, 17)
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(*stacked[0].unbind(1), cu, cu, 17, 17))
    (q, k, v), lengths = packed()
    out = flash_attn.flash_attn_varlen_kvpacked_func(q, torch.stack([k, v], 1), *lengths)
    assert torch.equal(out, flash_attn.flash_attn_varlen_func(q, k, v, *lengths))


def test_a_row_that_sees_nothing_has_lse_plus_infinity_and_out_zero():
    q, k, v = qkv(seqlen_q=SK + 3)
    out, lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    assert (lse[:, :, :3] == float("inf")).all()
    assert lse[:, :, 3:].isfinite().all()
    assert (out[:, :3] == 0).all()


@pytest.mark.parametrize("varlen", [False, True])
def test_dropped_probabilities_say_what_was_dropped(varlen):
    p = 0.3
    torch.manual_seed(2)
    if varlen:
        tensors, lengths = packed()
        q, k, v = tensors
        out, _, dropped = flash_attn.flash_attn_varlen_func(*tensors, *lengths, p, causal=True, return_attn_probs=True)
        pieces = [
            (q[None, :8], k[None, :20], v[None, :20], out[None, :8]),
            (q[None, 8:], k[None, 20:], v[None, 20:], out[None, 8:]),
        ]
    else:
        q, k, v = qkv()
        out, _, dropped = flash_attn.flash_attn_func(q, k, v, p, causal=True, return_attn_probs=True)
        pieces = [tuple(x[b : b + 1] for x in (q, k, v, out)) for b in range(B)]
    assert dropped.shape == (2, H, 128, 128)
    for b, (q, k, v, out) in enumerate(pieces):
        signed = dropped[b : b + 1, :, : q.shape[1], : k.shape[1]]
        probs = signed.abs() / signed.abs().sum(-1, keepdim=True).clamp(min=1e-37)
        kept = probs * (signed > 0) / (1 - p)
        expected = (kept @ v.transpose(1, 2).repeat_interleave(H // HK, 1)).transpose(1, 2)
        torch.testing.assert_close(out, expected)
        assert 0.2 < (signed < 0).sum() / (signed != 0).sum() < 0.4


def test_the_same_generator_state_drops_the_same():
    q, k, v = qkv()
    torch.manual_seed(5)
    first = flash_attn.flash_attn_func(q, k, v, 0.4)
    torch.manual_seed(5)
    assert torch.equal(first, flash_attn.flash_attn_func(q, k, v, 0.4))
    assert not torch.equal(first, flash_attn.flash_attn_func(q, k, v, 0.4))


def test_compile_gives_the_same_without_a_graph_break():
    torch._dynamo.reset()
    dense, (tensors, lengths) = qkv(), packed()

    def run(q, k, v):
        return flash_attn.flash_attn_func(q, k, v, causal=True, window_size=(9, -1)) * 2

    def run_varlen(q, k, v):
        return flash_attn.flash_attn_varlen_func(q, k, v, *lengths, causal=True, return_attn_probs=True)[1]

    for function, args in ((run, dense), (run_varlen, tensors)):
        got = torch.compile(function, fullgraph=True, backend="aot_eager")(*args)
        expected = function(*args)
        torch.testing.assert_close(got, expected)
        for g, e in zip(*(torch.autograd.grad(x.sum(), args[:2]) for x in (got, expected)), strict=True):
            torch.testing.assert_close(g, e)


def keywords(**changes):
    base = {"softmax_scale": D**-0.5, "causal": True, "window_size_left": -1, "window_size_right": -1}
    return base | {"dropout_p": 0.0, "softcap": 0.0, "alibi_slopes": None} | changes


def test_private_forward_and_backward_are_the_public_function():
    q, k, v = (x.detach() for x in qkv())
    args = keywords(dropout_p=0.2)
    out, lse, dropped, rng_state = private._flash_attn_forward(q=q, k=k, v=v, return_softmax=True, **args)
    assert dropped.shape == (B, H, 128, 128)
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    named = dict(zip(("dq", "dk", "dv"), gradients, strict=True))
    softmax_d = private._flash_attn_backward(
        dout=dout, q=q, k=k, v=v, out=out, softmax_lse=lse, deterministic=True, rng_state=rng_state, **named, **args
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = tileattn.attention(*leaves, causal=True, dropout_p=0.2, dropout_seed=rng_state[:1])
    assert torch.equal(out, expected)
    for got, want in zip(gradients, torch.autograd.grad(expected, leaves, dout), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(softmax_d[:, :, :SQ], (dout * out).sum(-1).transpose(1, 2))
    assert softmax_d.shape == (B, H, 128)


def test_private_varlen_functions_are_the_public_one():
    tensors, lengths = packed()
    q, k, v = (x.detach() for x in tensors)
    out, lse, dropped, rng_state = private._flash_attn_varlen_forward(q, k, v, *lengths, **keywords())
    assert dropped.shape == (0,)
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    softmax_d = private._flash_attn_varlen_backward(
        dout, q, k, v, out, lse, *gradients, *lengths, deterministic=False, rng_state=rng_state, **keywords()
    )
    expected = flash_attn.flash_attn_varlen_func(*tensors, *lengths, causal=True)
    assert torch.equal(out, expected)
    for got, want in zip(gradients, torch.autograd.grad(expected, tensors, dout), strict=True):
        torch.testing.assert_close(got, want)
    torch.testing.assert_close(softmax_d, (dout * out).sum(-1).t())


def test_parts_of_the_keys_combine_as_ring_attention_combines_them():
    """Two blocks of keys; the merged lse goes into the backward of each."""
    q, k, v = (x.detach() for x in qkv())
    blocks = [slice(0, 13), slice(13, SK)]
    full = keywords(causal=False)
    parts = [private._flash_attn_forward(q, k[:, b], v[:, b], return_softmax=False, **full)[:2] for b in blocks]
    lse = torch.stack([lse for _, lse in parts]).logsumexp(0)
    out = sum(o * (part - lse).exp().transpose(1, 2)[..., None] for o, part in parts)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    expected = tileattn.attention(*leaves)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(expected, leaves, dout)
    dq = 0
    for b in blocks:
        gradients = [torch.empty_like(x) for x in (q, k[:, b], v[:, b])]
        private._flash_attn_backward(dout, q, k[:, b], v[:, b], out, lse, *gradients, deterministic=False, **full)
        dq = dq + gradients[0]
        torch.testing.assert_close(gradients[1], want[1][:, b])
        torch.testing.assert_close(gradients[2], want[2][:, b])
    torch.testing.assert_close(dq, want[0])


def cached(seqlen_q=3, new=3):
    """q, caches, new k and v, and the lengths of the cached sequences."""
    caches = torch.randn(2, B, 32, HK, D)
    q, k, v = torch.randn(B, seqlen_q, H, D), torch.randn(B, new, HK, D), torch.randn(B, new, HK, D)
    return (q, *caches.unbind(0), k, v), torch.tensor([20, 7], dtype=torch.int32)


@pytest.mark.parametrize("package", [flash_attn, flash_attn_interface])
@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_cached_keys(package, num_splits):
    args, lengths = cached()
    ours = tuple(x.clone() for x in args)
    out, lse = package.flash_attn_with_kvcache(
        *args, cache_seqlens=lengths, causal=True, window_size=(11, 5), num_splits=num_splits, return_softmax_lse=True
    )
    expected = tileattn.attention_with_kvcache(
        *ours, cache_seqlens=lengths, causal=True, window=(11, 5), return_lse=True
    )
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse)
    assert torch.equal(args[1], ours[1])
    assert not out.requires_grad


def test_cached_keys_a_row_that_sees_nothing_has_lse_plus_infinity():
    (q, k_cache, v_cache, _, _), lengths = cached()
    lengths[1] = 0
    out, lse = flash_attn.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, return_softmax_lse=True)
    assert (lse[1] == float("inf")).all()
    assert (out[1] == 0).all()


def test_flash_attn_3_gives_a_row_that_sees_nothing_lse_minus_infinity():
    q, k, v = qkv()
    options = {"causal": True, "return_attn_probs": True}
    parts = [flash_attn_interface.flash_attn_func(q, k[:, :5], v[:, :5], **options) for _ in range(2)]
    assert (parts[0][1][:, :, : SQ - 5] == float("-inf")).all()
    outs, lses = torch.stack([out for out, _ in parts]), torch.stack([lse.transpose(1, 2) for _, lse in parts])
    assert (flash_attn_interface.flash_attn_combine(outs, lses)[0][:, : SQ - 5] == 0).all()
    (q, k_cache, v_cache, _, _), lengths = cached()
    call = {"cache_seqlens": lengths * 0, "return_softmax_lse": True}
    assert (flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, **call)[1] == float("-inf")).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("module", [flash_attn, flash_attn_interface])
def test_cached_keys_and_faulty_rotary_embedding(module, causal):
    (q, k_cache, v_cache, k, v), lengths = cached()
    call = {"rotary_cos": torch.ones(5, 4), "rotary_sin": torch.zeros(5, 4), "causal": causal}
    with pytest.raises(TypeError, match="rotary_cos: nothing is appended"):
        module.flash_attn_with_kvcache(q, k_cache, v_cache, cache_seqlens=lengths, **call)
    with pytest.raises(ValueError, match="rotary_cos: 5 positions, but the last of q or k is at position"):
        module.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, **call)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_cached_keys_and_rotary_embedding(causal, interleaved):
    """Neither causal nor windowed, flash_attn turns all rows of q by the angle of one position."""
    args, lengths = cached()
    angle = torch.rand(40, 4) * 6
    cos, sin = angle.cos(), angle.sin()
    q, k_cache, v_cache, k, v = (x.clone() for x in args)
    out = flash_attn.flash_attn_with_kvcache(*args, cos, sin, lengths, causal=causal, rotary_interleaved=interleaved)
    if causal:
        q = rotary.apply_rotary_emb(q, cos, sin, interleaved, seqlen_offsets=lengths)
    else:
        rows = [
            rotary.apply_rotary_emb(q[:, i : i + 1], cos, sin, interleaved, seqlen_offsets=lengths) for i in range(3)
        ]
        q = torch.cat(rows, 1)
    k = rotary.apply_rotary_emb(k, cos, sin, interleaved, seqlen_offsets=lengths)
    expected = tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths, causal=causal)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(args[1], k_cache)


@pytest.mark.parametrize(("module", "wide"), [(flash_attn, (32, 32)), (flash_attn_interface, (31, 2))])
def test_a_window_too_wide_to_hide_anything_is_none_to_the_rotary_embedding(module, wide):
    """Of 32 places in the cache and 3 rows."""
    args, lengths = cached()
    angle = torch.rand(40, 4) * 6
    call = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "cache_seqlens": lengths}
    windows = (-1, -1), wide, (wide[0] - 1, wide[1])
    without, with_wide, narrower = (
        module.flash_attn_with_kvcache(*(x.clone() for x in args), window_size=window, **call) for window in windows
    )
    assert torch.equal(without, with_wide)
    assert not torch.allclose(without, narrower)


def test_flash_attn_3_counts_positions_from_rotary_seqlens_and_takes_packed_queries():
    (q, k_cache, v_cache, k, v), lengths = cached()
    angle = torch.rand(60, 4)
    cos, sin = angle.cos(), angle.sin()
    start = lengths + 9
    cu = torch.tensor([0, 3, 6], dtype=torch.int32)
    ours = k_cache.clone(), v_cache.clone()
    out = flash_attn_interface.flash_attn_with_kvcache(
        *(x.flatten(0, 1) if i in (0, 3, 4) else x for i, x in enumerate((q, k_cache, v_cache, k, v))),
        rotary_cos=cos, rotary_sin=sin, cache_seqlens=lengths, rotary_seqlens=start, rotary_interleaved=False,
        cu_seqlens_q=cu, cu_seqlens_k_new=cu, max_seqlen_q=3, causal=True,
        scheduler_metadata=flash_attn_interface.get_scheduler_metadata(2, 3, 32, H, HK, D, lengths),
    )  # fmt: skip
    q, k = (rotary.apply_rotary_emb(x, cos, sin, seqlen_offsets=start) for x in (q, k))
    expected = tileattn.attention_with_kvcache(q, *ours, k, v, cache_seqlens=lengths, causal=True)
    torch.testing.assert_close(out, expected.flatten(0, 1))
    with pytest.raises(NotImplementedError, match="qv"):
        flash_attn_interface.flash_attn_with_kvcache(q, k_cache, v_cache, qv=q)


def same_chunk(rows, keys, chunk):
    """bool (rows, keys), the last row at the last key."""
    return (torch.arange(keys - rows, keys)[:, None] // chunk) == torch.arange(keys) // chunk


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (9, 3)}])
@pytest.mark.parametrize("rows", [SQ, SK + 5])
def test_attention_chunk_shows_a_row_the_keys_of_its_chunk(chunk, options, rows):
    q, k, v = qkv(seqlen_q=rows)
    ours = {name.removesuffix("_size"): value for name, value in options.items()}
    out = flash_attn_interface.flash_attn_func(q, k, v, attention_chunk=chunk, **options)
    torch.testing.assert_close(out, tileattn.attention(q, k, v, mask=same_chunk(rows, SK, chunk), **ours))
    (q, k, v), (cu_q, cu_k, *longest) = packed()
    out = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, cu_q, cu_k, *longest, attention_chunk=chunk, seqused_k=torch.tensor([20, 6]), **options
    )
    for rows, keys in ((slice(0, 8), slice(0, 20)), (slice(8, SQ), slice(20, 26))):
        mask = same_chunk(rows.stop - rows.start, keys.stop - keys.start, chunk)
        alone = tileattn.attention(q[None, rows], k[None, keys], v[None, keys], mask=mask, **ours)
        torch.testing.assert_close(out[rows], alone[0])


@pytest.mark.parametrize("chunk", [1, 7, 100])
@pytest.mark.parametrize("queries", ["padded", "packed", "packed like keys"])
def test_attention_chunk_in_a_cache(chunk, queries):
    (q, k_cache, v_cache, k, v), lengths = cached()
    leftpad = torch.tensor([4, 0], dtype=torch.int32)
    cu = torch.tensor([0, 1, 4], dtype=torch.int32)
    first = [0, 0] if queries == "padded" else [2, 0]  # of q and k
    where = {} if queries == "padded" else {"cu_seqlens_q": cu, "max_seqlen_q": 3}
    if queries == "packed":
        where["cu_seqlens_k_new"] = cu
    given = [x if queries == "padded" else torch.cat([x[0, 2:], x[1]]) for x in (q, k, v)]
    out = flash_attn_interface.flash_attn_with_kvcache(
        given[0], k_cache, v_cache, *given[1:], cache_seqlens=lengths, cache_leftpad=leftpad, causal=True,
        attention_chunk=chunk, **where,
    )  # fmt: skip
    outs = out if queries == "padded" else (out[:1], out[1:])
    for b in range(B):
        new = 3 - first[b]
        keys, values = (x[b : b + 1, leftpad[b] : lengths[b] + new] for x in (k_cache, v_cache))
        mask = same_chunk(new, keys.shape[1], chunk)
        alone = tileattn.attention(q[b : b + 1, first[b] :], keys, values, causal=True, mask=mask)
        torch.testing.assert_close(outs[b], alone[0])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_block_table_says_where_the_keys_are(page_size):
    (q, k, v), lengths = packed()
    pages = -(-20 // page_size)
    table = torch.randperm(3 * pages, dtype=torch.int32)[: 2 * pages].view(2, pages)
    k_pages, v_pages = (torch.randn(3 * pages, page_size, HK, D) for _ in range(2))
    for b, (start, stop) in enumerate([(0, 20), (20, SK)]):
        for paged, x in ((k_pages, k), (v_pages, v)):
            rows = torch.zeros(pages * page_size, HK, D)
            rows[: stop - start] = x[start:stop].detach()
            paged[table[b].long()] = rows.view(pages, page_size, HK, D)
    expected, expected_lse, _ = flash_attn.flash_attn_varlen_func(
        q, k, v, *lengths, causal=True, return_attn_probs=True
    )
    args = q, k_pages, v_pages, *lengths
    with torch.no_grad():  # from the cache
        out = flash_attn.flash_attn_varlen_func(*args, causal=True, block_table=table)
    torch.testing.assert_close(out, expected)
    out, lse, _ = flash_attn.flash_attn_varlen_func(*args, causal=True, block_table=table, return_attn_probs=True)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    out.sum().backward()
    assert q.grad.abs().sum() > 0
    with pytest.raises(ValueError, match="block_table: entry -"):
        flash_attn.flash_attn_varlen_func(*args, block_table=table - 3 * pages)


def test_only_used_rows_count():
    (q, k, v), lengths = packed()
    leftpad, seqused = torch.tensor([2, 0], dtype=torch.int32), torch.tensor([15, 7], dtype=torch.int32)
    out = private._flash_attn_varlen_forward(
        q.detach(), k, v, *lengths, **keywords(), leftpad_k=leftpad, seqused_k=seqused
    )[0]
    for rows, cols in ((slice(0, 8), slice(2, 15)), (slice(8, SQ), slice(20, 27))):
        alone = tileattn.attention(q[None, rows], k[None, cols], v[None, cols], causal=True)[0]
        torch.testing.assert_close(out[rows], alone)


def test_flash_attn_3_names():
    q, k, v = qkv()
    expected, expected_lse, _ = flash_attn.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    out, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True, num_splits=3)
    assert torch.equal(out, expected)
    assert torch.equal(lse, expected_lse)
    qkv_heads = torch.cat([q[:, :, :], *(x[:, :SQ] for x in (k, v))], 2)
    packed_out = flash_attn_interface.flash_attn_qkvpacked_func(qkv_heads, causal=True, num_heads_q=H)
    assert torch.equal(packed_out, flash_attn.flash_attn_func(q, k[:, :SQ], v[:, :SQ], causal=True))
    for name, value in {"qv": q, "k_descale": q}.items():
        with pytest.raises(NotImplementedError, match=f"{name}: tileattn's flash_attn_interface has no {name}"):
            flash_attn_interface.flash_attn_func(q, k, v, **{name: value})


def test_flash_attn_3_counts_only_used_rows_of_q_and_k():
    (q, k, v), lengths = packed()
    used_q, used_k = torch.tensor([5, 13], dtype=torch.int32), torch.tensor([20, 4], dtype=torch.int32)
    out, lse = flash_attn_interface.flash_attn_varlen_func(
        q, k, v, *lengths, seqused_q=used_q, seqused_k=used_k, return_attn_probs=True
    )
    for rows, cols in ((slice(0, 5), slice(0, 20)), (slice(8, SQ), slice(20, 24))):
        alone = tileattn.attention(q[None, rows], k[None, cols], v[None, cols], return_lse=True)
        torch.testing.assert_close(out[rows], alone.out[0])
        torch.testing.assert_close(lse[:, rows], alone.lse[0])
    assert (out[5:8] == 0).all()
    assert (lse[:, 5:8] == float("-inf")).all()
    for faulty in (used_k + 1, used_k - 5):
        with pytest.raises(ValueError, match="seqused, leftpad: rows"):
            flash_attn_interface.flash_attn_varlen_func(q, k, v, *lengths, seqused_k=faulty)


def test_flash_attn_3_combines_parts():
    q, k, v = qkv()
    parts = [tileattn.attention(q, k[:, c], v[:, c], return_lse=True) for c in (slice(0, 11), slice(11, SK))]
    outs, lses = torch.stack([p.out for p in parts]), torch.stack([p.lse.transpose(1, 2) for p in parts])
    out, lse = flash_attn_interface.flash_attn_combine(outs, lses)
    expected = tileattn.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(out, expected.out)
    torch.testing.assert_close(lse, expected.lse.transpose(1, 2))


@given(lengths=st.lists(st.integers(0, 6), min_size=1, max_size=5), unused=st.booleans())
@settings(max_examples=30, deadline=None)
def test_unpadding_and_padding_are_inverse(lengths, unused):
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    spare = ((torch.arange(6) == 5) & ~mask).int() if unused else None
    x = torch.randn(len(lengths), 6, 3, requires_grad=True)
    tokens, indices, cu_seqlens, longest, used = bert_padding.unpad_input(x, mask.int(), spare)
    taken = mask if spare is None else mask | spare.bool()
    assert tokens.shape[0] == cu_seqlens[-1] == taken.sum()
    assert cu_seqlens.dtype == torch.int32
    assert cu_seqlens.diff().tolist() == taken.sum(-1).tolist()
    assert longest == taken.sum(-1).max()
    assert used.tolist() == lengths
    back = bert_padding.pad_input(tokens, indices, len(lengths), 6)
    assert torch.equal(back, x * taken[..., None])
    back.sum().backward()
    assert torch.equal(x.grad, taken[..., None].expand_as(x).float())


def test_unpadding_of_concatenated_sequences():
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    x = torch.randn(3, 6, 2)
    tokens, _, cu_seqlens, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert cu_seqlens.tolist() == [0, 2, 5, 8, 10, 16]
    assert longest == 6
    assert torch.equal(tokens, torch.cat([x[0, :5], x[1, :5], x[2]]))


def turned_by_complex_numbers(x, cos, sin, positions, interleaved):
    half = cos.shape[1]
    first, second = (
        (x[..., : 2 * half : 2], x[..., 1 : 2 * half : 2]) if interleaved else x[..., : 2 * half].chunk(2, -1)
    )
    y = torch.complex(first, second) * torch.complex(cos, sin)[positions][..., None, :]
    if interleaved:
        return torch.cat([torch.view_as_real(y).flatten(-2), x[..., 2 * half :]], -1)
    return torch.cat([y.real, y.imag, x[..., 2 * half :]], -1)


@given(interleaved=st.booleans(), rotary_dim=st.sampled_from([2, 6, 16]), offset=st.sampled_from([0, 3, "tensor"]))
@settings(max_examples=20, deadline=None)
def test_rotary_embedding_turns_pairs(interleaved, rotary_dim, offset):
    x = torch.randn(B, 7, 3, D, dtype=torch.float64, requires_grad=True)
    angle = torch.rand(20, rotary_dim // 2, dtype=torch.float64)
    offsets = torch.tensor([2, 9]) if offset == "tensor" else offset
    positions = torch.arange(7) + (offsets[:, None] if offset == "tensor" else torch.full((B, 1), offset))
    out = rotary.apply_rotary_emb(x, angle.cos(), angle.sin(), interleaved, seqlen_offsets=offsets)
    expected = turned_by_complex_numbers(x, angle.cos(), angle.sin(), positions, interleaved)
    torch.testing.assert_close(out, expected)
    dout = torch.randn_like(out)
    got, want = (torch.autograd.grad(y, x, dout)[0] for y in (out, expected))
    torch.testing.assert_close(got, want)
    back = apply_rotary(out, angle.cos(), angle.sin(), offsets, interleaved=interleaved, conjugate=True)
    torch.testing.assert_close(back, x)


def test_rotary_embedding_of_packed_sequences_and_in_place():
    x, angle = torch.randn(9, 2, D), torch.rand(12, 4)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32)
    offsets = torch.tensor([1, 5])
    out = rotary.apply_rotary_emb(x, angle.cos(), angle.sin(), seqlen_offsets=offsets, cu_seqlens=cu, max_seqlen=5)
    for b, rows in enumerate((slice(0, 4), slice(4, 9))):
        alone = rotary.apply_rotary_emb(x[None, rows], angle.cos(), angle.sin(), seqlen_offsets=int(offsets[b]))
        assert torch.equal(out[rows], alone[0])
    stacked = torch.randn(B, 5, 3, H, D)
    before = stacked.clone()
    assert rotary.apply_rotary_emb_qkv_(stacked, angle.cos(), angle.sin(), seqlen_offsets=2) is stacked
    for i in (0, 1):
        expected = rotary.apply_rotary_emb(before[:, :, i], angle.cos(), angle.sin(), seqlen_offsets=2)
        assert torch.equal(stacked[:, :, i], expected)
    assert torch.equal(stacked[:, :, 2], before[:, :, 2])
    kv = before[:, :, 1:].clone()
    rotary.apply_rotary_emb_kv_(kv, angle.cos(), angle.sin(), seqlen_offsets=2)
    assert torch.equal(kv[:, :, 0], stacked[:, :, 1])


def test_rotary_embedding_in_place_has_the_gradient_of_one_that_is_not():
    """Of a leaf, as flash_attn does it, and of what was computed, whose other part passes."""
    angle = torch.rand(12, 4)
    cos, sin = angle.cos(), angle.sin()
    x, kv = torch.randn(B, 5, H, D), torch.randn(B, 5, 2, H, D)
    dout, dkv = torch.randn_like(x), torch.randn_like(kv)

    def turned(x):
        return rotary.apply_rotary_emb_torch(x, cos[3:8], sin[3:8])

    leaf, apart = x.clone().requires_grad_(), x.clone().requires_grad_()
    out = rotary.apply_rotary_emb(leaf, cos, sin, inplace=True, seqlen_offsets=3)
    assert torch.equal(out, turned(x))
    assert torch.equal(leaf, out)
    torch.testing.assert_close(*(torch.autograd.grad(y, z, dout) for y, z in ((out, leaf), (turned(apart), apart))))

    leaf, apart = kv.clone().requires_grad_(), kv.clone().requires_grad_()
    computed = leaf * 1
    rotary.apply_rotary_emb_kv_(computed, cos, sin, seqlen_offsets=3)
    expected = torch.stack([turned(apart[:, :, 0]), apart[:, :, 1]], 2)
    torch.testing.assert_close(*(torch.autograd.grad(y, z, dkv) for y, z in ((computed, leaf), (expected, apart))))


def compiled(module):
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def checkpointed(module):
    def run(*args):
        return module(*(x.clone() for x in args))  # which are to be the same the second time

    return lambda *args: torch.utils.checkpoint.checkpoint(run, *args, use_reentrant=False)


@pytest.mark.parametrize("how", [compiled, checkpointed])
@pytest.mark.parametrize("packed", ["qkv", "kv"])
def test_the_module_has_the_same_gradients_compiled_and_checkpointed(how, packed):
    """What it turns in place was computed before."""
    torch._dynamo.reset()
    module = rotary.RotaryEmbedding(D, scale_base=32.0)

    def differentiate(turn, x):
        before = x * 2
        turned = (turn(before),) if packed == "qkv" else turn(before[:, :, 0].clone(), before[:, :, 1:].clone())
        out = sum(y.sin().sum() for y in turned)
        return out, *torch.autograd.grad(out, x)

    x = torch.randn(B, 5, 3, H, D, requires_grad=True)
    torch.testing.assert_close(differentiate(how(module), x), differentiate(module, x))


@pytest.mark.parametrize("scale_base", [None, 32.0])
@pytest.mark.parametrize("offset", [0, 4, "tensor"])
def test_the_module_turns_so_that_scores_depend_on_distances(scale_base, offset):
    """The same vectors everywhere: q_i.k_j is a function of i - j, and with scale_base it fades."""
    module = rotary.RotaryEmbedding(D, scale_base=scale_base)
    qkv = torch.randn(1, 1, 3, 1, D).expand(B, 12, 3, 1, D).contiguous()
    separate = qkv[:, :, 0].clone(), qkv[:, :, 1:].clone()
    v = qkv[:, :, 2].clone()
    at = {"seqlen_offset": torch.tensor([1, 6]) if offset == "tensor" else offset, "max_seqlen": 18}
    turned = module(qkv, **at)
    assert torch.equal(turned[:, :, 2], v)
    q, k = turned[:, :, 0, 0], turned[:, :, 1, 0]
    scores = q @ k.mT
    for distance in range(-5, 6):
        same = scores.diagonal(distance, 1, 2)
        torch.testing.assert_close(same, same[0, :1].expand_as(same))
    frequency = 10000.0 ** (-torch.arange(0, D, 2) / D)
    angle = 3 * frequency
    fade = 1.0 if scale_base is None else ((torch.arange(0, D, 2) + 0.4 * D) / (1.4 * D)) ** (3 / scale_base)
    x, y = (part[0, 0, 0].unflatten(-1, (2, D // 2)) for part in (separate[0], separate[1][:, :, 0]))
    real = (x * y).sum(0) * angle.cos() + (x[1] * y[0] - x[0] * y[1]) * -angle.sin()
    torch.testing.assert_close(scores[0, 3, 0], (real * fade).sum())
    got_q, got_kv = module(*separate, **at)
    torch.testing.assert_close(got_q[:, :, 0], q)
    torch.testing.assert_close(got_kv[:, :, 0, 0], k)


def run_python(code):
    subprocess.run([sys.executable, "-c", code], check=True)


def test_install_makes_other_packages_imports_find_ours():
    run_python("""
import importlib.metadata, sys
import tileattn.compat
assert not any(type(finder).__module__ == "tileattn.compat" for finder in sys.meta_path), "importing installs nothing"
tileattn.compat.install()
tileattn.compat.install()
import flash_attn, flash_attn_interface, flash_attn.layers.rotary
from flash_attn.bert_padding import unpad_input
from flash_attn.flash_attn_interface import _flash_attn_forward
import tileattn.compat.flash_attn as ours
assert flash_attn is ours and flash_attn.__version__ == "2.8.3"
assert importlib.metadata.version("flash_attn") == importlib.metadata.version("flash-attn") == "2.8.3"
try:
    import flash_attn.losses
except ModuleNotFoundError as error:
    assert "flash_attn.losses" in str(error)
else:
    raise AssertionError("found flash_attn.losses")
""")


@pytest.mark.parametrize("first", ["transformers", "tileattn"])
def test_transformers_finds_flash_attention_2_and_3(first):
    pytest.importorskip("transformers")
    run_python(f"""
from unittest import mock
import tileattn.compat
first = {first!r}
if first == "tileattn":
    tileattn.compat.install()
from transformers.utils import import_utils
with mock.patch.object(import_utils, "is_torch_cuda_available", lambda: True):
    if first == "transformers":
        assert not import_utils.is_flash_attn_2_available()
        tileattn.compat.install()
    assert import_utils.is_flash_attn_2_available()
    assert import_utils.is_flash_attn_3_available()
    assert import_utils.is_flash_attn_greater_or_equal("2.4.1")
    assert not import_utils.is_flash_attn_4_available()
""")


def test_a_transformers_model_runs_with_flash_attention_2():
    """Transformers itself would not use FlashAttention on a CPU: its checks of the device are told otherwise."""
    pytest.importorskip("transformers")
    run_python("""
from unittest import mock
import tileattn.compat
tileattn.compat.install()
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import import_utils
config = LlamaConfig(
    vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
)
torch.manual_seed(0)
with (
    mock.patch.object(import_utils, "is_torch_cuda_available", lambda: True),
    mock.patch("transformers.modeling_utils.PreTrainedModel._flash_attn_can_dispatch", lambda *a, **k: True),
):
    import_utils.is_flash_attn_2_available.cache_clear()
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.bfloat16)
    ids = torch.randint(3, 100, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    with torch.no_grad():
        expected = model(ids, attention_mask=mask).logits
        model.set_attn_implementation("flash_attention_2")
        from tileattn.compat.flash_attn import flash_attn_interface
        with mock.patch.object(
            flash_attn_interface, "attention_varlen", side_effect=flash_attn_interface.attention_varlen
        ) as ours:
            got = model(ids, attention_mask=mask).logits
assert ours.called
torch.testing.assert_close(got[mask.bool()], expected[mask.bool()], rtol=0.1, atol=0.05)
""")


def test_install_comes_before_another_flash_attn():
    run_python("""
import sys, types
sys.modules["flash_attn"] = types.ModuleType("flash_attn")
import tileattn.compat
try:
    tileattn.compat.install()
except RuntimeError as error:
    assert "flash_attn is imported already" in str(error)
else:
    raise AssertionError("installed over another one")
""")
