"""Problem: the one description of one attention call, and the one place where arguments are checked.

`Problem.of(...)` takes what a user passed, refuses what makes no sense with one sentence that names the argument,
what came and what would do, and returns a frozen Problem together with the Inputs in canonical form. Backends trust
both and never check again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tileattn.block_mask import BlockMask, as_block_mask
from tileattn.mods import Mod, trace_mask_mod, trace_score_mod

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEED_RANGE = (-(2**63), 2**63 - 1)


class Inputs(NamedTuple):
    """The tensors of one attention call, in canonical form.

    q (batch, seqlen_q, num_heads, head_dim), k (batch, seqlen_k, num_heads_k, head_dim) and
    v (batch, seqlen_k, num_heads_k, head_dim_v); varlen: (total, heads, head_dim), sequence b owning rows
    cu_seqlens[b] to cu_seqlens[b + 1]. The last dim has stride 1.
    bias, mask: four dims, each either 1 or that of (batch, num_heads, seqlen_q, seqlen_k), any strides;
    varlen: the same with row and column counted inside each sequence.
    alibi_slopes: (1 or batch, num_heads); sink: (num_heads,); both of any floating dtype.
    No tensor is negated lazily, as the imaginary part of x.conj() is: kernels read memory as it is.
    dropout_seed: int64, one element.
    block_mask: uint8 (1 or batch, 1 or num_heads, q_blocks, k_blocks), contiguous: 0 skipped, 1 partial, 2 full (mask
    and mask_mod do not apply).
    score_mod_tensors, mask_mod_tensors: what the Problem's programs read.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    bias: Tensor | None = None
    mask: Tensor | None = None
    alibi_slopes: Tensor | None = None
    sink: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None
    dropout_seed: Tensor | None = None
    block_mask: Tensor | None = None
    score_mod_tensors: tuple[Tensor, ...] = ()
    mask_mod_tensors: tuple[Tensor, ...] = ()


class Forward(NamedTuple):
    """out: like q with head_dim_v. lse: (batch, num_heads, seqlen_q) or, varlen, (num_heads, total_q)."""

    out: Tensor
    lse: Tensor


class Wanted(NamedTuple):
    """Which gradients a backward call must return."""

    q: bool = True
    k: bool = True
    v: bool = True
    bias: bool = False
    alibi_slopes: bool = False
    sink: bool = False


class Gradients(NamedTuple):
    """Gradients in the shape and dtype of their inputs; None for those not wanted."""

    dq: Tensor | None = None
    dk: Tensor | None = None
    dv: Tensor | None = None
    dbias: Tensor | None = None
    dalibi_slopes: Tensor | None = None
    dsink: Tensor | None = None


