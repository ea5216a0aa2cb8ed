"""The attention function of Transformers, over tileattn's API."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from transformers.utils import logging

from tileattn.api import attention, attention_varlen
from tileattn.integrations.transformers.masks import StructuredMask

_logger = logging.get_logger(__name__)
_PACKING = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query, key, value: (batch, heads, seqlen, head_dim); returns (batch, seqlen, heads, head_dim_v) and None.

    attention_mask says all that is hidden, sliding windows included (so sliding_window among the kwargs is not needed):
    a StructuredMask, a boolean tensor (True: visible) or a floating one (added to the scores). Without one, causality
    is as is_causal, or else the module, says. s_aux: (heads,), the sinks. position_bias: added to the scores.
    """
    _refuse_unserved(kwargs)
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    mask, bias = attention_mask, position_bias
    options: dict[str, Any] = {"scale": scaling, "softcap": softcap, "sink": s_aux, "dropout_p": dropout}
    if isinstance(mask, StructuredMask) and _needs_the_tensor(mask, q, k, bias):
        mask = mask.dense()
    packing = None if bias is not None else _packing(mask, kwargs)
    if isinstance(mask, StructuredMask):
        k, v = k[:, : mask.columns], v[:, : mask.columns]
        bias = None if bias is None else bias[..., : mask.columns]
        options["window"] = (mask.left, mask.right)
        mask = None if mask.keys is None else mask.keys[:, None, None, :]
    elif mask is None:
        options["causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
    elif mask.is_floating_point():
        bias = mask if bias is None else mask + bias
        mask = None
    if packing is not None:
        return _packed(q, k, v, packing, options), None
    return attention(q, k, v, mask=mask, bias=bias, **options), None


def _needs_the_tensor(mask: StructuredMask, q: Tensor, k: Tensor, bias: Tensor | None) -> bool:
    """Lengths that are not the mask's get the error that any mask would give; and a bias is laid out over whole rows,
    not over each packed sequence."""
    return mask.shape[-2:] != (q.shape[1], k.shape[1]) or (mask.cu_seqlens is not None and bias is not None)


def _packing(mask: Tensor | None, kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k of packed sequences: those the mask knows of, or those
    given as arguments, under the names that Transformers has for FlashAttention."""
    if isinstance(mask, StructuredMask) and mask.cu_seqlens is not None:
        return mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen
    given = tuple(kwargs.get(name) for name in _PACKING)
    may_be_packed = mask is None or (isinstance(mask, StructuredMask) and mask.keys is None)
    return given if may_be_packed and None not in given else None


def _packed(q: Tensor, k: Tensor, v: Tensor, packing: tuple[Any, ...], options: dict[str, Any]) -> Tensor:
    """Attention within each of the sequences that the (batch * seqlen) tokens consist of."""
    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k = packing
    out = attention_varlen(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        cu_seqlens_q.int(),
        cu_seqlens_k.int(),
        int(max_seqlen_q),
        int(max_seqlen_k),
        **options,
    )
    return out.view(*q.shape[:2], *out.shape[1:])


def _refuse_unserved(kwargs: dict[str, Any]) -> None:
    for name in ("indices", "block_indices"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f'attn_implementation="tileattn": the model selects keys by {name}=, which is sparse attention; use '
                '"sdpa" or "eager"'
            )
    if kwargs.get("output_attentions"):
        _logger.warning_once(
            "tileattn never holds the attention matrix, so output_attentions=True returns none; use "
            'attn_implementation="eager" to get it.'
        )
