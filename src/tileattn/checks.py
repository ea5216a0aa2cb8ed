"""What the arguments of attention must be: each check refuses in one sentence that names the argument, what came and
what would do, and returns the argument in canonical form."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tileattn.block_mask import BlockMask

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SEED_RANGE = (-(2**63), 2**63 - 1)


def unit_last_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def check_tensor(name: str, x: object) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: got {type(x).__name__}, expected a torch.Tensor")
    if x.is_nested or x.layout != torch.strided:
        kind = f"nested ({x.layout})" if x.is_nested else str(x.layout)
        hint = "; attention_varlen takes sequences of different lengths" if x.is_nested else ""
        raise TypeError(f"{name}: a tensor of layout {kind}, expected a dense one{hint}")
    return x


def check_device(name: str, x: Tensor, device: torch.device) -> None:
    if x.device != device:
        raise ValueError(f"{name}: on device {x.device}, but q is on {device}; move it with {name}.to(q.device)")


def check_qkv(q: Tensor, k: Tensor, v: Tensor, varlen: bool) -> None:
    layout = "(total, heads, head_dim)" if varlen else "(batch, seqlen, heads, head_dim)"
    rank = 3 if varlen else 4
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_tensor(name, x)
        if x.dim() != rank:
            hint = "" if varlen or x.dim() != 3 else "; packed sequences need cu_seqlens_q and cu_seqlens_k"
            raise ValueError(f"{name}: got {x.dim()} dims with shape {tuple(x.shape)}, expected {rank}: {layout}{hint}")
        if x.dtype not in DTYPES:
            raise TypeError(f"{name}: dtype {x.dtype} is not supported; use float16, bfloat16, float32 or float64")
        if x.dtype != q.dtype:
            raise TypeError(f"{name}: dtype {x.dtype} differs from q's {q.dtype}; q, k and v must share one dtype")
        check_device(name, x, q.device)
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


def check_cu_seqlens(name: str, cu: Tensor | None, data_name: str, data: Tensor) -> int:
    """Number of sequences. Values are checked on the CPU alone: on a GPU that would wait for the device."""
    if cu is None:
        raise TypeError(f"{name}: got None; varlen attention needs both cu_seqlens_q and cu_seqlens_k")
    check_tensor(name, cu)
    if cu.dtype != torch.int32:
        raise TypeError(f"{name}: dtype {cu.dtype}, expected torch.int32; convert it with {name}.int()")
    if cu.dim() != 1 or cu.shape[0] < 1:
        raise ValueError(f"{name}: shape {tuple(cu.shape)}, expected (batch + 1,)")
    check_device(name, cu, data.device)
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


def check_max_seqlen(name: str, given: int | None, cu_name: str, cu: Tensor | None) -> int:
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


def check_scale(scale: float | None, head_dim: int) -> float:
    if scale is None:
        return head_dim**-0.5
    if isinstance(scale, Tensor) or not isinstance(scale, (int, float)):
        raise TypeError(f"scale: got {type(scale).__name__}, expected a float (or None for 1/sqrt(head_dim))")
    if not -math.inf < scale < math.inf:
        raise ValueError(f"scale={scale}: must be finite (None means 1/sqrt(head_dim))")
    return float(scale)


def check_window(window: tuple[int, int] | None) -> tuple[int, int]:
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


def check_softcap(softcap: float | None) -> float:
    if softcap is None:
        return 0.0
    if isinstance(softcap, Tensor) or not isinstance(softcap, (int, float)):
        raise TypeError(f"softcap: got {type(softcap).__name__}, expected a float (0.0 for none)")
    if not 0.0 <= softcap < math.inf:
        raise ValueError(f"softcap={softcap}: must be finite and >= 0 (0.0 means none)")
    return float(softcap)


def check_dropout(dropout_p: float) -> float:
    if isinstance(dropout_p, Tensor) or not isinstance(dropout_p, (int, float)):
        raise TypeError(f"dropout_p: got {type(dropout_p).__name__}, expected a float in [0, 1)")
    if not 0.0 <= dropout_p < 1.0:
        raise ValueError(f"dropout_p={dropout_p}: must be in [0, 1)")
    return float(dropout_p)


def check_dropout_seed(seed: int | Tensor | None, dropout_p: float, device: torch.device) -> Tensor | None:
    if isinstance(seed, Tensor):
        if seed.dtype != torch.int64 or seed.numel() != 1:
            raise TypeError(
                f"dropout_seed: tensor of dtype {seed.dtype} with {seed.numel()} elements, expected one int64"
            )
        check_device("dropout_seed", seed, device)
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


def check_broadcast(name: str, x: Tensor, scores: tuple[int, int, int, int]) -> Tensor:
    shape = tuple(x.shape)
    padded = (1,) * (4 - len(shape)) + shape
    if len(shape) > 4 or any(have not in (1, want) for have, want in zip(padded, scores, strict=False)):
        raise ValueError(
            f"{name}: shape {shape} does not broadcast to (batch, num_heads, seqlen_q, seqlen_k) = {tuple(scores)}"
        )
    return x.reshape(padded) if len(shape) < 4 else x


def check_bias(bias: Tensor | None, scores: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    if bias is None:
        return None
    check_tensor("bias", bias)
    if bias.dtype == torch.bool:
        raise TypeError("bias: dtype torch.bool; a boolean tensor (True = attend) is passed as mask=")
    if bias.dtype not in DTYPES:
        raise TypeError(f"bias: dtype {bias.dtype} is not supported; use a floating dtype")
    check_device("bias", bias, device)
    return check_broadcast("bias", bias.resolve_neg(), scores)


def check_mask(mask: Tensor | None, scores: tuple[int, int, int, int], device: torch.device) -> Tensor | None:
    if mask is None:
        return None
    check_tensor("mask", mask)
    if mask.dtype != torch.bool:
        raise TypeError(
            f"mask: dtype {mask.dtype}, expected torch.bool (True = attend); an additive float mask is passed as bias="
        )
    check_device("mask", mask, device)
    return check_broadcast("mask", mask, scores)


def check_alibi_slopes(slopes: Tensor | None, batch: int, num_heads: int, device: torch.device) -> Tensor | None:
    if slopes is None:
        return None
    check_tensor("alibi_slopes", slopes)
    if slopes.dtype not in DTYPES:
        raise TypeError(f"alibi_slopes: dtype {slopes.dtype} is not supported; use a floating dtype")
    if tuple(slopes.shape) not in ((num_heads,), (1, num_heads), (batch, num_heads)):
        raise ValueError(
            f"alibi_slopes: shape {tuple(slopes.shape)}, expected (num_heads,) = ({num_heads},) or (batch, num_heads) "
            f"= ({batch}, {num_heads})"
        )
    check_device("alibi_slopes", slopes, device)
    slopes = slopes.resolve_neg()
    return slopes.reshape(1, num_heads) if slopes.dim() == 1 else slopes


def check_sink(sink: Tensor | None, num_heads: int, device: torch.device) -> Tensor | None:
    if sink is None:
        return None
    check_tensor("sink", sink)
    if sink.dtype not in DTYPES:
        raise TypeError(f"sink: dtype {sink.dtype} is not supported; use a floating dtype")
    if tuple(sink.shape) != (num_heads,):
        raise ValueError(f"sink: shape {tuple(sink.shape)}, expected (num_heads,) = ({num_heads},)")
    check_device("sink", sink, device)
    return sink.resolve_neg().contiguous()


def check_block_mask(block_mask: BlockMask, scores: tuple[int, int, int, int], device: torch.device) -> Tensor:
    blocks, (m, n) = block_mask.blocks, block_mask.block_size
    if not isinstance(blocks, Tensor) or blocks.dtype != torch.uint8:
        raise TypeError(
            "block_mask: blocks must be torch.uint8 (0 skipped, 1 partial, 2 full); BlockMask.from_blocks makes such"
        )
    check_device("block_mask", blocks, device)
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
