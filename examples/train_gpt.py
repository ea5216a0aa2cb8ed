"""Train a GPT on text, byte by byte, with tileattn, cuDNN's or standard attention.

    python examples/train_gpt.py                                # tileattn alone
    python examples/train_gpt.py --compare --output training    # all three, at 2k, 8k and 32k tokens

On a GPU it has 24 blocks of width 1,024, heads of 128, about 340 million parameters, bfloat16 weights and float32
copies of them that AdamW updates; on a CPU it is tiny. The text is Python's own standard library unless --text names a
file. Implementations to compare start from the same weights, see the same data in the same order, and take turns of a
few steps. One that does not fit into memory, or cannot run here, is left out with a note.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import statistics
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import tileattn
from tileattn.cli.console import table
from tileattn.cli.env import stamp
from tileattn.dispatch import format_bytes
from tileattn.lab import plots
from tileattn.lab.memory import PeakMemory

HEAD_DIM, VOCABULARY = 128, 256
TURN = 5  # steps that one implementation takes before the next one's turn


class Size(NamedTuple):
    """Of the model, and of a step: `tokens`, or one sequence if that is longer, go through it together; but with
    standard attention only as many sequences at once as have `scores` in a head."""

    layers: int
    width: int
    dtype: torch.dtype
    lr: float
    tokens: int
    scores: int
    seqlens: tuple[int, ...]


SIZES = {
    "cuda": Size(24, 1024, torch.bfloat16, 3e-4, 16384, 8192**2, (2048, 8192, 32768)),
    "cpu": Size(2, 128, torch.float32, 3e-3, 256, 128**2, (64, 256)),
}


def tiled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return tileattn.attention(q, k, v, causal=True)


def cudnn(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        heads_first = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(*heads_first, is_causal=True).transpose(1, 2)


def standard(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As Transformers' "eager" attention has it: the softmax in float32."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-2, -1) * HEAD_DIM**-0.5 + future(q.shape[2], q.dtype, q.device)
    return (scores.softmax(-1, torch.float32).to(v.dtype) @ v).transpose(1, 2)


@functools.lru_cache(maxsize=1)
def future(seqlen: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.full((seqlen, seqlen), float("-inf"), dtype=dtype, device=device).triu(1)


# Each takes and returns (batch, seqlen, heads, head_dim).
ATTENTION = {"tileattn": tiled, "cudnn": cudnn, "standard": standard}


class Block(nn.Module):
    def __init__(self, width: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.attend = attend
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm_attention(x)).unflatten(-1, (3, -1, HEAD_DIM)).unbind(-3)
        x = x + self.out(self.attend(q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, width: int, longest: int, attend: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, width), nn.Embedding(longest, width)
        self.blocks = nn.Sequential(*(Block(width, attend) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                into_residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 * ((2 * layers) ** -0.5 if into_residual else 1.0))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)  # logits


class Trainer:
    """A model and its optimizer, whose weights are float32 and rounded to the model's dtype after each step.

    warm_up: steps until the learning rate is full.
    """

    def __init__(self, attention: str, size: Size, longest: int, device: torch.device, warm_up: int = 100):
        torch.manual_seed(0)
        with torch.device(device):
            self.model = GPT(size.layers, size.width, longest, ATTENTION[attention]).to(size.dtype)
        self.weights = [parameter.detach().float() for parameter in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.weights, size.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / warm_up))
        self.scores = size.scores if attention == "standard" else None
        self.losses: list[Tensor] = []

    def step(self, batch: Tensor) -> None:
        """batch: (sequences, seqlen + 1) bytes."""
        loss = torch.zeros((), device=batch.device)
        at_once = max(1, self.scores // (batch.shape[1] - 1) ** 2) if self.scores else len(batch)
        for part in batch.split(at_once):
            ids = part.long()
            logits = self.model(ids[:, :-1]).float()
            share = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()) * (len(part) / len(batch))
            share.backward()
            loss += share.detach()
        for weight, parameter in zip(self.weights, self.model.parameters(), strict=True):
            weight.grad, parameter.grad = parameter.grad.float(), None
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        with torch.no_grad():
            for weight, parameter in zip(self.weights, self.model.parameters(), strict=True):
                parameter.copy_(weight)
        self.losses.append(loss)


def batches(text: bytes, steps: int, sequences: int, seqlen: int) -> Tensor:
    """The data of all steps: (steps, sequences, seqlen + 1) bytes, drawn anywhere in the text."""
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(data) - seqlen, (steps, sequences, 1), generator=torch.Generator().manual_seed(0))
    return data[starts + torch.arange(seqlen + 1)]


def start(attention: str, size: Size, longest: int, data: Tensor) -> tuple[Trainer, int] | None:
    """A trainer after two steps, of which the first compiles and the second has this peak of memory beyond the weights
    and what the optimizer keeps; None if there is no kernel for it here, or too little memory."""
    try:
        trainer = Trainer(attention, size, longest, data.device)
        trainer.step(data[0])
        with PeakMemory(data.device) as peak:
            trainer.step(data[1])
    except RuntimeError as error:
        print(f"{attention}: left out at {data.shape[2] - 1} tokens. {str(error).splitlines()[0]}")
        return None
    return trainer, peak.bytes


def train(names: list[str], size: Size, longest: int, data: Tensor) -> list[dict[str, Any]]:
    """Train with each implementation, in turns; a row for each. data: (steps, sequences, seqlen + 1) bytes."""
    _, sequences, seqlen = data[..., 1:].shape
    trainers: dict[str, Trainer] = {}
    rows = []
    for name in names:
        ready = start(name, size, longest, data)
        torch.cuda.empty_cache()  # what this one held is free for the next
        if ready:
            trainers[name], peak = ready
            rows.append({"impl": name, "seqlen": seqlen, "sequences": sequences, "peak_bytes": peak})
    speeds: dict[str, list[float]] = {name: [] for name in trainers}
    for turn in data[2:].split(TURN):
        for name, trainer in trainers.items():
            began = time.perf_counter()
            for batch in turn:
                trainer.step(batch)
            loss = trainer.losses[-1].item()  # waits
            speeds[name].append(len(turn) * sequences * seqlen / (time.perf_counter() - began))
            print(
                f"  step {len(trainer.losses):3}  {name:9} loss {loss:.4f}  {speeds[name][-1]:9,.0f} tokens/s",
                flush=True,
            )
    for row in rows:
        row["tokens_per_s"] = round(statistics.median(speeds[row["impl"]]))
        row["loss"] = [round(loss.item(), 5) for loss in trainers[row["impl"]].losses]
    return rows


def report(rows: list[dict[str, Any]]) -> str:
    """A line for each row. Loss curves are held against the last implementation's of the same length."""
    lines = [["tokens", "attention", "tokens/s", "peak memory", "first and last loss", "greatest difference"]]
    for row in rows:
        last = [other for other in rows if other["seqlen"] == row["seqlen"]][-1]
        apart = max(abs(a - b) for a, b in zip(row["loss"], last["loss"], strict=True))
        losses = f"{row['loss'][0]:.4f}  {row['loss'][-1]:.4f}"
        peak, speed = format_bytes(row["peak_bytes"]), f"{row['tokens_per_s']:,}"
        lines.append([str(row["seqlen"]), row["impl"], speed, peak, losses, f"{apart:.4f} from {last['impl']}"])
    return table(lines) + "\n\nPeak memory is beyond the weights and what the optimizer keeps."


