"""Kernels that the Hopper backend keeps: for calls of other sizes they are what Triton would compile, without a GPU."""

import concurrent.futures.thread
import dataclasses

import pytest
import torch
import triton

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
from hopper_compiling import CompileDriver
from oracle import Case, build
from torch.utils._python_dispatch import TorchDispatchMode

from tileattn import ops
from tileattn.backends import ahead
from tileattn.backends.hopper import backward_launch, launch, schedule
from tileattn.problem import Forward, Wanted

BASE = Case(num_heads=4, num_heads_k=4, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
# batch, seqlen: whole blocks and others, numbers that are 1 or multiples of 16 and others
SIZES = [(1, 128), (2, 256), (16, 128), (1, 512), (1, 80), (3, 77), (17, 65), (1, 200)]
CALLS = {
    "full": {},
    "causal": {"causal": True},
    "one_head": {"causal": True, "num_heads": 1, "num_heads_k": 1},
    "groups": {"causal": True, "num_heads_k": 2},
    "window": {"window": (40, 3)},
    "transposed": {"layout": "bhsd"},
    "softcap_and_sink": {"softcap": 5.0, "sink": True},
    "head_dim_192": {"head_dim": 192, "head_dim_v": 128},
}


class Launches:
    """Stands in for _run: notes, by kernel and list that keeps it compiled, what Triton would compile it for."""

    def __init__(self):
        self.compiled_for, self.lists = {}, []

    def run(self, kernel, kept, programs, args, stream, options=launch.OPTIONS):
        *_, binder = kernel.create_binder()
        _, specialised, _ = binder(*args)
        self.lists.append(kept)  # which keeps its id
        self.compiled_for.setdefault((kernel.__name__, id(kept)), set()).add(repr(specialised))

    def count(self, name):
        return sum(kernel == name for kernel, _ in self.compiled_for)


@pytest.fixture
def launches(monkeypatch):
    found = Launches()
    monkeypatch.setattr(launch, "_run", found.run)
    monkeypatch.setattr(backward_launch, "_run", found.run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)  # that of tensors on the CPU
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(triton.runtime.driver, "_active", CompileDriver())
    return found


def odd(x):
    """The same numbers, starting between multiples of 16 bytes."""
    return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)


@pytest.mark.parametrize("name", CALLS)
def test_a_kept_kernel_is_the_one_that_triton_would_compile_for_other_sizes(name, launches):
    for batch, seqlen in SIZES:
        call = build(BASE.but(batch=batch, seqlen_q=seqlen, seqlen_k=seqlen, **CALLS[name]))
        for deterministic in (False, True):
            problem = dataclasses.replace(call.problem, deterministic=deterministic)
            out, lse = launch.forward(problem, call.inputs)
            for forward, dout, dlse in (
                (Forward(out, lse), call.dout, call.dlse),
                (Forward(odd(out), odd(lse)), odd(call.dout), odd(call.dlse)),
                (Forward(out, lse), call.dout, None),
                (Forward(out, lse), None, call.dlse),
            ):
                backward_launch.backward(problem, call.inputs, forward, dout, dlse, Wanted())
    assert all(len(kernels) == 1 for kernels in launches.compiled_for.values())
    # Whole blocks of keys and others, unless a window hides what the others lack; deterministic or not.
    assert launches.count("attention_forward") == (1 if {"causal", "window"} & {*CALLS[name]} else 2)
    assert launches.count("attention_backward") == (2 if "causal" in CALLS[name] else 4)


