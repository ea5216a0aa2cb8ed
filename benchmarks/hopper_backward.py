"""The Hopper backward beside cuDNN: same tensors, one process, alternating rounds, medians.

    python benchmarks/hopper_backward.py out.json [--head-dims 64,128,256] [--seqlens 1024,4096,16384] [--rounds 5]

16,384 tokens, heads * head_dim = 2,048, bfloat16, random data. Ours is called through `tileattn.attention` and
autograd, with all that comes before and after the kernel. FLOPs are counted 2.5 times those of forward.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import TOKENS, WIDTH, backward_of, measure, rows_of, write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileattn import attention


def implementations(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> dict[str, Callable[[], Any]]:
    """By name. q, k, v, dout: (batch, seqlen, heads, head_dim); cuDNN gets them in the order that it prefers."""
    runs = {}
    for name, deterministic in (("tileattn", False), ("tileattn-deterministic", True)):
        leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
        runs[name] = backward_of(attention(*leaves, causal=causal, deterministic=deterministic), leaves, dout)
    leaves = tuple(x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return {**runs, "cudnn": backward_of(out, leaves, dout.transpose(1, 2).contiguous())}


def cell(seqlen: int, head_dim: int, causal: bool, rounds: int) -> list[dict[str, Any]]:
    batch, heads = TOKENS // seqlen, WIDTH // head_dim
    tensors = [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    found = measure(implementations(*tensors, causal), rounds)
    return rows_of(found, "backward", seqlen, head_dim, causal, "", seqlen**2 / (2 if causal else 1))


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
        figures = "  ".join(f"{r['impl']} {r['tflops']:.0f}" for r in found)
        print(f"d{head_dim} {seqlen} {'causal' if causal else 'full':6} {figures}", flush=True)
        rows += found
        write(options.path, rows, options.commit)


if __name__ == "__main__":
    main()
