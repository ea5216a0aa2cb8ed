"""tileattn tune: find the fastest tiles of the Triton kernels on the GPU at hand, and write them to a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

import torch

from tileattn.cli import env, shapes
from tileattn.cli.console import Progress, UserError, table

KERNELS = ("forward", "backward_kv", "backward_q")
DESCRIPTION = """\
Compile and time tiles of the portable backend's kernels on this GPU, and write the fastest to a file:

  tileattn tune --head-dims 64 128 --out tiles.json
  TILEATTN_TILES=tiles.json python train.py

The file is small, can be shipped, and holds for GPUs of the same name; others keep the tiles that tileattn comes with.
Takes a few minutes for each head dim. Nothing is ever searched for outside this command.
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "tune",
        help="find the fastest tiles of the Triton kernels on this GPU",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--head-dims", type=shapes.positive, nargs="+", default=[64, 128], metavar="N", help="default: 64 128"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--kernels", choices=KERNELS, nargs="+", default=KERNELS, help="default: all")
    parser.add_argument("--out", type=Path, default=Path("tiles.json"), metavar="FILE", help="default: tiles.json")
    parser.add_argument(
        "--workers",
        type=shapes.positive,
        default=os.cpu_count(),
        metavar="N",
        help="processes that compile (default: one a core)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise UserError("needs a GPU that PyTorch can use; there is none here")
    if args.out.is_dir() or not args.out.parent.is_dir():
        raise UserError(f"--out {args.out}: {args.out.parent} is not a directory, or {args.out} is one")
    from tileattn.backends.portable import MAX_HEAD_DIM, search, tuned, tuning

    if max(args.head_dims) > MAX_HEAD_DIM:
        raise UserError(f"--head-dims {max(args.head_dims)}: the kernels serve head dims up to {MAX_HEAD_DIM}")

    dtype, device = shapes.DTYPES[args.dtype], torch.device("cuda", torch.cuda.current_device())
    trials = search.trials_for(args.head_dims, dtype, device, args.kernels)
    with Progress(search.steps(trials)) as progress:
        found = search.search(trials, dtype, args.workers, progress.step)
    best = search.best(found, dtype, lambda kernel, head_dim: tuning._lookup(device, dtype, head_dim, kernel))
    tuned.write(args.out, torch.cuda.get_device_name(device), env.versions(), [b.entry for b in best])
    print(_report(best))
    faulty = sum(timed.fault is not None for timed in found)
    print(f"\n{len(found)} tiles tried, of which {faulty} did not work. TILEATTN_TILES={args.out} uses the best.")
    return 0


def _report(best: list[Any]) -> str:
    lines = [["kernel", "head_dim", "tile", "warps", "stages", "speed"]]
    for entry, gain in best:
        tiles = [entry.tile] if entry.tile.dv is None else [entry.tile, entry.tile.dv]
        each = (
            [f"{t.block_m} x {t.block_n}" for t in tiles],
            [str(t.num_warps) for t in tiles],
            [str(t.num_stages) for t in tiles],
        )
        lines.append([entry.kernel, str(entry.head_dim), *map(", ".join, each), f"{gain:.2f} x"])
    return table(lines)
