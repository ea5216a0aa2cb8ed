"""tileattn bench: tileattn, standard attention and PyTorch's SDPA, alternating, on shapes of the user's."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tileattn
from tileattn.cli import env, shapes
from tileattn.cli.console import Progress, UserError, seconds, table
from tileattn.lab.traffic import visible_scores
from tileattn.problem import Problem
from tileattn.reference import standard_attention, visible

DESCRIPTION = """\
Time tileattn, standard attention (the one that holds the seqlen x seqlen matrix) and PyTorch's
scaled_dot_product_attention on random data. They take turns in one process and each figure is a median, so that what
else the machine does hits all of them alike.

  tileattn bench --seqlen 1024 4096 --causal
  tileattn bench --seqlen 8192 --heads 32 --heads-k 8 --head-dim 128 --dtype bfloat16 --against sdpa
  tileattn bench --seqlen 2048 --backward --json > result.json
"""
MINIMUM_ROUNDS = 3


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="time tileattn, standard attention and SDPA on given shapes",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--seqlen", type=shapes.positive, nargs="+", default=[1024, 2048, 4096], metavar="N", help="queries and keys"
    )
    shapes.add_arguments(parser)
    parser.add_argument("--backward", action="store_true", help="time the backward pass too")
    parser.add_argument(
        "--against", nargs="*", choices=("standard", "sdpa"), default=("standard", "sdpa"), help="default: both"
    )
    parser.add_argument(
        "--seconds", type=float, default=2.0, metavar="S", help="time for each shape and direction (default 2)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, times in ms")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    shapes.require_available(args.device)
    directions = ("forward", "backward") if args.backward else ("forward",)
    rows: list[dict[str, Any]] = []
    with Progress(len(args.seqlen) * len(directions)) as progress:
        for seqlen in args.seqlen:
            try:
                contestants, problem = _contestants(args, seqlen)
            except (TypeError, ValueError, RuntimeError) as error:
                raise UserError(str(error)) from error
            for direction in directions:
                progress.step(f"{seqlen} tokens, {direction}")
                times = _alternate(contestants, direction, args)
                rows += [_row(args, problem, impl, direction, t) for impl, t in times.items()]
    if args.json:
        print(json.dumps({**env.stamp(torch.device(args.device)), "rows": rows}, indent=2))
    else:
        print(_report(rows))
    return 0


def _contestants(args: argparse.Namespace, seqlen: int) -> tuple[dict[str, Callable[[], Tensor]], Problem]:
    """What to call for a forward pass, by name; inputs require gradients when the backward pass is timed."""
    options = {"causal": args.causal, "window": tuple(args.window), "softcap": args.softcap}
    q, k, v = (x.requires_grad_(args.backward) for x in shapes.tensors(args, seqlen, seqlen))
    problem, inputs = Problem.of(q, k, v, **options)
    contestants: dict[str, Callable[[], Tensor]] = {
        "tileattn": lambda: tileattn.attention(q, k, v, **options, backend=args.backend)
    }
    if "standard" in args.against:
        contestants["standard"] = lambda: standard_attention(problem, inputs).out
    if "sdpa" in args.against and not args.softcap:  # SDPA has no softcap
        q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
        windowed = tuple(args.window) != (-1, -1)
        mask = visible(problem, seqlen, seqlen, q.device) if windowed else None
        contestants["sdpa"] = lambda: F.scaled_dot_product_attention(
            q_, k_, v_, attn_mask=mask, is_causal=args.causal and not windowed, enable_gqa=problem.group > 1
        ).transpose(1, 2)
    contestants["tileattn"]()  # a first call that fails, fails here
    return contestants, problem


def _alternate(
    contestants: dict[str, Callable[[], Tensor]], direction: str, args: argparse.Namespace
) -> dict[str, float]:
    """Median seconds of each; they take turns until the time is up."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    deadline = time.perf_counter() + args.seconds
    while len(times["tileattn"]) < MINIMUM_ROUNDS + 1 or time.perf_counter() < deadline:
        for name, forward in contestants.items():
            with torch.set_grad_enabled(direction == "backward"):
                out = forward() if direction == "backward" else None
                _synchronize(args.device)
                start = time.perf_counter()
                if out is None:
                    forward()
                else:
                    out.backward(torch.ones_like(out))
                _synchronize(args.device)
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(spent[1:]) for name, spent in times.items()}  # the first round warms up


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _row(args: argparse.Namespace, problem: Problem, impl: str, direction: str, spent: float) -> dict[str, Any]:
    p = problem
    scores = p.batch * p.num_heads * visible_scores(p.seqlen_q, p.seqlen_k, p.window_left, p.window_right)
    products = (3, 2) if direction == "backward" else (1, 1)
    flops = 2 * scores * (products[0] * p.head_dim + products[1] * p.head_dim_v)
    return {
        "impl": impl,
        "direction": direction,
        "dtype": args.dtype,
        "batch": p.batch,
        "heads": p.num_heads,
        "heads_k": p.num_heads_k,
        "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k,
        "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v,
        "causal": args.causal,
        "variant": "" if tuple(args.window) == (-1, -1) else f"window {args.window[0]} {args.window[1]}",
        "ms": spent * 1e3,
        "tflops": flops / spent / 1e12,
    }


def _report(rows: list[dict[str, Any]]) -> str:
    """One line for each shape and direction: what each takes, and its time as a multiple of tileattn's."""
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    lines = [
        ["seqlen", "direction", *(f for i in impls for f in ((i, "GFLOP/s") if i == "tileattn" else (i, "ratio")))]
    ]
    cases: dict[Any, dict[str, Any]] = {(row["seqlen_q"], row["direction"]): {} for row in rows}
    for row in rows:
        cases[row["seqlen_q"], row["direction"]][row["impl"]] = row
    for (seqlen, direction), case in cases.items():
        ours = case["tileattn"]
        cells = [str(seqlen), direction, seconds(ours["ms"] / 1e3), f"{ours['tflops'] * 1e3:.0f}"]
        for impl in impls[1:]:
            cells += [seconds(case[impl]["ms"] / 1e3), f"{case[impl]['ms'] / ours['ms']:.2f} x"]
        lines.append(cells)
    return table(lines)
