"""What a call costs beside the kernels: host microseconds, the first call of a process, peak memory.

    python benchmarks/host.py out.json

Host time: calls on tensors so small that the GPU never is the limit, in blocks between which the GPU comes to rest; the
median over blocks, implementations taking turns. Cold start: a fresh process with an empty Triton cache, from before
`import tileattn` (torch imported and CUDA awake) to the end of the first forward and backward, and how many kernels are
compiled for other lengths and batches after that; both backends at the same time. Memory: the peak of forward and
backward, inputs included.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from common import write
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]  # of (batch, seqlen, heads, head_dim)

SMALL = {"batch": 1, "seqlen": 128, "heads": 4, "head_dim": 64}
LONG = {"batch": 1, "seqlen": 65536, "heads": 16, "head_dim": 128}
BLOCKS, CALLS = 20, 50
# direction and variant of host rows; in the last, autograd's own thread for the GPU is not woken
HOST = ("forward", "host"), ("forward+backward", "host"), ("forward+backward", "host, one thread")

COLD = """
import sys, time, torch, triton
torch.ones(1, device="cuda").sum().item()
begin = time.perf_counter()
import tileattn
imported = time.perf_counter()
compiled = []
JITFunction = triton.runtime.jit.JITFunction
compile_kernel = JITFunction._do_compile
JITFunction._do_compile = lambda self, *args, **named: compiled.append(self) or compile_kernel(self, *args, **named)
def run(batch, seqlen):
    shape, like = (batch, seqlen, 8, 128), {"device": "cuda", "dtype": torch.bfloat16, "requires_grad": True}
    q, k, v = (torch.randn(shape, **like) for _ in range(3))
    tileattn.attention(q, k, v, causal=True, backend=sys.argv[1]).sum().backward()
    torch.cuda.synchronize()
run(1, 1024)
end = time.perf_counter()
first = len(compiled)
for batch, seqlen in ((2, 1024), (1, 2000), (3, 777), (1, 4096)):
    run(batch, seqlen)
print(imported - begin, end - imported, first, len(compiled) - first)
"""


def tileattn(backend: str) -> Attention:
    from tileattn import attention

    return lambda q, k, v: attention(q, k, v, causal=True, backend=backend)


def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As a model calls it whose heads come after the sequence."""
    return F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True).transpose(1, 2)


def fa2(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        return sdpa(q, k, v)


def tensors(batch: int, seqlen: int, heads: int, head_dim: int) -> list[Tensor]:
    """q, k, v and the gradient of out."""
    return [torch.randn(batch, seqlen, heads, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def host_times(implementations: dict[str, Attention]) -> list[dict[str, Any]]:
    q, k, v, dout = tensors(**SMALL)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def both(attention: Attention) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(attention(*leaves), leaves, dout)

    def one_thread(attention: Attention) -> Callable[[], Any]:
        def run() -> None:
            with torch.autograd.set_multithreading_enabled(False):
                torch.autograd.grad(attention(*leaves), leaves, dout)

        return run

    rows = []
    for (direction, variant), build in zip(HOST, (lambda f: lambda: f(q, k, v), both, one_thread), strict=True):
        runs = {name: build(f) for name, f in implementations.items()}
        times: dict[str, list[float]] = {name: [] for name in runs}
        for block in range(BLOCKS + 2):  # two to warm up
            for name, run in runs.items():
                begin = time.perf_counter()
                for _ in range(CALLS):
                    run()
                elapsed = time.perf_counter() - begin
                torch.cuda.synchronize()
                if block >= 2:
                    times[name].append(elapsed / CALLS * 1e6)
        rows += [
            row(name, direction, variant, SMALL, us=round(statistics.median(us), 1), us_least=round(min(us), 1))
            for name, us in times.items()
        ]
    return rows


class ColdStart:
    """A process that begins when this is made."""

    def __init__(self, backend: str) -> None:
        self.backend, self.cache = backend, tempfile.TemporaryDirectory()
        environment = os.environ | {"TRITON_CACHE_DIR": self.cache.name}
        command = [sys.executable, "-c", COLD, backend]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def row(self) -> dict[str, Any]:
        printed, _ = self.process.communicate()
        self.cache.cleanup()
        imported, first, compiled, recompiled = map(float, printed.split())
        figures = {"import_s": round(imported, 3), "first_call_s": round(first, 2)}
        figures |= {"compiled": int(compiled), "recompiled": int(recompiled)}
        size = {"batch": 1, "seqlen": 1024, "heads": 8, "head_dim": 128}
        return row(f"tileattn-{self.backend}", "forward+backward", "cold", size, **figures)


def peak_memory(name: str, attention: Attention) -> dict[str, Any]:
    q, k, v, dout = tensors(**LONG)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(attention(*leaves), leaves, dout)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(attention(*leaves), leaves, dout)
    return row(name, "forward+backward", "memory", LONG, bytes=torch.cuda.max_memory_allocated())


def row(impl: str, direction: str, variant: str, size: dict[str, int], **figures: Any) -> dict[str, Any]:
    return {
        "impl": impl,
        "direction": direction,
        "dtype": "bfloat16",
        "batch": size["batch"],
        "heads": size["heads"],
        "heads_k": size["heads"],
        "seqlen_q": size["seqlen"],
        "seqlen_k": size["seqlen"],
        "head_dim": size["head_dim"],
        "head_dim_v": size["head_dim"],
        "causal": True,
        "variant": variant,
        **figures,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """For docs/kernel-notes.md."""
    found = {(r["variant"], r["direction"], r["impl"]): r for r in rows}
    lines = ["| host microseconds | forward | forward + backward | in one thread |", "| --- | --- | --- | --- |"]
    for name in dict.fromkeys(r["impl"] for r in rows if r["variant"] == "host"):
        us = [found[variant, direction, name]["us"] for direction, variant in HOST]
        lines.append(f"| {name} | {us[0]:.0f} | {us[1]:.0f} | {us[2]:.0f} |")
    lines += ["", "| | import, s | first call, s | kernels | compiled anew |", "| --- | --- | --- | --- | --- |"]
    for r in rows:
        if r["variant"] == "cold":
            figures = r["import_s"], r["first_call_s"], r["compiled"], r["recompiled"]
            lines.append(f"| {r['impl']} | " + " | ".join(map(str, figures)) + " |")
    lines += ["", "| | peak, GiB |", "| --- | --- |"]
    lines += [f"| {r['impl']} | {r['bytes'] / 2**30:.2f} |" for r in rows if r["variant"] == "memory"]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("path")
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    options = parser.parse_args()
    starts = [ColdStart("portable"), ColdStart("hopper")]
    ours = {f"tileattn-{backend}": tileattn(backend) for backend in ("portable", "hopper")}
    memory = [peak_memory(name, attention) for name, attention in {"torch-fa2": fa2, **ours}.items()]
    cold = [start.row() for start in starts]
    rows = [*host_times({"torch-sdpa": sdpa, **ours}), *cold, *memory]
    print(table(rows))
    write(options.path, rows, options.commit)


if __name__ == "__main__":
    main()
