"""PyTorch's own attention on tileattn: an implementation of its registry for FlashAttention.

    import tileattn
    from torch.nn.attention import activate_flash_attention_impl

    activate_flash_attention_impl("tileattn")

From then on the operators behind scaled_dot_product_attention's FlashAttention backend and behind varlen_attn are
tileattn's, on CUDA devices and on the CPU, in eager mode and in what torch.compile makes, until
restore_flash_attention_impl().
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import register_flash_attention_impl

from tileattn import dispatch, ops
from tileattn.compat.flash_attn.flash_attn_interface import dropped_probabilities
from tileattn.compat.kvcache import with_kvcache
from tileattn.compat.packing import Packed, used_rows
from tileattn.problem import Forward, Problem, Wanted

NAME = "tileattn"


def register() -> None:
    """Make the name known to torch.nn.attention. Activates nothing."""
    register_flash_attention_impl(NAME, register_fn=_activate)


class _Handle:
    """What the registry keeps while the implementation is active."""

    def __init__(self, library: torch.library.Library) -> None:
        self.library = library

    def remove(self) -> None:
        self.library._destroy()


def _activate() -> _Handle:
    library = torch.library.Library("aten", "IMPL")
    for key in ("CUDA", "CPU"):
        library.impl("_flash_attention_forward", _forward, key)
        library.impl("_flash_attention_forward_no_dropout_inplace", _forward_into, key)
        library.impl("_flash_attention_backward", _backward, key)
    library.impl("_scaled_dot_product_flash_attention", _sdpa_forward, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_backward", _sdpa_backward, "CUDA")
    library.impl("_scaled_dot_product_flash_attention_for_cpu", _sdpa_forward_cpu, "CPU")
    library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", _sdpa_backward_cpu, "CPU")
    return _Handle(library)


# The operators' arguments and returns are PyTorch's. Tensors are (batch, seqlen, heads, head_dim) or, with cum_seq_q,
# packed; those of scaled_dot_product_attention (batch, heads, seqlen, head_dim). The lse of a row that sees nothing is
# +inf.


def _forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    seqused_k: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """num_splits=1 keeps the keys of a paged cache together; otherwise it has no effect. The debug mask is flash_attn's
    S_dmask."""
    options = _options(is_causal, window_size_left, window_size_right, scale) | {"alibi_slopes": alibi_slopes}
    rng_state = torch.zeros(2, dtype=torch.int64, device=query.device)
    if dropout_p > 0.0:
        torch.randint(-(2**63), 2**63 - 1, (1,), out=rng_state[:1], device=query.device)
    if cum_seq_q is None:
        if seqused_k is not None or block_table is not None:
            raise NotImplementedError("tileattn: seqused_k and block_table need packed queries (cum_seq_q)")
        out, lse, debug_mask = _attend((query, key, value), options, dropout_p, rng_state, return_debug_mask)
    elif block_table is not None:
        if dropout_p > 0.0:
            raise NotImplementedError("tileattn: dropout is not supported with block_table, which is for inference")
        lengths = cum_seq_k.diff() if seqused_k is None and cum_seq_k is not None else seqused_k
        options |= {"block_table": block_table, "cu_seqlens_q": cum_seq_q, "max_seqlen_q": max_q}
        nothing_new = None, None, None, None, False
        out, lse = with_kvcache(query, key, value, *nothing_new, lengths, num_splits or 0, options)
        lse, debug_mask = _infinite(lse), query.new_empty(0)
    else:
        keys = _keys(key, value, cum_seq_k, max_k, seqused_k)
        options |= _varlen(cum_seq_q, keys.cu_seqlens, max_q, keys.max_seqlen)
        out, lse, debug_mask = _attend((query, keys.k, keys.v), options, dropout_p, rng_state, return_debug_mask)
    unused = torch.zeros((), dtype=torch.int64, device=query.device)
    return _like(out, query), lse, rng_state.view(torch.uint64), unused.view(torch.uint64), debug_mask


def _forward_into(out: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    result, lse, *_ = _forward(*args, **kwargs)
    out.copy_(result)
    return lse


def _backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    rng_state: Tensor,
    unused: Tensor,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
) -> tuple[Tensor, ...]:
    options = _options(is_causal, window_size_left, window_size_right, scale)
    if cum_seq_q is not None:
        options |= _varlen(cum_seq_q, cum_seq_k, max_q, max_k)
    tensors = query, key, value
    gradients = _differentiate(grad_out, tensors, out, logsumexp, options, dropout_p, rng_state.view(torch.int64))
    return tuple(_like(g, x) for g, x in zip(gradients, tensors, strict=True))


def _sdpa_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    return_debug_mask: bool = False,
    *,
    scale: float | None = None,
) -> tuple[Any, ...]:
    q, k, v = _transposed(query, key, value)
    lengths = q.shape[1], k.shape[1]
    out, lse, *rest = _forward(q, k, v, None, None, *lengths, dropout_p, is_causal, return_debug_mask, scale=scale)
    return _like(out.transpose(1, 2), query), lse, None, None, *lengths, *rest


def _sdpa_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    philox_seed: Tensor,
    philox_offset: Tensor,
    *,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    dout, q, k, v, o = _transposed(grad_out, query, key, value, out)
    rest = cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, philox_seed, philox_offset
    gradients = _transposed(*_backward(dout, q, k, v, o, logsumexp, *rest, scale=scale))
    return tuple(_like(g, x) for g, x in zip(gradients, (query, key, value), strict=True))


def _sdpa_forward_cpu(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    q, k, v, options = _top_left(query, key, value, is_causal, attn_mask, scale)
    out, lse, _ = _attend((q, k, v), options, 0.0, None)
    # the layout that PyTorch's meta kernel promises
    return _like(out.transpose(1, 2), query), lse.transpose(1, 2).contiguous().transpose(1, 2)


def _sdpa_backward_cpu(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, ...]:
    q, k, v, options = _top_left(query, key, value, is_causal, attn_mask, scale)
    dout, o = _transposed(grad_out, out)
    dq, dk, dv = _differentiate(dout, (q, k, v), o, logsumexp, options, 0.0, None)
    unseen = (0, 0, 0, 0, 0, key.shape[2] - k.shape[1])
    return _transposed(dq, *(torch.nn.functional.pad(x, unseen) for x in (dk, dv)))


def _top_left(
    query: Tensor, key: Tensor, value: Tensor, is_causal: bool, attn_mask: Tensor | None, scale: float | None
) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    """q, k, v and options of a call in which causality begins at the top left: row i sees columns up to i."""
    q, k, v = _transposed(query, key, value)
    if is_causal:
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    right = q.shape[1] - k.shape[1] if is_causal else -1
    return q, k, v, {"window": (-1, right), "bias": attn_mask, "scale": scale}


def _attend(
    qkv: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    dropout_p: float,
    rng_state: Tensor | None,
    debug: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    seed = None if rng_state is None else rng_state[:1]
    problem, inputs = Problem.of(*qkv, dropout_p=dropout_p, dropout_seed=seed, **options)
    out, lse = ops.run(problem, inputs)
    return out, _infinite(lse), dropped_probabilities(problem, inputs, dropout_p if debug else 0.0, seed)


def _infinite(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == float("-inf"), float("inf"))


def _differentiate(
    dout: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    out: Tensor,
    logsumexp: Tensor,
    options: dict[str, Any],
    dropout_p: float,
    rng_state: Tensor | None,
) -> tuple[Tensor, ...]:
    seed = None if rng_state is None or dropout_p == 0.0 else rng_state[:1]
    deterministic = torch.are_deterministic_algorithms_enabled()
    problem, inputs = Problem.of(*qkv, dropout_p=dropout_p, dropout_seed=seed, deterministic=deterministic, **options)
    lse = logsumexp.masked_fill(logsumexp == float("inf"), float("-inf")).contiguous()
    backend = dispatch.load(dispatch.choose(problem, direction="backward"))
    gradients = backend.backward(problem, inputs, Forward(out, lse), dout, None, Wanted())
    return tuple(g for g in gradients[:3] if g is not None)


def _options(is_causal: bool, left: int | None, right: int | None, scale: float | None) -> dict[str, Any]:
    window = tuple(-1 if bound is None else max(bound, -1) for bound in (left, right))
    return {"causal": is_causal, "window": window, "scale": scale}


def _varlen(cum_seq_q: Tensor, cum_seq_k: Tensor | None, max_q: int, max_k: int) -> dict[str, Any]:
    return {"cu_seqlens_q": cum_seq_q, "cu_seqlens_k": cum_seq_k, "max_seqlen_q": max_q, "max_seqlen_k": max_k}


def _keys(key: Tensor, value: Tensor, cum_seq_k: Tensor | None, max_k: int, seqused_k: Tensor | None) -> Packed:
    """The keys that count, packed."""
    if cum_seq_k is None:
        raise TypeError("tileattn: cum_seq_k: got None, needed with cum_seq_q where there is no block_table")
    packed = Packed(key, value, cum_seq_k, max_k)
    return packed if seqused_k is None else used_rows(packed, None, seqused_k)


def _transposed(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(1, 2) for x in tensors)


def _like(x: Tensor, model: Tensor) -> Tensor:
    """x in the layout that torch.empty_like(model) has, as PyTorch's meta kernels promise."""
    if x.stride() == model.stride():
        return x
    empty = torch.empty_like(model, device="meta")
    return x if x.stride() == empty.stride() else torch.empty_like(model).copy_(x)
