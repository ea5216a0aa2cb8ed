"""The Hopper forward beside its peers, through the public calls: one process, alternating rounds, medians.

    python benchmarks/hopper.py --suites square,gqa,window,wide,varlen --output result.json

Every call has 16,384 tokens, or one longer sequence; heads x head_dim is 2,048 but where a suite says otherwise. FA3
(package fa3-fwd), FA4 (flash-attn-4) and cuDNN (through torch) are measured where they can be had and support the call.
of_matmul and of_exp2 are the shares of what the matrix units and those of exponentials give in the same process: to a
square product of 8,192, and to exponentials alone. The larger one tells which binds.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from common import TOKENS, WIDTH, in_turn, time_once, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileattn

# Long-tailed: most sequences are short, most tokens lie in a few long ones.
LENGTHS = (64, 1536, 128, 6144, 256, 64, 768, 128, 3072, 64, 512, 128, 2048, 256, 64, 1024, 128)


class Case(NamedTuple):
    """One call. data: random; growing: logits grow towards the first key, which is visited last; outlier: one key
    stands out; large: queries ten times as large; file:PATH: what activations.py wrote there."""

    suite: str
    lengths: tuple[int, ...]
    head_dim: int
    head_dim_v: int
    heads: int
    heads_k: int
    causal: bool
    window: tuple[int, int] = (-1, -1)
    data: str = "random"

    @property
    def varlen(self) -> bool:
        return len(set(self.lengths)) > 1

    def scores(self) -> float:
        """Those that are seen, counting half of a causal square."""
        left, pairs = self.window[0], 0.0
        for n in self.lengths:
            pairs += n * left - left**2 / 2 if 0 <= left < n else n**2 / (2 if self.causal else 1)
        return pairs * self.heads

    def flops(self) -> float:
        return 2 * self.scores() * (self.head_dim + self.head_dim_v)

    @property
    def variant(self) -> str:
        return self.suite if self.suite != "square" else Path(self.data.removeprefix("file:")).stem

    def __str__(self) -> str:
        size = "varlen" if self.varlen else str(self.lengths[0])
        dims = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        heads = f"{self.heads}/{self.heads_k}"
        return f"{self.suite:7} {dims:9} {heads:6} {size:6} {'causal' if self.causal else 'full':6} {self.variant}"


def lengths_of(n: int) -> tuple[int, ...]:
    return (n,) * max(TOKENS // n, 1)


def cases(suite: str, head_dims: list[int], seqlens: list[int], data: list[str]) -> Iterator[Case]:
    for causal in (False, True):
        if suite == "square":
            for head_dim in head_dims:
                for n in seqlens:
                    for kind in data:
                        heads = WIDTH // head_dim
                        yield Case(suite, lengths_of(n), head_dim, head_dim, heads, heads, causal, data=kind)
        elif suite == "gqa":
            for n in seqlens:
                yield Case(suite, lengths_of(n), 128, 128, 64, 8, causal)
        elif suite == "window" and causal:
            for n in (4096, 16384):
                yield Case(suite, lengths_of(n), 128, 128, 16, 16, causal, (1024, 0))
        elif suite == "wide":
            for n in seqlens:
                yield Case(suite, lengths_of(n), 192, 128, 16, 16, causal)
        elif suite == "varlen":
            yield Case(suite, LENGTHS, 128, 128, 16, 16, causal)


def activations(case: Case) -> list[Tensor]:
    """q, k and v of a file, repeated to a case's batch, length, heads and head_dim."""
    found = torch.load(case.data.removeprefix("file:"))
    group = found["q"].shape[2] // found["k"].shape[2]
    tiled = []
    for name, heads, head_dim in (
        ("q", case.heads, case.head_dim),
        ("k", case.heads_k, case.head_dim),
        ("v", case.heads_k, case.head_dim_v),
    ):
        x = found[name] if name == "q" else found[name].repeat_interleave(group, 2)
        x = x.flatten(2)
        for dim, size in enumerate((len(case.lengths), case.lengths[0], heads * head_dim)):
            x = x.index_select(dim, torch.arange(size) % x.shape[dim])
        tiled.append(x.cuda().unflatten(2, (heads, head_dim)))
    return tiled


