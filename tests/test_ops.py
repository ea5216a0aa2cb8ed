"""The operators as PyTorch's machinery sees them: opcheck, compile, checkpointing, autocast, FLOP counting."""

import functools
import subprocess
import sys

import pytest
import torch
from torch._dynamo import compiled_autograd
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

import tileattn
from tileattn import ops
from tileattn.backends import cpu
from tileattn.backends.cpu import scores
from tileattn.problem import Problem, Wanted

B, SQ, SK, H, HK, D, DV = 2, 33, 47, 4, 2, 16, 8
FORWARD, BACKWARD = torch.ops.tileattn.attention_forward.default, torch.ops.tileattn.attention_backward.default


def qkv(dtype=torch.float64):
    shapes = (B, SQ, H, D), (B, SK, HK, D), (B, SK, HK, DV)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def everything():
    """Every modifier at once, the learnable ones with gradients."""
    learnable = {"bias": (H, SQ, SK), "alibi_slopes": (H,), "sink": (H,)}
    options = {n: torch.rand(shape, dtype=torch.float64, requires_grad=True) for n, shape in learnable.items()}
    return options | {
        "mask": torch.rand(B, 1, SQ, SK) > 0.2,
        "causal": True,
        "window": (40, -1),
        "softcap": 5.0,
        "dropout_p": 0.1,
        "dropout_seed": 5,
    }


def packed():
    q, k, v = (x[0].detach().requires_grad_() for x in qkv())
    cu_q = torch.tensor([0, 10, 10, SQ], dtype=torch.int32)
    cu_k = torch.tensor([0, 20, 30, SK], dtype=torch.int32)
    return q, k, v, cu_q, cu_k


def flat(problem, inputs):
    p = problem
    scalars = p.seqlen_q, p.seqlen_k, p.scale, p.window_left, p.window_right, p.softcap, p.dropout_p, p.deterministic
    return (*inputs, *scalars, p.score_mod, p.score_derivative, p.mask_mod, p.block_size, "cpu")


def call_of(kind):
    if kind == "plain":
        return Problem.of(*qkv())
    if kind == "mods":
        weights, limit = torch.rand(H), torch.tensor([20, 40])
        return Problem.of(
            *qkv(),
            score_mod=lambda score, b, h, row, col: score * weights[h],
            mask_mod=lambda b, h, row, col: col < limit[b],
            block_mask=tileattn.BlockMask.from_blocks(torch.tensor([[True, False], [True, True]]), (20, 30)),
        )
    if kind == "everything":
        return Problem.of(*qkv(), **everything())
    q, k, v, cu_q, cu_k = packed()
    return Problem.of(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, causal=True)


@pytest.mark.parametrize("kind", ["plain", "everything", "packed", "mods"])
def test_opcheck(kind):
    problem, inputs = call_of(kind)
    torch.library.opcheck(FORWARD, flat(problem, inputs))
    out, lse = (x.detach() for x in ops.run(problem, inputs, "cpu"))
    arguments = [x.detach() if isinstance(x, torch.Tensor) else x for x in flat(problem, inputs)]
    wanted = [True] * 3 + [kind == "everything"] * 3
    torch.library.opcheck(BACKWARD, (torch.randn_like(out), torch.randn_like(lse), out, lse, *arguments, wanted))


@pytest.mark.parametrize("kind", ["plain", "mods"])
def test_a_backend_gets_the_same_by_way_of_the_operator_or_not(kind, monkeypatch):
    problem, inputs = call_of(kind)
    forward, got = cpu.forward, []
    monkeypatch.setattr(
        cpu, "forward", lambda problem, inputs: got.append((problem, inputs)) or forward(problem, inputs)
    )
    ops.run(problem, inputs, "cpu")
    FORWARD(*flat(problem, inputs))
    for got_problem, got_inputs in got:
        assert got_problem == problem
        for x, y in zip(got_inputs, inputs, strict=True):
            assert type(x) is type(y)
    assert len(got) == 2


@pytest.mark.parametrize("kind", ["plain", "everything", "packed", "mods"])
def test_a_default_device_does_not_matter(kind):
    """Tensors say where a call is computed: also with torch.set_default_device("cuda")."""
    problem, inputs = call_of(kind)
    for tile in (scores._window_tile, scores._distance_tile):
        tile.cache_clear()
    with torch.device("meta"):
        got = cpu.forward(problem, inputs)
        gradients = cpu.backward(problem, inputs, got, got.out, None, Wanted())
    want = cpu.forward(problem, inputs)
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    expected = cpu.backward(problem, inputs, want, want.out, None, Wanted())
    assert all(torch.equal(x, y) for x, y in zip(gradients, expected, strict=True) if x is not None)


