"""Worker threads: each runs whole tasks with single-threaded operators, which beats splitting every small operator over
all cores. Operators and scripted functions release the GIL, so plain Python threads do.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

MIN_PARALLEL_WORK = 2**22  # multiply-adds; waking the workers costs about as much time as these

# A tile is so large that malloc would return its pages to the system at every free. Having freed one larger block, it
# keeps them.
torch.empty(2**24, dtype=torch.uint8, device="cpu")


class Job(NamedTuple):
    """Tasks that may run at once in any order, and what to do with their results, in the order of the tasks: the sum
    over tasks is therefore the same in every run."""

    tasks: Sequence[Callable[[], Any]]
    finish: Callable[[list[Any]], None]


def threads_for(work: int) -> int:
    """How many threads a call should use, as torch.set_num_threads says, when it makes so many multiply-adds."""
    return 1 if work < MIN_PARALLEL_WORK else _operators.threads()


def run(jobs: list[Job], threads: int) -> None:
    """Run jobs, first come first served, on so many threads, the caller's among them."""
    helpers = min(threads, sum(len(job.tasks) for job in jobs)) - 1
    queue = _Queue(jobs, torch.is_inference_mode_enabled())
    futures: list[Future[None]] = []
    with _operators:
        with contextlib.suppress(RuntimeError):  # pools take nothing any more once the main thread has ended
            futures.extend(_pool(threads - 1).submit(queue.drain) for _ in range(helpers))
        try:
            queue.drain()
        finally:
            done = wait(futures).done
    for future in done:
        future.result()


class _SingleThreadedOperators:
    """While any call is inside, operators use one thread: their number of threads is one for the whole process. The
    caller's may not use more in between either: OpenMP's threads spin for a while and take the workers' cores."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.inside = self.outside_threads = 0

    def threads(self) -> int:
        with self.lock:
            return self.outside_threads if self.inside else torch.get_num_threads()

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.outside_threads = torch.get_num_threads()
                torch.set_num_threads(1)
            self.inside += 1

    def __exit__(self, *exception: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                torch.set_num_threads(self.outside_threads)


_operators = _SingleThreadedOperators()


class _Queue:
    """Tasks of all jobs; whoever ends a job's last task finishes the job."""

    def __init__(self, jobs: list[Job], inference: bool) -> None:
        self.jobs, self.inference = jobs, inference
        self.results: list[list[Any]] = [[None] * len(job.tasks) for job in jobs]
        self.missing = [len(job.tasks) for job in jobs]
        self.pending = iter([(j, t) for j, job in enumerate(jobs) for t in range(len(job.tasks))])
        self.lock = threading.Lock()

    def drain(self) -> None:
        with torch.inference_mode(self.inference), torch.no_grad(), torch.autocast("cpu", enabled=False):
            while True:
                with self.lock:
                    j, t = next(self.pending, (None, None))
                if j is None or t is None:
                    return
                result = self.jobs[j].tasks[t]()
                with self.lock:
                    self.results[j][t] = result
                    self.missing[j] -= 1
                    last = self.missing[j] == 0
                if last:
                    self.jobs[j].finish(self.results[j])
                    self.results[j] = []


_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(workers: int) -> ThreadPoolExecutor:
    """The pool of that many workers, made on first use."""
    with _lock:
        if workers not in _pools:
            _pools[workers] = ThreadPoolExecutor(workers, thread_name_prefix="tileattn")
        return _pools[workers]


def _forget() -> None:
    """Threads do not survive a fork."""
    global _pools, _lock, _operators
    if _operators.inside:
        torch.set_num_threads(_operators.outside_threads)
    _pools, _lock, _operators = {}, threading.Lock(), _SingleThreadedOperators()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
