"""Pictures of what was measured. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tileattn.dispatch import format_bytes

# By implementation, as result files name it: what a legend says, and the colour.
STYLES = {
    "standard": ("standard attention", "#c44e52"),
    "sdpa": ("PyTorch SDPA", "#8c8c8c"),
    "torch-flex": ("FlexAttention", "#d9a441"),
    "torch-fa2": ("FA2 in PyTorch", "#b9b9b9"),
    "torch-cudnn": ("cuDNN", "#8c8c8c"),
    "cudnn": ("cuDNN", "#8c8c8c"),
    "fa3": ("FA3", "#d9a441"),
    "fa4": ("FA4", "#b07aa1"),
    "tileattn-deterministic": ("tileattn, deterministic", "#8fb8de"),
    "tileattn-portable": ("tileattn, portable", "#1f6fb4"),
    "tileattn": ("tileattn", "#1f6fb4"),
}


def attention_scaling(scaling: Mapping[str, Sequence[Mapping[str, Any]]], subtitle: str, path: Path) -> None:
    """Draw time and peak memory over sequence length, both axes logarithmic, one line for each implementation.

    scaling: for each implementation, rows of {seqlen, seconds, peak_bytes}.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    figure = _figure("Attention over sequence length", subtitle, (11, 5))
    panels = (("seconds", "time", 10, _seconds), ("peak_bytes", "peak memory, output included", 4, _bytes))
    for axes, (key, title, base, written) in zip(figure.subplots(1, 2), panels, strict=True):
        lengths = sorted({row["seqlen"] for rows in scaling.values() for row in rows})
        for name, rows in scaling.items():
            x, y = [row["seqlen"] for row in rows], [row[key] for row in rows]
            label, colour = STYLES[name]
            axes.plot(x, y, marker="o", markersize=5, linewidth=2, color=colour, label=label)
            beside = [row[key] for other in scaling.values() for row in other[-1:] if row["seqlen"] == x[-1]]
            # labels of lines that end together stand apart
            place = "center" if len(beside) == 1 else "bottom" if y[-1] == max(beside) else "top"
            axes.annotate(
                written(y[-1]) + ("" if x[-1] == lengths[-1] else "\nthen too large"),
                (x[-1], y[-1]),
                xytext=(8, 0),
                textcoords="offset points",
                va=place,
                color=colour,
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
    figure.axes[0].legend(frameon=False, loc="upper left")
    _save(figure, path)


def attention_speed(rows: Sequence[Mapping[str, Any]], subtitle: str, path: Path) -> None:
    """Draw TFLOP/s by sequence length, a panel for each direction, causality and head dim.

    rows: of a result file, one for each (impl, direction, causal, head_dim, seqlen_q).
    """
    lines = list(dict.fromkeys((row["direction"], row["causal"]) for row in rows))
    head_dims = sorted({row["head_dim"] for row in rows})
    figure = _figure("Speed of attention", subtitle, (4 * len(head_dims), 2.8 * len(lines) + 1))
    panels = figure.subplots(len(lines), len(head_dims), squeeze=False, sharey="row")
    for row_of_panels, (direction, causal) in zip(panels, lines, strict=True):
        for axes, head_dim in zip(row_of_panels, head_dims, strict=True):
            here = [r for r in rows if (r["direction"], r["causal"], r["head_dim"]) == (direction, causal, head_dim)]
            _bars(axes, {(r["seqlen_q"], r["impl"]): r["tflops"] for r in here})
            axes.set_title(f"{direction}{', causal' if causal else ''}, head_dim {head_dim}", fontsize=11)
        row_of_panels[0].set_ylabel("TFLOP/s")
    for axes in panels[-1]:
        axes.set_xlabel("tokens")
    _legend(figure)
    _save(figure, path)


def training(rows: Sequence[Mapping[str, Any]], subtitle: str, path: Path) -> None:
    """Draw loss over steps, speed and peak memory of training with each implementation.

    rows: {impl, seqlen, loss: of each step, tokens_per_s, peak_bytes}.
    """
    lengths = sorted({row["seqlen"] for row in rows})
    impls = list(dict.fromkeys(row["impl"] for row in rows))
    figure = _figure("Training a GPT", subtitle, (4.2 * max(2, len(lengths)), 7))
    above, below = figure.subfigures(2, 1)
    for axes, length in zip(above.subplots(1, len(lengths), squeeze=False)[0], lengths, strict=True):
        for row in (row for row in rows if row["seqlen"] == length):
            wider = 2 * impls.index(row["impl"])  # where curves coincide, each is seen beside the one on it
            axes.plot(
                range(1, len(row["loss"]) + 1),
                row["loss"],
                color=STYLES[row["impl"]][1],
                linewidth=1.2 + wider,
                zorder=-wider,
            )
        axes.set_title(f"loss over steps, {length:,} tokens a sequence", fontsize=11)
    speed, memory = below.subplots(1, 2)
    _bars(speed, {(row["seqlen"], row["impl"]): row["tokens_per_s"] / 1e3 for row in rows})
    speed.set_title("thousand tokens a second, by length", fontsize=11)
    _bars(memory, {(row["seqlen"], row["impl"]): row["peak_bytes"] / 2**30 for row in rows})
    memory.set_title("peak memory beyond the weights, GiB, by length", fontsize=11)
    _legend(figure)
    _save(figure, path)


def _figure(title: str, subtitle: str, size: tuple[float, float]) -> Any:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title + "\n", fontsize=14, fontweight="bold")
    figure.text(0.5, 1 - 0.375 / size[1], subtitle, ha="center", fontsize=9.5, color="#555555")
    return figure


def _bars(axes: Any, values: Mapping[tuple[int, str], float]) -> None:
    """Bars of (sequence length, implementation), a group for each length, each with its value on top."""
    lengths = sorted({length for length, _ in values})
    impls = sorted({impl for _, impl in values}, key=[*STYLES].index)
    width = 0.84 / len(impls)
    for i, impl in enumerate(impls):
        label, colour = STYLES[impl]
        there = [(at, values[length, impl]) for at, length in enumerate(lengths) if (length, impl) in values]
        x = [at + (i - (len(impls) - 1) / 2) * width for at, _ in there]
        bars = axes.bar(x, [y for _, y in there], width * 0.92, color=colour, label=label)
        axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.grid(axis="y", color="#e4e4e4")


def _legend(figure: Any) -> None:
    """One for all panels, below them."""
    pairs = [pair for axes in figure.axes for pair in zip(*axes.get_legend_handles_labels(), strict=True)]
    labels = {label: handle for handle, label in pairs}
    figure.legend(labels.values(), labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _save(figure: Any, path: Path) -> None:
    for axes in figure.axes:
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    return format_bytes(value).replace(".0 ", " ")