def test_whoever_looks_sees_the_operators():
    seen = []

    class Watching(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    tensors = qkv()
    with Watching():
        out = tileattn.attention(*tensors)
        torch.autograd.grad(out.sum(), tensors)
    assert FORWARD in seen
    assert BACKWARD in seen
    with torch.profiler.profile() as profile:
        torch.autograd.grad(tileattn.attention(*tensors).sum(), tensors)
    assert {"tileattn::attention_forward", "tileattn::attention_backward"} <= {e.name for e in profile.events()}


def by_dual_numbers(f, x, tangent):
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x, tangent))


def by_function_transform(f, x, tangent):
    return torch.func.jvp(f, (x,), (tangent,))


@pytest.mark.parametrize("jvp", [by_dual_numbers, by_function_transform])
def test_forward_mode_is_refused_and_not_lost(jvp):
    q, k, v = (x.detach() for x in qkv())
    bias, slopes = torch.zeros(H, SQ, SK, dtype=q.dtype), torch.ones(H)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda q: tileattn.attention(q, k, v), q, q)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda bias: tileattn.attention(q, k, v, bias=bias, alibi_slopes=slopes), bias, bias)
    jvp(lambda x: x + tileattn.attention(q, k, v).sum(), bias, bias)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.vmap])
def test_function_transforms_are_refused_where_attention_would_be_transformed(transform):
    q, k, v = torch.randn(3, 1, 5, 2, 8)
    with pytest.raises(NotImplementedError, match="function transforms"):
        transform(lambda q: tileattn.attention(q, k, v).sum())(q[None] if transform is torch.func.vmap else q)
    out = transform(lambda x: (x * tileattn.attention(q, k, v)).sum())(q)
    assert out.isfinite().all()


def test_gradients_of_many_vectors_at_once_are_refused():
    q, k, v = qkv()
    out = tileattn.attention(q, k, v)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(out, q, torch.ones(3, *out.shape, dtype=out.dtype), is_grads_batched=True)


class Wrapper(torch.Tensor):
    """Around memory that is not its own, as what a collective operation will have sent."""

    @staticmethod
    def __new__(cls, inside):
        return torch.Tensor._make_wrapper_subclass(cls, inside.shape, strides=inside.stride(), dtype=inside.dtype)

    def __init__(self, inside):
        self.inside = inside

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*[x.inside if isinstance(x, Wrapper) else x for x in args], **(kwargs or {}))


def test_a_gradient_may_be_a_wrapper_of_the_one_that_kernels_read(monkeypatch):
    q, k, v = qkv()
    out, lse = tileattn.attention(q, k, v, return_lse=True)
    backward, seen = cpu.backward, []
    monkeypatch.setattr(cpu, "backward", lambda *args: seen.append((type(args[3]), type(args[4]))) or backward(*args))
    douts = [torch.randn_like(x) for x in (out, lse)]
    want, got = (
        torch.autograd.grad((out, lse), (q, k, v), grads, retain_graph=True)
        for grads in (douts, [Wrapper(x) for x in douts])
    )
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
    assert seen == [(torch.Tensor, torch.Tensor)] * 2


def test_gradcheck_of_every_input_at_once():
    options = everything()
    learnable = [name for name in options if name in ("bias", "alibi_slopes", "sink")]

    def run(q, k, v, *values):
        changed = options | dict(zip(learnable, values, strict=True))
        return tileattn.attention(q, k, v, return_lse=True, **changed)

    assert torch.autograd.gradcheck(run, (*qkv(), *(options[name] for name in learnable)), fast_mode=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_gives_the_same_without_a_graph_break(dynamic):
    torch._dynamo.reset()
    tensors, options = qkv(), everything()

    def run(q, k, v):
        return tileattn.attention(q, k, v, **options) * 2

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for part in (slice(None), slice(0, 1)):
        args = [x[part] for x in tensors]
        if part.stop:
            options["mask"] = options["mask"][part]
        expected, got = run(*args), compiled(*args)
        torch.testing.assert_close(got, expected)
        for g, e in zip(*(torch.autograd.grad(x.sum(), tensors) for x in (got, expected)), strict=True):
            torch.testing.assert_close(g, e)


def test_compile_of_packed_sequences():
    torch._dynamo.reset()
    q, k, v, cu_q, cu_k = packed()

    def run(q, k, v):
        return tileattn.attention_varlen(q, k, v, cu_q, cu_k, 23, 20, causal=True, return_lse=True)

    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(q, k, v), run(q, k, v), strict=True):
        torch.testing.assert_close(got, expected)


def test_compile_draws_a_new_seed_every_call():
    torch._dynamo.reset()
    q, k, v = qkv()
    compiled = torch.compile(lambda: tileattn.attention(q, k, v, dropout_p=0.5), fullgraph=True, backend="aot_eager")
    assert not torch.equal(compiled(), compiled())


