"""Search for tiles on the GPU at hand: compile candidates in parallel, check them against the default, time them."""

from __future__ import annotations

import concurrent.futures
import itertools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from tileattn.backends import portable
from tileattn.backends.portable import tuning
from tileattn.backends.portable.tuning import Kernel, Tile
from tileattn.problem import Forward, Inputs, Problem, Wanted

WANTED = {"backward_kv": Wanted(False, True, True), "backward_q": Wanted(True, False, False)}


class Size(NamedTuple):
    seqlen: int
    causal: bool


class Trial(NamedTuple):
    kernel: Kernel
    head_dim: int
    tile: Tile


# the sizes to time at, each of TOKENS tokens with heads * head_dim = WIDTH
SIZES = tuple(Size(n, causal) for n, causal in itertools.product((1024, 4096, 16384), (False, True)))
TOKENS, WIDTH = 16384, 2048


def _call(size: Size, head_dim: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Problem, Inputs]:
    shape = (max(tokens // size.seqlen, 1), size.seqlen, max(WIDTH // head_dim, 1), head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    return Problem.of(q, k, v, causal=size.causal)


def _runner(trial: Trial, problem: Problem, inputs: Inputs) -> Callable[[], tuple[torch.Tensor, ...]]:
    """A function that launches what the trial is about, with its tile and the default ones for the rest."""
    default = tuning._lookup

    def lookup(device: Any, dtype: Any, head_dim: int, kernel: Kernel) -> Tile:
        return trial.tile if kernel == trial.kernel else default(device, dtype, head_dim, kernel)

    def run() -> tuple[torch.Tensor, ...]:
        tuning._lookup = lookup  # type: ignore[assignment]
        try:
            if trial.kernel == "forward":
                return tuple(portable.forward(problem, inputs))
            return tuple(g for g in launch(WANTED[trial.kernel]) if g is not None)
        finally:
            tuning._lookup = default

    if trial.kernel != "forward":
        from tileattn.backends.portable.backward import _Backward

        saved: Forward = portable.forward(problem, inputs)
        launch = _Backward(problem, inputs, saved, torch.randn_like(saved.out), None).gradients
    return run


def _small(trial: Trial, dtype: torch.dtype, causal: bool) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    problem, inputs = _call(Size(2048, causal), trial.head_dim, dtype, 2048)
    return _runner(trial, problem, inputs)()


def _compile(trial: Trial, dtype: torch.dtype) -> str | None:
    """Fill Triton's cache. None: good; otherwise what went wrong."""
    try:
        for causal in (False, True):
            _small(trial, dtype, causal)
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:100]}"
    return None


def _check(trial: Trial, dtype: torch.dtype) -> str | None:
    """Compare a trial with the default tile."""
    problem, _ = _call(SIZES[0], trial.head_dim, dtype, 1024)
    default = trial._replace(tile=tuning.tile_for(problem, trial.kernel))
    for causal in (False, True):
        for x, y in zip(_small(trial, dtype, causal), _small(default, dtype, causal), strict=True):
            error = ((x.float() - y.float()).norm() / y.float().norm()).item()
            if not error < 1e-2:
                return f"error {error:.1e}"
    return None


def _time(run: Callable[[], Any], budget_ms: float = 30.0) -> float:
    """Median milliseconds of a launch, over about budget_ms."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    run()
    start.record()
    run()
    end.record()
    end.synchronize()
    repeats = max(3, min(50, int(budget_ms / start.elapsed_time(end))))
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    for begin, finish in pairs:
        begin.record()
        run()
        finish.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(finish) for begin, finish in pairs)


def search(trials: list[Trial], dtype: torch.dtype, workers: int, log: Any = sys.stdout) -> list[dict[str, Any]]:
    """Rows of {kernel, head_dim, tile, seqlen, causal, ms}; faulty trials have `fault` instead of times."""
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        faults = list(pool.map(_compile, trials, itertools.repeat(dtype)))
    rows: list[dict[str, Any]] = []
    for (head_dim, kernel), group in itertools.groupby(
        zip(trials, faults, strict=True), key=lambda pair: (pair[0].head_dim, pair[0].kernel)
    ):
        print(f"{kernel} head_dim {head_dim}: " + " ".join(f"{s.seqlen}{'c' * s.causal}" for s in SIZES), file=log)
        good = []
        for trial, compile_fault in group:
            fault = compile_fault or _check(trial, dtype)
            if fault:
                rows.append({"kernel": kernel, "head_dim": head_dim, "tile": trial.tile, "fault": fault})
                print(f"  {tuple(trial.tile)}: {fault}", file=log)
            else:
                good.append(trial)
        times: dict[Trial, list[float]] = {trial: [] for trial in good}
        for size in SIZES:
            problem, inputs = _call(size, head_dim, dtype)
            runners = [_runner(trial, problem, inputs) for trial in good]
            for trial, run in zip(good, runners, strict=True):
                ms = _time(run)
                times[trial].append(ms)
                rows.append({"kernel": kernel, "head_dim": head_dim, "tile": trial.tile, **size._asdict(), "ms": ms})
        for trial in sorted(good, key=lambda t: statistics.geometric_mean(times[t])):
            print(f"  {tuple(trial.tile)!s:40} " + " ".join(f"{ms:7.3f}" for ms in times[trial]), file=log, flush=True)
    return rows


def main(arguments: list[str]) -> None:
    """candidates.json ([[kernel, head_dim, [tile...]], ...]), results.json, number of compiling processes."""
    candidates, results, workers = arguments
    with open(candidates) as file:
        trials = [Trial(kernel, head_dim, Tile(*tile)) for kernel, head_dim, tile in json.load(file)]
    rows = search(trials, torch.bfloat16, int(workers))
    with open(results, "w") as file:
        json.dump(rows, file)


if __name__ == "__main__":
    main(sys.argv[1:])
