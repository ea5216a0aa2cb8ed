"""The mask function of Transformers: what a model's mask means, without building it where that can be avoided.

Transformers describes a mask by a function of (batch, head, row, column), composed from a few of its own. Compositions
of causality, sliding window, padding and packing are recognised and become a StructuredMask, which holds one flag a key
and a few numbers; all else (bidirectional prefixes, chunks, blocks of an image, a user's function) is built, exactly.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import masking_utils

_KEEP_STRUCTURE = {
    torch.ops.aten.alias.default,
    torch.ops.aten.clone.default,
    torch.ops.aten.detach.default,
    torch.ops.aten._to_copy.default,
}


class StructuredMask(torch.Tensor):
    """A boolean mask of shape (batch, 1, seqlen_q, seqlen_k) that is known by its structure and holds no such tensor.

    Row i sees column j when j < columns, -left <= j - i - (columns - seqlen_q) <= right (a negative bound: unlimited),
    keys[b, j] where there are keys, and, where there is cu_seqlens, both belong to one sequence.

    Attributes:
        keys: bool (batch, columns) or None.
        cu_seqlens: int32 (sequences + 1,) over the flattened (batch * seqlen_q) tokens, or None.
        columns, left, right, max_seqlen: ints.

    The attention function reads the attributes. Whatever else a model does with its mask (slice it, combine it) is done
    on the boolean tensor, built at that moment.
    """

    keys: Tensor | None
    cu_seqlens: Tensor | None
    columns: int
    left: int
    right: int
    max_seqlen: int

    @staticmethod
    def __new__(cls, shape, device, keys, cu_seqlens, columns, left, right, max_seqlen):
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bool, device=device)
        mask.keys, mask.cu_seqlens = keys, cu_seqlens
        mask.columns, mask.left, mask.right, mask.max_seqlen = columns, left, right, max_seqlen
        return mask

    def dense(self) -> Tensor:
        """The boolean (batch, 1, seqlen_q, seqlen_k) tensor."""
        batch, _, seqlen_q, seqlen_k = self.shape
        columns = torch.arange(seqlen_k, device=self.device)
        distance = columns - torch.arange(seqlen_q, device=self.device)[:, None] - (self.columns - seqlen_q)
        seen = columns.expand(batch, 1, seqlen_q, seqlen_k) < self.columns
        if self.left >= 0:
            seen = seen & (distance >= -self.left)
        if self.right >= 0:
            seen = seen & (distance <= self.right)
        if self.keys is not None:
            keys = nn.functional.pad(self.keys, (0, seqlen_k - self.columns))
            seen = seen & keys[:, None, None, :]
        if self.cu_seqlens is not None:
            tokens = torch.arange(batch * seqlen_q, dtype=torch.int32, device=self.device)
            sequence = torch.searchsorted(self.cu_seqlens, tokens, right=True).view(batch, 1, seqlen_q)
            seen = seen & (sequence[..., :, None] == sequence[..., None, :])
        return seen

    def _moved(self, device: torch.device) -> StructuredMask:
        keys, cu_seqlens = (None if x is None else x.to(device) for x in (self.keys, self.cu_seqlens))
        return StructuredMask(
            self.shape, device, keys, cu_seqlens, self.columns, self.left, self.right, self.max_seqlen
        )

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):  # type: ignore[override]
        kwargs = kwargs or {}
        if func in _KEEP_STRUCTURE and kwargs.get("dtype") in (None, torch.bool):
            return args[0]._moved(kwargs.get("device") or args[0].device)
        args, kwargs = tree_map_only(StructuredMask, StructuredMask.dense, (args, kwargs))
        return func(*args, **kwargs)

    # torch.compile sees through the class by these two when a compiled layer is handed a mask made outside it.
    def __tensor_flatten__(self):
        inner = [name for name in ("keys", "cu_seqlens") if getattr(self, name) is not None]
        return inner, (tuple(self.shape), self.device, self.columns, self.left, self.right, self.max_seqlen)

    @staticmethod
    def __tensor_unflatten__(inner, context, size, stride):
        shape, device, *numbers = context
        return StructuredMask(shape, device, inner.get("keys"), inner.get("cu_seqlens"), *numbers)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        parts = [f"shape={tuple(self.shape)}", f"left={self.left}", f"right={self.right}"]
        parts += [f"{name}={getattr(self, name)}" for name in ("keys", "cu_seqlens") if getattr(self, name) is not None]
        return f"StructuredMask({', '.join(parts)})"


class Pattern(NamedTuple):
    """left and right: how far a row sees, None for unlimited; sequence: (batch, seqlen_q) number of each token's
    sequence, None when there is but one."""

    left: int | None = None
    right: int | None = None
    sequence: Tensor | None = None

    def __and__(self, other: Pattern) -> Pattern | None:
        if self.sequence is not None and other.sequence is not None:
            return None
        sequence = self.sequence if other.sequence is None else other.sequence
        return Pattern(_least(self.left, other.left), _least(self.right, other.right), sequence)


def _least(a: int | None, b: int | None) -> int | None:
    return a if b is None else b if a is None else min(a, b)


def _tracing() -> bool:
    return torch.compiler.is_compiling() or torch.jit.is_tracing()


def recognise(mask_function: Callable, packed: bool = False) -> Pattern | None:
    """The Pattern that one of Transformers' mask functions stands for, None for one that is not known. packed: it only
    matters within each of several packed sequences."""
    if mask_function is masking_utils.causal_mask_function:
        return Pattern(right=0)
    if mask_function is masking_utils.bidirectional_mask_function:
        return Pattern()
    # torch.compile cannot look into the closure of a function made inside its graph
    if _tracing() or getattr(mask_function, "__module__", None) != masking_utils.__name__:
        return None
    cells = zip(mask_function.__code__.co_freevars, mask_function.__closure__ or (), strict=True)
    captured = {name: cell.cell_contents for name, cell in cells}
    match mask_function.__qualname__:
        case "sliding_window_overlay.<locals>.inner_mask":
            return Pattern(left=captured["sliding_window"] - 1)
        case "sliding_window_bidirectional_overlay.<locals>.inner_mask":
            return Pattern(left=captured["sliding_window"], right=captured["sliding_window"])
        case "packed_sequence_mask_function.<locals>.inner_mask":
            return Pattern(sequence=captured["packed_sequence_mask"])
        case "remap_positions_for_packed_sequence.<locals>.inner_mask" if packed:
            # counts positions from the start of each sequence, which changes no distance within one
            return recognise(captured["mask_function"], packed)
        case "and_masks.<locals>.and_mask":
            functions = captured["mask_functions"]
            packed = packed or any(f.__qualname__.startswith("packed_sequence_mask_function") for f in functions)
            parts = [recognise(function, packed) for function in functions]
            return functools.reduce(lambda a, b: None if a is None or b is None else a & b, parts)
    return None


def mask_forward(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    config: Any = None,
    device: torch.device | str = "cpu",
    **rest: Any,
) -> Tensor | None:
    """What Transformers calls once a forward pass for each kind of layer. Row i of the queries stands at position
    q_offset + i, column j of the keys at kv_offset + j; attention_mask is (batch, positions), False for padding.

    Returns None when nothing is hidden but what causality hides, bottom-right aligned; or a StructuredMask; or, where
    that cannot say it, the boolean (batch, 1, seqlen_q, seqlen_k) tensor.
    """
    if not _tracing():
        _refuse_without_interface(type(config).__module__)
    build = functools.partial(
        masking_utils.sdpa_mask,
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        allow_is_causal_skip=False,
        config=config,
        device=device,
        **rest,
    )
    pattern = recognise(mask_function)
    if pattern is None:
        return build()
    may_skip = allow_is_causal_skip if pattern.right == 0 else allow_is_bidirectional_skip
    # A model that allows no skip is about to compute with the tensor, unless it is packing that forbids the skip.
    if not may_skip and pattern.sequence is None:
        return build()
    if _tracing() and (isinstance(q_offset, Tensor) or attention_mask is not None):
        return build()  # a graph cannot read their values
    reach = _reach(pattern, q_length, int(q_offset) - kv_offset, kv_length)
    if reach is None:
        return build()
    columns, left, right = reach
    keys = _visible_keys(attention_mask, kv_length, kv_offset, columns)
    if may_skip and columns == kv_length and left < 0 and keys is None and pattern.sequence is None:
        return None
    cu_seqlens, max_seqlen = None, 0
    if pattern.sequence is not None:
        if keys is not None or not q_length == columns == kv_length:
            return build()
        cu_seqlens, max_seqlen = _cu_seqlens(pattern.sequence)
    if _tracing():
        return build()  # nor make a StructuredMask
    shape = (batch_size, 1, q_length, kv_length)
    return StructuredMask(shape, torch.device(device), keys, cu_seqlens, columns, left, right, max_seqlen)


def _reach(pattern: Pattern, seqlen_q: int, offset: int, kv_length: int) -> tuple[int, int, int] | None:
    """(columns, left, right) of a StructuredMask for a query i that stands over column i + offset, -1 for a bound that
    hides nothing. None when a bound matters and the last query does not stand over the last column."""
    columns = min(kv_length, offset + seqlen_q) if pattern.right == 0 else kv_length
    left, right = pattern.left, pattern.right
    if left is None or left >= offset + seqlen_q - 1:
        left = -1
    if right is None or right + offset >= columns - 1:
        right = -1
    if (left >= 0 or right >= 0) and offset != columns - seqlen_q:
        return None
    return columns, left, right


def _visible_keys(attention_mask: Tensor | None, kv_length: int, kv_offset: int, columns: int) -> Tensor | None:
    """Bool (batch, columns), None when no key is padding. Positions that attention_mask does not reach are padding."""
    padded = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padded is None:
        return None
    keys = padded[:, kv_offset : kv_offset + columns]
    return None if keys.all() else keys


def _cu_seqlens(sequence: Tensor) -> tuple[Tensor, int]:
    """Offsets of the packed sequences in the flattened (batch * seqlen_q) tokens, and the longest length."""
    starts = torch.ones_like(sequence, dtype=torch.bool)
    starts[:, 1:] = sequence[:, 1:] != sequence[:, :-1]
    offsets = starts.flatten().nonzero()[:, 0]
    cu_seqlens = nn.functional.pad(offsets, (0, 1), value=sequence.numel()).int()
    return cu_seqlens, int(cu_seqlens.diff().max())


@functools.cache
def _refuse_without_interface(config_module: str) -> None:
    """Raise for a model whose own code computes attention: it would take this mask for another kind, or no mask for
    none needed. Transformers lets it choose any registered implementation."""
    modeling = sys.modules.get(config_module.replace(".configuration_", ".modeling_"))
    if modeling is None or hasattr(modeling, "ALL_ATTENTION_FUNCTIONS"):
        return
    for name, member in vars(modeling).items():
        own = isinstance(member, type) and issubclass(member, nn.Module) and member.__module__ == modeling.__name__
        if own and "Attention" in name:
            raise ValueError(
                f'attn_implementation="tileattn": {name} of {modeling.__name__} computes attention itself, not through '
                'AttentionInterface; use attn_implementation="eager"'
            )
