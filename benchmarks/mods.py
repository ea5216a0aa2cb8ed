"""Modifiers and sparsity of the portable backend beside compiled FlexAttention: same tensors, alternating rounds.

    python benchmarks/mods.py out.json [--variants alibi,bias,mask,window,documents,blocks] [--head-dims 64,128]
        [--seqlens 4096,16384] [--rounds 5]

Cells of the same commit that out.json already holds are kept, so that it can be made in parts. Prints a table of all
that the file holds.

16,384 tokens, heads * head_dim = 2,048, bfloat16. Every cell has a process of its own, so that all compile at once;
then they take turns on the GPU. FLOPs are those of the scores that the mask leaves, backward 2.5 times as many.

alibi       causal; ours also as the score_mod that FlexAttention gets
bias        (1, heads, seqlen, seqlen), without a gradient; ours also as a score_mod that reads it; one for all heads
            where that would have 2^31 elements or more
mask        (1, 1, seqlen, seqlen), one half drawn; FlexAttention as a mask_mod that reads it
window      causal, the last 1,024 tokens
documents   causal inside documents of random lengths; ours also as packed sequences
blocks      a tenth of the blocks of 128 x 128, drawn for each head
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing
import operator
import statistics
import threading
from typing import Any

import torch
from common import TOKENS, WIDTH, Pair, backward_of, kept, measure_pairs, write
from torch import Tensor
from torch.nn.attention import flex_attention as flex

from tileattn import BlockMask, attention, attention_varlen

VARIANTS = ("alibi", "bias", "mask", "window", "documents", "blocks")
WINDOW, BLOCK = 1024, 128
PATIENCE = 600.0  # seconds to wait for others to compile


class Cell:
    """Tensors of one cell, and ways to attend to them."""

    def __init__(self, variant: str, head_dim: int, seqlen: int) -> None:
        self.variant, self.head_dim, self.seqlen = variant, head_dim, seqlen
        self.generator = torch.Generator("cuda").manual_seed(0)
        self.heads = WIDTH // head_dim
        shape = TOKENS // seqlen, seqlen, self.heads, head_dim
        self.q, self.k, self.v, self.dout = (self.randn(*shape) for _ in range(4))
        self.causal = variant in ("alibi", "window", "documents")

    def randn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, generator=self.generator)

    def ours(self, **options: Any) -> Pair:
        leaves = tuple(x.detach().requires_grad_() for x in (self.q, self.k, self.v))

        def forward() -> Tensor:
            return attention(*leaves, backend="portable", **options)

        return forward, backward_of(forward(), leaves, self.dout)

    def packed(self, cu_seqlens: Tensor, longest: int) -> Pair:
        leaves = tuple(x.detach().flatten(0, 1).requires_grad_() for x in (self.q, self.k, self.v))

        def forward() -> Tensor:
            return attention_varlen(*leaves, cu_seqlens, cu_seqlens, longest, longest, causal=True, backend="portable")

        return forward, backward_of(forward(), leaves, self.dout.flatten(0, 1))

    def flex(self, score_mod: Any = None, block_mask: Any = None) -> Pair:
        leaves = tuple(x.transpose(1, 2).contiguous().requires_grad_() for x in (self.q, self.k, self.v))
        compiled = torch.compile(flex.flex_attention, dynamic=False)

        def forward() -> Tensor:
            return compiled(*leaves, score_mod=score_mod, block_mask=block_mask)

        return forward, backward_of(forward(), leaves, self.dout.transpose(1, 2).contiguous())

    def flex_mask(self, mask_mod: Any) -> Any:
        return flex.create_block_mask(mask_mod, None, None, self.seqlen, self.seqlen, device="cuda")

    def pairs(self) -> tuple[dict[str, Pair], float]:
        """Implementations, and how many scores a head has."""
        return getattr(self, self.variant)()

    def alibi(self) -> tuple[dict[str, Pair], float]:
        slopes = torch.exp2(-8.0 * torch.arange(1, self.heads + 1, device="cuda") / self.heads)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return score - slopes[h] * (row - col).abs()

        pairs = {
            "tileattn-portable": self.ours(causal=True, alibi_slopes=slopes),
            "tileattn-portable score_mod": self.ours(causal=True, score_mod=score_mod),
            "torch-flex": self.flex(score_mod, self.flex_mask(causal)),
        }
        return pairs, self.seqlen * self.seqlen / 2

    def bias(self) -> tuple[dict[str, Pair], float]:
        own = self.heads if self.heads * self.seqlen**2 < 2**31 else 1
        bias = self.randn(1, own, self.seqlen, self.seqlen)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return score + bias[0, h if own > 1 else 0, row, col]

        pairs = {
            "tileattn-portable": self.ours(bias=bias),
            "tileattn-portable score_mod": self.ours(score_mod=score_mod),
            "torch-flex": self.flex(score_mod),
        }
        return pairs, self.seqlen * self.seqlen

    def mask(self) -> tuple[dict[str, Pair], float]:
        mask = torch.rand(self.seqlen, self.seqlen, device="cuda", generator=self.generator) < 0.5

        def shown(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return mask[row, col]

        pairs = {
            "tileattn-portable": self.ours(mask=mask),
            "torch-flex": self.flex(None, self.flex_mask(shown)),
        }
        return pairs, float(mask.sum())

    def window(self) -> tuple[dict[str, Pair], float]:
        def recent(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return (row >= col) & (row - col < WINDOW)

        pairs = {
            "tileattn-portable": self.ours(causal=True, window=(WINDOW - 1, 0)),
            "torch-flex": self.flex(None, self.flex_mask(recent)),
        }
        return pairs, WINDOW * (self.seqlen - WINDOW / 2)

    def documents(self) -> tuple[dict[str, Pair], float]:
        cuts = torch.rand(7, generator=torch.Generator().manual_seed(1)).mul(self.seqlen).int().sort().values
        edges = torch.cat([torch.tensor([0]), cuts, torch.tensor([self.seqlen])]).int()
        document = torch.bucketize(torch.arange(self.seqlen), cuts, right=True).int().cuda()
        batch = TOKENS // self.seqlen
        starts = torch.cat([edges[:-1] + b * self.seqlen for b in range(batch)] + [torch.tensor([TOKENS])])

        def mask_mod(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
            return (row >= col) & (document[row] == document[col])

        block_mask = BlockMask.from_mod(mask_mod, None, None, self.seqlen, self.seqlen, device="cuda")
        pairs = {
            "tileattn-portable": self.ours(block_mask=block_mask),
            "tileattn-portable varlen": self.packed(starts.int().cuda(), int(edges.diff().max())),
            "torch-flex": self.flex(None, self.flex_mask(mask_mod)),
        }
        return pairs, float((edges.diff().double() ** 2).sum()) / 2

    def blocks(self) -> tuple[dict[str, Pair], float]:
        n = self.seqlen // BLOCK
        drawn = torch.rand(1, self.heads, n, n, device="cuda", generator=self.generator) < 0.1
        drawn |= torch.eye(n, dtype=torch.bool, device="cuda")
        counts, order = (
            drawn.sum(-1, dtype=torch.int32),
            drawn.int().argsort(dim=-1, descending=True, stable=True).int(),
        )
        flex_mask = flex.BlockMask.from_kv_blocks(
            torch.zeros_like(counts), torch.zeros_like(order), counts, order, BLOCK_SIZE=BLOCK
        )
        pairs = {
            "tileattn-portable": self.ours(block_mask=BlockMask.from_blocks(drawn, BLOCK)),
            "torch-flex": self.flex(None, flex_mask),
        }
        return pairs, float(drawn.double().mean()) * self.seqlen**2


def causal(b: Tensor, h: Tensor, row: Tensor, col: Tensor) -> Tensor:
    return row >= col


def work(cell: tuple[str, int, int], rounds: int, compiled: Any, turn: Any, found: Any) -> None:
    """One process: compile, wait until all have, and take a turn."""
    variant, head_dim, seqlen = cell
    rows: list[dict[str, Any]] = []
    try:
        this = Cell(variant, head_dim, seqlen)
        pairs, scores = this.pairs()
        for forward, backward in pairs.values():
            backward()
            with torch.no_grad():
                forward()
        torch.cuda.synchronize()
    except Exception as error:
        print(f"{cell}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        pairs = {}
    with contextlib.suppress(threading.BrokenBarrierError):  # one takes very long: do not wait for it
        compiled.wait(PATIENCE)
    if pairs:
        with turn:
            rows = measure_pairs(pairs, rounds, seqlen, head_dim, this.causal, variant, scores)
    found.put(rows)


def summary(rows: list[dict[str, Any]]) -> str:
    """A table, a line a variant, direction and head dim, each length a figure: ours as it is meant to be called, the
    other way, FlexAttention, and the ratio of the first to the last; and geometric means of the ratios."""
    lines = ["| | tileattn portable | the other way | FlexAttention | ratio |", "| --- " * 5 + "|"]
    ratios: dict[str, list[float]] = {}
    line = operator.itemgetter("variant", "direction", "head_dim")
    order = lambda r: (VARIANTS.index(r["variant"]), r["direction"] == "backward", r["head_dim"], r["seqlen_q"])  # noqa: E731
    for (variant, direction, head_dim), group in itertools.groupby(sorted(rows, key=order), key=line):
        columns: tuple[list[str], ...] = ([], [], [], [])
        for _, cell in itertools.groupby(group, key=operator.itemgetter("seqlen_q")):
            tflops = {r["impl"]: r["tflops"] for r in cell}
            flex, ours = tflops.pop("torch-flex"), tflops.pop("tileattn-portable")
            ratios.setdefault(f"{variant} {direction}", []).append(ours / flex)
            found = f"{ours:.0f}", *(f"{x:.0f}" for x in tflops.values()), *["–"] * (not tflops), f"{flex:.0f}"
            for column, figure in zip(columns, (*found, f"{ours / flex:.2f}"), strict=True):
                column.append(figure)
        cells = ["–" if set(column) == {"–"} else "/".join(column) for column in columns]
        lines.append("| " + " | ".join([f"{variant} {direction} d{head_dim}", *cells]) + " |")
    lines += [f"geometric mean {where}: {statistics.geometric_mean(found):.2f}" for where, found in ratios.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("path")
    parser.add_argument("--variants", type=lambda text: text.split(","), default=list(VARIANTS))
    parser.add_argument("--head-dims", type=numbers, default=[64, 128])
    parser.add_argument("--seqlens", type=numbers, default=[4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    options = parser.parse_args()
    cells = list(itertools.product(options.variants, options.head_dims, options.seqlens))
    context = multiprocessing.get_context("spawn")
    compiled, turn, found = context.Barrier(len(cells)), context.Lock(), context.Queue()
    processes = [context.Process(target=work, args=(cell, options.rounds, compiled, turn, found)) for cell in cells]
    for process in processes:
        process.start()
    rows = kept(options.path, options.commit)
    rows = [r for r in rows if (r["variant"], r["head_dim"], r["seqlen_q"]) not in cells]
    for _ in cells:
        rows += found.get()
        write(options.path, rows, options.commit)
    for process in processes:
        process.join()
    print(summary(rows))


if __name__ == "__main__":
    main()
