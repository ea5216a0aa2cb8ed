"""Search for tiles on the GPU at hand: compile candidates in parallel, check and time them beside the tiles in use."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

import torch

from tileattn.backends import portable
from tileattn.backends.portable import launch, tuning
from tileattn.backends.portable.backward import Backward
from tileattn.backends.portable.tuned import Entry
from tileattn.backends.portable.tuning import Kernel, Tile, block_dim_of, wrong_if_held
from tileattn.problem import Forward, Inputs, Problem, Wanted

# What to find tiles for. dk and dv can come from one launch (backward_kv) or from two.
Work = Literal["forward", "backward_kv", "backward_k", "backward_v", "backward_q"]
WANTED = {
    "backward_kv": Wanted(False, True, True),
    "backward_k": Wanted(False, True, False),
    "backward_v": Wanted(False, False, True),
}


class Trial(NamedTuple):
    work: Work
    head_dim: int
    tile: Tile


class Size(NamedTuple):
    seqlen: int
    causal: bool


class Timed(NamedTuple):
    """A trial and its milliseconds at each of SIZES; at the first few alone if it fell behind, none if it is faulty."""

    trial: Trial
    ms: list[float]
    fault: str | None = None


# the sizes to time at, the one in the middle first, each of TOKENS tokens with heads * head_dim = WIDTH
SIZES = tuple(Size(n, causal) for n, causal in itertools.product((4096, 16384, 1024), (False, True)))
TOKENS, WIDTH = 16384, 2048


BEHIND = 1.3  # times as slow as the fastest so far: not timed at more sizes


def trials_for(
    head_dims: list[int], dtype: torch.dtype, device: torch.device, kernels: Sequence[Kernel] = get_args(Kernel)
) -> list[Trial]:
    """The tiles in use, and what else may be worth a try."""
    properties = torch.cuda.get_device_properties(device)
    shared = getattr(properties, "shared_memory_per_block_optin", properties.shared_memory_per_block)
    descriptors = torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9
    return [
        Trial(work, head_dim, tile)
        for head_dim in head_dims
        for work in get_args(Work)
        if kernel_of(work) in kernels
        for tile in dict.fromkeys(
            [
                *_in_use(work, device, dtype, head_dim),
                *candidates(work, head_dim, dtype.itemsize, shared, descriptors and dtype.itemsize == 2),
            ]
        )
    ]


def _in_use(work: Work, device: torch.device, dtype: torch.dtype, head_dim: int) -> list[Tile]:
    tile = tuning._lookup(device, dtype, head_dim, kernel_of(work))
    alone, dv = tile._replace(dv=None), tile.dv
    if work in ("backward_k", "backward_v"):
        return [] if dv is None else [alone if work == "backward_k" else dv]
    return [alone] if dv is None else []


def kernel_of(work: Work) -> Kernel:
    return work if work in ("forward", "backward_q") else "backward_kv"


def candidates(work: Work, head_dim: int, itemsize: int, shared: int, descriptors: bool) -> Iterator[Tile]:
    """Tiles whose operands fit in shared memory, and whose sums and scores fit in registers and fill some."""
    dim = block_dim_of(head_dim)
    by_key = kernel_of(work) == "backward_kv"
    operands = 1 if work in ("forward", "backward_v") else 2  # that stay, of as many rows as the sums
    sums = 2 if work == "backward_kv" else 1
    scores = 1 if work in ("forward", "backward_v") else 2
    blocks = (16, 32, 64, 128)
    for block_m, block_n, num_warps, num_stages in itertools.product(blocks, blocks, (4, 8), (1, 2, 3)):
        stays, passes = (block_n, block_m) if by_key else (block_m, block_n)
        bytes_held = itemsize * dim * (operands * stays + 2 * passes * num_stages)
        registers = (sums * stays * dim + scores * block_m * block_n) / (32 * num_warps)
        if bytes_held <= shared and 32 <= registers <= 224:
            yield (tile := Tile(block_m, block_n, num_warps, num_stages, descriptors))
            room = 224 - operands * stays * dim / (64 * num_warps)
            if descriptors and not by_key and registers <= room and not wrong_if_held(tile, head_dim):
                yield tile._replace(held=True)
            if by_key and registers > 128:  # two loops may be one too many for the registers
                yield Tile(block_m, block_n, num_warps, num_stages, descriptors, ranges=False)


def search(
    trials: list[Trial], dtype: torch.dtype, workers: int, step: Step = lambda label, worth=1: None
) -> list[Timed]:
    """Compile every trial in `workers` processes, drop the faulty, time the rest in turns, those that fall behind at a
    few sizes only. step is told what is done, and how many of `steps` that takes."""
    faults: dict[Trial, str | None] = {}
    with _mapping(workers) as mapping:
        for trial, fault in zip(trials, mapping(compile_trial, trials, itertools.repeat(dtype)), strict=True):
            step(f"compiled {_named(trial)}")
            faults[trial] = fault
    found = []
    for _, group in itertools.groupby(trials, key=lambda trial: trial[:2]):
        racing = []
        for trial in group:
            step(f"checking {_named(trial)}")
            fault = faults[trial] or check_trial(trial, dtype)
            if fault is None:
                racing.append(trial)
            else:
                step(f"dropping {_named(trial)}", len(SIZES))
                found.append(Timed(trial, [], fault))
        times: dict[Trial, list[float]] = {trial: [] for trial in racing}
        for i, size in enumerate(SIZES):
            for trial, ms in time_trials(racing, size, dtype, step).items():
                times[trial].append(ms)
            means = {trial: statistics.geometric_mean(times[trial]) for trial in racing}
            for trial in racing:
                if means[trial] > BEHIND * min(means.values()):
                    step(f"dropping {_named(trial)}", len(SIZES) - i - 1)
            racing = [trial for trial in racing if means[trial] <= BEHIND * min(means.values())]
        found += [Timed(trial, ms) for trial, ms in times.items()]
    return found


def steps(trials: list[Trial]) -> int:
    return (2 + len(SIZES)) * len(trials)


def _named(trial: Trial) -> str:
    tile = trial.tile
    return f"{trial.work} head_dim {trial.head_dim}, {tile.block_m} x {tile.block_n}, {tile.num_warps} warps"


@contextlib.contextmanager
def _mapping(workers: int) -> Iterator[Callable[..., Any]]:
    """map, over processes unless there is to be one alone."""
    if workers == 1:
        yield map
    else:
        with concurrent.futures.ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
            yield pool.map


def compile_trial(trial: Trial, dtype: torch.dtype) -> str | None:
    """Fill Triton's cache. None: good; otherwise what went wrong."""
    try:
        for causal in (False, True):
            run = _small(trial, _lookup_of(trial), dtype, causal)
            with _as_told():
                run()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).strip()[:100]}"
    return None


