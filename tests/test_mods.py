"""score_mod, mask_mod and block masks: traced programs, their errors, and FlexAttention as an independent oracle."""

import math

import pytest
import torch
from oracle import Case, build
from torch.nn.attention.flex_attention import and_masks, create_block_mask, flex_attention, or_masks

import tileattn
from tileattn import BlockMask, mods, trace_mask_mod, trace_score_mod
from tileattn.mods import Program
from tileattn.reference import standard_attention

B, H, HK, SQ, SK, D = 2, 4, 2, 70, 90, 16
doc = torch.arange(SK) // 25
slopes, table = torch.rand(H), torch.randn(H, 2 * SK + 1)
half = torch.tensor(0.5)


def with_slopes(score, b, h, row, col):
    return score * half - slopes[h] * (row - col).abs()


SCORE_MODS = {
    "identity": lambda s, b, h, r, c: s,
    "slopes": with_slopes,
    "table": lambda s, b, h, r, c: s + table[h, (r - c).clamp(-9, 9) + SK] * 2 - (r % 3) + (c // 2) * 0.1,
    "where": lambda s, b, h, r, c: torch.where((r >= c) & (doc[r] == doc[c]), s * slopes[h], -math.inf),
    "tanh": lambda s, b, h, r, c: torch.tanh(s / 2) * 2,
    "activations": lambda s, b, h, r, c: torch.relu(s) ** 2 + torch.sigmoid(s) / 3 + torch.nn.functional.silu(s - b),
    "gelu": lambda s, b, h, r, c: torch.nn.functional.gelu(s) + torch.erf(s).square(),
    "extrema": lambda s, b, h, r, c: torch.maximum(s, -s) + torch.minimum(s, s * 0 + 1) - s.clamp(max=0.3),
    "division": lambda s, b, h, r, c: 1 / s.abs().clamp(min=0.1) + torch.exp2(-s.abs()) + (1 + s * s).log(),
    "replaced": lambda s, b, h, r, c: (r - c) * 0.25 + table[0, c],
    "constant": lambda s, b, h, r, c: torch.zeros_like(s),
    "fixed_column": lambda s, b, h, r, c: s + table[h, 3] - half,
}
MASK_MODS = {
    "causal": lambda b, h, r, c: r >= c,
    "window": lambda b, h, r, c: (r - c).abs() <= 11,
    "documents": lambda b, h, r, c: (doc[r] == doc[c]) & ~((h == 1) & (c % 7 == 2)),
    "nothing": lambda b, h, r, c: r < 0,
    "both": and_masks(lambda b, h, r, c: r >= c, lambda b, h, r, c: c != 3),
    "either": or_masks(lambda b, h, r, c: r == c, lambda b, h, r, c: c < 3),
}


def qkv(dtype=torch.float64):
    shapes = (B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, D)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("name", SCORE_MODS)
def test_a_program_and_its_derivative_do_what_the_function_does(name):
    function, mod = SCORE_MODS[name], trace_score_mod(SCORE_MODS[name])
    score = torch.randn(B, H, SQ, SK, requires_grad=True)
    b, h, r, c = (torch.arange(n, dtype=torch.int32) for n in score.shape)
    at = b.view(-1, 1, 1, 1), h.view(-1, 1, 1), r.view(-1, 1), c
    expected = function(score, *at).expand(score.shape)
    got = Program.parse(mod.program).run((score.detach(), *at), mod.tensors, torch.float32)
    torch.testing.assert_close(got.expand(score.shape), expected.detach())
    grad = torch.randn_like(score)
    want = torch.autograd.grad(expected, score, grad)[0] if expected.requires_grad else torch.zeros_like(score)
    found = Program.parse(mod.derivative).run((score.detach(), *at, grad), mod.tensors, torch.float32)
    torch.testing.assert_close(found.expand(score.shape), want)


def test_a_program_knows_whether_it_reads_by_column():
    by_column = {name for name, f in SCORE_MODS.items() if Program.parse(trace_score_mod(f).program).reads_by("col")}
    assert by_column == {"table", "where", "replaced"}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mod_agrees_with_flex_attention(name):
    compare_with_flex(SCORE_MODS[name], None)


@pytest.mark.parametrize("name", MASK_MODS)
@pytest.mark.parametrize("how", ["function", "ours", "flex"])
def test_mask_mod_and_block_masks_agree_with_flex_attention(name, how):
    compare_with_flex(with_slopes if how == "ours" else None, MASK_MODS[name], how)


def compare_with_flex(score_mod, mask_mod, how="function"):
    """Outputs against FlexAttention; gradients, which it has no CPU kernel for, against the functions themselves."""
    q, k, v = tensors = qkv()
    flex_mask = None if mask_mod is None else create_block_mask(mask_mod, B, H, SQ, SK, device="cpu", BLOCK_SIZE=16)
    options = {
        "function": {"mask_mod": mask_mod},
        "ours": {"block_mask": mask_mod and BlockMask.from_mod(mask_mod, None, H, SQ, SK, (16, 32))},
        "flex": {"block_mask": flex_mask},
    }[how]
    out, lse = tileattn.attention(q, k, v, score_mod=score_mod, return_lse=True, **options)
    expected, expected_lse = flex_attention(
        *(x.detach().transpose(1, 2) for x in tensors), score_mod, flex_mask, enable_gqa=True, return_lse=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2).to(out.dtype), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse.to(lse.dtype), rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    want = torch.autograd.grad(by_hand(q, k, v, score_mod, mask_mod), tensors, dout)
    for got, expect in zip(torch.autograd.grad(out, tensors, dout), want, strict=True):
        torch.testing.assert_close(got, expect, rtol=1e-5, atol=1e-5)


def by_hand(q, k, v, score_mod, mask_mod):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(H // HK, 1) for x in (k, v))
    scores = q @ k.transpose(-1, -2) / D**0.5
    at = torch.meshgrid(*(torch.arange(n) for n in scores.shape), indexing="ij")
    if score_mod is not None:
        scores = score_mod(scores, *at).to(scores.dtype) + 0 * scores
    if mask_mod is not None:
        scores = scores.masked_fill(~mask_mod(*at), -math.inf)
    seen = (scores > -math.inf).any(-1, keepdim=True)
    return (torch.softmax(scores.masked_fill(~seen, 0.0), -1) * seen @ v).transpose(1, 2)


def test_gradcheck_of_score_mod_with_every_modifier():
    q, k, v = (x[:1, :9].detach().requires_grad_() for x in qkv())
    bias = torch.randn(H, 9, 9, dtype=torch.float64, requires_grad=True)

    def run(q, k, v, bias):
        return tileattn.attention(
            q, k, v, bias=bias, softcap=3.0, score_mod=SCORE_MODS["activations"], mask_mod=MASK_MODS["causal"],
            return_lse=True, block_mask=BlockMask.from_blocks(torch.tensor([[1, 0], [1, 1]]).bool(), (5, 5)),
        )  # fmt: skip

    assert torch.autograd.gradcheck(run, (q, k, v, bias), fast_mode=True)


def test_a_block_mask_hides_what_its_map_says_and_full_blocks_ignore_masks():
    case = Case(block_size=(32, 64), mask=(True, True, True, True))
    problem, inputs, *_ = build(case)
    blocks = torch.tensor([[0, 2], [2, 1], [1, 0], [0, 0]], dtype=torch.uint8)[None, None]
    masked = inputs._replace(block_mask=blocks)
    kinds = blocks.repeat_interleave(32, 2).repeat_interleave(64, 3)
    seen = (kinds == 2) | ((kinds == 1) & inputs.mask)
    plain, plain_inputs = tileattn.problem.Problem.of(*inputs[:3], mask=seen)
    expected = standard_attention(plain, plain_inputs)
    torch.testing.assert_close(standard_attention(problem, masked).out, expected.out)
    from tileattn.backends import cpu

    torch.testing.assert_close(cpu.forward(problem, masked).out, expected.out)


def test_skipped_blocks_are_not_computed(monkeypatch):
    from tileattn.backends.cpu.scores import Scores

    visited = []
    product = Scores.product
    monkeypatch.setattr(Scores, "product", lambda *args: visited.append(args) or product(*args))
    q = k = v = torch.randn(1, 512, 1, 8)
    tileattn.attention(q, k, v, block_mask=BlockMask.from_blocks(torch.eye(4).bool()))
    assert sum(args[1].shape[0] * args[2].shape[0] for args in visited) == 4 * 128 * 128


def test_from_mask_and_from_mod_find_the_same_blocks(monkeypatch):
    monkeypatch.setattr("tileattn.block_mask.CHUNK", 2048)
    mod = MASK_MODS["causal"]
    of_mod = BlockMask.from_mod(mod, B, H, SQ, SK, (16, 32))
    at = torch.meshgrid(*(torch.arange(n) for n in (B, H, SQ, SK)), indexing="ij")
    of_mask = BlockMask.from_mask(mod(*at), (16, 32))
    assert torch.equal(of_mod.blocks, of_mask.blocks)
    assert set(of_mod.blocks.unique().tolist()) == {0, 1, 2}
    q, k, v = qkv()
    outs = [tileattn.attention(q, k, v, block_mask=m) for m in (of_mod, of_mask)]
    torch.testing.assert_close(*outs)


def test_a_mask_beside_a_block_mask_decides_in_full_blocks_too():
    q, k, v = qkv()
    mask = torch.rand(SQ, SK) > 0.5
    blocks = BlockMask.from_blocks(torch.ones(1, 1, dtype=torch.bool), (128, 128))
    got = tileattn.attention(q, k, v, mask=mask, block_mask=blocks)
    torch.testing.assert_close(got, tileattn.attention(q, k, v, mask=mask))


def test_functions_are_traced_again_only_when_what_they_read_has_changed(monkeypatch):
    traced = []
    trace = mods._trace_score_mod
    monkeypatch.setattr(mods, "_trace_score_mod", lambda *args: traced.append(args) or trace(*args))
    scale, weights = 2.0, torch.ones(4)

    def helper(x):
        return x * scale

    def score_mod(score, b, h, row, col):
        return helper(score) + weights[h]

    first = trace_score_mod(score_mod)
    assert trace_score_mod(score_mod) is first
    weights.add_(1.0)  # tensors are read in every call
    assert trace_score_mod(score_mod) is first
    scale = 3.0
    assert trace_score_mod(score_mod).program != first.program
    weights = torch.zeros(4)
    assert trace_score_mod(score_mod).tensors[0] is weights
    assert len(traced) == 3
    assert trace_score_mod(first) is first
    settings = {"scale": 1.0}  # may change unnoticed
    programs = []
    for settings["scale"] in (1.0, 2.0):
        programs.append(trace_score_mod(unknown := (lambda s, b, h, r, c: s * settings["scale"])).program)
    assert programs[0] != programs[1]
    assert unknown not in mods._cache


def test_compile_takes_what_was_traced_outside():
    torch._dynamo.reset()
    q, k, v = qkv()
    score_mod, mask_mod = trace_score_mod(with_slopes), trace_mask_mod(MASK_MODS["documents"])
    block_mask = BlockMask.from_mod(MASK_MODS["causal"], None, None, SQ, SK, 16)

    def run(q, k, v):
        plain = tileattn.attention(q, k, v, score_mod=score_mod, mask_mod=mask_mod)
        return plain + tileattn.attention(q, k, v, block_mask=block_mask)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    got, expected = compiled(q, k, v), run(q, k, v)
    torch.testing.assert_close(got, expected)
    for g, e in zip(*(torch.autograd.grad(x.sum(), (q, k, v)) for x in (got, expected)), strict=True):
        torch.testing.assert_close(g, e)
    with pytest.raises(Exception, match="cannot be traced inside"):
        torch.compile(lambda: tileattn.attention(q, k, v, mask_mod=MASK_MODS["causal"]), fullgraph=True)()


learned = torch.randn(H, requires_grad=True)
UNTRACEABLE = [
    (lambda s, b, h, r, c: s if r > c else -s, "score_mod: cannot be traced .* without Python control flow"),
    (lambda s, b, h, r: s, "score_mod: cannot be traced"),
    (lambda s, b, h, r, c: s.cumsum(0), "score_mod: operation cumsum is not pointwise on a tile; use of: abs"),
    (lambda s, b, h, r, c: s + slopes, r"score_mod: uses a tensor of shape \(4,\) as a whole; index it by all"),
    (lambda s, b, h, r, c: s + table[h][r], r"score_mod: returns .* for one score; .*: t\[h, row\], not t\[h\]\[row\]"),
    (lambda s, b, h, r, c: s + learned[h], r"score_mod: reads a tensor of shape \(4,\) that requires a gradient"),
    (lambda s, b, h, r, c: s.mul_(2), "score_mod: changes a tensor in place"),
    (lambda s, b, h, r, c: (s, r), "score_mod: returns .*, expected one tensor|score_mod: cannot be traced"),
]


@pytest.mark.parametrize(("function", "message"), UNTRACEABLE, ids=[m[:40] for _, m in UNTRACEABLE])
def test_what_a_tile_cannot_do_is_refused_in_words(function, message):
    with pytest.raises(ValueError, match=message):
        tileattn.attention(*qkv(), score_mod=function)
