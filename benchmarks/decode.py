"""Decoding from a cache beside FlashAttention-3: same tensors, one process, alternating rounds, medians.

    python benchmarks/decode.py benchmarks/results/h200-decode.json

One query a sequence, bfloat16, head_dim 128. TB/s counts the keys and values of the lengths once. Large calls are timed
as they are, small ones (variant "graph") in a CUDA graph of ten; "varied" has lengths from 1 to the whole cache. A
cache of less than the L2 (60 MB) stays there between calls, for all. FA3 (package fa3-fwd, built without paging) is
measured where it can be imported.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from common import measure, write

from tileattn import attention_with_kvcache

HEAD_DIM = 128
CALLS = 10  # in a graph


class Shape(NamedTuple):
    batch: int
    seqlen: int
    heads: int
    heads_k: int
    graph: bool = False
    varied: bool = False


SHAPES = [
    Shape(1, 131072, 64, 8),
    Shape(16, 16384, 64, 8),
    Shape(64, 4096, 64, 8),
    Shape(128, 8192, 64, 8),
    Shape(64, 8192, 64, 8, varied=True),
    Shape(8, 16384, 128, 1, graph=True),
    Shape(1, 4096, 64, 8, graph=True),
    Shape(1, 4096, 64, 8),
]


def implementations(shape: Shape, page_size: int) -> tuple[dict[str, Callable[[], Any]], int]:
    """By name, and how many keys there are."""
    s, device = shape, "cuda"
    pages = s.seqlen // page_size
    paged = torch.randn(2, s.batch * pages, page_size, s.heads_k, HEAD_DIM, dtype=torch.bfloat16, device=device)
    k_pages, v_pages = paged.unbind(0)
    k, v = (x.view(s.batch, s.seqlen, s.heads_k, HEAD_DIM) for x in (k_pages, v_pages))
    table = torch.randperm(s.batch * pages, device=device).int().view(s.batch, pages)
    q = torch.randn(s.batch, 1, s.heads, HEAD_DIM, dtype=torch.bfloat16, device=device)
    lengths = torch.full((s.batch,), s.seqlen, dtype=torch.int32, device=device)
    if s.varied:
        lengths = torch.randint(1, s.seqlen + 1, (s.batch,), dtype=torch.int32, device=device)
    found: dict[str, Callable[[], Any]] = {
        "tileattn": lambda: attention_with_kvcache(q, k, v, cache_seqlens=lengths),
        f"tileattn, pages of {page_size}": lambda: attention_with_kvcache(
            q, k_pages, v_pages, cache_seqlens=lengths, block_table=table
        ),
    }
    try:
        from fa3_fwd_interface import flash_attn_with_kvcache
    except ImportError:
        pass
    else:
        found["fa3"] = lambda: flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths)
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


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds and TB/s of each call, a column for each implementation."""
    names = list(dict.fromkeys(row["impl"] for row in rows))
    lines = ["| batch, keys, heads | " + " | ".join(names) + " |", "| --- |" + " --- |" * len(names)]
    calls: dict[tuple[Any, ...], dict[str, str]] = {}
    for row in rows:
        call = row["batch"], row["seqlen_k"], row["heads"], row["heads_k"], row["variant"]
        calls.setdefault(call, {})[row["impl"]] = f"{row['ms'] * 1e3:.1f} µs, {row['tbps']:.2f} TB/s"
    for (batch, keys, heads, heads_k, variant), found in calls.items():
        call = f"{batch} x {keys:,}, {heads} : {heads_k}" + (f", {variant}" if variant else "")
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
        if shape.graph:
            runs = {name: graphed(run) for name, run in runs.items()}
        with torch.inference_mode():
            found = measure(runs, options.rounds)
        if shape.graph:
            found = {name: ms / CALLS for name, ms in found.items()}
        moved = 2 * 2 * keys * shape.heads_k * HEAD_DIM
        rows += [
            {
                "impl": name,
                "direction": "decode",
                "dtype": "bfloat16",
                "batch": shape.batch,
                "heads": shape.heads,
                "heads_k": shape.heads_k,
                "seqlen_q": 1,
                "seqlen_k": shape.seqlen,
                "head_dim": HEAD_DIM,
                "head_dim_v": HEAD_DIM,
                "causal": False,
                "variant": "graph" if shape.graph else "varied" if shape.varied else "",
                "ms": round(ms, 5),
                "tbps": round(moved / ms * 1e-9, 3),
            }
            for name, ms in found.items()
        ]
        shown = "  ".join(f"{name} {ms * 1e3:.1f} us {moved / ms * 1e-9:.2f} TB/s" for name, ms in found.items())
        print(
            f"b{shape.batch} s{shape.seqlen} {shape.heads}:{shape.heads_k} {rows[-1]['variant']:6} {shown}", flush=True
        )
        write(options.output, rows, options.commit)
    print(table(rows))


if __name__ == "__main__":
    main()