@dataclass(frozen=True)
class Problem:
    """Sizes and scalars of one attention call. Score (i, j) of a sequence with lengths sq and sk is visible when
    -window_left <= j - i - (sk - sq) <= window_right, a negative bound meaning unlimited; causal is window_right = 0.
    """

    batch: int
    seqlen_q: int  # varlen: the longest sequence
    seqlen_k: int
    num_heads: int
    num_heads_k: int
    head_dim: int
    head_dim_v: int
    dtype: torch.dtype
    device: torch.device
    scale: float
    window_left: int = -1
    window_right: int = -1
    softcap: float = 0.0
    dropout_p: float = 0.0
    deterministic: bool = False
    varlen: bool = False
    aligned: bool = True  # strides of q, k and v are multiples of 16 bytes, see aligned_strides
    has_bias: bool = False
    has_mask: bool = False
    has_alibi: bool = False
    has_sink: bool = False
    score_mod: str = ""  # text of a mods.Program; of (score, b, h, row, col)
    score_derivative: str = ""  # of (score, b, h, row, col, grad): grad times the derivative of score_mod by its score
    mask_mod: str = ""  # of (b, h, row, col)
    block_size: tuple[int, ...] = ()  # rows and columns of a block of block_mask; () without one

    @property
    def group(self) -> int:
        """Query heads that share one key head (1: MHA, num_heads: MQA)."""
        return self.num_heads // self.num_heads_k

    @property
    def causal(self) -> bool:
        return self.window_right == 0

    @property
    def lse_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == torch.float64 else torch.float32

    @staticmethod
    def describing(inputs: Inputs, **scalars: Any) -> Problem:
        """The call that checked inputs and the fields that no tensor tells make."""
        q, k, v = inputs[:3]
        cu_seqlens_q = inputs.cu_seqlens_q
        return Problem(
            batch=cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else q.shape[0],
            num_heads=q.shape[-2],
            num_heads_k=k.shape[-2],
            head_dim=q.shape[-1],
            head_dim_v=v.shape[-1],
            dtype=q.dtype,
            device=q.device,
            varlen=cu_seqlens_q is not None,
            aligned=aligned_strides(q, k, v),
            has_bias=inputs.bias is not None,
            has_mask=inputs.mask is not None,
            has_alibi=inputs.alibi_slopes is not None,
            has_sink=inputs.sink is not None,
            **scalars,
        )

    @staticmethod
    def of(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        max_seqlen_q: int | None = None,
        max_seqlen_k: int | None = None,
        causal: bool = False,
        scale: float | None = None,
        window: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        bias: Tensor | None = None,
        mask: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        sink: Tensor | None = None,
        dropout_p: float = 0.0,
        dropout_seed: int | Tensor | None = None,
        deterministic: bool = False,
        score_mod: Callable[..., Tensor] | Mod | None = None,
        mask_mod: Callable[..., Tensor] | Mod | None = None,
        block_mask: Any = None,
    ) -> tuple[Problem, Inputs]:
        """Check everything and return the call in canonical form. Raises TypeError or ValueError."""
        optional = cu_seqlens_q, cu_seqlens_k, bias, mask, alibi_slopes, sink, dropout_seed
        key = None
        if not torch.compiler.is_compiling() and _all_none(*optional, score_mod, mask_mod, block_mask):
            key, found = _lookup(q, k, v, causal, scale, window, softcap, dropout_p, deterministic)
            if found is not None:
                return found, Inputs(_unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v))
        varlen = cu_seqlens_q is not None or cu_seqlens_k is not None
        _check_qkv(q, k, v, varlen)
        num_heads = q.shape[-2]
        if varlen:
            batch = _check_cu_seqlens("cu_seqlens_q", cu_seqlens_q, "q", q)
            batch_k = _check_cu_seqlens("cu_seqlens_k", cu_seqlens_k, "k", k)
            if batch != batch_k:
                raise ValueError(
                    f"cu_seqlens_k: {batch_k} sequences where cu_seqlens_q has {batch}; both need batch + 1 entries"
                )
            seqlen_q = _check_max_seqlen("max_seqlen_q", max_seqlen_q, "cu_seqlens_q", cu_seqlens_q)
            seqlen_k = _check_max_seqlen("max_seqlen_k", max_seqlen_k, "cu_seqlens_k", cu_seqlens_k)
        else:
            batch, seqlen_q, seqlen_k = q.shape[0], q.shape[1], k.shape[1]
        left, right = _check_window(window)
        scores = (batch, num_heads, seqlen_q, seqlen_k)
        blocks: Tensor | None = None
        block_size: tuple[int, ...] = ()
        if block_mask is not None:
            block_mask = as_block_mask(block_mask)
            blocks, block_size = _check_block_mask(block_mask, scores, q.device), block_mask.block_size
            mask, mask_mod, blocks = _with_block_mask(block_mask, mask, mask_mod, blocks)
        of_score = None if score_mod is None else trace_score_mod(score_mod, q.device)
        of_mask = None if mask_mod is None else trace_mask_mod(mask_mod, q.device)
        q, k, v = _unit_last_stride(q), _unit_last_stride(k), _unit_last_stride(v)
        scalars = {
            "seqlen_q": seqlen_q,
            "seqlen_k": seqlen_k,
            "scale": _check_scale(scale, q.shape[-1]),
            "window_left": left,
            "window_right": 0 if causal else right,
            "softcap": _check_softcap(softcap),
            "dropout_p": _check_dropout(dropout_p),
            "deterministic": bool(deterministic),
            "score_mod": "" if of_score is None else of_score.program,
            "score_derivative": "" if of_score is None else of_score.derivative,
            "mask_mod": "" if of_mask is None else of_mask.program,
            "block_size": block_size,
        }
        inputs = Inputs(
            q=q,
            k=k,
            v=v,
            bias=_check_bias(bias, scores, q.device),
            mask=_check_mask(mask, scores, q.device),
            alibi_slopes=_check_alibi_slopes(alibi_slopes, batch, num_heads, q.device),
            sink=_check_sink(sink, num_heads, q.device),
            cu_seqlens_q=cu_seqlens_q,
            cu_seqlens_k=cu_seqlens_k,
            dropout_seed=_check_dropout_seed(dropout_seed, dropout_p, q.device),
            block_mask=blocks,
            score_mod_tensors=() if of_score is None else _as_read(of_score.tensors),
            mask_mod_tensors=() if of_mask is None else _as_read(of_mask.tensors),
        )
        problem = Problem.describing(inputs, **scalars)
        if key is not None and not problem.dropout_p and not isinstance(causal, Tensor):  # with dropout a seed is drawn
            if len(_checked) >= MAX_CHECKED:  # more, if threads come together
                _checked.clear()
            _checked[key] = problem
        return problem, inputs