def check_trial(trial: Trial, dtype: torch.dtype) -> str | None:
    """Compare a trial with the tile in use."""
    for causal in (False, True):
        expected = _small(trial, tuning._lookup, dtype, causal)()
        for x, y in zip(_small(trial, _lookup_of(trial), dtype, causal)(), expected, strict=True):
            error = ((x.float() - y.float()).norm() / y.float().norm()).item()
            if not error < 1e-2:
                return f"error {error:.1e}"
    return None


def time_trials(trials: list[Trial], size: Size, dtype: torch.dtype, step: Step) -> dict[Trial, float]:
    """Milliseconds of each on the GPU, the better of two turns, so that a slow moment of the machine harms none."""
    times: dict[Trial, float] = {}
    if trials:
        problem, inputs = _call(size, trials[0].head_dim, dtype)
    for trial in 2 * trials:
        if trial not in times:
            step(f"timing {_named(trial)} at {size.seqlen}")
        ms = _time(_runner(trial.work, _lookup_of(trial), problem, inputs))
        times[trial] = min(times.get(trial, ms), ms)
    return times


Step = Callable[..., None]  # of a label, and how many steps it takes, 1 if not said
Lookup = Callable[[torch.device, torch.dtype, int, Kernel], Tile]
Run = Callable[[], tuple[torch.Tensor, ...]]


def _lookup_of(trial: Trial) -> Lookup:
    """The trial's tile, and those in use for other kernels."""
    in_use = tuning._lookup

    def lookup(device: torch.device, dtype: torch.dtype, head_dim: int, kernel: Kernel) -> Tile:
        return trial.tile if kernel == kernel_of(trial.work) else in_use(device, dtype, head_dim, kernel)

    return lookup