def tensors(case: Case, dtype: torch.dtype) -> list[Tensor]:
    if case.data.startswith("file:"):
        return [x.to(dtype) for x in activations(case)]
    generator = torch.Generator("cuda").manual_seed(0)
    rows = (sum(case.lengths),) if case.varlen else (len(case.lengths), case.lengths[0])
    shapes = (case.heads, case.head_dim), (case.heads_k, case.head_dim), (case.heads_k, case.head_dim_v)
    q, k, v = (torch.randn(*rows, *shape, device="cuda", generator=generator) for shape in shapes)
    n = case.lengths[0]
    if case.data == "growing":
        k *= torch.linspace(12, 0.1, n, device="cuda")[:, None, None]
    elif case.data == "outlier":
        k[:, n // 3] *= 30
    elif case.data == "large":
        q *= 10
    return [x.to(dtype) for x in (q, k, v)]


@functools.lru_cache
def peers() -> dict[str, tuple[Callable[..., Any], Callable[..., Any]]]:
    """Those that are installed: for sequences of one length, and for packed ones."""
    found = {}
    for name, module in (("fa3", "fa3_fwd_interface"), ("fa4", "flash_attn.cute")):
        try:
            peer = importlib.import_module(module)
        except ImportError:
            continue
        found[name] = peer.flash_attn_func, peer.flash_attn_varlen_func
    return found


def implementations(case: Case, q: Tensor, k: Tensor, v: Tensor) -> dict[str, Callable[[], Any]]:
    """By name. Each allocates its own output; cuDNN gets its tensors in the order that it prefers."""
    causal, window = case.causal, case.window
    windows = {"tileattn": {"window": window}, "fa3": {"window_size": window}}
    windows["fa4"] = {"window_size": tuple(None if side < 0 else side for side in window)}
    packed: dict[str, Any] = {}
    if case.varlen:
        ends = torch.tensor((0, *case.lengths), device="cuda").cumsum(0).to(torch.int32)
        packed = {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
        packed |= {"max_seqlen_q": max(case.lengths), "max_seqlen_k": max(case.lengths)}
    found: dict[str, Callable[[], Any]] = {
        name: functools.partial(pair[case.varlen], q, k, v, **packed, causal=causal, **windows[name])
        for name, pair in {"tileattn": (tileattn.attention, tileattn.attention_varlen), **peers()}.items()
    }
    if not case.varlen and window == (-1, -1):
        heads_first = [x.transpose(1, 2).contiguous() for x in (q, k, v)]

        def cudnn() -> Any:
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                return F.scaled_dot_product_attention(
                    *heads_first, is_causal=causal, enable_gqa=case.heads > case.heads_k
                )

        found["cudnn"] = cudnn
    return found


def captured(function: Callable[[], Any]) -> Callable[[], None]:
    """A call's kernels without its host work."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay


def supported(functions: dict[str, Callable[[], Any]], graph: bool) -> dict[str, Callable[[], Any]]:
    kept = {}
    for name, function in functions.items():
        try:
            function()
            kept[name] = captured(function) if graph else function
        except Exception as error:  # noqa: PERF203  (peers raise what they like)
            print(f"{name} refuses: {str(error)[:100]}".splitlines()[0])
    return kept


def milliseconds(functions: dict[str, Callable[[], Any]], rounds: int, duration: float) -> dict[str, float]:
    """Medians over rounds in which all take their turn for about `duration` ms."""
    once = {name: time_once(function, 3) for name, function in functions.items() if time_once(function, 2)}
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds):
        for name in in_turn(once, i):
            repeats = max(5, int(duration / once[name]))
            time_once(functions[name], repeats // 4 + 1)
            times[name].append(time_once(functions[name], repeats))
    return {name: statistics.median(found) for name, found in times.items()}


def matmul_peak(dtype: torch.dtype) -> float:
    """TFLOP/s of a square product of 8,192: what the matrix units give under this card's power limit."""
    a, b = (torch.randn(8192, 8192, device="cuda").to(dtype) for _ in range(2))
    return 2 * 8192**3 / milliseconds({"mm": lambda: a @ b}, 3, 60.0)["mm"] * 1e-9


@triton.jit
def _exponentials(out_ptr, count):
    x = (tl.arange(0, 4096) + tl.program_id(0)).to(tl.float32)
    for _ in range(count):
        x = tl.exp2(-x)
    tl.store(out_ptr + tl.arange(0, 4096), x)


def exponential_peak() -> float:
    """Exponentials a millisecond, of which nothing else keeps the units."""
    programs, count = 4096, 1024
    out = torch.empty(4096, device="cuda")
    ms = milliseconds({"exp2": lambda: _exponentials[(programs,)](out, count)}, 3, 20.0)["exp2"]
    return programs * 4096 * count / ms


class Peaks(NamedTuple):
    """TFLOP/s of the matrix units, exponentials a millisecond."""

    matmul: float
    exponentials: float


def row(name: str, ms: float, case: Case, dtype: torch.dtype, peaks: Peaks) -> dict[str, Any]:
    tflops = case.flops() / ms * 1e-9
    return {
        "impl": name,
        "direction": "forward",
        "dtype": str(dtype).removeprefix("torch."),
        "batch": len(case.lengths),
        "heads": case.heads,
        "heads_k": case.heads_k,
        "seqlen_q": max(case.lengths),
        "seqlen_k": max(case.lengths),
        "head_dim": case.head_dim,
        "head_dim_v": case.head_dim_v,
        "causal": case.causal,
        "variant": case.variant,
        "ms": round(ms, 5),
        "tflops": round(tflops, 1),
        "of_matmul": round(tflops / peaks.matmul, 3),
        "of_exp2": round(case.scores() / ms / peaks.exponentials, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", default="square", help="of square,gqa,window,wide,varlen")
    parser.add_argument("--head-dims", default="64,128,256", help="of the square suite")
    parser.add_argument("--seqlens", default="1024,4096,16384")
    parser.add_argument("--data", default="random", help="of the square suite: random,growing,outlier,large,file:PATH")
    parser.add_argument("--graph", action="store_true", help="time replays of captured calls, so without host work")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--duration", type=float, default=60.0, help="milliseconds of each round")
    parser.add_argument("--output")
    parser.add_argument("--commit", help="where git is not at hand")
    options = parser.parse_args()
    dtype = getattr(torch, options.dtype)
    head_dims, seqlens = ([*map(int, text.split(","))] for text in (options.head_dims, options.seqlens))
    peaks = Peaks(matmul_peak(dtype), exponential_peak())
    print(f"matmul {peaks.matmul:.0f} TFLOP/s, {peaks.exponentials * 1e-9:.2f} 10^12 exponentials a second")
    rows = []
    for suite in options.suites.split(","):
        for case in cases(suite, head_dims, seqlens, options.data.split(",")):
            functions = supported(implementations(case, *tensors(case, dtype)), options.graph)
            found = milliseconds(functions, options.rounds, options.duration)
            how = {"graph": options.graph, "duration": options.duration}
            measured = [row(name, ms, case, dtype, peaks) | how for name, ms in found.items()]
            rows += measured
            shown = "  ".join(f"{r['impl']} {r['tflops']:.0f}" for r in measured)
            ours = measured[0]
            print(f"{case} {shown}  ({ours['of_matmul']:.0%} of matmul, {ours['of_exp2']:.0%} of exp2)", flush=True)
            if options.output:  # whatever comes after it
                write(options.output, rows, options.commit)


if __name__ == "__main__":
    main()
