"""The Hopper forward beside its peers: same tensors, one process, alternating rounds, medians.

    python benchmarks/hopper.py --head-dims 128 --output benchmarks/results/h200-hopper-forward.json

Batch is 16,384 tokens / seqlen, heads x head_dim is 2,048. Every implementation is called through its Python function
and allocates its own output; FA3 (package fa3-fwd) is measured where it can be imported.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import json
import statistics
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileattn.backends import hopper
from tileattn.problem import Problem

TOKENS, WIDTH = 16384, 2048


def implementations(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    """By name. q, k, v: (batch, seqlen, heads, head_dim); cuDNN gets them in the order that it prefers."""
    q_heads, k_heads, v_heads = (x.transpose(1, 2).contiguous() for x in (q, k, v))

    def tileattn() -> Any:
        problem, inputs = Problem.of(q, k, v, causal=causal)
        return hopper.forward(problem, inputs)

    def cudnn() -> Any:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q_heads, k_heads, v_heads, is_causal=causal)

    found: dict[str, Callable[[], Any]] = {"tileattn": tileattn, "cudnn": cudnn}
    try:
        from fa3_fwd_interface import flash_attn_func
    except ImportError:
        return found
    return {**found, "fa3": functools.partial(flash_attn_func, q, k, v, causal=causal)}


def tensors(seqlen: int, head_dim: int, data: str, dtype: torch.dtype) -> list[Tensor]:
    """data: random; growing: logits grow towards the first key, which is visited last; outlier: one key stands out;
    large: inputs ten times as large."""
    generator = torch.Generator("cuda").manual_seed(0)
    shape = TOKENS // seqlen, seqlen, WIDTH // head_dim, head_dim
    q, k, v = (torch.randn(shape, device="cuda", generator=generator) for _ in range(3))
    if data == "growing":
        k *= torch.linspace(12, 0.1, seqlen, device="cuda")[:, None, None]
    elif data == "outlier":
        k[:, seqlen // 3] *= 30
    elif data == "large":
        q *= 10
    return [x.to(dtype) for x in (q, k, v)]


def milliseconds(functions: dict[str, Callable[[], Any]], rounds: int, duration: float) -> dict[str, float]:
    """Medians over rounds in which all take their turn for about `duration` ms."""
    once = {name: _time(function, 3) for name, function in functions.items() if _time(function, 2)}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(rounds):
        for name, function in functions.items():
            repeats = max(5, int(duration / once[name]))
            _time(function, repeats // 4 + 1)
            times[name].append(_time(function, repeats))
    return {name: statistics.median(found) for name, found in times.items()}


def _time(function: Callable[[], Any], repeats: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / repeats


def row(
    name: str, ms: float, seqlen: int, head_dim: int, causal: bool, data: str, dtype: torch.dtype
) -> dict[str, Any]:
    flops = 4 * TOKENS * seqlen * WIDTH / (2 if causal else 1)
    heads = WIDTH // head_dim
    return {
        "impl": name,
        "direction": "forward",
        "dtype": str(dtype).removeprefix("torch."),
        "batch": TOKENS // seqlen,
        "heads": heads,
        "heads_k": heads,
        "seqlen_q": seqlen,
        "seqlen_k": seqlen,
        "head_dim": head_dim,
        "head_dim_v": head_dim,
        "causal": causal,
        "variant": data,
        "ms": round(ms, 5),
        "tflops": round(flops / ms * 1e-9, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head-dims", default="64,128,256")
    parser.add_argument("--seqlens", default="1024,4096,16384")
    parser.add_argument("--data", default="random", help="of random,growing,outlier,large")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=60.0, help="milliseconds of each round")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    rows = []
    for head_dim in map(int, options.head_dims.split(",")):
        for seqlen in map(int, options.seqlens.split(",")):
            for causal in (False, True):
                for data in options.data.split(","):
                    functions = implementations(*tensors(seqlen, head_dim, data, dtype), causal)
                    found = milliseconds(functions, options.rounds, options.duration)
                    measured = [row(n, ms, seqlen, head_dim, causal, data, dtype) for n, ms in found.items()]
                    rows += measured
                    shown = "  ".join(f"{r['impl']} {r['tflops']:.0f}" for r in measured)
                    print(f"d{head_dim} {seqlen} {'causal' if causal else 'full':6} {data:8} {shown}", flush=True)
    if options.output:
        commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True).stdout.strip()
        result = {
            "device": torch.cuda.get_device_name(),
            "commit": commit,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "versions": {"torch": torch.__version__, "triton": triton.__version__},
            "rows": rows,
        }
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
