"""The public functions on a GPU, whoever serves them: repeated calls, threads, graphs, torch.compile. pytest -m gpu"""

import os
import subprocess
import sys
import threading

import pytest
import torch
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

import tileattn
from tileattn.backends import hopper
from tileattn.backends.portable import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

BACKENDS = [
    "portable",
    pytest.param(
        "hopper",
        marks=pytest.mark.skipif(not hopper._is_hopper(torch.device("cuda", 0)), reason="needs a Hopper GPU"),
    ),
]


def memory(*shape, dtype=torch.bfloat16):
    return torch.randn(shape, device="cuda", dtype=dtype)


# q, k and v of each are alike; what differs from one to the next is what a launch that is kept must not mix up
TENSORS = {
    "contiguous": lambda: memory(2, 160, 4, 64),
    "others_like_it": lambda: memory(2, 160, 4, 64),
    "heads_first": lambda: memory(2, 4, 160, 64).transpose(1, 2),
    "cut_from_wider": lambda: memory(2, 160, 6, 64)[:, :, 1:5],
    "not_aligned": lambda: memory(2 * 160 * 4 * 64 + 1)[1:].view(2, 160, 4, 64),
    "padded_rows": lambda: memory(2, 160, 4, 72)[..., :64],
    "longer": lambda: memory(2, 200, 4, 64),
    "float16": lambda: memory(2, 160, 4, 64, dtype=torch.float16),
    "one_head": lambda: memory(2, 160, 1, 64),
}


def differentiated(backend, q, k, v, dout):
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    out, lse = tileattn.attention(q, k, v, causal=True, backend=backend, return_lse=True)
    return out, lse, *torch.autograd.grad(out, (q, k, v), dout)


def drawn():
    torch.manual_seed(0)
    calls = {name: [draw() for _ in range(4)] for name, draw in TENSORS.items()}
    x = memory(2, 160, 4, 64)
    return calls | {"one_tensor": [x, x, x, x]}


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def expected(backend, call):
    """By way of the operator, and of launches that nothing was kept of."""
    launch._kept.cache_clear()
    with Watching():
        return differentiated(backend, *call)


@pytest.mark.parametrize("backend", BACKENDS)
def test_calls_may_alternate(backend):
    calls = drawn()
    want = {name: expected(backend, call) for name, call in calls.items()}
    for order in (list(calls), list(reversed(calls))):
        for name in 2 * order:
            for got, x in zip(differentiated(backend, *calls[name]), want[name], strict=True):
                assert torch.equal(got, x), name


@pytest.mark.parametrize("backend", BACKENDS)
def test_threads_with_streams_of_their_own(backend):
    calls = drawn()
    want = {name: expected(backend, call) for name, call in calls.items()}
    torch.cuda.synchronize()
    wrong = []

    def work(name):
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                got = differentiated(backend, *calls[name])
                if not all(torch.equal(x, y) for x, y in zip(got, want[name], strict=True)):
                    wrong.append(name)

    threads = [threading.Thread(target=work, args=(name,)) for name in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("backend", BACKENDS)
def test_forward_and_backward_in_a_cuda_graph(backend):
    static, other = (drawn()[name] for name in ("contiguous", "others_like_it"))
    want = expected(backend, other)
    differentiated(backend, *static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = differentiated(backend, *static)
    for x, y in zip(static, other, strict=True):
        x.copy_(y)
    graph.replay()
    for got, x in zip(captured, want, strict=True):
        assert torch.equal(got, x)


CAPTURE_WHILE_COMPILING = """
import sys, threading, torch, tileattn
from tileattn.backends import ahead

capturing, begin, begun = threading.Event(), ahead.begin, []

def begin_late(device, compile_kernel):
    begin(device, lambda: capturing.wait() and compile_kernel())
    begun.append(compile_kernel)

ahead.begin = begin_late
q, k, v = (torch.randn(2, 160, 4, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
want = tileattn.attention(q, k, v, backend=sys.argv[1])
graph = torch.cuda.CUDAGraph()
with torch.no_grad(), torch.cuda.graph(graph, capture_error_mode="global"):
    capturing.set()
    ahead.wait()
    out = tileattn.attention(q, k, v, backend=sys.argv[1])
graph.replay()
assert torch.equal(out, want)
assert len(begun) >= 2
want.backward(torch.ones_like(want))
"""


@pytest.mark.parametrize("backend", BACKENDS)
def test_kernels_may_be_compiled_ahead_while_a_graph_is_captured(backend, tmp_path):
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", CAPTURE_WHILE_COMPILING, backend], env=environment, check=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_compiled_calls_are_the_eager_ones(backend):
    torch._dynamo.reset()
    compiled = torch.compile(differentiated, backend="aot_eager")
    for name in ("contiguous", "longer", "heads_first"):
        call = drawn()[name]
        for got, x in zip(compiled(backend, *call), differentiated(backend, *call), strict=True):
            assert torch.equal(got, x), name


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_graphs_that_torch_compile_replays_are_the_eager_calls(backend, training):
    def attend(q, k, v):
        return tileattn.attention(2 * q, k, v, causal=True, backend=backend)

    def results(attend, q, k, v, dout):
        with torch.set_grad_enabled(training):
            q, k, v = (x.detach().requires_grad_(training) for x in (q, k, v))
            out = attend(q, k, v)
            found = out, *(torch.autograd.grad(out, (q, k, v), dout) if training else ())
            return [x.clone() for x in found]

    torch._dynamo.reset()
    skipped = counters["inductor"]["cudagraph_skips"]
    compiled = torch.compile(attend, mode="reduce-overhead")
    for _ in range(5):  # the first runs, the second captures, the others replay, on other tensors each time
        call = [memory(2, 160, 4, 64) for _ in range(4)]
        torch.compiler.cudagraph_mark_step_begin()
        for got, want in zip(results(compiled, *call), results(attend, *call), strict=True):
            assert torch.equal(got, want)
    assert counters["inductor"]["cudagraph_skips"] == skipped


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", BACKENDS)
def test_another_device_than_the_current_one(backend):
    call = drawn()["contiguous"]
    want = expected(backend, call)
    for got, x in zip(differentiated(backend, *(x.to("cuda:1") for x in call)), want, strict=True):
        assert torch.equal(got.cpu(), x.cpu())
