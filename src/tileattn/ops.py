"""torch.library operators: what the dispatcher, torch.compile, checkpointing and FLOP counters see of tileattn.

`tileattn::attention_forward` and `tileattn::attention_backward` take every tensor and scalar of a call flat, rebuild
the Problem (without checking it again) and hand it to the backend named in the call, or to the one that they choose:
whoever traces a call may have symbols for sizes, and would compile it once for each side of every bound of a backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from tileattn import dispatch
from tileattn.problem import Forward, Inputs, Problem, Wanted

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor? alibi_slopes, Tensor? sink, "
    "Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? dropout_seed, Tensor? block_mask, "
    "Tensor[] score_mod_tensors, Tensor[] mask_mod_tensors"
)
_SCALARS = (
    "SymInt seqlen_q, SymInt seqlen_k, float scale, SymInt window_left, SymInt window_right, float softcap, "
    "float dropout_p, bool deterministic, str score_mod, str score_derivative, str mask_mod, int[] block_size, "
    "str? backend"
)
_NUM_TENSORS = len(Inputs._fields)
_TAGS = (torch.Tag.pt2_compliant_tag,)

_lib = torch.library.Library("tileattn", "DEF")
_lib.define(f"attention_forward({_TENSORS}, {_SCALARS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_lib.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_SCALARS}, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsink)",
    tags=_TAGS,
)


def run(problem: Problem, inputs: Inputs, backend: str | None = None) -> Forward:
    """Differentiable forward of a checked problem. It goes straight to the backend where nobody would see the operator:
    two passes through the dispatcher, with arguments this many, take longer than all the rest of a call."""
    if may_be_observed(inputs[:-2]):
        return Forward(*torch.ops.tileattn.attention_forward.default(*_flat(problem, inputs, backend)))
    refuse_tangents(inputs[:-2])
    backend = dispatch.choose(problem, backend)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs[:-2] if x is not None):
        return Forward(*_attend(problem, inputs, backend, observed=False))
    return dispatch.load(backend).forward(problem, inputs)


def may_be_observed(tensors: Iterable[Any]) -> bool:
    """Whether somebody may look for an operator of these tensors: a compiler, a mode, a function transform, a tracer, a
    profiler, or a subclass of Tensor."""
    return (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._get_tracing_state() is not None
        or torch._C._autograd._profiler_enabled()
        or not {type(x) for x in tensors} <= _PLAIN
    )


def refuse_tangents(tensors: Iterable[Any]) -> None:
    """Kernels would lose them without a word."""
    if forward_ad._current_level < 0:
        return
    if any(isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(
            "tileattn: forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not supported; use "
            "standard attention where they are needed"
        )


def _refuse_transforms(*_: Any) -> None:
    raise NotImplementedError(
        "tileattn: function transforms (torch.func.grad, vjp, jacrev, vmap; is_grads_batched) are not supported; use "
        "torch.autograd.grad, and put what is mapped over into the batch"
    )


_PLAIN = {Tensor, torch.nn.Parameter, type(None)}


def _flat(problem: Problem, inputs: Inputs, backend: str | None) -> tuple[Any, ...]:
    """The arguments of `attention_forward`."""
    p = problem
    return (
        *inputs,
        p.seqlen_q,
        p.seqlen_k,
        p.scale,
        p.window_left,
        p.window_right,
        p.softcap,
        p.dropout_p,
        p.deterministic,
        p.score_mod,
        p.score_derivative,
        p.mask_mod,
        p.block_size,
        backend,
    )


def split(args: tuple[Any, ...]) -> tuple[Problem, Inputs, str | None]:
    """The Problem, Inputs and backend that the arguments of `attention_forward` stand for."""
    *tensors, of_score, of_mask = args[:_NUM_TENSORS]
    inputs = Inputs._make((*tensors, tuple(of_score), tuple(of_mask)))  # lists, from the dispatcher
    seqlen_q, seqlen_k, scale, left, right, softcap, dropout_p, deterministic, *mods, backend = args[_NUM_TENSORS:]
    score_mod, score_derivative, mask_mod, block_size = mods
    problem = Problem.describing(
        inputs,
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        scale=scale,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        score_mod=score_mod,
        score_derivative=score_derivative,
        mask_mod=mask_mod,
        block_size=tuple(block_size),
    )
    return problem, inputs, backend


def _forward(*args: Any) -> Forward:
    problem, inputs, backend = split(args)
    return dispatch.load(dispatch.choose(problem, backend)).forward(problem, inputs)


def _forward_fake(*args: Any) -> Forward:
    problem, inputs, _ = split(args)
    return Forward.unwritten(inputs.q, problem.head_dim_v, problem.lse_dtype)


def _backward(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    problem, inputs, backend = split(args[:-1])
    wanted = Wanted(*args[-1])
    serving = dispatch.load(dispatch.choose_backward(problem, backend))
    gradients = serving.backward(problem, inputs, Forward(out, lse), dout, dlse, wanted)
    return tuple(out.new_empty(0) if g is None else g for g in gradients)


def _backward_fake(dout: Any, dlse: Any, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, inputs, _ = split(args[:-1])
    sources = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.alibi_slopes, inputs.sink)
    return tuple(x.new_empty(x.shape) if w else out.new_empty(0) for x, w in zip(sources, args[-1], strict=True))


# Problems of which a backward was announced, and kinds: problems that differ in sizes alone share their kernels.
_anticipated: set[Problem] = set()
MAX_ANTICIPATED = 4096


def _anticipate(problem: Problem, inputs: Inputs, backend: str, wanted: Wanted) -> None:
    """Have the backward kernels of a call compiled beside those of its forward, if it is the first of its kind."""
    if problem in _anticipated:
        return
    if len(_anticipated) >= MAX_ANTICIPATED:
        _anticipated.clear()
    kind = replace(problem, batch=1, seqlen_q=1, seqlen_k=1, num_heads=1, num_heads_k=1)
    known = kind in _anticipated
    _anticipated.update((problem, kind))
    if not known and problem.device.type == "cuda" and not torch.cuda.is_current_stream_capturing():
        inputs = without_memory(inputs)
        forward = Forward.unwritten(inputs.q, problem.head_dim_v, problem.lse_dtype)
        serving = dispatch.load(dispatch.choose_backward(problem, backend))
        serving.anticipate(problem, inputs, forward, forward.out, None, wanted)


def without_memory(inputs: Inputs) -> Inputs:
    """The same layouts, on the "meta" device."""

    def like(x: Any) -> Any:
        if isinstance(x, tuple):
            return tuple(map(like, x))
        return None if x is None else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return Inputs._make(map(like, inputs))


class _Attention(torch.autograd.Function):
    """Autograd of `attention_forward`, by hand: torch.library.register_autograd costs 70 microseconds a call."""

    @staticmethod
    def forward(
        ctx: Any, problem: Problem, inputs: Inputs, backend: str | None, observed: bool, *_differentiable: Any
    ) -> tuple[Tensor, Tensor]:
        if observed:
            with torch._C._AutoDispatchBelowAutograd():
                out, lse = torch.ops.tileattn.attention_forward.default(*_flat(problem, inputs, backend))
        else:
            assert backend is not None  # run has chosen
            _anticipate(problem, inputs, backend, Wanted(*ctx.needs_input_grad[4:]))
            out, lse = dispatch.load(backend).forward(problem, inputs)
        *tensors, of_score, of_mask = inputs
        ctx.save_for_backward(out, lse, *tensors, *of_score, *of_mask)
        ctx.problem, ctx.backend, ctx.num_of_mask = problem, backend, len(of_mask)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if dout is None and dlse is None:
            return (None,) * len(ctx.needs_input_grad)
        out, lse, *saved = ctx.saved_tensors
        middle, end = len(Inputs._fields) - 2, len(saved) - ctx.num_of_mask
        inputs = Inputs._make((*saved[:middle], tuple(saved[middle:end]), tuple(saved[end:])))
        wanted = Wanted(*ctx.needs_input_grad[4:])
        gradients: tuple[Tensor | None, ...]
        if torch.is_grad_enabled() or may_be_observed((*inputs[:-2], dout, dlse)):
            flat = _flat(ctx.problem, inputs, ctx.backend)
            got = torch.ops.tileattn.attention_backward.default(dout, dlse, out, lse, *flat, wanted)
            gradients = tuple([g if w else None for g, w in zip(got, wanted, strict=True)])
        else:
            for x in (dout, dlse):
                if x is not None and torch._C._functorch.is_legacy_batchedtensor(x):
                    _refuse_transforms()
            backend = dispatch.load(dispatch.choose_backward(ctx.problem, ctx.backend))
            gradients = backend.backward(ctx.problem, inputs, Forward(out, lse), dout, dlse, wanted)
        return None, None, None, None, *gradients


def _attend(problem: Problem, inputs: Inputs, backend: str | None, observed: bool) -> tuple[Tensor, Tensor]:
    differentiable = inputs.q, inputs.k, inputs.v, inputs.bias, inputs.alibi_slopes, inputs.sink  # as in Wanted
    return _Attention.apply(problem, inputs, backend, observed, *differentiable)


class _Gradients(torch.autograd.Function):
    """Autograd of `attention_backward`: there is none."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tileattn.attention_backward.default(*args)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, ...]:
        raise NotImplementedError(
            "tileattn: double backward is not supported (gradients are first-order only); drop create_graph=True, or "
            "use standard attention where second derivatives are needed"
        )


