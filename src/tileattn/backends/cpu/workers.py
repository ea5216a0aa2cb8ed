"""Worker threads: each runs whole tasks with single-threaded operators, which beats splitting every small operator over
all cores. Operators release the GIL, so plain Python threads do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch

MIN_PARALLEL_WORK = 2**22  # multiply-adds; waking the workers costs about as much time as these

# A tile is so large that malloc would return its pages to the system at every free. Having freed one larger block, it
# keeps them.
torch.empty(2**24, dtype=torch.uint8)


class Job(NamedTuple):
    """Tasks that may run at once in any order, and what to do with their results, in the order of the tasks: the sum
    over tasks is therefore the same in every run."""

    tasks: Sequence[Callable[[], Any]]
    finish: Callable[[list[Any]], None]


def threads_for(work: int) -> int:
    """How many threads a call should use, as torch.set_num_threads says, when it makes so many multiply-adds."""
    return 1 if work < MIN_PARALLEL_WORK else torch.get_num_threads()


def run(jobs: list[Job], threads: int) -> None:
    """Run jobs, first come first served. On one thread they run in the caller's."""
    if threads == 1 or sum(len(job.tasks) for job in jobs) == 1:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            for job in jobs:
                job.finish([task() for task in job.tasks])
        return
    queue = _Queue(jobs, torch.is_inference_mode_enabled())
    pool = _pool(threads)
    futures = [pool.submit(queue.drain) for _ in range(threads)]
    for future in wait(futures).done:
        future.result()


class _Queue:
    """Tasks of all jobs; whoever ends a job's last task finishes the job."""

    def __init__(self, jobs: list[Job], inference: bool) -> None:
        self.jobs, self.inference = jobs, inference
        self.results: list[list[Any]] = [[None] * len(job.tasks) for job in jobs]
        self.missing = [len(job.tasks) for job in jobs]
        self.pending = iter([(j, t) for j, job in enumerate(jobs) for t in range(len(job.tasks))])
        self.lock = threading.Lock()

    def drain(self) -> None:
        with torch.inference_mode(self.inference), torch.no_grad():
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


def _pool(threads: int) -> ThreadPoolExecutor:
    """The pool of that many threads, made on first use."""
    with _lock:
        if threads not in _pools:
            _pools[threads] = _start(threads)
        return _pools[threads]


def _start(threads: int) -> ThreadPoolExecutor:
    ready = threading.Barrier(threads + 1)
    pool = ThreadPoolExecutor(threads, thread_name_prefix="tileattn", initializer=lambda: torch.set_num_threads(1))
    for _ in range(threads):
        pool.submit(ready.wait)
    ready.wait()
    # torch.set_num_threads sets its thread's number and the default of threads to come: give the default back
    torch.set_num_threads(threads)
    return pool


def _forget() -> None:
    """Threads do not survive a fork."""
    global _pools, _lock
    _pools, _lock = {}, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
