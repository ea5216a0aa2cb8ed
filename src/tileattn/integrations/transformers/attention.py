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
    if isinstance(mask, StructuredMask) and mask.cu_seqlens is not None:
        if bias is None:
            options["window"] = (mask.left, mask.right)
            return _packed(q, k, v, (mask.cu_seqlens, mask.cu_seqlens, mask.max_seqlen, mask.max_seqlen), options), None
        mask = mask.dense()  # the bias is laid out over whole rows, not over each sequence
    if isinstance(mask, StructuredMask):
        k, v = k[:, : mask.columns], v[:, : mask.columns]
        bias = None if bias is None else bias[..., : mask.columns]
        options["window"] = (mask.left, mask.right)
        mask = None if mask.keys is None else mask.keys[:, None, None, :]
    elif mask is None:
        options["causal"] = getattr(module, "is_causal", True) if is_causal is None else is_causal
        packing = tuple(kwargs.get(name) for name in _PACKING)
        if bias is None and None not in packing:
            return _packed(q, k, v, packing, options), None
    elif mask.is_floating_point():
        bias = mask if bias is None else mask + bias
        mask = None
    return attention(q, k, v, mask=mask, bias=bias, **options), None


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