def _autograd(operator: Any, record: Callable[..., tuple[Tensor, ...]]) -> Any:
    """Kernel of the Autograd dispatch key: `record` where a gradient is needed, else pass through."""

    def kernel(*args: Any) -> tuple[Tensor, ...]:
        refuse_tangents(args)
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            if torch._C._functorch.peek_interpreter_stack() is not None:
                _refuse_transforms()
            return record(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return kernel


def _register() -> None:
    forward, backward = torch.ops.tileattn.attention_forward.default, torch.ops.tileattn.attention_backward.default
    _lib.impl("attention_forward", _forward, "CompositeExplicitAutograd")
    _lib.impl("attention_backward", _backward, "CompositeExplicitAutograd")
    _lib.impl("attention_forward", _autograd(forward, lambda *args: _attend(*split(args), observed=True)), "Autograd")
    _lib.impl("attention_backward", _autograd(backward, _Gradients.apply), "Autograd")
    torch.library.register_fake("tileattn::attention_forward", _forward_fake, lib=_lib)
    torch.library.register_fake("tileattn::attention_backward", _backward_fake, lib=_lib)
    for name in ("attention_forward", "attention_backward"):
        torch.library.register_vmap(f"tileattn::{name}", _refuse_transforms, lib=_lib)


_register()
