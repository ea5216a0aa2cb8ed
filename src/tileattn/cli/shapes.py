"""The arguments that describe one attention call, shared by explain and bench."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from tileattn.cli.console import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


def add_device(parser: Any) -> None:
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", default=default, help=f"cpu, cuda, cuda:1, ... (default here: {default})")


def require_available(device: str) -> None:
    """Raise UserError unless something can be computed on the device."""
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter from a PyTorch built without the device
        raise UserError(f"--device {device}: {str(error).splitlines()[0]}") from error


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("shape")
    group.add_argument("--batch", type=positive, default=1, metavar="N")
    group.add_argument("--heads", type=positive, default=8, metavar="N", help="query heads (default 8)")
    group.add_argument(
        "--heads-k", type=positive, metavar="N", help="key and value heads, dividing --heads (GQA; default: --heads)"
    )
    group.add_argument("--head-dim", type=positive, default=64, metavar="N", help="of queries and keys (default 64)")
    group.add_argument("--head-dim-v", type=positive, metavar="N", help="of values (default: --head-dim)")
    group.add_argument("--dtype", choices=DTYPES, default="float32")
    group.add_argument(
        "--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ..."
    )
    group = parser.add_argument_group("what a row sees")
    group.add_argument("--causal", action="store_true", help="no column after its own position, bottom-right aligned")
    group.add_argument(
        "--window",
        type=int,
        nargs=2,
        default=(-1, -1),
        metavar=("LEFT", "RIGHT"),
        help="that many columns before and after its own position; -1: unlimited",
    )
    parser.add_argument("--softcap", type=float, default=0.0, metavar="X", help="scores become X tanh(score / X)")
    parser.add_argument("--backend", metavar="NAME", help="insist on this backend")


def tensors(args: argparse.Namespace, seqlen_q: int, seqlen_k: int, **options) -> list[torch.Tensor]:
    """q, k and v of the shape asked for, random."""
    heads_k = args.heads_k or args.heads
    head_dim_v = args.head_dim_v or args.head_dim
    sizes = ((seqlen_q, args.heads, args.head_dim), (seqlen_k, heads_k, args.head_dim), (seqlen_k, heads_k, head_dim_v))
    return [torch.randn(args.batch, *s, dtype=DTYPES[args.dtype], device=args.device, **options) for s in sizes]
