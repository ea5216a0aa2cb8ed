"""FLOP formulas of the operators for torch.utils.flop_counter: visible scores alone are counted."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch

from tileattn import kvcache_ops, ops
from tileattn.lab.traffic import count_cached_scores, count_scores

COUNTER = "torch.utils.flop_counter"


def forward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """S = Q K^T contracts head_dim, O = P V yields head_dim_v."""
    return _flops(args, per_head_dim=1, per_head_dim_v=1)


def backward_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """S, dQ and dK contract or yield head_dim; dP and dV head_dim_v. Arguments as `attention_backward` takes them."""
    return _flops(args[4:-1], per_head_dim=3, per_head_dim_v=2)


def _flops(args: tuple[Any, ...], per_head_dim: int, per_head_dim_v: int) -> int:
    problem, inputs, _ = ops.split(args)
    return 2 * count_scores(problem, inputs) * (per_head_dim * problem.head_dim + per_head_dim_v * problem.head_dim_v)


def cached_flops(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Of `kvcache_attend`; `kvcache_append` has no products."""
    problem, inputs, _ = kvcache_ops.split(args)
    return 2 * count_cached_scores(problem, inputs) * (problem.head_dim + problem.head_dim_v)


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
    counter.register_flop_formula(torch.ops.tileattn.kvcache_attend, get_raw=True)(cached_flops)


class _AfterImport:
    """A meta path finder that finds nothing itself and calls `then` with module `name` once it has been imported."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then, self.asking = name, then, False

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != self.name or self.asking:
            return None
        self.asking = True
        spec = importlib.util.find_spec(name)
        self.asking = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_then(module: ModuleType) -> None:
                sys.meta_path.remove(self)
                execute(module)
                self.then(module)

            spec.loader.exec_module = execute_then  # type: ignore[method-assign]
        return spec