# Calls of q, k, v and scalars that were found to be in order: checking one takes 10 microseconds.
_checked: dict[Any, Problem] = {}
MAX_CHECKED = 4096


def _all_none(*arguments: Any) -> bool:
    return set(map(type, arguments)) == {type(None)}


def _lookup(q: Tensor, k: Tensor, v: Tensor, *scalars: Any) -> tuple[Any, Problem | None]:
    """All that checks of such a call look at, and what they found; None where that has no hash (symbolic sizes, a
    window in a list)."""
    try:
        strides = (q.stride(), k.stride(), v.stride())
        key = (q.shape, k.shape, v.shape, strides, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, scalars)
        return key, _checked.get(key)
    except (AttributeError, TypeError):
        return None, None


def aligned_strides(*tensors: Tensor) -> bool:
    """Whether every dim but the last is a positive multiple of 16 bytes apart (one of size 1 does not matter)."""
    return not any(
        size != 1 and (stride == 0 or stride * x.element_size() % 16)
        for x in tensors
        for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)
    )


def _as_read(tensors: Iterable[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.detach().resolve_neg() for t in tensors)


def _unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _check_tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    return x


def _check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: on device {x.device}, but q is on {device}; move it with {name}.to(q.device)")


def _check_qkv(q: Tensor, k: Tensor, v: Tensor, varlen: bool) -> None:
    layout = "(total, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
    rank = 3 if varlen else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        _check_tensor(name, x)
        if x.dim() != rank:
            hint = "" if varlen or x.dim() != 3 else "; packed sequences need cu_seqlens_q and cu_seqlens_k"
            raise ValueError(f"{name}: got {x.dim()} dims with shape {tuple(x.shape)}, expected {rank}: {layout}{hint}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype} is not supported; use float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}; q, k and v must share one dtype")
        _check_device(name, x, q.device)
    if q.shape[-1] == 0 or v.shape[-1] == 0 or q.shape[-2] == 0 or k.shape[-2] == 0:
        raise ValueError(
            f"q, k, v: heads and head_dim must be at least 1, got shapes {tuple(q.shape)}, {tuple(k.shape)}, "
            f"{tuple(v.shape)} ({layout})"
        )
    if k.shape[-1] != q.shape[-1]:
        raise ValueError(f"k: head_dim {k.shape[-1]} differs from q's head_dim {q.shape[-1]}; they must be equal")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"v: shape {tuple(v.shape)} does not fit k's {tuple(k.shape)}; all but the last dim must be equal"
        )
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q: {q.shape[-2]} heads is not a multiple of k's {k.shape[-2]} heads; grouped-query attention needs "
            f"heads of q = group * heads of k"
        )
    if not varlen and q.shape[0] != k.shape[0]:
        raise ValueError(f"k: batch {k.shape[0]} differs from q's batch {q.shape[0]}; they must be equal")


