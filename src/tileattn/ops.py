"""torch.library operators: what the dispatcher, torch.compile, checkpointing and FLOP counters see of tileattn.

`tileattn::attention_forward` and `tileattn::attention_backward` take every tensor and scalar of a call flat, rebuild
the Problem (without checking it again) and hand it to the backend named in the call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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
    "str backend"
)
_NUM_TENSORS = len(Inputs._fields)
_WANTED_PLACES = [Inputs._fields.index(name) for name in Wanted._fields]
_TAGS = (torch.Tag.pt2_compliant_tag,)

_lib = torch.library.Library("tileattn", "DEF")
_lib.define(f"attention_forward({_TENSORS}, {_SCALARS}) -> (Tensor out, Tensor lse)", tags=_TAGS)
_lib.define(
    f"attention_backward(Tensor? dout, Tensor? dlse, Tensor out, Tensor lse, {_TENSORS}, {_SCALARS}, bool[] wanted)"
    " -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias, Tensor dalibi_slopes, Tensor dsink)",
    tags=_TAGS,
)


def run(problem: Problem, inputs: Inputs, backend: str) -> Forward:
    """Differentiable forward of a checked problem."""
    p = problem
    out, lse = torch.ops.tileattn.attention_forward.default(
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
    return Forward(out, lse)


def split(args: tuple[Any, ...]) -> tuple[Problem, Inputs, str]:
    """The Problem, Inputs and backend that the flat arguments of `attention_forward` stand for."""
    inputs = Inputs(*args[:_NUM_TENSORS])
    q, k, v = inputs[:3]
    seqlen_q, seqlen_k, scale, left, right, softcap, dropout_p, deterministic, *mods, backend = args[_NUM_TENSORS:]
    score_mod, score_derivative, mask_mod, block_size = mods
    varlen = inputs.cu_seqlens_q is not None
    problem = Problem(
        batch=inputs.cu_seqlens_q.shape[0] - 1 if varlen else q.shape[0],
        seqlen_q=seqlen_q,
        seqlen_k=seqlen_k,
        num_heads=q.shape[-2],
        num_heads_k=k.shape[-2],
        head_dim=q.shape[-1],
        head_dim_v=v.shape[-1],
        dtype=q.dtype,
        device=q.device,
        scale=scale,
        window_left=left,
        window_right=right,
        softcap=softcap,
        dropout_p=dropout_p,
        deterministic=deterministic,
        varlen=varlen,
        has_bias=inputs.bias is not None,
        has_mask=inputs.mask is not None,
        has_alibi=inputs.alibi_slopes is not None,
        has_sink=inputs.sink is not None,
        score_mod=score_mod,
        score_derivative=score_derivative,
        mask_mod=mask_mod,
        block_size=tuple(block_size),
    )
    return problem, inputs, backend


def _forward(*args: Any) -> Forward:
    problem, inputs, backend = split(args)
    return dispatch.load(backend).forward(problem, inputs)


def _forward_fake(*args: Any) -> tuple[Tensor, Tensor]:
    problem, inputs, _ = split(args)
    q = inputs.q
    rows = q.shape[:1] if problem.varlen else (q.shape[0], problem.num_heads, q.shape[1])
    lse_shape = (problem.num_heads, *rows) if problem.varlen else rows
    return q.new_empty((*q.shape[:-1], problem.head_dim_v)), q.new_empty(lse_shape, dtype=problem.lse_dtype)


def _backward(dout: Tensor | None, dlse: Tensor | None, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    problem, inputs, backend = split(args[:-1])
    wanted = Wanted(*args[-1])
    backend = dispatch.choose_backward(problem, backend)
    gradients = dispatch.load(backend).backward(problem, inputs, Forward(out, lse), dout, dlse, wanted)
    return tuple(out.new_empty(0) if g is None else g for g in gradients)


def _backward_fake(dout: Any, dlse: Any, out: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    _, inputs, _ = split(args[:-1])
    sources = (inputs.q, inputs.k, inputs.v, inputs.bias, inputs.alibi_slopes, inputs.sink)
    return tuple(x.new_empty(x.shape) if w else out.new_empty(0) for x, w in zip(sources, args[-1], strict=True))


class _Attention(torch.autograd.Function):
    """Autograd of `attention_forward`, by hand: torch.library.register_autograd costs 70 microseconds a call."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        with torch._C._AutoDispatchBelowAutograd():
            out, lse = torch.ops.tileattn.attention_forward.default(*args)
        *tensors, of_score, of_mask = args[:_NUM_TENSORS]
        ctx.save_for_backward(out, lse, *tensors, *of_score, *of_mask)
        ctx.num_of_mask, ctx.scalars = len(of_mask), args[_NUM_TENSORS:]
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        returned: list[Tensor | None] = [None] * len(ctx.needs_input_grad)
        if dout is not None or dlse is not None:
            wanted = [ctx.needs_input_grad[place] for place in _WANTED_PLACES]
            out, lse, *saved = ctx.saved_tensors
            tensors, lists = saved[: _NUM_TENSORS - 2], saved[_NUM_TENSORS - 2 :]
            of_score, of_mask = lists[: len(lists) - ctx.num_of_mask], lists[len(lists) - ctx.num_of_mask :]
            grads = torch.ops.tileattn.attention_backward.default(
                dout, dlse, out, lse, *tensors, of_score, of_mask, *ctx.scalars, wanted
            )
            for place, want, grad in zip(_WANTED_PLACES, wanted, grads, strict=True):
                returned[place] = grad if want else None
        return tuple(returned)


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


def _autograd(operator: Any, function: type[torch.autograd.Function]) -> Any:
    """Kernel of the Autograd dispatch key: record `function` where a gradient is needed, else pass through."""

    def kernel(*args: Any) -> tuple[Tensor, ...]:
        if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in args):
            return function.apply(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return operator(*args)

    return kernel


def _register() -> None:
    forward, backward = torch.ops.tileattn.attention_forward.default, torch.ops.tileattn.attention_backward.default
    _lib.impl("attention_forward", _forward, "CompositeExplicitAutograd")
    _lib.impl("attention_backward", _backward, "CompositeExplicitAutograd")
    _lib.impl("attention_forward", _autograd(forward, _Attention), "Autograd")
    _lib.impl("attention_backward", _autograd(backward, _Gradients), "Autograd")
    torch.library.register_fake("tileattn::attention_forward", _forward_fake, lib=_lib)
    torch.library.register_fake("tileattn::attention_backward", _backward_fake, lib=_lib)


_register()
