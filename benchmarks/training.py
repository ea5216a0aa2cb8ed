"""What keeps loss curves of examples/train_gpt.py apart, noise or an error?

    python benchmarks/training.py out.json

Gradients: of the model in float32, whose attention alone is bfloat16, after some steps of training. Against the
gradients where attention is computed in float32, of the same rounded q, k and v, only what an implementation rounds is
left: its root mean square over that of the gradients, in all parameters, and in those that make q, k and v.

Losses: of the model as the example trains it, with a gentle and with a steep warm-up, each implementation by itself.
Among them are some that differ in nothing but the order in which they sum: how far these come apart is noise.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from common import stamp
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileattn

sys.path.insert(0, str(Path(__file__).parent.parent / "examples"))
import train_gpt

STEEP, GENTLE = 10, 100  # steps of warm-up
FIRST = 37  # steps of the first of two greatest differences


def fa2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def backwards(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Standard attention with the last key first: the same sums, in another order."""
    q, k, v = q.transpose(1, 2), k.flip(1).transpose(1, 2), v.flip(1).transpose(1, 2)
    hidden = train_gpt.future(q.shape[2], q.dtype, q.device).flip(1)
    scores = q @ k.transpose(-2, -1) * train_gpt.HEAD_DIM**-0.5 + hidden
    return (scores.softmax(-1, torch.float32).to(v.dtype) @ v).transpose(1, 2)


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return train_gpt.standard(q.float(), k.float(), v.float())


ATTENTION = {
    "standard": train_gpt.standard,
    "standard, last key first": backwards,
    "cudnn": train_gpt.cudnn,
    "fa2": fa2,
    "tileattn": train_gpt.tiled,
    "tileattn, again": train_gpt.tiled,  # dQ is summed in the order in which blocks are done
    "tileattn, portable": partial(tileattn.attention, causal=True, backend="portable"),
}
train_gpt.ATTENTION.update(ATTENTION)


class Rounded(nn.Module):
    """Attention in `dtype` amid a model in float32."""

    def __init__(self, attend: Any, dtype: torch.dtype):
        super().__init__()
        self.attend, self.dtype = attend, dtype

    def forward(self, *qkv: Tensor) -> Tensor:
        return self.attend(*(x.to(self.dtype) for x in qkv)).float()


def gradients(model: train_gpt.GPT, attend: Any, dtype: torch.dtype, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Of a float32 model's parameters: of all, and of those that make q, k and v. One sequence at a time."""
    for block in model.blocks:
        block.attend = Rounded(attend, dtype)
    model.zero_grad()
    for sequence in ids.split(1):
        loss = F.cross_entropy(model(sequence[:, :-1]).flatten(0, 1), sequence[:, 1:].flatten())
        (loss / len(ids)).backward()
    grads = {name: parameter.grad.flatten() for name, parameter in model.named_parameters()}
    return torch.cat(list(grads.values())), torch.cat([x for name, x in grads.items() if "qkv" in name])


def errors(size: train_gpt.Size, data: Tensor, after: list[int]) -> Iterator[dict[str, Any]]:
    """Rows of gradients. data: (steps, sequences, seqlen + 1) bytes."""
    trainer = train_gpt.Trainer("tileattn", size, data.shape[2] - 1, data.device)
    for step, batch in enumerate(data):
        if step in after:
            model, ids = copy.deepcopy(trainer.model).float(), batch[:2].long()
            with torch.no_grad():
                for weight, parameter in zip(trainer.weights, model.parameters(), strict=True):
                    parameter.copy_(weight)
            want = gradients(model, exact, size.dtype, ids)
            for name, attend in ATTENTION.items():
                found = gradients(model, attend, size.dtype, ids)
                rms, rms_qkv = ((got - x).norm() / x.norm() for got, x in zip(found, want, strict=True))
                cosine = F.cosine_similarity(found[1] - want[1], want[1], 0)
                figures = {"rms": rms.item(), "rms_qkv": rms_qkv.item(), "cosine_qkv": cosine.item()}
                yield {"impl": name, "variant": "gradients", "step": step, **figures}
            del model, want, found
        trainer.step(batch)


def curve(name: str, size: train_gpt.Size, data: Tensor, warm_up: int) -> dict[str, Any]:
    trainer = train_gpt.Trainer(name, size, data.shape[2] - 1, data.device, warm_up)
    for batch in data:
        trainer.step(batch)
    return {"impl": name, "variant": f"warm-up {warm_up}", "loss": [round(x.item(), 5) for x in trainer.losses]}


def table(rows: list[dict[str, Any]]) -> str:
    """For docs/training.md."""
    lines = ["| after steps | attention | error of gradients, % | of those of q, k, v, % | its cosine to them |"]
    lines += ["| --- | --- | --- | --- | --- |"]
    for r in rows:
        if r["variant"] == "gradients":
            error = f"{100 * r['rms']:.3f} | {100 * r['rms_qkv']:.3f} | {r['cosine_qkv']:+.4f}"
            lines.append(f"| {r['step']} | {r['impl']} | {error} |")
    lines += [
        "",
        f"| | attention | from the first, {FIRST} steps | all steps | last loss |",
        "| --- | --- | --- | --- | --- |",
    ]
    for r in rows:
        if "loss" in r:
            first = next(x["loss"] for x in rows if x["variant"] == r["variant"])
            apart = [abs(x - y) for x, y in zip(r["loss"], first, strict=True)]
            most = f"{max(apart[:FIRST]):.4f} | {max(apart):.4f}"
            lines.append(f"| {r['variant']} | {r['impl']} | {most} | {r['loss'][-1]:.4f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path", type=Path)
    parser.add_argument("--parts", nargs="+", choices=("gradients", "gentle", "steep"), default=["gradients", "gentle"])
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=list(ATTENTION), help="of the curves")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    options = parser.parse_args()
    size, seqlen = train_gpt.SIZES["cuda"], 2048
    text = train_gpt.read(None)
    data = train_gpt.batches(text, options.steps, size.tokens // seqlen, seqlen).to("cuda")
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        rows.append(row)
        print(f"{time.perf_counter() - began:5.1f} s", row, flush=True)
        options.path.write_text(json.dumps({**stamp(options.commit), "rows": rows}, indent=1))

    began = time.perf_counter()
    if "gradients" in options.parts:
        for row in errors(size, data, [0, 10, options.steps - 1]):
            add(row)
    for part, warm_up in (("gentle", GENTLE), ("steep", STEEP)):
        for name in options.attention if part in options.parts else ():
            add(curve(name, size, data, warm_up))
    print(table(rows))


if __name__ == "__main__":
    main()
