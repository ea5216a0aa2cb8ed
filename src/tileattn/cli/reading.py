"""What the demo measures. Each function runs in a process that serves one attention implementation and no other, so
that peak memory is that one's alone; what they share is kept in this module from one call to the next."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tileattn
from tileattn.lab.memory import PeakMemory
from tileattn.problem import Problem
from tileattn.reference import standard_attention

# How the demo calls them, and what Transformers does.
IMPLEMENTATIONS = {"standard": "eager", "sdpa": "sdpa", "tileattn": "tileattn"}
LOSS_ROWS = 256  # rows of logits at once: all of them, over a large vocabulary, would outweigh attention
_state: dict[str, Any] = {}


def load(directory: str, implementation: str, dtype: str, device: str) -> None:
    """Load the model in `directory` with this attention and warm it up."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    from tileattn.integrations.transformers import register

    register()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation=IMPLEMENTATIONS[implementation]
    )
    model = _state["model"] = model.to(device).eval()
    with torch.inference_mode():
        model.model(torch.zeros(1, 32, dtype=torch.long, device=device))


@torch.inference_mode()
def read(ids: list[int]) -> dict[str, float]:
    """A forward pass over the tokens, twice: {loss: mean next-token loss, seconds, peak_bytes: beyond the weights}."""
    model = _state["model"]
    tokens = torch.tensor([ids], device=model.device)
    start = time.perf_counter()
    model.model(tokens, use_cache=True)
    _synchronize(model.device)
    spent = time.perf_counter() - start
    with PeakMemory(model.device) as peak:
        out = model.model(tokens, use_cache=True)
        _synchronize(model.device)
    _state["cache"], _state["hidden"] = out.past_key_values, out.last_hidden_state[:, -1:]
    return {"loss": _loss(model, out.last_hidden_state[0], tokens[0]), "seconds": spent, "peak_bytes": peak.bytes}


def _loss(model: Any, hidden: Tensor, tokens: Tensor) -> float:
    total = 0.0
    for rows, targets in zip(hidden[:-1].split(LOSS_ROWS), tokens[1:].split(LOSS_ROWS), strict=True):
        total += F.cross_entropy(model.lm_head(rows).float(), targets, reduction="sum").item()
    return total / (len(tokens) - 1)


@torch.inference_mode()
def write(count: int, stop: int | None) -> dict[str, Any]:
    """Continue what was read, greedily: {tokens: at most `count`, up to the token `stop`; margins: by how much each
    one's logit was above the next best; seconds_per_token}."""
    model, cache, hidden = _state["model"], _state.pop("cache"), _state.pop("hidden")
    tokens: list[int] = []
    margins: list[float] = []
    start = time.perf_counter()
    while True:
        best = model.lm_head(hidden[:, -1]).float().topk(2)
        tokens.append(int(best.indices[0, 0]))
        margins.append(float(best.values[0, 0] - best.values[0, 1]))
        if tokens[-1] == stop or len(tokens) == count:
            break
        hidden = model.model(best.indices[:, :1], past_key_values=cache).last_hidden_state
    return {"tokens": tokens, "margins": margins, "seconds_per_token": (time.perf_counter() - start) / len(tokens)}


@torch.inference_mode()
def scale(implementation: str, seqlen: int, heads: int, heads_k: int, head_dim: int, dtype: str, device: str) -> dict:
    """Causal attention alone on random data: {seconds: median of three, peak_bytes: output included}."""
    _state.clear()
    options: dict[str, Any] = {"dtype": getattr(torch, dtype), "device": device}
    q = torch.randn(1, seqlen, heads, head_dim, **options)
    k, v = (torch.randn(1, seqlen, heads_k, head_dim, **options) for _ in range(2))

    def attend() -> Tensor:
        if implementation == "tileattn":
            return tileattn.attention(q, k, v, causal=True)
        if implementation == "sdpa":
            q_, k_, v_ = (x.transpose(1, 2) for x in (q, k, v))
            return F.scaled_dot_product_attention(q_, k_, v_, is_causal=True, enable_gqa=heads != heads_k)
        return standard_attention(*Problem.of(q, k, v, causal=True)).out

    attend()  # warms up
    times = []
    for _ in range(3):
        start = time.perf_counter()
        attend()
        _synchronize(q.device)
        times.append(time.perf_counter() - start)
    with PeakMemory(q.device) as peak:
        out = attend()
        _synchronize(q.device)
    del out
    return {"seconds": sorted(times)[1], "peak_bytes": peak.bytes}


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
