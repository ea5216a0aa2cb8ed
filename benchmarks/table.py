"""Print a result file of the GPU as the docs have it: TFLOP/s full/causal, and geometric means over each peer.

python benchmarks/table.py benchmarks/results/h200-hopper-forward.json
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tileattn.lab.plots import STYLES

Cell = tuple[str, int, bool]  # what a line is called, its sequence length, and whether it is causal


def cell(row: Mapping[str, Any]) -> Cell:
    dims = f"{row['head_dim']}" + (f"/{row['head_dim_v']}" if row["head_dim_v"] != row["head_dim"] else "")
    grouped = f"GQA {row['heads']}/{row['heads_k']}" if row["heads"] != row["heads_k"] else ""
    variant = row["variant"] if row["variant"] not in ("random", "gqa", "wide") else ""
    return " ".join(filter(None, (row["direction"], variant, f"d{dims}", grouped))), row["seqlen_q"], row["causal"]


def label(impl: str) -> str:
    return STYLES[impl][0] if impl in STYLES else impl


def table(tflops: dict[str, dict[Cell, float]]) -> str:
    lines = dict.fromkeys((name, seqlen) for cells in tflops.values() for name, seqlen, _ in cells)
    text = [["", *map(label, tflops)], ["---"] * (len(tflops) + 1)]
    for name, seqlen in lines:
        found = [[cells.get((name, seqlen, causal)) for causal in (False, True)] for cells in tflops.values()]
        shown = ["/".join("–" if x is None else f"{x:.0f}" for x in pair) if any(pair) else "–" for pair in found]
        text.append([f"{name} {seqlen // 1024}k", *shown])
    return "\n".join(f"| {' | '.join(line)} |" for line in text)


def ratios(ours: dict[Cell, float], peer: dict[Cell, float]) -> str:
    """Of the cells that both have, by direction."""
    said = []
    for direction in ("forward", "backward"):
        found = [ours[at] / peer[at] for at in ours if at in peer and at[0].startswith(direction)]
        if found:
            mean, behind = statistics.geometric_mean(found), sum(ratio < 1 for ratio in found)
            said.append(
                f"{direction} {mean:.2f} ({min(found):.2f} to {max(found):.2f}, {behind} of {len(found)} behind)"
            )
    return ", ".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seqlens", type=int, nargs="+", help="these lengths alone")
    options = parser.parse_args()
    tflops: dict[str, dict[Cell, float]] = {}
    for row in json.loads(options.result.read_text())["rows"]:
        if options.seqlens is None or row["seqlen_q"] in options.seqlens:
            tflops.setdefault(row["impl"], {})[cell(row)] = row["tflops"]
    print(table(tflops))
    ours = next(impl for impl in tflops if impl.startswith("tileattn"))
    for peer in tflops:
        if peer != ours:
            print(f"\n{label(ours)} over {label(peer)}: {ratios(tflops[ours], tflops[peer])}")


if __name__ == "__main__":
    main()