def test_compiled_autograd_traces_backward_whole():
    q, k, v = qkv()
    want = torch.autograd.grad(tileattn.attention(q, k, v).sum(), (q, k, v))
    out = tileattn.attention(q, k, v).sum()
    torch._dynamo.reset()
    with compiled_autograd._enable(torch.compile(backend="aot_eager", fullgraph=True)):
        out.backward()
    for x, gradient in zip((q, k, v), want, strict=True):
        torch.testing.assert_close(x.grad, gradient)


def test_double_backward_is_refused_in_words():
    q, k, v = qkv()
    (dq,) = torch.autograd.grad(tileattn.attention(q, k, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dq.sum().backward()


def test_selective_checkpointing_can_save_attention():
    seen = []

    def policy(context, op, *args, **kwargs):
        seen.append(op)
        return CheckpointPolicy.MUST_SAVE if op == FORWARD else CheckpointPolicy.PREFER_RECOMPUTE

    def block(q, k, v):
        return tileattn.attention(q.sin(), k, v, dropout_p=0.2).cos()

    tensors = qkv()
    torch.manual_seed(1)
    expected = torch.autograd.grad(block(*tensors).sum(), tensors)
    for contexts in ({}, {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}):
        torch.manual_seed(1)
        out = checkpoint(block, *tensors, use_reentrant=False, **contexts)
        for got, want in zip(torch.autograd.grad(out.sum(), tensors), expected, strict=True):
            torch.testing.assert_close(got, want)
    assert FORWARD in seen


def test_autocast_casts_q_k_and_v():
    q, k, v = qkv(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        out = tileattn.attention(q, k, v.bfloat16())
    assert out.dtype == torch.bfloat16
    out.sum().backward()
    assert q.grad.dtype == torch.float32
    assert tileattn.attention(q, k, v).dtype == torch.float32


def test_deterministic_follows_torch(monkeypatch):
    seen = []
    monkeypatch.setattr(ops, "run", lambda problem, *rest: seen.append(problem.deterministic) or (None, None))
    q, k, v = qkv()
    tileattn.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        tileattn.attention(q, k, v)
        tileattn.attention(q, k, v, deterministic=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True, False]


@pytest.mark.parametrize("causal", [False, True])
def test_flops_count_visible_scores(causal):
    q, k, v = qkv()
    with FlopCounterMode(display=False) as counter:
        tileattn.attention(q, k, v, causal=causal).sum().backward()
    offset = SK - SQ
    scores = B * H * (sum(min(SK, i + offset + 1) for i in range(SQ)) if causal else SQ * SK)
    assert counter.get_total_flops() == 2 * scores * ((D + DV) + (3 * D + 2 * DV))


def test_flops_of_packed_sequences_count_each_alone():
    q, k, v, cu_q, cu_k = packed()
    with FlopCounterMode(display=False) as counter:
        tileattn.attention_varlen(q, k, v, cu_q, cu_k)
    assert counter.get_total_flops() == 2 * H * (10 * 20 + 23 * 17) * (D + DV)


def test_flops_of_a_block_mask_count_blocks_that_are_not_skipped():
    q, k, v = qkv()
    blocks = torch.rand(B, H, 3, 3) < 0.5
    block_mask = tileattn.BlockMask.from_blocks(blocks, (16, 20))
    with FlopCounterMode(display=False) as counter:
        tileattn.attention(q, k, v, causal=True, block_mask=block_mask)
    shown = blocks.repeat_interleave(16, 2).repeat_interleave(20, 3)[..., :SQ, :SK]
    shown = shown & torch.ones(SQ, SK, dtype=torch.bool).tril(SK - SQ)
    assert counter.get_total_flops() == 2 * int(shown.sum()) * (D + DV)


def test_importing_costs_neither_time_nor_triton():
    code = """
import importlib.util, sys, time, torch
start = time.process_time()
import tileattn
took = time.process_time() - start
assert took < 0.15, f"import tileattn took {took:.3f} s"
assert "triton" not in sys.modules
importlib.util.find_spec("torch.utils.flop_counter")  # somebody asks whether there is one
import torch.utils.flop_counter as counter
assert torch.ops.tileattn.attention_forward in counter.flop_registry
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_inputs_and_gradients_may_have_any_strides():
    q, k, v = qkv()
    expected = tileattn.attention(q, k, v)
    dout = torch.randn_like(expected)
    want = torch.autograd.grad(expected, (q, k, v), dout)
    views = [x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    got = tileattn.attention(*views)
    torch.testing.assert_close(got, expected)
    strided = dout.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    for g, w in zip(torch.autograd.grad(got, views, strided), want, strict=True):
        torch.testing.assert_close(g, w)
    # sum() hands backward an expanded gradient with zero strides
    tileattn.attention(q, k, v).sum().backward()
    assert q.grad.isfinite().all()
