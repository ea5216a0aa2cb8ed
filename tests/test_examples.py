"""Every example runs."""

from __future__ import annotations

import json
import runpy
import sys
from pathlib import Path

import pytest
import torch

import tileattn

SHORT = {"train_gpt": ["--steps", "5"]}
EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path, monkeypatch, capsys):
    if "transformers" in path.stem:
        pytest.importorskip("transformers")
    monkeypatch.setattr(sys, "argv", [str(path), *SHORT.get(path.stem, [])])
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_a_gpt_trains_the_same_as_with_standard_attention(tmp_path, monkeypatch, capsys):
    path = Path(__file__).parent.parent / "examples" / "train_gpt.py"
    options = ["--compare", "--seqlen", "48", "--steps", "8", "--device", "cpu", "--output", str(tmp_path / "training")]
    monkeypatch.setattr(sys, "argv", [str(path), *options])
    runpy.run_path(str(path), run_name="__main__")
    rows = {row["impl"]: row for row in json.loads((tmp_path / "training.json").read_text())["rows"]}
    assert set(rows) == {"tileattn", "standard"}
    assert "cudnn: left out" in capsys.readouterr().out
    assert rows["tileattn"]["loss"] == pytest.approx(rows["standard"]["loss"], abs=1e-3)
    assert rows["tileattn"]["loss"][-1] < rows["tileattn"]["loss"][0] - 0.2
    assert (tmp_path / "training.png").stat().st_size > 10_000


def test_training_goes_on_without_what_does_not_fit_into_memory(monkeypatch, capsys):
    example = runpy.run_path(str(Path(__file__).parent.parent / "examples" / "train_gpt.py"))

    sequences = []

    def hungry(q, k, v):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def counting(q, k, v):
        sequences.append(q.shape[0])
        return tileattn.attention(q, k, v, causal=True)

    monkeypatch.setitem(example["ATTENTION"], "standard", hungry)
    monkeypatch.setitem(example["ATTENTION"], "tileattn", counting)
    data = example["batches"](b"some text, " * 40, steps=4, sequences=2, seqlen=16)
    rows = example["train"](["tileattn", "standard"], example["SIZES"]["cpu"], 16, data)
    assert [row["impl"] for row in rows] == ["tileattn"]
    assert set(sequences) == {2}  # a step's all go through it together
    assert "standard: left out at 16 tokens. CUDA out of memory." in capsys.readouterr().out