@contextlib.contextmanager
def _as_told() -> Iterator[None]:
    """A tile that has no room for its stages is a faulty one. With fewer it would be another, compiled once a stage."""
    in_use, launch.start = launch.start, launch.start_as_told
    try:
        yield
    finally:
        launch.start = in_use


def _small(trial: Trial, lookup: Lookup, dtype: torch.dtype, causal: bool) -> Run:
    torch.manual_seed(0)
    problem, inputs = _call(Size(2048, causal), trial.head_dim, dtype, 2048)
    return _runner(trial.work, lookup, problem, inputs)


def _call(size: Size, head_dim: int, dtype: torch.dtype, tokens: int = TOKENS) -> tuple[Problem, Inputs]:
    shape = (max(tokens // size.seqlen, 1), size.seqlen, max(WIDTH // head_dim, 1), head_dim)
    q, k, v = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    return Problem.of(q, k, v, causal=size.causal)


def _runner(work: Work, lookup: Lookup, problem: Problem, inputs: Inputs) -> Run:
    """A function that launches the work with tiles that lookup gives."""
    if work != "forward":
        saved: Forward = portable.forward(problem, inputs)
        launches = Backward(problem, inputs, saved, torch.randn_like(saved.out), None)
        launches.statistics()

    def run() -> tuple[torch.Tensor, ...]:
        in_use, tuning._lookup = tuning._lookup, lookup  # type: ignore[assignment]
        try:
            if work == "forward":
                return tuple(portable.forward(problem, inputs))
            if work == "backward_q":
                return launches.query_gradients()[:1]
            return tuple(g for g in launches.key_gradients(WANTED[work]) if g is not None)
        finally:
            tuning._lookup = in_use

    return run


def _time(run: Callable[[], Any], budget_ms: float = 15.0) -> float:
    """Milliseconds on the GPU, whatever the CPU takes to launch: the median replay of a CUDA graph."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    times: list[float] = []
    while len(times) < 3 or (sum(times) < budget_ms and len(times) < 50):
        events[0].record()
        graph.replay()
        events[1].record()
        events[1].synchronize()
        times.append(events[0].elapsed_time(events[1]))
    return statistics.median(times)


class Best(NamedTuple):
    """A tile found, and how many times as fast it is as the one in use: the geometric mean over SIZES, or over those
    that the one in use was timed at."""

    entry: Entry
    gain: float


def best(found: list[Timed], dtype: torch.dtype, in_use: Callable[[Kernel, int], Tile]) -> list[Best]:
    """The fastest tile for each kernel and head dim; for backward_kv one that does both, or one each for dk and dv."""
    name = str(dtype).removeprefix("torch.")
    chosen = []
    for head_dim in dict.fromkeys(timed.trial.head_dim for timed in found):
        of = {work: [t for t in found if t.trial[:2] == (work, head_dim) and t.ms] for work in get_args(Work)}
        apart = [
            (k.trial.tile._replace(dv=v.trial.tile), [x + y for x, y in zip(k.ms, v.ms, strict=False)])
            for k, v in itertools.product(of["backward_k"], of["backward_v"])
        ]
        options: dict[Kernel, list[tuple[Tile, list[float]]]] = {
            "forward": [(t.trial.tile, t.ms) for t in of["forward"]],
            "backward_kv": [(t.trial.tile, t.ms) for t in of["backward_kv"]] + apart,
            "backward_q": [(t.trial.tile, t.ms) for t in of["backward_q"]],
        }
        for kernel, tiles in options.items():
            times = dict(tiles)
            means = {tile: statistics.geometric_mean(ms) for tile, ms in tiles if len(ms) == len(SIZES)}
            if means:
                fastest = min(means, key=means.__getitem__)
                ratios = [x / y for x, y in zip(times.get(in_use(kernel, head_dim), ()), times[fastest], strict=False)]
                gain = statistics.geometric_mean(ratios) if ratios else float("nan")
                chosen.append(Best(Entry(kernel, name, head_dim, fastest), gain))
    return chosen
