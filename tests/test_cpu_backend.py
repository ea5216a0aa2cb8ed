"""The CPU backend, held to the oracle rule, with its own tiles and with tiles so small that every test has many."""

import subprocess
import sys
import threading

import oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import ALL_DIMS, MODS, SHAPES, Case

from tileattn import attention, attention_varlen
from tileattn.backends import cpu
from tileattn.backends.cpu import stacks, steps, tiling, workers
from tileattn.backends.cpu.forward import OnlineSoftmax
from tileattn.backends.cpu.scores import Scores
from tileattn.philox import keep_mask
from tileattn.problem import Problem, Wanted

MODIFIERS = oracle.MODIFIERS | MODS
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
SMALL = tiling.Blocks(rows=16, cols=16, strip=8, align=4)


def make_tiles_small(monkeypatch, stacked=False, parallel=False, blocks=SMALL):
    monkeypatch.setattr(tiling, "BLOCKS", blocks)
    monkeypatch.setattr(tiling, "MIN_ROWS", blocks.rows // 2)
    if not stacked:
        monkeypatch.setattr(stacks, "SMALL_SCORES", 0)
    if parallel:
        monkeypatch.setattr(workers, "MIN_PARALLEL_WORK", 0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modifiers(modifier, dtype):
    oracle.check(cpu, Case(dtype=dtype, **MODIFIERS[modifier]))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape, dtype):
    oracle.check(cpu, Case(dtype=dtype, **SHAPES[shape]))


@pytest.mark.parametrize("stacked", [False, True], ids=["alone", "stacked"])
@pytest.mark.parametrize("modifier", MODIFIERS)
def test_modifiers_in_many_tiles(modifier, stacked, monkeypatch):
    make_tiles_small(monkeypatch, stacked)
    oracle.check(cpu, Case(**MODIFIERS[modifier]))


@pytest.mark.parametrize("modifier", ["plain", "causal", "gqa_causal", "everything", "varlen_everything"])
def test_modifiers_on_many_threads(modifier, monkeypatch):
    make_tiles_small(monkeypatch, parallel=True)
    oracle.check(cpu, Case(dtype=torch.bfloat16, **MODIFIERS[modifier]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True},
        {"window": (300, 40)},
        {"seqlen_q": 700, "seqlen_k": 1300, "causal": True, "head_dim_v": 128},
        {"num_heads": 3, "softcap": 5.0, "alibi": True, "mask": (True, False, True, True), "sink": True},
        {"seqlen_q": 2, "seqlen_k": 5000, "num_heads": 3},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_large_tiles(changes, dtype):
    oracle.check(
        cpu, Case(batch=1, seqlen_q=1100, seqlen_k=1100, num_heads_k=1, head_dim=64, dtype=dtype).but(**changes)
    )


@settings(max_examples=150, deadline=None)
@given(case=oracle.cases(dtypes=(torch.float32, torch.bfloat16, torch.float64), mods=True), stacked=st.booleans())
def test_any_problem(case, stacked):
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_tiles_small(monkeypatch, stacked)
        oracle.check(cpu, case)


GRADCHECKED = {
    name: MODIFIERS[name]
    for name in MODIFIERS
    if name not in ("scale", "negative_scale", "bhsd", "sliced", "offset", "strided", "sharp", "mqa", "bias_hides")
    and not name.startswith("varlen")
}
TINY = {"batch": 1, "seqlen_q": 5, "seqlen_k": 6, "head_dim": 2, "head_dim_v": 2, "dtype": torch.float64}


@pytest.mark.parametrize("modifier", GRADCHECKED)
def test_gradcheck(modifier, monkeypatch):
    make_tiles_small(monkeypatch, blocks=tiling.Blocks(rows=4, cols=4, strip=2, align=1))
    changes = {
        **GRADCHECKED[modifier],
        **TINY,
        "num_heads": 2,
        "num_heads_k": 1 if "num_heads_k" in MODIFIERS[modifier] else 2,
    }
    window = changes.get("window", (-1, -1))
    gradcheck(Case(**{**changes, "window": tuple(min(bound, 3) for bound in window)}))


@settings(max_examples=15, deadline=None)
@given(case=oracle.cases(dtypes=(torch.float64,), max_seqlen=6, mods=True))
def test_gradcheck_of_combinations(case):
    with pytest.MonkeyPatch.context() as monkeypatch:
        make_tiles_small(monkeypatch, blocks=tiling.Blocks(rows=4, cols=4, strip=2, align=1))
        gradcheck(case.but(head_dim=2, head_dim_v=3, num_heads=min(case.num_heads, 2), bias_hides=False, magnitude=1.0))


def gradcheck(case):
    """out and lse against finite differences, in everything that has a gradient."""
    problem, inputs, *_ = oracle.build(case)
    names = [name for name in Wanted._fields if getattr(inputs, name) is not None]

    def function(*leaves):
        x = inputs._replace(**dict(zip(names, leaves, strict=True)))
        options = {
            "scale": problem.scale,
            "window": (problem.window_left, problem.window_right),
            "softcap": problem.softcap,
            "bias": x.bias,
            "mask": x.mask,
            "alibi_slopes": x.alibi_slopes,
            "sink": x.sink,
            "dropout_p": problem.dropout_p,
            "dropout_seed": x.dropout_seed,
            "return_lse": True,
            "backend": "cpu",
        }
        if problem.varlen:
            found = attention_varlen(x.q, x.k, x.v, x.cu_seqlens_q, x.cu_seqlens_k, **options)
        else:
            found = attention(x.q, x.k, x.v, **options)
        return found.out, found.lse.nan_to_num(neginf=0.0)

    leaves = [getattr(inputs, name).detach().clone().requires_grad_() for name in names]
    assert torch.autograd.gradcheck(function, leaves)


ADVERSARIAL = {
    "growing": lambda scores: 7.0 * torch.arange(scores.shape[-1]),
    "falling": lambda scores: -7.0 * torch.arange(scores.shape[-1]),
    "one_key_above": lambda scores: 30.0 * (torch.arange(scores.shape[-1]) == 50),
    "very_large": lambda scores: torch.full(scores.shape[-1:], 1e4),
    "very_small": lambda scores: torch.full(scores.shape[-1:], -1e4),
    "alternating": lambda scores: 1e4 * (-1.0) ** (torch.arange(scores.shape[-1]) // 20),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ADVERSARIAL)
def test_adversarial_scores(kind, dtype, monkeypatch):
    """Scores that leave the running maximum far behind, or below, from tile to tile."""
    make_tiles_small(monkeypatch)
    call = oracle.build(Case(seqlen_q=40, seqlen_k=128, causal=True, dtype=dtype))
    call.inputs.q[..., 0] = 1.0
    call.inputs.k[..., 0] = ADVERSARIAL[kind](torch.empty(128))[None, :, None] / call.problem.scale
    oracle.check_call(cpu, call)


def test_textbook_step_takes_over_when_the_maximum_keeps_growing(monkeypatch):
    make_tiles_small(monkeypatch)
    shifted = []
    step = steps._shifted_step
    monkeypatch.setattr(steps, "_shifted_step", lambda *args: shifted.append(step(*args)) or shifted[-1])
    monkeypatch.setattr(sys.modules[OnlineSoftmax.__module__], "attend", steps._attend)
    call = oracle.build(Case(batch=1, num_heads=1, num_heads_k=1, seqlen_q=16, seqlen_k=320))
    call.inputs.q[..., 0] = 1.0
    call.inputs.k[..., 0] = 7.0 * torch.arange(320)[None, :, None] / call.problem.scale
    oracle.check_call(cpu, call)
    assert shifted == [False] * steps.MAX_RETRIES
    shifted.clear()
    oracle.check(cpu, Case(batch=1, num_heads=1, num_heads_k=1, seqlen_q=16, seqlen_k=320))
    assert shifted == [True] * 19


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, 64),
        ({"causal": True}, 28 + 8 * 2),  # 8 diagonal tiles of two strips
        ({"window": (16, 0)}, 8 * 2 + 7 * 2),
        ({"mask": (False, False, False, True)}, 32),
    ],
    ids=["all", "causal", "window", "mask"],
)
def test_hidden_tiles_are_not_computed(changes, expected, monkeypatch):
    make_tiles_small(monkeypatch)
    computed = []
    once_a_tile = "product" if "mask" in changes else "windows"
    method = getattr(Scores, once_a_tile)
    monkeypatch.setattr(Scores, once_a_tile, lambda *args: computed.append(1) or method(*args))
    problem, inputs, dout, dlse = oracle.build(Case(batch=1, num_heads=1, num_heads_k=1, **changes))
    if inputs.mask is not None:
        inputs.mask[..., :64], inputs.mask[..., 64:] = False, True
    forward = cpu.forward(problem, inputs)
    assert len(computed) == expected
    computed.clear()
    cpu.backward(problem, inputs, forward, dout, dlse, Wanted())
    assert len(computed) == expected


def test_dropout_drops_what_the_oracle_drops(monkeypatch):
    make_tiles_small(monkeypatch)
    seqlen, p, seed = 70, 0.4, -12345
    q, k = torch.randn(2, seqlen, 2, 8), torch.randn(2, seqlen, 2, 8)
    v = torch.eye(seqlen)[None, :, None].expand(2, seqlen, 2, seqlen)
    out = attention(q, k, v, dropout_p=p, dropout_seed=seed, backend="cpu")  # the probabilities themselves
    b, h, i = torch.arange(2), torch.arange(2), torch.arange(seqlen)
    keep = keep_mask(seed, p, b[:, None, None], h[:, None], i, range(seqlen))
    assert torch.equal(out.transpose(1, 2) > 0, keep)


@pytest.mark.parametrize("modifier", ["plain", "everything", "varlen_everything"])
def test_bitwise_equal_from_run_to_run(modifier, monkeypatch):
    make_tiles_small(monkeypatch, parallel=True)
    call = oracle.build(Case(batch=1, seqlen_q=70, seqlen_k=70).but(**MODIFIERS[modifier]))
    first = oracle.run(cpu, call)
    for _ in range(20):
        for name, x in oracle.run(cpu, call).items():
            assert torch.equal(x, first[name]), name


@pytest.fixture
def restored_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("modifier", ["plain", "everything"])
def test_independent_of_the_number_of_threads(modifier, monkeypatch, restored_threads):
    make_tiles_small(monkeypatch, parallel=True)
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        oracle.check(cpu, Case(batch=1, num_heads=1, num_heads_k=1).but(**MODIFIERS[modifier]))
        assert torch.get_num_threads() == threads


def test_workers_leave_the_threads_of_others_alone(monkeypatch, restored_threads):
    make_tiles_small(monkeypatch, parallel=True)
    torch.set_num_threads(3)
    oracle.run(cpu, oracle.build(Case()))
    seen = []
    other = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    other.start()
    other.join()
    assert seen == [3]


def test_errors_in_workers_reach_the_caller():
    def fail():
        raise KeyError("from a task")

    with pytest.raises(KeyError, match="from a task"):
        workers.run([workers.Job([fail], print)] * 4, threads=2)


def test_works_in_inference_mode_and_ignores_autocast(monkeypatch):
    make_tiles_small(monkeypatch, parallel=True)
    q, k, v = torch.randn(3, 1, 64, 2, 16).unbind()
    expected = attention(q, k, v)
    with torch.inference_mode():
        assert torch.equal(attention(q, k, v), expected)
    problem, inputs = Problem.of(q, k, v)
    monkeypatch.setattr(workers, "MIN_PARALLEL_WORK", 2**40)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(cpu.forward(problem, inputs).out, expected)


def test_works_in_a_forked_child():
    """Threads do not survive a fork; the child makes its own."""
    program = """
import os, torch
from tileattn import attention
torch.set_num_threads(2)
q = torch.randn(1, 600, 4, 64)
expected = attention(q, q, q)
child = os.fork()
if child == 0:
    torch.set_num_threads(1)
    os._exit(0 if torch.allclose(attention(q, q, q), expected, atol=1e-5) else 1)
raise SystemExit(os.waitpid(child, 0)[1])
"""
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0


def test_works_in_a_thread_that_outlives_the_main_one():
    """Executors take nothing any more by then."""
    program = """
import threading, torch
from tileattn import attention
torch.set_num_threads(2)
q = torch.randn(1, 600, 4, 64)
expected = attention(q, q, q)
def late():
    threading.main_thread().join()
    print(torch.allclose(attention(q, q, q), expected, atol=1e-5))
threading.Thread(target=late).start()
"""
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60).stdout
    assert shown.strip() == "True"


