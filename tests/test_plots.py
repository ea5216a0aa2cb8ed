"""Pictures and tables of results show every figure."""

import json
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from tileattn.lab import plots

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"


@pytest.fixture
def drawn(monkeypatch):
    """Figures, instead of files."""
    figures = []
    monkeypatch.setattr(plots, "_save", lambda figure, path: figures.append(figure))
    return figures


def heights(axes):
    return sorted(bar.get_height() for bar in axes.patches)


@pytest.mark.parametrize("name", ["h200-hopper-forward", "h200-hopper-backward", "h200-portable"])
def test_every_figure_of_a_benchmark_is_a_bar(name, drawn, tmp_path):
    rows = json.loads((RESULTS / f"{name}.json").read_text())["rows"]
    rows = [row for row in rows if row["variant"] in ("", "random")]
    plots.attention_speed(rows, "", tmp_path)
    shown = [height for axes in drawn[0].axes for height in heights(axes)]
    assert sorted(shown) == sorted(row["tflops"] for row in rows)


def test_training_shows_curves_speed_and_memory(drawn, tmp_path):
    rows = [
        {"impl": "tileattn", "seqlen": 64, "loss": [3.0, 2.0], "tokens_per_s": 2000, "peak_bytes": 2**30},
        {"impl": "standard", "seqlen": 64, "loss": [3.0, 2.1], "tokens_per_s": 1000, "peak_bytes": 2**31},
        {"impl": "tileattn", "seqlen": 128, "loss": [4.0], "tokens_per_s": 3000, "peak_bytes": 2**31},
    ]
    plots.training(rows, "", tmp_path)
    first, second, speed, memory = drawn[0].axes
    assert sorted(list(line.get_ydata()) for line in first.lines) == [[3.0, 2.0], [3.0, 2.1]]
    assert [list(line.get_ydata()) for line in second.lines] == [[4.0]]
    assert (heights(speed), heights(memory)) == ([1.0, 2.0, 3.0], [1.0, 2.0, 2.0])


def test_a_table_has_full_and_causal_side_by_side_and_ratios_to_each_peer(monkeypatch, capsys, tmp_path):
    same = {"direction": "forward", "variant": "random", "head_dim": 64, "head_dim_v": 64, "heads": 8, "heads_k": 8}
    figures = {"tileattn": (400.0, 200.0), "fa3": (200.0, None)}
    rows = [
        {"impl": impl, "seqlen_q": 4096, "causal": causal, "tflops": tflops} | same
        for impl, pair in figures.items()
        for causal, tflops in zip((False, True), pair, strict=True)
        if tflops
    ]
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(sys, "argv", ["table.py", str(result)])
    runpy.run_path(str(RESULTS.parent / "table.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "|  | tileattn | FA3 |"
    assert lines[2] == "| forward d64 4k | 400/200 | 200/– |"
    assert lines[-1] == "tileattn over FA3: forward 2.00 (2.00 to 2.00, 0 of 1 behind)"