def _check_cu_seqlens(name: str, cu: Tensor | None, data_name: str, data: Tensor) -> int:
    """Number of sequences. Values are checked on the CPU alone: on a GPU that would wait for the device."""
    if cu is None:
        raise TypeError(f"{name}: got None; varlen attention needs both cu_seqlens_q and cu_seqlens_k")
    _check_tensor(name, cu)
    if cu.dtype != torch.int32:
        raise TypeError(f"{name}: dtype {cu.dtype}, expected torch.int32; convert it with {name}.int()")
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name}: shape {tuple(cu.shape)}, expected (batch + 1,)")
    _check_device(name, cu, data.device)
    if cu.stride(0) != 1 and cu.shape[0] > 1:
        raise ValueError(f"{name}: stride {cu.stride(0)}, expected a contiguous tensor; use {name}.contiguous()")
    if cu.device.type == "cpu" and not torch.compiler.is_compiling():
        values = cu.tolist()
        if values[0] != 0:
            raise ValueError(f"{name}: starts at {values[0]}, expected 0 (sequence b owns rows cu[b] to cu[b + 1])")
        for b in range(len(values) - 1):
            if values[b + 1] < values[b]:
                raise ValueError(
                    f"{name}: decreases from {values[b]} to {values[b + 1]} at sequence {b}; offsets must not decrease"
                )
        if values[-1] != data.shape[0]:
            where = "before" if values[-1] < data.shape[0] else "after"
            raise ValueError(
                f"{name}: ends at {values[-1]}, {where} the data: {data_name} has {data.shape[0]} rows, and the last "
                f"entry must equal that"
            )
    return cu.shape[0] - 1


def _check_max_seqlen(name: str, given: int | None, cu_name: str, cu: Tensor | None) -> int:
    if given is not None:
        if isinstance(given, bool) or not isinstance(given, (int, torch.SymInt)):
            raise TypeError(f"{name}: got {type(given).__name__}, expected an int (or None to read it from {cu_name})")
        if given < 0:
            raise ValueError(f"{name}={given}: must be 0 or more")
        if cu.device.type != "cpu" or torch.compiler.is_compiling():
            return given
    if torch.compiler.is_compiling():
        raise ValueError(f"{name}: must be given under torch.compile, where {cu_name} cannot be read")
    lengths = cu.diff()
    longest = int(lengths.max()) if len(lengths) else 0
    if given is not None and given < longest:
        raise ValueError(f"{name}={given}: less than the longest sequence of {cu_name}, {longest}")
    return longest if given is None else given


def _check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, Tensor) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: got {type(scale).__name__}, expected a float (or None for 1/sqrt(head_dim))")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale}: must be finite (None means 1/sqrt(head_dim))")
    return float(scale)


def _check_window(window: tuple[int, int] | None) -> tuple[int, int]:
    if window is None:
        return -1, -1
    if not isinstance(window, (tuple, list)) or len(window) != 2:
        raise TypeError(f"window={window!r}: expected (left, right), two ints, -1 for unlimited")
    for side, bound in zip(("left", "right"), window, strict=True):
        if isinstance(bound, bool) or not isinstance(bound, (int, torch.SymInt)):
            raise TypeError(f"window={window!r}: {side} is {type(bound).__name__}, expected an int, -1 for unlimited")
        if bound < -1:
            raise ValueError(f"window={window!r}: {side} must be >= -1 (-1 means unlimited)")
    return window[0], window[1]


def _check_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, Tensor) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap: got {type(softcap).__name__}, expected a float (0.0 for none)")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap}: must be finite and >= 0 (0.0 means none)")
    return float(softcap)


def _check_dropout(dropout_p: float) -> float:
    if isinstance(dropout_p, Tensor) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: got {type(dropout_p).__name__}, expected a float in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: must be in [0, 1)")
    return float(dropout_p)


def _check_dropout_seed(seed: int | Tensor | None, dropout_p: float, device: torch.device) -> Tensor | None:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"dropout_seed: tensor of dtype {seed.dtype} with {seed.numel()} elements, expected one int64"
            )
        _check_device("dropout_seed", seed, device)
    elif seed is not None:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"dropout_seed: got {type(seed).__name__}, expected an int, an int64 tensor or None")
        if not SEED_RANGE[0] <= seed <= SEED_RANGE[1]:
            raise ValueError(f"dropout_seed={seed}: must fit in 64 signed bits")
    if dropout_p == 0.0:
        return None
    if isinstance(seed, Tensor):
        return seed.reshape(1)
    if seed is not None:
        return torch.full((1,), seed, dtype=torch.int64, device=device)
    return torch.randint(SEED_RANGE[0], SEED_RANGE[1], (1,), dtype=torch.int64, device=device)


def _check_broadcast(name: str, x: Tensor, scores: tuple[int, int, int, int]) -> Tensor:
    shape = tuple(x.shape)
    padded = (1,) * (4 - len(shape)) + shape
    if len(shape) > 4 or any(have not in (1, want) for have, want in zip(padded, scores, strict=False)):
        raise ValueError(
            f"{name}: shape {shape} does not broadcast to (batch, num_heads, seqlen_q, seqlen_k) = {tuple(scores)}"
        )
    return x.reshape(padded) if len(shape) < 4 else x