@pytest.mark.parametrize("name", [*CALLS, "packed"])
def test_what_is_anticipated_is_what_backward_launches(name, launches, monkeypatch):
    def note(kernel, programs, args, options):
        launches.run(kernel, [], programs, args, 0)

    def by_kernel():
        return {kernel: found for (kernel, _), found in launches.compiled_for.items()}

    monkeypatch.setattr(ahead, "begin", lambda device, compile_kernel: compile_kernel())
    monkeypatch.setattr(backward_launch, "compile_only", note)
    packed = {"causal": True, "lengths_q": (130, 80), "lengths_k": (130, 80)}
    problem, inputs, dout, _ = build(BASE.but(seqlen_q=200, seqlen_k=200, **CALLS.get(name, packed)))
    like = ops.without_memory(inputs)
    forward = Forward.unwritten(like.q, problem.head_dim_v)
    backward_launch.anticipate(problem, like, forward, forward.out, None, Wanted())
    anticipated = by_kernel()
    launches.compiled_for.clear()
    forward = launch.forward(problem, inputs)
    launches.compiled_for.clear()
    backward_launch.backward(problem, inputs, forward, dout, None, Wanted())
    assert anticipated == by_kernel()
    assert len(anticipated) == 3 + (name == "packed")


@pytest.mark.parametrize(
    ("seqlen", "heads_k"),
    [(80, 12), (1100, 6)],  # 12 blocks of 128 keys are too few for 132 multiprocessors, 108 are not
)
def test_query_heads_share_their_keys_head_where_there_are_key_blocks_enough(seqlen, heads_k, launches, monkeypatch):
    found = []

    def run(kernel, kept, programs, args, stream, options=launch.OPTIONS):
        if kernel is backward_launch.attention_backward:
            found.append((args[1].base.shape[-2], programs))
        launches.run(kernel, kept, programs, args, stream)

    monkeypatch.setattr(backward_launch, "_run", run)
    call = build(BASE.but(batch=2, seqlen_q=seqlen, seqlen_k=seqlen, num_heads=12, num_heads_k=6, causal=True))
    forward = launch.forward(call.problem, call.inputs)
    gradients = backward_launch.backward(call.problem, call.inputs, forward, call.dout, None, Wanted())
    assert found == [(heads_k, 2 * heads_k * -(-seqlen // 128))]
    assert gradients.dk.shape == call.inputs.k.shape


def test_modifiers_may_start_anywhere(launches):
    call = build(BASE.but(alibi=True, sink=True))
    slopes, sink = (x.float() for x in (call.inputs.alibi_slopes, call.inputs.sink))
    for change in (lambda x: x, odd):
        launch.forward(call.problem, call.inputs._replace(alibi_slopes=change(slopes), sink=change(sink)))
    assert [len(kernels) for kernels in launches.compiled_for.values()] == [1]


def test_a_counter_that_is_kept_comes_from_no_pool_of_this_thread(monkeypatch):
    """Dispatch modes, as memory pools, are a thread's own."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(schedule, "_counters", {})

    class Nowhere(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            raise AssertionError(func)

    with Nowhere():
        counter = schedule.counter_for(torch.device("cpu"), 1)
        assert schedule.counter_for(torch.device("cpu"), 1) is counter
        other = schedule.counter_for(torch.device("cpu"), 2)
    assert (counter.dtype, counter.tolist(), other.tolist()) == (torch.int32, [0], [0])
    assert other.data_ptr() != counter.data_ptr()


def test_a_counter_is_made_for_a_thread_that_outlives_the_main_one_too(monkeypatch):
    """Executors take nothing any more by then."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(schedule, "_counters", {})
    monkeypatch.setattr(concurrent.futures.thread, "_shutdown", True)
    assert schedule.counter_for(torch.device("cpu"), 1).tolist() == [0]


def test_what_keeps_a_counter_from_being_made_is_told(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(schedule, "_counters", {})
    with pytest.raises(RuntimeError, match="nowhere"):
        schedule.counter_for("nowhere", 1)


def test_packed_sequences_of_all_lengths_share_a_kernel(launches):
    for lengths in ((70, 80), (16, 128), (200,), (65,) * 16):
        launch.forward(*build(BASE.but(lengths_q=lengths, lengths_k=lengths, causal=True))[:2])
    assert {kernel for kernel, _ in launches.compiled_for} == {"rank_sequences", "attention_forward"}
    assert [len(kernels) for kernels in launches.compiled_for.values()] == [1, 1]
