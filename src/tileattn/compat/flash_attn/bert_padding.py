"""Between padded batches and packed tokens, as flash_attn.bert_padding does it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Rows of x (n, ...): (len(indices), ...)."""
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """(first_axis_dim, ...) with values (len(indices), ...) at indices and zeros elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def index_first_axis_residual(x: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows, and x without its gradient."""
    return x[indices], x.detach()


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """hidden_states (batch, seqlen, ...), attention_mask (batch, seqlen), 1 for tokens that count; unused_mask 1 for
    tokens that are allocated and do not. Returns the tokens (total, ...), their indices in (batch * seqlen), cu_seqlens
    int32 (batch + 1,), the longest length, and how many tokens of each sequence count, int32 (batch,)."""
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    indices, cu_seqlens, longest = _packing(taken.bool(), taken.sum(-1))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest, attention_mask.sum(-1).int()


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Several short sequences in one row: attention_mask_in_length (batch, seqlen) lists their lengths, zeros after
    them. Returns as `unpad_input`, one entry of cu_seqlens a short sequence."""
    seqlen = attention_mask_in_length.shape[-1]
    taken = torch.arange(seqlen, device=attention_mask_in_length.device) < attention_mask_in_length.sum(-1)[:, None]
    indices, cu_seqlens, longest = _packing(taken, attention_mask_in_length[attention_mask_in_length > 0])
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, longest


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of `unpad_input`: (batch, seqlen, ...), zeros where no token was."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))


def _packing(taken: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor, int]:
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return indices, cu_seqlens, int(lengths.max()) if lengths.numel() else 0