def _check_bias(bias: Tensor | None, scores: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    _check_tensor("bias", bias)
    if bias.dtype == torch.bool:
        raise TypeError("bias: dtype torch.bool; a boolean tensor (True = attend) is passed as mask=")
    if bias.dtype not in DTYPES:
        raise TypeError(f"bias: dtype {bias.dtype} is not supported; use a floating dtype")
    _check_device("bias", bias, device)
    return _check_broadcast("bias", bias.resolve_neg(), scores)


def _check_mask(mask: Tensor | None, scores: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    _check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask: dtype {mask.dtype}, expected torch.bool (True = attend); an additive float mask is passed as bias="
        )
    _check_device("mask", mask, device)
    return _check_broadcast("mask", mask, scores)


def _check_alibi_slopes(slopes: Tensor | None, batch: int, num_heads: int, device: torch.device) -> Tensor | None:
    if slopes is None:
        return None
    _check_tensor("alibi_slopes", slopes)
    if slopes.dtype not in DTYPES:
        raise TypeError(f"alibi_slopes: dtype {slopes.dtype} is not supported; use a floating dtype")
    if tuple(slopes.shape) not in ((num_heads,), (1, num_heads), (batch, num_heads)):
        raise ValueError(
            f"alibi_slopes: shape {tuple(slopes.shape)}, expected (num_heads,) = ({num_heads},) or (batch, num_heads) "
            f"= ({batch}, {num_heads})"
        )
    _check_device("alibi_slopes", slopes, device)
    slopes = slopes.resolve_neg()
    return slopes.reshape(1, num_heads) if slopes.dim() == 1 else slopes


def _check_sink(sink: Tensor | None, num_heads: int, device: torch.device) -> Tensor | None:
    if sink is None:
        return None
    _check_tensor("sink", sink)
    if sink.dtype not in DTYPES:
        raise TypeError(f"sink: dtype {sink.dtype} is not supported; use a floating dtype")
    if tuple(sink.shape) != (num_heads,):
        raise ValueError(f"sink: shape {tuple(sink.shape)}, expected (num_heads,) = ({num_heads},)")
    _check_device("sink", sink, device)
    return sink.resolve_neg()


def _check_block_mask(block_mask: BlockMask, scores: tuple[int, int, int, int], device: torch.device) -> Tensor:
    blocks, (m, n) = block_mask.blocks, block_mask.block_size
    if not isinstance(blocks, Tensor) or blocks.dtype != torch.uint8:
        raise TypeError(
            "block_mask: blocks must be torch.uint8 (0 skipped, 1 partial, 2 full); BlockMask.from_blocks makes such"
        )
    _check_device("block_mask", blocks, device)
    batch, num_heads, seqlen_q, seqlen_k = scores
    if block_mask.seqlens is not None and block_mask.seqlens != (seqlen_q, seqlen_k):
        raise ValueError(
            f"block_mask: made for (seqlen_q, seqlen_k) = {block_mask.seqlens}, but these are {(seqlen_q, seqlen_k)}"
        )
    want = (batch, num_heads, -(-seqlen_q // m), -(-seqlen_k // n))
    shape = tuple(blocks.shape)
    if len(shape) != 4 or shape[2:] != want[2:] or shape[0] not in (1, batch) or shape[1] not in (1, num_heads):
        raise ValueError(
            f"block_mask: blocks of shape {shape}, expected (batch or 1, num_heads or 1, q_blocks, k_blocks) = {want} "
            f"with block_size {m, n}"
        )
    return blocks.contiguous()


def _with_block_mask(block_mask: BlockMask, mask: Any, mask_mod: Any, blocks: Tensor) -> tuple[Any, Any, Tensor]:
    """mask, mask_mod and the map of a call: the block mask's, or the caller's, which decide in full blocks too."""
    for name, own, given in (("mask", block_mask.mask, mask), ("mask_mod", block_mask.mask_mod, mask_mod)):
        if own is not None and given is not None:
            raise ValueError(f"{name}: block_mask has one already; combine the two, and make the BlockMask of that")
    if mask is not None or mask_mod is not None:
        blocks = blocks.clamp(max=1)
    mask = block_mask.mask if mask is None else mask
    return mask, block_mask.mask_mod if mask_mod is None else mask_mod, blocks
