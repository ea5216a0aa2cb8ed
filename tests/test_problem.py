"""Problem: every wrong argument gets one clear error; every right one a canonical form."""

import itertools
import math

import pytest
import torch

import tileattn
import tileattn.problem as problem_module
from tileattn import BlockMask
from tileattn.lab.traffic import visible_scores
from tileattn.problem import Problem
from tileattn.reference import visible

B, SQ, SK, H, HK, D, DV = 2, 5, 7, 4, 2, 8, 6


def dense(**changes):
    arguments = {"q": torch.randn(B, SQ, H, D), "k": torch.randn(B, SK, HK, D), "v": torch.randn(B, SK, HK, DV)}
    return arguments | changes


def packed(**changes):
    arguments = {
        "q": torch.randn(SQ, H, D),
        "k": torch.randn(SK, HK, D),
        "v": torch.randn(SK, HK, DV),
        "cu_seqlens_q": torch.tensor([0, 2, 2, SQ], dtype=torch.int32),
        "cu_seqlens_k": torch.tensor([0, 3, 4, SK], dtype=torch.int32),
    }
    return arguments | changes


def cu(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


meta = torch.empty(B, SK, HK, D, device="meta")
nan, inf = math.nan, math.inf
far = torch.empty(SQ, device="meta")
RAGGED = torch.nested.nested_tensor([torch.ones(n, H, D) for n in (2, 3)], layout=torch.jagged)
MASK_MOD = tileattn.trace_mask_mod(lambda b, h, row, col: row >= col)
BLOCKS = BlockMask.from_blocks(torch.ones(2, 2, dtype=torch.bool), 128)
OF_MOD = BlockMask.from_mod(MASK_MOD, None, None, SQ, SK, 4)

WRONG = [
    # q, k, v
    (dense(q=[[1.0]]), TypeError, r"q: got list, expected a torch.Tensor"),
    (dense(k=torch.ones(B, SK, HK, D).to_sparse()), TypeError, r"k: a tensor of layout torch.sparse_coo, expected"),
    (dense(q=RAGGED), TypeError, r"q: a tensor of layout nested \(torch.jagged\), .*attention_varlen"),
    (dense(mask=torch.ones(SQ, SK, dtype=torch.bool).to_sparse()), TypeError, r"mask: a tensor of layout torch.spars"),
    (dense(q=torch.randn(SQ, H, D)), ValueError, r"q: got 3 dims with shape \(5, 4, 8\), expected 4: \(batch, seqlen"),
    (dense(v=torch.randn(B, SK, HK, DV, 1)), ValueError, r"v: got 5 dims"),
    (dense(q=torch.ones(B, SQ, H, D, dtype=torch.int32)), TypeError, r"q: dtype torch.int32 is not supported; use fl"),
    (dense(q=torch.ones(B, SQ, H, D, dtype=torch.complex64)), TypeError, r"q: dtype torch.complex64"),
    (dense(k=torch.randn(B, SK, HK, D).half()), TypeError, r"k: dtype torch.float16 differs from q's torch.float32"),
    (dense(k=meta), ValueError, r"k: on device meta, but q is on cpu; move it"),
    (dense(k=torch.randn(B, SK, HK, D + 1)), ValueError, r"k: head_dim 9 differs from q's head_dim 8"),
    (dense(v=torch.randn(B, SK + 1, HK, DV)), ValueError, r"v: shape \(2, 8, 2, 6\) does not fit k's \(2, 7, 2, 8\)"),
    (dense(v=torch.randn(B, SK, 1, DV)), ValueError, r"v: shape .* does not fit k's"),
    (dense(k=torch.randn(B, SK, 3, D), v=torch.randn(B, SK, 3, D)), ValueError, r"q: 4 heads is not a multiple of k's"),
    (dense(q=torch.randn(3, SQ, H, D)), ValueError, r"k: batch 2 differs from q's batch 3"),
    (dense(q=torch.randn(B, SQ, 0, D)), ValueError, r"heads and head_dim must be at least 1"),
    (dense(v=torch.randn(B, SK, HK, 0)), ValueError, r"heads and head_dim must be at least 1"),
    # scalars
    (dense(scale=nan), ValueError, r"scale=nan: must be finite"),
    (dense(scale=-inf), ValueError, r"scale=-inf: must be finite"),
    (dense(scale="1"), TypeError, r"scale: got str, expected a float"),
    (dense(scale=torch.tensor(1.0)), TypeError, r"scale: got Tensor, expected a float"),
    (dense(window=(-2, 0)), ValueError, r"window=\(-2, 0\): left must be >= -1 \(-1 means unlimited\)"),
    (dense(window=(0, -3)), ValueError, r"window=\(0, -3\): right must be >= -1"),
    (dense(window=4), TypeError, r"window=4: expected \(left, right\)"),
    (dense(window=(1, 2, 3)), TypeError, r"window=\(1, 2, 3\): expected \(left, right\)"),
    (dense(window=(1.0, 2)), TypeError, r"left is float, expected an int"),
    (dense(window=(1, True)), TypeError, r"right is bool, expected an int"),
    (dense(softcap=-1.0), ValueError, r"softcap=-1.0: must be finite and >= 0"),
    (dense(softcap=inf), ValueError, r"softcap=inf: must be finite"),
    (dense(softcap="30"), TypeError, r"softcap: got str"),
    (dense(dropout_p=1.0), ValueError, r"dropout_p=1.0: must be in \[0, 1\)"),
    (dense(dropout_p=-0.1), ValueError, r"dropout_p=-0.1: must be in"),
    (dense(dropout_p=nan), ValueError, r"dropout_p=nan: must be in"),
    (dense(dropout_p="half"), TypeError, r"dropout_p: got str"),
    (dense(dropout_p=0.1, dropout_seed=2**63), ValueError, r"dropout_seed=9223372036854775808: must fit in 64"),
    (dense(dropout_p=0.1, dropout_seed=1.5), TypeError, r"dropout_seed: got float"),
    (dense(dropout_p=0.1, dropout_seed=torch.tensor([1, 2])), TypeError, r"dropout_seed: tensor .* with 2 elements"),
    (dense(dropout_p=0.1, dropout_seed=torch.tensor(1.0)), TypeError, r"dropout_seed: tensor of dtype torch.float32"),
    # modifiers
    (
        dense(bias=torch.randn(SQ, SK + 1)),
        ValueError,
        r"bias: shape \(5, 8\) does not broadcast to .* = \(2, 4, 5, 7\)",
    ),
    (dense(bias=torch.randn(1, B, H, SQ, SK)), ValueError, r"bias: shape .* does not broadcast"),
    (dense(bias=torch.ones(SQ, SK, dtype=torch.bool)), TypeError, r"bias: dtype torch.bool; .* passed as mask="),
    (dense(bias=torch.ones(SQ, SK, dtype=torch.int64)), TypeError, r"bias: dtype torch.int64 is not supported"),
    (dense(bias=2.0), TypeError, r"bias: got float, expected a torch.Tensor"),
    (dense(mask=torch.zeros(SQ, SK)), TypeError, r"mask: dtype torch.float32, expected torch.bool .* passed as bias="),
    (
        dense(mask=torch.ones(3, 1, SQ, SK, dtype=torch.bool)),
        ValueError,
        r"mask: shape \(3, 1, 5, 7\) does not broadcast",
    ),
    (dense(mask=torch.ones(SQ, SK, dtype=torch.bool, device="meta")), ValueError, r"mask: on device meta"),
    (dense(alibi_slopes=torch.randn(HK)), ValueError, r"alibi_slopes: shape \(2,\), expected \(num_heads,\) = \(4,\)"),
    (dense(alibi_slopes=torch.ones(H, dtype=torch.int32)), TypeError, r"alibi_slopes: dtype torch.int32"),
    (dense(sink=torch.randn(1, H)), ValueError, r"sink: shape \(1, 4\), expected \(num_heads,\) = \(4,\)"),
    (dense(sink=torch.ones(H, dtype=torch.bool)), TypeError, r"sink: dtype torch.bool"),
    # mods and block masks
    (dense(score_mod=3), TypeError, r"score_mod: got int, expected a function or a traced one"),
    (dense(score_mod=MASK_MOD), TypeError, r"score_mod: got a traced mask_mod; trace it with tileattn.trace_score_mod"),
    (dense(mask_mod=lambda b, h, r, c: r - c), ValueError, r"mask_mod: returns torch.int32, expected torch.bool"),
    (dense(mask_mod=lambda b, h, r, c: far[r] > c), ValueError, r"mask_mod: .*(meta|device)"),
    (dense(block_mask=torch.ones(1, 1)), TypeError, r"block_mask: got torch.float32 of shape \(1, 1\), expected a til"),
    (dense(block_mask=BlockMask(torch.ones(1, 1))), TypeError, r"block_mask: blocks must be torch.uint8"),
    (dense(block_mask=BLOCKS), ValueError, r"block_mask: blocks of shape \(1, 1, 2, 2\), expected .* = \(2, 4, 1, 1\)"),
    (dense(block_mask=OF_MOD, mask_mod=MASK_MOD), ValueError, r"mask_mod: block_mask has one already; combine the two"),
    (
        dense(block_mask=OF_MOD._replace(seqlens=(5, 6))),
        ValueError,
        r"block_mask: made for \(seqlen_q, seqlen_k\) = \(5, 6\), but these are \(5, 7\)",
    ),
    # varlen
    (packed(cu_seqlens_k=None), TypeError, r"cu_seqlens_k: got None; varlen attention needs both"),
    (packed(cu_seqlens_q=None, cu_seqlens_k=None), ValueError, r"q: got 3 dims .*; packed sequences need cu_seqlens_q"),
    (packed(q=torch.randn(1, SQ, H, D)), ValueError, r"q: got 4 dims .* expected 3: \(total, heads, head_dim\)"),
    (packed(cu_seqlens_q=cu(0, 2, SQ, dtype=torch.int64)), TypeError, r"cu_seqlens_q: dtype torch.int64, exp"),
    (packed(cu_seqlens_q=[0, SQ]), TypeError, r"cu_seqlens_q: got list"),
    (packed(cu_seqlens_q=cu(0, SQ)[None]), ValueError, r"cu_seqlens_q: shape \(1, 2\), expected \(batch \+ 1,\)"),
    (packed(cu_seqlens_q=cu(0, 3, 2, SQ)), ValueError, r"cu_seqlens_q: decreases from 3 to 2 at sequence 1"),
    (packed(cu_seqlens_q=cu(1, 2, 2, SQ)), ValueError, r"cu_seqlens_q: starts at 1, expected 0"),
    (packed(cu_seqlens_q=cu(0, 1, 2, SQ - 1)), ValueError, r"cu_seqlens_q: ends at 4, before the data: q has 5 rows"),
    (packed(cu_seqlens_k=cu(0, 1, 2, SK + 1)), ValueError, r"cu_seqlens_k: ends at 8, after the data: k has 7 rows"),
    (packed(cu_seqlens_k=cu(0, SK)), ValueError, r"cu_seqlens_k: 1 sequences where cu_seqlens_q has 3"),
    (packed(cu_seqlens_k=cu(0, 9, 1, 9, 4, 9, SK)[::2]), ValueError, r"cu_seqlens_k: stride 2, expected a contiguous"),
    (packed(max_seqlen_q=2), ValueError, r"max_seqlen_q=2: less than the longest sequence of cu_seqlens_q, 3"),
    (packed(max_seqlen_k=-1), ValueError, r"max_seqlen_k=-1: must be 0 or more"),
    (packed(max_seqlen_q=3.0), TypeError, r"max_seqlen_q: got float"),
    (packed(max_seqlen_q=torch.tensor(3)), TypeError, r"max_seqlen_q: got Tensor"),
    # backends
    (dense(backend="cuda"), ValueError, r"backend='cuda': unknown; use one of .*'cpu'"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=[w[2][:48] for w in WRONG])
def test_wrong_arguments_get_one_clear_error(arguments, error, message):
    call = tileattn.attention_varlen if "cu_seqlens_q" in arguments else tileattn.attention
    with pytest.raises(error, match=message):
        call(**arguments)


def test_a_tensor_on_a_device_without_backend_is_refused_with_every_reason():
    q, k, v = (torch.empty(1, 4, 2, 8, device="meta") for _ in range(3))
    with pytest.raises(ValueError, match=r"no backend serves this call .*cpu: "):
        tileattn.attention(q, k, v)


def test_causal_is_a_window_without_right_side():
    assert Problem.of(**dense(causal=True))[0] == Problem.of(**dense(window=(-1, 0)))[0]
    assert Problem.of(**dense(causal=True, window=(3, 9)))[0].window_right == 0


def test_modifiers_come_out_in_canonical_rank():
    problem, inputs = Problem.of(
        **dense(bias=torch.randn(SK), mask=torch.ones(SQ, 1, dtype=torch.bool), alibi_slopes=torch.ones(H))
    )
    assert inputs.bias.shape == (1, 1, 1, SK)
    assert inputs.mask.shape == (1, 1, SQ, 1)
    assert inputs.alibi_slopes.shape == (1, H)
    assert problem.scale == D**-0.5
    assert problem.group == 2


def test_only_a_strided_last_dim_is_copied():
    q = torch.randn(B, H, SQ, D).transpose(1, 2)
    k = torch.randn(B, SK, HK, 2 * D)[..., ::2]
    _, inputs = Problem.of(q, k, torch.randn(B, SK, HK, DV))
    assert inputs.q is q
    assert inputs.k.is_contiguous()
    assert torch.equal(inputs.k, k)


def test_what_torch_negates_lazily_is_negated_for_kernels():
    bias, slopes, sink = (torch.rand(*n, dtype=torch.complex64).conj().imag for n in ((H, SQ, SK), (H,), (H,)))
    read = {"bias": bias, "alibi_slopes": slopes, "sink": sink}
    _, inputs = Problem.of(**dense(**read), score_mod=lambda score, b, h, row, col: score + sink[h])
    for name, x in read.items():
        got = getattr(inputs, name)
        assert x.is_neg()
        assert not got.is_neg()
        assert torch.equal(got.squeeze(0), x)
    assert not any(x.is_neg() for x in inputs.score_mod_tensors)
    strided = torch.rand(B, SQ, H, D, dtype=torch.complex64).conj().imag
    assert not Problem.of(**dense(q=strided))[1].q.is_neg()


def test_calls_that_were_checked_are_forgotten_when_they_are_many(monkeypatch):
    monkeypatch.setattr(problem_module, "_checked", dict.fromkeys(range(5)))
    monkeypatch.setattr(problem_module, "MAX_CHECKED", 4)  # so threads that came together have put in one too many
    first, _ = Problem.of(**dense())
    assert list(problem_module._checked.values()) == [first]
    assert Problem.of(**dense())[0] is first


def test_a_seed_is_drawn_from_torchs_generator():
    torch.manual_seed(0)
    first = Problem.of(**dense(dropout_p=0.5))[1].dropout_seed
    second = Problem.of(**dense(dropout_p=0.5))[1].dropout_seed
    torch.manual_seed(0)
    assert torch.equal(Problem.of(**dense(dropout_p=0.5))[1].dropout_seed, first)
    assert not torch.equal(first, second)
    assert Problem.of(**dense())[1].dropout_seed is None


def test_visible_scores_counts_what_the_oracle_shows():
    problem, _ = Problem.of(**dense())
    for sq, sk, left, right in itertools.product((0, 1, 5, 9), (0, 1, 4, 12), (-1, 0, 3, 20), (-1, 0, 2, 30)):
        shown = visible(Problem(**(vars(problem) | {"window_left": left, "window_right": right})), sq, sk, "cpu")
        assert visible_scores(sq, sk, left, right) == shown.sum(), (sq, sk, left, right)


@pytest.mark.parametrize(
    ("layout", "aligned"),
    [("contiguous", True), ("heads_first", True), ("one_head", True), ("odd_rows", False), ("expanded", False)],
)
def test_strides_of_16_bytes_are_told_apart(layout, aligned):
    x = torch.zeros(2, 10, 4, 32, dtype=torch.bfloat16)
    k = {
        "contiguous": x,
        "heads_first": torch.zeros(2, 4, 10, 32, dtype=torch.bfloat16).transpose(1, 2),
        "one_head": torch.zeros(2, 10, 40, dtype=torch.bfloat16)[:, :, None, :32],
        "odd_rows": torch.zeros(2, 10, 4 * 32 + 4, dtype=torch.bfloat16)[..., :128].unflatten(2, (4, 32)),
        "expanded": x[:, :, :1].expand(-1, -1, 4, -1),
    }[layout]
    assert Problem.of(x, k, k)[0].aligned is aligned