@pytest.mark.parametrize("missing", ["dout", "dlse"])
def test_one_gradient_may_be_missing(missing):
    problem, inputs, dout, dlse = oracle.build(Case(sink=True, causal=True))
    flowing = {"dout": dout, "dlse": dlse}
    zeros = {**flowing, missing: torch.zeros_like(flowing[missing])}
    forward, wanted = cpu.forward(problem, inputs), oracle.wanted(inputs)
    without = cpu.backward(problem, inputs, forward, **{**flowing, missing: None}, wanted=wanted)
    expected = cpu.backward(problem, inputs, forward, **zeros, wanted=wanted)
    for x, y in zip(without, expected, strict=True):
        assert x is y is None or torch.equal(x, y)


def test_only_wanted_gradients_are_returned():
    problem, inputs, dout, _ = oracle.build(Case(sink=True, bias=ALL_DIMS))
    forward = cpu.forward(problem, inputs)
    for name in Wanted._fields[:4]:
        wanted = Wanted(**{n: n == name for n in Wanted._fields})
        found = cpu.backward(problem, inputs, forward, dout, None, wanted)
        assert [f for f, x in found._asdict().items() if x is not None] == [f"d{name}"]


def test_supports_and_tiles():
    problem, _ = Problem.of(*torch.empty(3, 1, 4096, 4, 64, device="meta").unbind())
    assert "CPU" in cpu.supports(problem)
    problem, _ = Problem.of(*torch.empty(3, 1, 4096, 4, 64).unbind())
    assert cpu.supports(problem) is None
    for direction in ("forward", "backward"):
        block_m, block_n, why = cpu.tiles(problem, direction)
        assert (block_m, block_n) == (tiling.BLOCKS.rows, tiling.BLOCKS.cols)
        assert why


