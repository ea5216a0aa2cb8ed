"""Queries, keys and values of a real model, as its attention layers get them, for benchmarks on other than random data.

    python benchmarks/activations.py activations.pt --layers 1 18 25

SmolLM2-135M-Instruct (see `tileattn demo --help` for what it needs; 30 layers, 9 query heads over 3 key heads, head_dim
64) reads a text. The file holds {"q", "k", "v"}, each (layers, seqlen, heads, head_dim) in bfloat16, after the rotary
embedding. Two heads side by side make one of 128 whose logits are the sum of both.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tileattn import attention
from tileattn.cli import demo


def collector(layers: list[int], found: dict[str, list[Tensor]]) -> Callable[..., Any]:
    """An attention function for Transformers that keeps what some layers give it."""

    def attend(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float, **_: Any
    ) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        if module.layer_idx in layers:
            for name, x in zip("qkv", (q, k, v), strict=True):
                found[name].append(x[0].bfloat16())
        return attention(q, k, v, causal=True, scale=scaling), None

    return attend


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 18, 25])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--document", type=Path, help="a text file (default: a chapter of Python's help)")
    options = parser.parse_args()

    found: dict[str, list[Tensor]] = {name: [] for name in "qkv"}
    with tempfile.TemporaryDirectory() as folder:
        model = demo.unpack(demo.require_packages(), folder, "float32")
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register("collector", collector(options.layers, found))
        reader: Any = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="collector")
    ids = model.tokenizer(demo.document(options.document), return_tensors="pt").input_ids[:, : options.tokens]
    with torch.inference_mode():
        reader.model(ids)
    stacked = {name: torch.stack(layers) for name, layers in found.items()}
    torch.save(stacked, options.output)

    q, k = stacked["q"].float(), stacked["k"].float()
    k = k.repeat_interleave(q.shape[2] // k.shape[2], 2)
    for layer, rows, keys in zip(options.layers, q, k, strict=True):
        logits = torch.einsum("mhd,nhd->hmn", rows[-64:], keys) * rows.shape[-1] ** -0.5  # of the last 64 tokens
        first = logits.softmax(-1)[..., 0].mean()
        print(f"layer {layer}: logits {logits.min():.0f} to {logits.max():.0f}, {first:.0%} on the first key")


if __name__ == "__main__":
    main()
