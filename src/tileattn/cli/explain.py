"""tileattn explain: who would serve a call, and what it would move and hold. Computes nothing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

import tileattn
from tileattn.cli import shapes
from tileattn.cli.console import UserError

DESCRIPTION = """\
Say which backend would serve an attention call of this shape, with which tiles and why, and how many bytes it moves
between slow memory (DRAM, HBM) and fast memory (cache, SRAM), beside what standard attention would move and hold.
Nothing is computed and no memory is used, so any length will do. Tiles depend on the chip, which must be there:

  tileattn explain --seqlen-q 131072 --causal --dtype bfloat16
  tileattn explain --seqlen-q 1 --seqlen-k 8192 --heads 32 --heads-k 8      one token of decoding, GQA
  tileattn explain --seqlen-q 8192 --causal --window 1023 0                 a sliding window of 1,024
"""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="which backend and tiles serve a shape, and the bytes that moves",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seqlen-q", type=shapes.positive, default=4096, metavar="N", help="queries (default 4096)")
    parser.add_argument("--seqlen-k", type=shapes.positive, metavar="N", help="keys (default: --seqlen-q)")
    shapes.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    shapes.require_available(args.device)
    try:
        with FakeTensorMode():
            q, k, v = shapes.tensors(args, args.seqlen_q, args.seqlen_k or args.seqlen_q)
            explanation = tileattn.explain(
                q, k, v, causal=args.causal, window=tuple(args.window), softcap=args.softcap, backend=args.backend
            )
    except (TypeError, ValueError, RuntimeError) as error:
        raise UserError(str(error)) from error
    print(json.dumps(as_json(explanation), indent=2) if args.json else explanation)
    return 0


def as_json(explanation: tileattn.Explanation) -> dict[str, Any]:
    problem = {
        name: str(x) if not isinstance(x, int | float | None) else x for name, x in vars(explanation.problem).items()
    }
    return {
        "problem": problem,
        "backend": explanation.backend,
        "tiles": explanation.tiles._asdict(),
        "tiled": explanation.tiled._asdict(),
        "standard": explanation.standard._asdict(),
        "refusals": explanation.refusals,
    }