MEMORY_PROGRAM = """
import torch
from tileattn import attention

def status(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field)) / 1024

def tensors(seqlen):
    return [torch.randn(1, seqlen, 8, 64, requires_grad=True) for _ in range(3)]

attention(*tensors(512)).sum().backward()
q, k, v = tensors(32768)
dout = torch.randn(1, 32768, 8, 64)
open("/proc/self/clear_refs", "w").write("5")
before = status("VmRSS")
out = attention(q, k, v, window=(1024, 0))
after_forward = status("VmHWM")
torch.autograd.grad(out, (q, k, v), dout)
one = out.nbytes / 2**20
print(after_forward - before - one, status("VmHWM") - before - 4 * one)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_of_32k_tokens():
    """MiB beyond inputs, outputs and gradients. A window makes it quick; the buffers are those without one."""
    ran = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, timeout=300)
    forward, both = map(float, ran.stdout.split())
    assert forward < 64
    assert both < 256


def test_calls_from_several_threads_leave_the_number_of_threads_as_it_was(monkeypatch, restored_threads):
    make_tiles_small(monkeypatch, parallel=True)
    torch.set_num_threads(3)
    problem, inputs, dout, dlse = oracle.build(Case())

    def dq():
        return cpu.backward(problem, inputs, cpu.forward(problem, inputs), dout, dlse, Wanted()).dq

    expected = dq()
    different = []

    def repeat():
        different.extend(1 for _ in range(10) if not torch.equal(dq(), expected))

    threads = [threading.Thread(target=repeat) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert different == []
    assert torch.get_num_threads() == 3


def test_the_steps_are_scripted_and_run_as_python_too(monkeypatch):
    assert isinstance(steps.attend, torch.jit.ScriptFunction)
    for module, name in ((OnlineSoftmax.__module__, "attend"), (OnlineSoftmax.__module__, "write")):
        monkeypatch.setattr(sys.modules[module], name, getattr(steps, f"_{name}"))
    monkeypatch.setattr(sys.modules["tileattn.backends.cpu.backward"], "differentiate", steps._differentiate)
    make_tiles_small(monkeypatch)
    oracle.check(cpu, Case(causal=True))
