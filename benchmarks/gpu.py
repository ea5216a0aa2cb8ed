"""The portable backend beside torch's FlashAttention-2, cuDNN and compiled FlexAttention, alternating in one process.

    python benchmarks/gpu.py out.json [--head-dims 64,128,256] [--seqlens 1024,4096,16384] [--rounds 5]

16,384 tokens, heads * head_dim = 2,048, bfloat16, random data. Each round times every implementation once on a cell;
a cell's figure is the median over rounds. FLOPs are counted as 4 * tokens * seqlen * heads * head_dim forward (half of
it when causal), and 2.5 times that backward.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import TOKENS, WIDTH, Pair, backward_of, measure_pairs, write
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


def cell(seqlen: int, head_dim: int, causal: bool, rounds: int) -> list[dict[str, Any]]:
    batch, heads = TOKENS // seqlen, WIDTH // head_dim
    q, k, v, dout = (torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    pairs: dict[str, Pair] = {}
    for name, build in IMPLEMENTATIONS.items():
        pair = _try(build, *leaves, dout, causal)
        if pair is not None:
            pairs[name] = pair
    scores = seqlen * seqlen * (0.5 if causal else 1.0)
    return measure_pairs(pairs, rounds, seqlen, head_dim, causal, "", scores)


def summary(rows: list[dict[str, Any]]) -> str:
    """Ours beside each peer, cell by cell, and geometric means of the ratios."""
    lines, ratios = [], {}
    key = lambda r: (r["direction"], r["head_dim"], r["seqlen_q"], r["causal"])  # noqa: E731
    for where, group in itertools.groupby(sorted(rows, key=key), key=key):
        by_name = {r["impl"]: r["tflops"] for r in group}
        ours = by_name["tileattn-portable"]
        bar = max((t for n, t in by_name.items() if n in ("torch-fa2", "torch-flex")), default=0.0)
        for name, tflops in by_name.items():
            ratios.setdefault((where[0], name), []).append(ours / tflops)
        figures = " ".join(f"{name} {tflops:.0f}" for name, tflops in by_name.items())
        lines.append(f"{where[0]} d{where[1]} {where[2]}{' causal' * where[3]}: {figures}; to the bar {ours / bar:.2f}")
    for (direction, name), found in ratios.items() if len(lines) > 2 else ():
        lines.append(f"geometric mean {direction} over {name}: {statistics.geometric_mean(found):.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("path")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--seqlens", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for head_dim, seqlen, causal in itertools.product(options.head_dims, options.seqlens, (False, True)):
        found = cell(seqlen, head_dim, causal, options.rounds)
        print(summary(found), flush=True)
        rows += found
        write(options.path, rows, options.commit)
    print(summary(rows))


if __name__ == "__main__":
    main()
