"""FLOP formulas of the operators for torch.utils.flop_counter: visible scores alone are counted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from tileattn import ops
from tileattn.lab.traffic import visible_scores
from tileattn.problem import Inputs, Problem

COUNTER = "torch.utils.flop_counter"


def forward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """S = Q K^T contracts head_dim, O = P V yields head_dim_v."""
    return _flops(args, per_head_dim=1, per_head_dim_v=1)


def backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """S, dQ and dK contract or yield head_dim; dP and dV head_dim_v. Arguments as `attention_backward` takes them."""
    return _flops(args[4:-1], per_head_dim=3, per_head_dim_v=2)


def _flops(args: tuple[Any, ...], per_head_dim: int, per_head_dim_v: int) -> int:
    problem, inputs, _ = ops.split(args)
    lengths, blocks = _lengths(problem, inputs), inputs.block_mask
    if blocks is not None and _readable(blocks):
        scores = sum(_scores_in_blocks(problem, blocks, b, *of_sequence) for b, of_sequence in enumerate(lengths))
    else:
        window = problem.window_left, problem.window_right
        scores = problem.num_heads * sum(visible_scores(*of_sequence, *window) for of_sequence in lengths)
    return 2 * scores * (per_head_dim * problem.head_dim + per_head_dim_v * problem.head_dim_v)


def _lengths(problem: Problem, inputs: Inputs) -> list[tuple[int, int]]:
    """(seqlen_q, seqlen_k) of each sequence; the longest for all where cu_seqlens cannot be read."""
    if problem.varlen and _readable(inputs.cu_seqlens_q):
        return list(zip(inputs.cu_seqlens_q.diff().tolist(), inputs.cu_seqlens_k.diff().tolist(), strict=True))
    return [(problem.seqlen_q, problem.seqlen_k)] * problem.batch


def _readable(x: Tensor | None) -> bool:
    return type(x) is Tensor and x.device.type != "meta"


def _scores_in_blocks(problem: Problem, blocks: Tensor, b: int, seqlen_q: int, seqlen_k: int) -> int:
    """Scores of one sequence, all heads, that the window shows and the block mask does not skip."""
    m, n = problem.block_size
    blocks = blocks[min(b, blocks.shape[0] - 1)].cpu()  # [num_heads or 1, q_blocks, k_blocks]
    rows, starts = torch.arange(seqlen_q), torch.arange(blocks.shape[2]) * n
    first = rows + (seqlen_k - seqlen_q) - (problem.window_left if problem.window_left >= 0 else seqlen_q + seqlen_k)
    last = rows + (seqlen_k - seqlen_q) + (problem.window_right if problem.window_right >= 0 else seqlen_q + seqlen_k)
    begin = torch.maximum(first.clamp(min=0)[:, None], starts)
    end = torch.minimum((last + 1).clamp(max=seqlen_k)[:, None], starts + n)
    shown = torch.zeros(blocks.shape[1:], dtype=torch.int64).index_add_(0, rows // m, (end - begin).clamp(min=0))
    return int(((blocks > 0) * shown).expand(problem.num_heads, -1, -1).sum())


def register() -> None:
    """Register the formulas with the counter, now or when it is imported: importing it here would import Triton, a
    tenth of a second that users who count nothing need not pay."""
    if COUNTER in sys.modules:
        _register_with(sys.modules[COUNTER])
    else:
        sys.meta_path.insert(0, _AfterImport(COUNTER, _register_with))


def _register_with(counter: ModuleType) -> None:
    counter.register_flop_formula(torch.ops.tileattn.attention_forward, get_raw=True)(forward_flops)
    counter.register_flop_formula(torch.ops.tileattn.attention_backward, get_raw=True)(backward_flops)


class _AfterImport:
    """A meta path finder that finds nothing itself and calls `then` with module `name` once it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then(module: ModuleType) -> None:
                execute(module)
                self.then(module)

            spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
