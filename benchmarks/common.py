"""What the GPU benchmarks share: sizes, alternating measurement, and the shape of results."""

from __future__ import annotations

import datetime
import json
import statistics
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import triton

TOKENS, WIDTH = 16384, 2048  # batch * seqlen, heads * head_dim
Pair = tuple[Callable[[], Any], Callable[[], Any]]  # forward and backward


def backward_of(out: torch.Tensor, inputs: tuple[torch.Tensor, ...], dout: torch.Tensor) -> Callable[[], Any]:
    return lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)


def time_once(run: Callable[[], Any], repeats: int) -> float:
    """Milliseconds of one run, over `repeats` back to back."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def in_turn(names: Iterable[str], i: int) -> list[str]:
    """The names in the order of round i: backwards every other time, and another one first every two rounds. Each finds
    the clock that the one before left, and shall not always come behind the same."""
    names = list(names)
    first = i // 2 % len(names) if names else 0
    return (names[first:] + names[:first])[:: -1 if i % 2 else 1]


def measure(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Median over rounds, each of which times every implementation, in orders that change."""
    repeats = {}
    for name, run in runs.items():
        run()
        repeats[name] = max(2, min(20, int(15.0 / time_once(run, 2))))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for i in range(rounds):
        for name in in_turn(runs, i):
            time_once(runs[name], 1)
            times[name].append(time_once(runs[name], repeats[name]))
    return {name: statistics.median(ms) for name, ms in times.items()}


def measure_pairs(
    pairs: dict[str, Pair], rounds: int, seqlen: int, head_dim: int, causal: bool, variant: str, scores: float
) -> list[dict[str, Any]]:
    """Rows of a cell: forward, then backward. scores: that one head of one batch has, on average; they are what FLOPs
    are counted of, 2.5 times as many backward as forward."""
    rows = []
    for place, direction in enumerate(("forward", "backward")):
        with torch.set_grad_enabled(direction == "backward"):
            found = measure({name: pair[place] for name, pair in pairs.items()}, rounds)
        rows += rows_of(found, direction, seqlen, head_dim, causal, variant, scores)
    return rows


def rows_of(
    found: dict[str, float], direction: str, seqlen: int, head_dim: int, causal: bool, variant: str, scores: float
) -> list[dict[str, Any]]:
    """Rows of milliseconds by implementation."""
    batch, heads = TOKENS // seqlen, WIDTH // head_dim
    flops = 4 * batch * heads * scores * head_dim * (2.5 if direction == "backward" else 1.0)
    return [
        {
            "impl": name,
            "direction": direction,
            "dtype": "bfloat16",
            "batch": batch,
            "heads": heads,
            "heads_k": heads,
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
            "causal": causal,
            "variant": variant,
            "ms": round(ms, 4),
            "tflops": round(flops / ms * 1e-9, 1),
        }
        for name, ms in found.items()
    ]


def stamp(commit: str | None) -> dict[str, Any]:
    """What was measured, on what, and when. commit: where git is not at hand."""
    if commit is None:
        done = subprocess.run(["git", "describe", "--always", "--dirty", "--abbrev=40"], capture_output=True, text=True)
        commit = done.stdout.strip()
    return {
        "device": torch.cuda.get_device_name(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "versions": {"torch": torch.__version__, "triton": triton.__version__, "cuda": torch.version.cuda},
    }


def kept(path: str, commit: str | None) -> list[dict[str, Any]]:
    """Rows of a result file that is there already, if they were measured like those to come."""
    old = json.loads(Path(path).read_text()) if Path(path).exists() else {"rows": []}
    alike = all(old.get(name) == x for name, x in stamp(commit).items() if name != "date")
    return old["rows"] if alike else []


def write(path: str, rows: list[dict[str, Any]], commit: str | None) -> None:
    """The result file."""
    Path(path).write_text(json.dumps({**stamp(commit), "rows": rows}, indent=1))