def read(path: Path | None) -> bytes:
    if path is not None:
        return path.read_bytes()
    library = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(file.read_bytes() for file in sorted(library.glob("*.py")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attention", nargs="+", choices=ATTENTION, default=["tileattn"])
    parser.add_argument("--compare", action="store_true", help="all three, at several lengths")
    parser.add_argument("--seqlen", type=int, nargs="+", help="tokens in a sequence; several lengths after each other")
    parser.add_argument("--steps", type=int, nargs="+", default=[50], help="or a number for each length")
    parser.add_argument("--text", type=Path, help="a file")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and, if matplotlib is installed, OUTPUT.png")
    parser.add_argument("--device", type=torch.device, default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    size = SIZES[args.device.type]
    names = list(ATTENTION) if args.compare else args.attention
    seqlens = args.seqlen or size.seqlens[: None if args.compare else 1]
    text = read(args.text)
    if min(args.steps) < 3:
        parser.error("--steps: at least 3, as the first two warm up")
    if len(text) <= max(seqlens):
        parser.error(f"{len(text)} bytes of text, {max(seqlens)} tokens in a sequence: give a longer text")

    rows = []
    for seqlen, steps in zip(seqlens, args.steps * len(seqlens), strict=False):
        sequences = max(1, size.tokens // seqlen)
        print(f"{steps} steps on {sequences} x {seqlen} tokens")
        rows += train(names, size, max(seqlens), batches(text, steps, sequences, seqlen).to(args.device))
        if args.output:
            save(rows, args.device, args.output)
    print("", report(rows), sep="\n")


def save(rows: list[dict[str, Any]], device: torch.device, path: Path) -> None:
    found = {**stamp(device), "rows": rows}
    path.with_suffix(".json").write_text(json.dumps(found, indent=1))
    if importlib.util.find_spec("matplotlib"):
        plots.training(rows, f"{found['device']}, torch {torch.__version__}", path.with_suffix(".png"))


if __name__ == "__main__":
    main()
