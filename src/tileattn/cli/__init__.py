"""The command `tileattn`: demo, bench, explain, env, tune."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import tileattn
from tileattn.cli import bench, demo, env, explain, tune
from tileattn.cli.console import UserError

DESCRIPTION = """\
Exact attention without the seqlen x seqlen matrix.

  tileattn explain   which backend and tiles would serve a shape, and how many bytes that moves (computes nothing)
  tileattn env       what is installed, what the hardware is, which backends can be used and why not
  tileattn bench     time tileattn, standard attention and PyTorch's SDPA on shapes of yours
  tileattn tune      find the fastest tiles of the Triton kernels on your GPU
  tileattn demo      read a document with a language model three ways and compare them
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code: 0, 1 when a check of the demo fails, 2 for arguments that make no
    sense."""
    parser = argparse.ArgumentParser(
        prog="tileattn", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"tileattn {tileattn.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for module in (demo, bench, explain, env, tune):
        module.add_parser(commands)
    args = parser.parse_args(argv)
    try:
        return args.run(args)
    except UserError as error:
        print(f"tileattn {args.command}: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
