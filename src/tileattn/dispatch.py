"""Which backend serves a Problem, and why."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

from tileattn.backends import Backend, Direction, Tiles
from tileattn.kvcache import CacheProblem
from tileattn.lab.traffic import Traffic, count_scores, standard_traffic, tiled_traffic
from tileattn.problem import Inputs, Problem

# In order of preference: the first that supports a problem serves it.
BACKENDS = ("cpu", "hopper", "portable")


def load(name: str) -> Backend:
    """The backend's module, imported on first use; by import statements, in which type checkers see a Backend."""
    if name == "cpu":
        from tileattn.backends import cpu

        return cpu
    if name == "hopper":
        from tileattn.backends import hopper

        return hopper
    if name == "portable":
        from tileattn.backends import portable

        return portable
    raise KeyError(name)


@functools.lru_cache(maxsize=4096)
def choose(problem: Problem, backend: str | None = None, direction: Direction = "forward") -> str:
    """Name of the backend that serves `problem`; `backend` insists on one. Raises ValueError when none does. Sizes are
    numbers: under torch.compile the operators choose, when they run."""
    if backend is None:
        refusals = {}
        for name in BACKENDS:
            reason = load(name).supports(problem, direction)
            if reason is None:
                return name
            refusals[name] = reason
        listed = "; ".join(f"{name}: {reason}" for name, reason in refusals.items())
        raise ValueError(f"no backend serves this call ({listed})")
    if backend not in BACKENDS:
        known = ", ".join(map(repr, BACKENDS))
        raise ValueError(f"backend={backend!r}: unknown; use one of {known}, or None to choose")
    reason = load(backend).supports(problem, direction)
    if reason is not None:
        raise ValueError(f"backend={backend!r}: {reason}")
    return backend


@functools.lru_cache(maxsize=4096)
def choose_backward(problem: Problem, forward: str | None) -> str:
    """Who differentiates what backend `forward` (None: the one chosen) computed: itself, or the first that can. All
    share out and lse."""
    forward = choose(problem, forward)
    return forward if load(forward).supports(problem, "backward") is None else choose(problem, None, "backward")


@dataclass(frozen=True)
class Explanation:
    """What `tileattn.explain` found: who serves a call, with which tiles, and what it moves and holds.

    Bytes are of one forward pass. `tiled` counts what crosses between slow memory and the tile; `standard` what
    standard attention would move and hold beside its inputs and output.
    """

    problem: Problem
    backend: str
    tiles: Tiles
    tiled: Traffic
    standard: Traffic
    refusals: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        p = self.problem
        return explained(
            self.refusals,
            f"problem   batch {p.batch}, {p.seqlen_q} x {p.seqlen_k} tokens, {in_words(p)}",
            f"backend   {self.backend}",
            f"tiles     {self.tiles}",
            f"moves     {format_bytes(self.tiled.moved)}; standard attention {format_bytes(self.standard.moved)}",
            f"holds     {format_bytes(self.tiled.held)}; standard attention {format_bytes(self.standard.held)}",
        )


def explain(problem: Problem, inputs: Inputs, backend: str | None = None) -> Explanation:
    """Explain how `problem` would be served. Of inputs only a block mask counts."""
    name = choose(problem, backend)
    refusals = passed_over(name, BACKENDS, lambda other: load(other).supports(problem))
    tiles = load(name).tiles(problem)
    scores = count_scores(problem, inputs) if problem.block_size else None
    tiled = tiled_traffic(problem, tiles, scores)
    return Explanation(problem, name, tiles, tiled, standard_traffic(problem), refusals)


def passed_over(name: str, backends: tuple[str, ...], refusal: Callable[[str], str | None]) -> dict[str, str]:
    """Why none of the backends before it serves what `name` does."""
    return {other: refusal(other) or f"backend={name!r} was asked for" for other in backends[: backends.index(name)]}


def explained(refusals: dict[str, str], *lines: str) -> str:
    """What an explanation prints: lines, and why other backends are not used."""
    return "\n".join((*lines, *(f"not used  {name}: {reason}" for name, reason in refusals.items())))


def in_words(problem: Problem | CacheProblem) -> str:
    """Heads, dims, dtype and device."""
    p = problem
    heads = f"{p.num_heads} heads" + (f" over {p.num_heads_k}" if p.group > 1 else "")
    dims = f"head_dim {p.head_dim}" + (f"/{p.head_dim_v}" if p.head_dim_v != p.head_dim else "")
    return f"{heads}, {dims}, {p.dtype}, {p.device}"


def format_bytes(n: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    return f"{n:.1f} TiB"
