"""Plain text for terminals: tables, a progress bar, sizes and times. No dependency, and the same everywhere."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence


class UserError(Exception):
    """What the user asked for cannot be done; the message says what would."""


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells in aligned columns, the first to the left and the others to the right; the first row is a head."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * scale >= 1 or unit == "us":
            return f"{value * scale:.3g} {unit}" if value * scale < 1000 else f"{value * scale:.0f} {unit}"
    raise AssertionError


class Progress:
    """A bar on stderr when that is a terminal, nothing otherwise.

    with Progress(total) as progress:
        progress.step("what is done now")
    """

    def __init__(self, total: int):
        self.total, self.done, self.start = total, 0, time.monotonic()
        self.visible = sys.stderr.isatty()

    def step(self, label: str, worth: int = 1) -> None:
        """Say what begins now, as so many steps; all before it are done."""
        if self.visible:
            filled = 24 * self.done // self.total
            elapsed = time.monotonic() - self.start
            text = f"[{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total} {elapsed:4.0f} s  {label}"
            print(f"\r\033[K{text[: shutil.get_terminal_size().columns - 1]}", end="", file=sys.stderr, flush=True)
        self.done += worth

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.visible:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
