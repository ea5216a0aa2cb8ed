"""The portable backend beside torch's FlashAttention-2, cuDNN and compiled FlexAttention, alternating in one process.

    python benchmarks/gpu.py out.json [--head-dims 64,128,256] [--seqlens 1024,4096,16384] [--rounds 5] [--workers 12]

Cells of the same commit that out.json already holds are kept, so that it can be made in parts. With workers everything
is compiled first, in so many processes. Prints a table of all that the file holds.

16,384 tokens, heads * head_dim = 2,048, bfloat16, random data. Each round times every implementation once on a cell;
a cell's figure is the median over rounds. FLOPs are counted as 4 * tokens * seqlen * heads * head_dim forward (half of
it when causal), and 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import itertools
import multiprocessing
import operator
import os
import statistics
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from common import TOKENS, WIDTH, Pair, backward_of, kept, measure_pairs, write
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tileattn import attention


def tileattn_portable(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool) -> Pair:
    def forward() -> torch.Tensor:
        return attention(q, k, v, causal=causal, backend="portable")

    return forward, backward_of(forward(), (q, k, v), dout)


def _sdpa(backend: SDPBackend) -> Callable[..., Pair]:
    def build(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool) -> Pair:
        heads_first = [x.transpose(1, 2) for x in (q, k, v)]

        def forward() -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(*heads_first, is_causal=causal)

        return forward, backward_of(forward(), (q, k, v), dout.transpose(1, 2))

    return build


def flex(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, causal: bool) -> Pair:
    heads_first = [x.transpose(1, 2).contiguous().detach().requires_grad_() for x in (q, k, v)]
    seqlen = q.shape[1]
    torch.compiler.reset()  # else the shapes of earlier cells count against its limit of recompilations
    compiled = torch.compile(flex_attention, dynamic=False)
    mask = None
    if causal:
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seqlen, seqlen, device="cuda")

    def forward() -> torch.Tensor:
        return compiled(*heads_first, block_mask=mask)

    return forward, backward_of(forward(), tuple(heads_first), dout.transpose(1, 2).contiguous())


IMPLEMENTATIONS: dict[str, Callable[..., Pair]] = {
    "tileattn-portable": tileattn_portable,
    "torch-fa2": _sdpa(SDPBackend.FLASH_ATTENTION),
    "torch-cudnn": _sdpa(SDPBackend.CUDNN_ATTENTION),
    "torch-flex": flex,
}


def _try(build: Callable[..., Pair], *arguments: Any) -> Pair | None:
    """None where an implementation refuses a cell, after saying so."""
    try:
        pair = build(*arguments)
        pair[1]()
    except Exception as error:
        print(f"{build}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        return None
    return pair


class Cell(NamedTuple):
    seqlen: int
    head_dim: int
    causal: bool

    def tensors(self) -> list[torch.Tensor]:
        """q, k, v and dout."""
        shape = TOKENS // self.seqlen, self.seqlen, WIDTH // self.head_dim, self.head_dim
        q, k, v, dout = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4))
        return [*(x.requires_grad_() for x in (q, k, v)), dout]


def prepare(cells: list[Cell], workers: int) -> None:
    """Fill the caches of Triton and of torch.compile. Our kernels are the same for every length."""
    ours = {(cell.head_dim, cell.causal): cell for cell in cells}.values()
    tasks = [("torch-flex", cell) for cell in cells] + [("tileattn-portable", cell) for cell in ours]
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # what workers inherit
    with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(_compile, *zip(*tasks, strict=True)))


def _compile(name: str, cell: Cell) -> None:
    pair = _try(IMPLEMENTATIONS[name], *cell.tensors(), cell.causal)
    if pair is not None:
        with torch.no_grad():
            pair[0]()


def measure_cell(cell: Cell, rounds: int) -> list[dict[str, Any]]:
    seqlen, head_dim, causal = cell
    *leaves, dout = cell.tensors()
    pairs: dict[str, Pair] = {}
    for name, build in IMPLEMENTATIONS.items():
        pair = _try(build, *leaves, dout, causal)
        if pair is not None:
            pairs[name] = pair
    scores = seqlen * seqlen * (0.5 if causal else 1.0)
    return measure_pairs(pairs, rounds, seqlen, head_dim, causal, "", scores)


def summary(rows: list[dict[str, Any]]) -> str:
    """A table, each cell full/causal, and geometric means of the ratios of ours to each peer and to the bar, the better
    of FA2 and FlexAttention."""
    names = list(IMPLEMENTATIONS)
    lines = ["| | " + " | ".join(names) + " | to the bar |", "| --- " * (len(names) + 2) + "|"]
    ratios: dict[tuple[str, str], list[float]] = {}
    for (direction, head_dim, seqlen), group in _grouped(rows, "direction", "head_dim", "seqlen_q"):
        columns: dict[str, list[str]] = {name: [] for name in (*names, "bar")}
        for _, both in _grouped(group, "causal"):
            tflops = {row["impl"]: row["tflops"] for row in both}
            tflops["bar"] = max((tflops[n] for n in ("torch-fa2", "torch-flex") if n in tflops), default=float("nan"))
            for name in names:
                columns[name].append(f"{tflops[name]:.0f}" if name in tflops else "-")
            columns["bar"].append(f"{tflops[names[0]] / tflops['bar']:.2f}")
            for name in tflops.keys() - {names[0]}:
                ratios.setdefault((direction, name), []).append(tflops[names[0]] / tflops[name])
        where = f"{direction} d{head_dim} {seqlen // 1024}k"
        lines.append("| " + " | ".join([where, *map("/".join, columns.values())]) + " |")
    for (direction, name), found in sorted(ratios.items()):
        mean = statistics.geometric_mean(found)
        lines.append(f"{direction} over {name}: geometric mean {mean:.3f}, least {min(found):.2f}")
    return "\n".join(lines)


def _grouped(rows: list[dict[str, Any]], *names: str) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    of = operator.itemgetter(*names)
    for values, group in itertools.groupby(sorted(rows, key=of), key=of):
        yield values, list(group)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("path")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--seqlens", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    options = parser.parse_args()
    cells = [Cell(*x) for x in itertools.product(options.seqlens, options.head_dims, (False, True))]
    rows = kept(options.path, options.commit)
    rows = [r for r in rows if Cell(r["seqlen_q"], r["head_dim"], r["causal"]) not in cells]
    if options.workers:
        prepare(cells, options.workers)
    for cell in cells:
        print(cell, flush=True)
        rows += measure_cell(cell, options.rounds)
        write(options.path, rows, options.commit)
    print(summary(rows))


if __name__ == "__main__":
    main()
