"""Pictures of what was measured. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tileattn.dispatch import format_bytes

COLOURS = {"standard": "#c44e52", "sdpa": "#8c8c8c", "tileattn": "#1f6fb4"}
LABELS = {"standard": "standard attention", "sdpa": "PyTorch SDPA", "tileattn": "tileattn"}


def attention_scaling(scaling: Mapping[str, Sequence[Mapping[str, Any]]], subtitle: str, path: Path) -> None:
    """Draw time and peak memory over sequence length, both axes logarithmic, one line for each implementation.

    scaling: for each implementation, rows of {seqlen, seconds, peak_bytes}.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    figure = Figure(figsize=(11, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle("Attention over sequence length\n", fontsize=14, fontweight="bold")
    figure.text(0.5, 0.925, subtitle, ha="center", fontsize=9.5, color="#555555")
    panels = (("seconds", "time", 10, _seconds), ("peak_bytes", "peak memory, output included", 4, _bytes))
    for axes, (key, title, base, written) in zip(figure.subplots(1, 2), panels, strict=True):
        lengths = sorted({row["seqlen"] for rows in scaling.values() for row in rows})
        for name, rows in scaling.items():
            x, y = [row["seqlen"] for row in rows], [row[key] for row in rows]
            axes.plot(x, y, marker="o", markersize=5, linewidth=2, color=COLOURS[name], label=LABELS[name])
            beside = [row[key] for other in scaling.values() for row in other[-1:] if row["seqlen"] == x[-1]]
            # labels of lines that end together stand apart
            place = "center" if len(beside) == 1 else "bottom" if y[-1] == max(beside) else "top"
            axes.annotate(
                written(y[-1]) + ("" if x[-1] == lengths[-1] else "\nthen too large"),
                (x[-1], y[-1]),
                xytext=(8, 0),
                textcoords="offset points",
                va=place,
                color=COLOURS[name],
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=base)
        axes.set_title(title, fontsize=12)
        axes.set_xlabel("tokens")
        axes.margins(x=0.16, y=0.1)
        axes.xaxis.set_major_locator(FixedLocator(lengths))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:,.0f}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _, written=written: written(y)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.grid(which="major", color="#e4e4e4")
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.axes[0].legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=140)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    return format_bytes(value).replace(".0 ", " ")
