"""Decoding from a cache beside FlashAttention-3: same tensors, one process, alternating rounds, medians.

    python benchmarks/decode.py benchmarks/results/h200-decode.json

bfloat16, one query a sequence but for chunks of a prompt. TB/s counts the keys and values of the lengths once. Calls
are timed in a CUDA graph of ten; variant "eager" is called from Python. "varied" has lengths from 1 to the whole cache.
A cache of less than the L2 (60 MB) stays there between calls, for all. FA3 (package fa3-fwd, built without paging) is
measured where it can be imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import measure, write

from tileattn import attention_with_kvcache

CALLS = 10  # in a graph


class Shape(NamedTuple):
    """seqlen_q: over 1, the queries are the last of the sequence, and causal."""

    batch: int
    seqlen: int
    heads: int
    heads_k: int
    head_dim: int = 128
    seqlen_q: int = 1
    variant: str = ""

    @property
    def causal(self) -> bool:
        return self.seqlen_q > 1


SHAPES = [
    Shape(1, 131072, 64, 8),
    Shape(16, 16384, 64, 8),
    Shape(64, 4096, 64, 8),
    Shape(128, 8192, 64, 8),
    Shape(8, 16384, 128, 1),
    Shape(1, 4096, 64, 8),
    Shape(1, 4096, 64, 8, variant="eager"),
    Shape(64, 8192, 64, 8, variant="varied"),
    Shape(16, 16384, 64, 8, head_dim=64),
    Shape(16, 8192, 64, 8, head_dim=256),
    Shape(2, 8192, 32, 8, seqlen_q=2048, variant="chunk"),
]


def implementations(shape: Shape, page_size: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """By name, and how many keys there are."""
    s, device = shape, "cuda"
    pages = s.seqlen // page_size
    paged = torch.randn(2, s.batch * pages, page_size, s.heads_k, s.head_dim, dtype=torch.bfloat16, device=device)
    k_pages, v_pages = paged.unbind(0)
    k, v = (x.view(s.batch, s.seqlen, s.heads_k, s.head_dim) for x in (k_pages, v_pages))
    table = torch.randperm(s.batch * pages, device=device).int().view(s.batch, pages)
    q = torch.randn(s.batch, s.seqlen_q, s.heads, s.head_dim, dtype=torch.bfloat16, device=device)
    lengths = torch.full((s.batch,), s.seqlen, dtype=torch.int32, device=device)
    if s.variant == "varied":
        lengths = torch.randint(1, s.seqlen + 1, (s.batch,), dtype=torch.int32, device=device)
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": s.causal}
    found: dict[str, Callable[[], Any]] = {
        "tileattn": lambda: attention_with_kvcache(q, k, v, **options),
        f"tileattn, pages of {page_size}": lambda: attention_with_kvcache(
            q, k_pages, v_pages, block_table=table, **options
        ),
    }
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        pass
    else:
        found["fa3"] = lambda: flash_attn_with_kvcache(q, k, v, **options)
    return found, int(lengths.sum())


def graphed(run: Callable[[], Any]) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS):
            run()
    return graph.replay


def rate(shape: Shape, keys: int, ms: float) -> dict[str, float]:
    """What bounds the call: bytes a second, or for a chunk of a prompt products."""
    s = shape
    if s.seqlen_q == 1:
        return {"tbps": round(2 * 2 * keys * s.heads_k * s.head_dim / ms * 1e-9, 3)}
    scores = s.batch * s.seqlen_q * (s.seqlen - (s.seqlen_q - 1) / 2)
    return {"tflops": round(4 * s.heads * scores * s.head_dim / ms * 1e-9, 1)}


def shown(row: dict[str, Any]) -> str:
    return f"{row['ms'] * 1e3:.1f} µs, " + (f"{row['tbps']:.2f} TB/s" if "tbps" in row else f"{row['tflops']} TFLOP/s")


def table(rows: list[dict[str, Any]]) -> str:
    """A line a call, a column for each implementation."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = ["| batch, keys, heads | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    calls: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        call = tuple(row[name] for name in ("batch", "seqlen_k", "heads", "heads_k", "head_dim", "seqlen_q", "variant"))
        calls.setdefault(call, {})[row["impl"]] = shown(row)
    for (batch, keys, heads, heads_k, head_dim, seqlen_q, variant), found in calls.items():
        call = f"{batch} x {keys:,}, {heads} : {heads_k}"
        call += f", head_dim {head_dim}" if head_dim != 128 else ""
        call += f", {seqlen_q:,} queries" if seqlen_q > 1 else f", {variant}" if variant else ""
        lines.append("| " + " | ".join([call, *(found.get(name, "") for name in names)]) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--commit", help="where git is not at hand")
    options = parser.parse_args()
    rows = []
    for shape in SHAPES:
        runs, keys = implementations(shape, options.page_size)
        calls = 1 if shape.variant == "eager" else CALLS
        if calls > 1:
            runs = {name: graphed(run) for name, run in runs.items()}
        with torch.inference_mode():
            found = {name: ms / calls for name, ms in measure(runs, options.rounds).items()}
        of_shape = [
            {
                "impl": name,
                "direction": "decode",
                "dtype": "bfloat16",
                "batch": shape.batch,
                "heads": shape.heads,
                "heads_k": shape.heads_k,
                "seqlen_q": shape.seqlen_q,
                "seqlen_k": shape.seqlen,
                "head_dim": shape.head_dim,
                "head_dim_v": shape.head_dim,
                "causal": shape.causal,
                "variant": shape.variant,
                "ms": round(ms, 5),
                **rate(shape, keys, ms),
            }
            for name, ms in found.items()
        ]
        print(*shape, *(f" {row['impl']} {shown(row)}" for row in of_shape), flush=True)
        rows += of_shape
        write(options.output, rows, options.commit)
    print(table(rows))


if __name__ == "__main__":
    main()
