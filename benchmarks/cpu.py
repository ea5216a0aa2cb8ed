"""The CPU backend beside PyTorch's CPU flash attention and standard attention: one process, alternating, random data.

    python benchmarks/cpu.py --output benchmarks/results/epyc-cpu.json

tileattn is called through its public API on (batch, seqlen, heads, head_dim); F.scaled_dot_product_attention on
contiguous (batch, heads, seqlen, head_dim), the order it prefers. Backward is timed through autograd for all. Each
takes its turn for TURN seconds, first call not counted, because OpenMP's threads spin for milliseconds after one
operator and take cores from the next. A figure is the best of the rounds' medians: what else the machine does only ever
adds to it.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from tileattn import attention
from tileattn.cli import env
from tileattn.cli.console import Progress, table
from tileattn.lab.traffic import visible_scores
from tileattn.problem import Problem
from tileattn.reference import standard_attention

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TURN = 0.04  # seconds; at least one call
STANDARD_SEQLEN = 4096  # standard attention is timed at this length alone: its matrices soon fill the memory


def implementations(case: dict[str, Any], direction: str) -> dict[str, Callable[[], object]]:
    """What to time, by name."""
    backward = direction == "backward"
    shape = case["batch"], case["seqlen_q"], case["heads"], case["head_dim"]
    q, k, v, dout = (torch.randn(shape, dtype=DTYPES[case["dtype"]]) for _ in range(4))
    ours = [x.requires_grad_(backward) for x in (q, k, v)]
    theirs = [x.detach().transpose(1, 2).contiguous().requires_grad_(backward) for x in (q, k, v)]
    problem, inputs = Problem.of(*ours, causal=case["causal"])
    calls = {
        "tileattn": (ours, dout, lambda: attention(*ours, causal=case["causal"])),
        "sdpa": (
            theirs,
            dout.transpose(1, 2).contiguous(),
            lambda: F.scaled_dot_product_attention(*theirs, is_causal=case["causal"]),
        ),
    }
    if case["seqlen_q"] == STANDARD_SEQLEN:
        calls["standard"] = (ours, dout, lambda: standard_attention(problem, inputs).out)
    if not backward:
        return {name: call for name, (_, _, call) in calls.items()}
    return {name: _backward(call(), leaves, gradient) for name, (leaves, gradient, call) in calls.items()}


def _backward(out: torch.Tensor, leaves: list[torch.Tensor], gradient: torch.Tensor) -> Callable[[], object]:
    return lambda: torch.autograd.grad(out, leaves, gradient, retain_graph=True)


def milliseconds(functions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    best = dict.fromkeys(functions, math.inf)
    for _ in range(rounds):
        for name, function in functions.items():
            function()
            times: list[float] = []
            while not times or sum(times) < TURN:
                start = time.perf_counter()
                function()
                times.append(time.perf_counter() - start)
            best[name] = min(best[name], 1e3 * statistics.median(times))
    return best


def measure(cases: list[dict[str, Any]], rounds: int) -> list[dict[str, Any]]:
    rows = []
    with Progress(2 * len(cases)) as progress:
        for case in cases:
            scores = visible_scores(case["seqlen_q"], case["seqlen_k"], -1, 0 if case["causal"] else -1)
            for direction, products in (("forward", 2), ("backward", 5)):
                progress.step(f"{direction} {describe(case)}")
                flops = 2 * products * case["batch"] * case["heads"] * scores * case["head_dim"]
                for impl, ms in milliseconds(implementations(case, direction), rounds).items():
                    rows.append({"impl": impl, "direction": direction, **case, "ms": ms, "tflops": flops / ms / 1e9})
    return rows


def describe(case: dict[str, Any]) -> str:
    mask = "causal" if case["causal"] else "full"
    return f"{case['dtype']} {case['heads']} heads x {case['head_dim']}, {case['seqlen_q']} {mask}"


def report(rows: list[dict[str, Any]]) -> str:
    """Speeds of tileattn and its ratio to the others, then the geometric means of the ratios to sdpa."""
    grouped: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for row in rows:
        grouped.setdefault((row["direction"], describe(row)), {})[row["impl"]] = row
    lines = [["case", "direction", "tileattn GFLOP/s", "x sdpa", "x standard"]]
    ratios: dict[tuple[str, str], list[float]] = {}
    for (direction, name), row in grouped.items():
        ours = row["tileattn"]
        against = {impl: other["ms"] / ours["ms"] for impl, other in row.items()}
        ratios.setdefault((ours["dtype"], direction), []).append(against["sdpa"])
        standard = f"{against['standard']:.2f}" if "standard" in against else ""
        lines.append([name, direction, f"{1e3 * ours['tflops']:.0f}", f"{against['sdpa']:.2f}", standard])
    means = [["x sdpa", "geometric mean", "lowest"]]
    for (dtype, direction), found in ratios.items():
        means.append(
            [f"{dtype} {direction}", f"{math.exp(sum(map(math.log, found)) / len(found)):.2f}", f"{min(found):.2f}"]
        )
    return f"{table(lines)}\n\n{table(means)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="8 heads of 64, 1k and 4k, 3 rounds: a minute")
    parser.add_argument("--rounds", type=int, default=8, help="how often each is timed (default 8)")
    parser.add_argument("--output", type=Path, help="JSON file to write")
    args = parser.parse_args()
    heads, head_dims, seqlens = ((8,), (64,), (1024, 4096)) if args.quick else ((2, 8), (64, 128), (1024, 4096, 8192))
    cases = [
        {
            "dtype": dtype,
            "batch": 1,
            "heads": h,
            "heads_k": h,
            "seqlen_q": seqlen,
            "seqlen_k": seqlen,
            "head_dim": head_dim,
            "head_dim_v": head_dim,
            "causal": causal,
            "variant": "",
        }
        for dtype in DTYPES
        for h in heads
        for head_dim in head_dims
        for seqlen in seqlens
        for causal in (False, True)
    ]
    rows = measure(cases, 3 if args.quick else args.rounds)
    print(report(rows))
    if args.output:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()
        found = {**env.stamp(torch.device("cpu")), "commit": commit, "rows": rows}
        args.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
