"""The Hopper backward kernel's own source on a CPU: what it computes, and that the simulator catches planted faults."""

import collections
import dataclasses
import functools
import random
import re
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from oracle import Call, Case, assert_rule, build, run_reference

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
from hopper_simulator import PACKAGE, Kernel, Machine, Pointer, Scalar, _triton, expect_wrong

from tileattn.backends.hopper import backward_launch
from tileattn.backends.hopper.backward_launch import backward_mode_of, backward_plan_for
from tileattn.problem import Forward
from tileattn.reference import standard_attention

SMALL = Case(
    batch=1, seqlen_q=200, seqlen_k=300, num_heads=2, num_heads_k=2, head_dim=64, head_dim_v=64, dtype=torch.bfloat16
)
CASES = {
    "full": {"seqlen_q": 256, "seqlen_k": 384},
    "tails": {},
    "one_key": {"seqlen_k": 1},
    "causal": {"causal": True, "seqlen_q": 384, "seqlen_k": 384, "batch": 2},
    "causal_tails": {"causal": True, "seqlen_q": 333, "seqlen_k": 333},
    "more_keys": {"causal": True, "seqlen_k": 523},
    "more_queries": {"causal": True, "seqlen_q": 400, "seqlen_k": 70},
    "few_queries": {"causal": True, "seqlen_q": 64, "seqlen_k": 300},
    "gqa": {"num_heads": 6, "causal": True},
    "mqa": {"num_heads": 3, "num_heads_k": 1},
    "head_dim_40_56": {"head_dim": 40, "head_dim_v": 56},
    "head_dim_72_128": {"head_dim": 72, "head_dim_v": 128},
    "head_dim_128": {"head_dim": 128, "head_dim_v": 128},
    "head_dim_128_causal": {"head_dim": 128, "head_dim_v": 128, "causal": True, "seqlen_q": 300},
    "head_dim_128_unaligned": {"head_dim": 128, "head_dim_v": 128, "causal": True, "seqlen_q": 64, "seqlen_k": 333},
    "head_dim_256": {"head_dim": 256, "head_dim_v": 256},
    "head_dim_256_causal": {"head_dim": 256, "head_dim_v": 256, "causal": True, "seqlen_q": 300},
    "head_dim_192_128": {"head_dim": 192, "head_dim_v": 128, "causal": True, "num_heads_k": 1},
    "float16": {"dtype": torch.float16, "causal": True},
    "right_window": {"window": (-1, 50)},
    "window": {"window": (100, 30)},
    "window_far_left": {"window": (20, 0), "seqlen_q": 64, "seqlen_k": 523},
    "causal_window": {"causal": True, "window": (130, -1), "seqlen_k": 400},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi": True, "batch": 2},
    "alibi_causal": {"alibi": True, "causal": True, "seqlen_q": 333, "num_heads": 6, "softcap": 3.0},
    "alibi_head_dim_128": {"alibi": True, "window": (100, 30), "head_dim": 128, "head_dim_v": 128},
    "alibi_head_dim_256": {"alibi": True, "head_dim": 256, "head_dim_v": 256, "num_heads_k": 1, "batch": 2},
    "alibi_varlen": {"alibi": True, "lengths_q": (70, 0, 129), "lengths_k": (70, 65, 300), "causal": True},
    "sharp": {"magnitude": 30.0, "causal": True},
    "varlen": {"lengths_q": (70, 0, 129, 1, 300), "lengths_k": (70, 65, 64, 0, 300)},
    "varlen_causal": {"lengths_q": (64, 1, 130), "lengths_k": (100, 300, 65), "causal": True, "num_heads_k": 1},
    "varlen_window": {"lengths_q": (3, 140, 0, 270), "lengths_k": (5, 300, 7, 270), "window": (100, 30)},
    "varlen_head_dim_128": {
        "lengths_q": (0, 67, 1, 90), "lengths_k": (3, 67, 129, 99), "causal": True, "head_dim": 128, "head_dim_v": 128,
    },
    "varlen_head_dim_256": {"lengths_q": (64, 130), "lengths_k": (200, 65), "head_dim": 256, "head_dim_v": 256},
    "varlen_many": {"lengths_q": (3,) * 130, "lengths_k": (5,) * 40 + (2,) * 90, "num_heads_k": 1},
}  # fmt: skip


def differentiate(kernel: Kernel, call: Call, **options) -> dict[str, torch.Tensor]:
    problem, inputs, dout, dlse = call
    exact = standard_attention(problem, inputs, torch.float64)
    forward = Forward(exact.out.to(problem.dtype), exact.lse.float())
    gradients = kernel.backward(problem, inputs, forward, dout, dlse, **options)
    return {name: x for name, x in gradients._asdict().items() if x is not None}


def expect_rule(kernel: Kernel, call: Call, **options) -> None:
    exact, low = run_reference(call, torch.float64), run_reference(call, None)
    for name, x in differentiate(kernel, call, **options).items():
        assert_rule(name, x, exact[name], low[name])


@pytest.mark.parametrize("name", CASES)
def test_oracle_rule(name):
    expect_rule(Kernel(), build(SMALL.but(**CASES[name])))


def test_oracle_rule_in_the_order_for_newer_assemblers():
    kernel = Kernel(("backward_steps", "LATE_DK = gl.constexpr(TRITON >= (3, 9))", "LATE_DK = True"))
    expect_rule(kernel, build(SMALL.but(**CASES["head_dim_128_causal"])))


@pytest.mark.parametrize("name", ["tails", "causal_tails", "head_dim_128_unaligned", "window_far_left"])
def test_keys_past_the_end_add_nothing_however_low_all_scores_are(name):
    """Such a key is zeros, with a score of 0: beside a lse of -300 its exponential is infinite."""
    problem, inputs, *gradients = build(SMALL.but(**CASES[name]))
    q, k = inputs.q.abs() + 6, -inputs.k.abs() - 6
    call = Call(problem, inputs._replace(q=q, k=k), *gradients)
    assert standard_attention(*call[:2], torch.float64).lse.max() < -300
    expect_rule(Kernel(), call)


WIDE = {"head_dim": 256, "head_dim_v": 256}
TWO_WAYS = {
    "wide": {**WIDE, "seqlen_q": 130, "seqlen_k": 300},
    "wide_causal": {**WIDE, "causal": True, "seqlen_q": 300, "num_heads": 3, "num_heads_k": 3},
    "wide_more_keys": {**WIDE, "causal": True, "seqlen_q": 100, "seqlen_k": 333},
    "wide_more_queries": {**WIDE, "causal": True, "seqlen_q": 333, "seqlen_k": 100, "batch": 2},
    "wide_right_window": {**WIDE, "window": (-1, 50), "seqlen_q": 200, "seqlen_k": 200},
    "wide_window": {**WIDE, "window": (100, 30)},
    "wide_gqa": {**WIDE, "causal": True, "seqlen_q": 130, "num_heads": 6, "num_heads_k": 3},
    "wide_one_block": {**WIDE, "causal": True, "seqlen_q": 64, "seqlen_k": 64, "num_heads": 5, "num_heads_k": 5},
    "wide_softcap": {**WIDE, "softcap": 3.0, "causal": True},
    "wide_alibi": {**WIDE, "alibi": True, "causal": True, "num_heads": 3, "num_heads_k": 3},
    "wide_192_128": {"head_dim": 192, "head_dim_v": 128, "causal": True},
    "wide_varlen_causal": {
        **WIDE, "lengths_q": (64, 0, 1, 130), "lengths_k": (100, 65, 200, 190), "causal": True, "num_heads": 3,
        "num_heads_k": 3,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    [
        "full", "causal_tails", "more_keys", "few_queries", "gqa", "window_far_left", "window", "varlen_causal",
        "varlen_window", "head_dim_128_causal", "varlen_head_dim_128", "varlen_head_dim_256", *TWO_WAYS,
    ],
)  # fmt: skip
def test_deterministic_tiles_take_their_turns(name):
    """The first program takes all tiles in order, so a turn that waits for a later tile is a deadlock."""
    call = build(SMALL.but(**(CASES | TWO_WAYS)[name]))
    problem = dataclasses.replace(call.problem, deterministic=True)
    expect_rule(Kernel(), call._replace(problem=problem))


SHARED = {
    "64": {"seqlen_q": 384, "seqlen_k": 600},
    "64_window_that_hides_nothing": {"seqlen_q": 384, "seqlen_k": 600, "window": (-1, 500)},
    "128": {"seqlen_q": 384, "seqlen_k": 512, "head_dim": 128, "head_dim_v": 128, "batch": 2},
    "96_one_tile": {
        "seqlen_q": 600, "seqlen_k": 100, "num_heads": 1, "num_heads_k": 1, "head_dim": 96, "head_dim_v": 96,
    },
    "256": {"seqlen_q": 256, "seqlen_k": 250, "head_dim": 256, "head_dim_v": 256},
}  # fmt: skip


@pytest.mark.parametrize("share", [1, 2])
@pytest.mark.parametrize("name", SHARED)
def test_programs_share_the_tiles_of_the_last_round(name, share):
    expect_rule(Kernel(), build(SMALL.but(**SHARED[name])), share=share)


@pytest.mark.parametrize("seed", range(60))
def test_every_step_is_drawn_once_in_ranges_of_a_length(seed):
    draw = random.Random(seed)
    programs, tiles, blocks = draw.randint(1, 40), draw.randint(1, 100), draw.randint(1, 20)
    share = draw.randint(1, blocks)
    schedule = types.SimpleNamespace(**Kernel()._load("key_schedule", _triton(Machine(0), 0, programs)))
    mode = types.SimpleNamespace(SPLIT=True, MASKED=0, BLOCK_M=128)
    grid = types.SimpleNamespace(num_tiles=Scalar(tiles), seqlen_q=Scalar(blocks * 128), steps=Scalar(share))
    counter, whole = np.zeros(1, int), tiles // programs * programs
    steps = dict.fromkeys(range(tiles), 0)
    for _ in range(programs):
        tile, first, left = schedule.next_steps(Pointer(counter), Scalar(0), Scalar(0), grid, mode)
        while tile < tiles:
            assert first + left <= blocks if tile < whole else left <= share
            assert steps[tile] == first  # they are drawn in order
            work = schedule.part_of(schedule.Work(*[Scalar(blocks)] * 9), first, left)
            assert work.end == blocks - first
            steps[tile] += work.blocks
            tile, first, left = schedule.next_steps(Pointer(counter), tile + 1, left - work.blocks, grid, mode)
    assert set(steps.values()) == {blocks}
    assert counter[0] == 0


@pytest.mark.parametrize("varlen", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("seed", range(60))
def test_turns_number_the_key_blocks_that_add_to_a_block(seed, varlen):
    """0, 1, 2 and so on, in the order of the tiles' numbers; every score that the window shows is in a tile. Half of
    the problems have tiles that come from the diagonal."""
    draw = random.Random(seed)
    heads, head_dim = draw.randint(1, 3), draw.choice([64, 128, 256])
    window = draw.choice([-1, 0, 30, 300]), draw.choice([-1, 0, 30, 300])
    if seed % 2:
        heads, head_dim, window = draw.randint(2, 5), 256, (-1, draw.choice([0, 0, 1, 63, 64]))
    unit = draw.choice([1, 64])
    sequences = draw.randint(1, 4)
    lengths_q, lengths_k = ([draw.randint(1, 900 // unit) * unit for _ in range(sequences)] for _ in range(2))
    call = (SMALL.but(lengths_q=lengths_q, lengths_k=lengths_k) if varlen else
            SMALL.but(batch=sequences, seqlen_q=lengths_q[0], seqlen_k=lengths_k[0]))  # fmt: skip
    if not varlen:
        lengths_q, lengths_k = lengths_q[:1] * sequences, lengths_k[:1] * sequences
    call = call.but(num_heads=heads, num_heads_k=heads, head_dim=head_dim, head_dim_v=head_dim, window=window)
    built = build(call)
    problem, inputs = dataclasses.replace(built.problem, deterministic=True), built.inputs
    plan, mode = backward_plan_for(problem), backward_mode_of(problem)
    modules = _triton(Machine(0), 0, 1)
    schedule = types.SimpleNamespace(**Kernel()._load("key_schedule", modules))
    shapes, table = [x.shape for x in inputs[:2]], None
    if varlen:
        shapes = [(shape[0] + 1, 0, 0, *shape[1:]) for shape in shapes]
        table = Pointer(Kernel().rank(inputs.cu_seqlens_k, inputs.cu_seqlens_q, heads, mode.BLOCK_N))
    descriptors = (types.SimpleNamespace(shape=tuple(map(Scalar, shape))) for shape in shapes)
    grid = schedule.grid_of_keys(*descriptors, table, Scalar(sequences), *map(Scalar, plan.sizes), mode)
    hidden = []
    for seqlen_q, seqlen_k in zip(lengths_q, lengths_k, strict=True):
        distance = torch.arange(seqlen_k) - torch.arange(seqlen_q)[:, None] - (seqlen_k - seqlen_q)
        shown = (distance >= -window[0]) | (window[0] < 0)
        shown &= (distance <= window[1]) | (window[1] < 0)
        hidden.append(~shown.repeat(heads, 1, 1))
    added, ways, entry = collections.Counter(), set(), Scalar(0)
    for number in range(grid.num_tiles):
        entry = modules[f"{PACKAGE}.schedule"].sequence_of(Scalar(number), entry, table, grid, mode)
        work = schedule.locate_keys(Scalar(number), entry, table, grid, mode)
        blocks = [schedule.block_of(Scalar(n), work, grid, mode) for n in range(work.blocks)]
        assert sorted(blocks) == list(range(work.end - work.blocks, work.end))
        ways |= {blocks[0] < blocks[-1]} if len(blocks) > 1 else set()
        rows = slice((work.end - work.blocks) * mode.BLOCK_M, work.end * mode.BLOCK_M)
        hidden[work.batch][work.head, rows, work.row : work.row + mode.BLOCK_N] = True
        for block in blocks:
            at = work.batch, work.head, block
            assert schedule.turn_of(block, work, grid, mode) == added[at]
            added[at] += 1
    assert all(x.all() for x in hidden)
    assert len(ways) < 2 or mode.BOTH_WAYS
    long = min(lengths_q[0], lengths_k[0]) > 2 * mode.BLOCK_N  # of the sequence that comes first in the table or dense
    assert ways == {False, True} or not (mode.BOTH_WAYS and long)


FAULTS = {
    "queries are released before the product has read them": (
        "backward_steps",
        "    dk = warpgroup_mma_wait(0, deps=(dk_token,))\n    pipes.q.release(i)",
        "    pipes.q.release(i)\n    dk = warpgroup_mma_wait(0, deps=(dk_token,))",
    ),
    "dout is released before the product has read it": (
        "backward_steps",
        "    fence_async_shared()\n    barrier_sync(",
        "    pipes.dout.release(i)\n    barrier_sync(",
    ),
    "nobody waits for dout": ("backward_steps", "    pipes.dout.wait(i)\n", ""),
    "nobody waits for the queries": ("backward_steps", "    pipes.q.wait(i)\n", ""),
    "nobody waits for the values": ("backward", "            pipes.v.wait(entry)\n", "            pass\n"),
    "nobody releases the values": (
        "backward",
        "            pipes.k.release(entry)\n            pipes.v.release(entry)\n",
        "            pipes.k.release(entry)\n",
    ),
    "keys are overwritten without asking": (
        "pipeline",
        "        self.queries.acquire(i)\n        for field",
        "        for field",
    ),
    "the next queries are written without asking": ("backward", "                pipes.q.acquire(i)\n", ""),
    "the statistics are not waited for": ("backward", "statistics_desc.block_type.nbytes\n", "0\n"),
    "a warpgroup reads dS before the other has written it": (
        "backward_steps",
        "    barrier_sync(mode.BARRIERS, WARPGROUPS)",
        "    pass  #",
    ),
    "dS has one buffer": ("backward_steps", "pipes.ds.index(i % 2)", "pipes.ds.index(0)"),
    "dQ is read while in flight": (
        "backward_steps",
        "warpgroup_mma_wait(1, deps=(dq_token,))",
        "warpgroup_mma_wait(2, deps=(dq_token,))",
    ),
    "dK is read while in flight": (
        "backward_steps",
        "warpgroup_mma_wait(0, deps=(dk_token,))",
        "warpgroup_mma_wait(1, deps=(dk_token,))",
    ),
    "an outbox's phase is swapped": ("pipeline", "(i & 1) ^ 1", "i & 1"),
    "an outbox is given back while it is carried": ("pipeline", "        store_wait(0)\n", ""),
    "the halves of dQ are swapped": (
        "backward_carry",
        "grid, mode) * mode.WARPGROUPS + WARPGROUP",
        "grid, mode) * mode.WARPGROUPS + 1 - WARPGROUP",
    ),
    "dV is stored as dK": ("backward_carry", "dk_desc if IS_DK else dv_desc", "dk_desc"),
    "the counter is not set back": (
        "key_schedule",
        "    gl.store(counter_ptr, 0, mask=taken == num_tiles + gl",
        "    (gl",
    ),
}


ALONE = Path(backward_launch.__file__).with_name("backward_alone.py").read_text()
BEFORE_QUERIES_ARE_RELEASED = re.search(r"fence_async_shared\(\)(\n.*?)    pipes\.q\.release", ALONE, re.DOTALL)[1]
ALONE_FAULTS = {
    "queries are released before the product has read them": (
        "backward_alone",
        f"    fence_async_shared(){BEFORE_QUERIES_ARE_RELEASED}    pipes.q.release(i)\n",
        f"    pipes.q.release(i)\n    fence_async_shared(){BEFORE_QUERIES_ARE_RELEASED}",
    ),
    "nobody waits for dout": ("backward_alone", "    pipes.dout.wait(i)\n", ""),
    "nobody waits for the queries": ("backward_alone", "    pipes.q.wait(i)\n", ""),
    "nobody waits for the values": ("backward_alone", "        pipes.v.wait(entry)\n", ""),
    "S of the next block is that of this one": (
        "backward_alone",
        "entry, pipes.q, then)",
        "entry, pipes.q, i)",
    ),
    "S of the next block is read while in flight": (
        "backward_alone",
        "    s0 = warpgroup_mma_wait(0, deps=(s0,))",
        "    s0 = warpgroup_mma_wait(1, deps=(s0,))",
    ),
    "lse of the next block is that of this one": ("backward_alone", "statistics_of(then,", "statistics_of(i,"),
    "S of the second half is read while in flight": (
        "backward_alone",
        "warpgroup_mma_wait(1, deps=(s1,))",
        "warpgroup_mma_wait(2, deps=(s1,))",
    ),
    "dP is read while in flight": (
        "backward_alone",
        "warpgroup_mma_wait(1, deps=(dv0, dp0))",
        "warpgroup_mma_wait(2, deps=(dv0, dp0))",
    ),
    "dQ is read while in flight": (
        "backward_alone",
        "warpgroup_mma_wait(0, deps=(dk1, dq))",
        "warpgroup_mma_wait(1, deps=(dk1, dq))",
    ),
    "dQ is written where the one before has not left": (
        "backward_alone",
        "    outbox.wait(i + 2 * entry)\n    dk0",
        "    dk0",
    ),
    "the halves of dV are swapped": ("backward_alone", "dv[half]", "dv[1 - half]"),
}


WIDE_FAULTS = {
    "S is read while in flight": (
        "backward_wide",
        "    s = warpgroup_mma_wait(0, deps=(s,))\n    first",
        "    s = warpgroup_mma_wait(1, deps=(s,))\n    first",
    ),
    "queries are released before dK has read them": (
        "backward_wide",
        "    dk = warpgroup_mma_wait(0, deps=(dk,))\n    pipes.q.release(i)\n    send_dq",
        "    pipes.q.release(i)\n    dk = warpgroup_mma_wait(0, deps=(dk,))\n    send_dq",
    ),
    "nobody waits for the queries": ("backward_wide", "    pipes.q.wait(i)\n", ""),
    "dP does not wait for dout": ("backward_wide", "    pipes.dout.wait(i)\n    dout = pipes", "    dout = pipes"),
    "dV does not wait for dout": ("backward_wide", "    pipes.dout.wait(i)\n    dv = ", "    dv = "),
    "dout is released before dP has read it": (
        "backward_wide",
        "    dp = warpgroup_mma_wait(0, deps=(dp,))\n    pipes.dout.release(i)",
        "    pipes.dout.release(i)\n    dp = warpgroup_mma_wait(0, deps=(dp,))",
    ),
    "dout is released before dV has read it": (
        "backward_wide",
        "    dv = warpgroup_mma_wait(0, deps=(dv,))\n    pipes.dout.release(i)",
        "    pipes.dout.release(i)\n    dv = warpgroup_mma_wait(0, deps=(dv,))",
    ),
    "nobody waits for the values": (
        "backward_wide",
        "        if WARPGROUP == 1:\n            pipes.v.wait(entry)\n",
        "",
    ),
    "P is read before it is there": (
        "backward_wide",
        "    barrier_sync(mode.BARRIERS, WARPGROUPS)  # P is there\n    p = pipes.p.load(layout)\n",
        "    p = pipes.p.load(layout)\n    barrier_sync(mode.BARRIERS, WARPGROUPS)\n",
    ),
    "P is overwritten before it has been read": (
        "backward_wide",
        "    if not FIRST:\n        barrier_sync(mode.BARRIERS + 1, WARPGROUPS)",
        "    pipes.p.store(narrow(p * factor, dtype))\n"
        "    if not FIRST:\n        barrier_sync(mode.BARRIERS + 1, WARPGROUPS)",
    ),
    "dS is read before it is there": (
        "backward_wide",
        "    barrier_sync(mode.BARRIERS + 1, WARPGROUPS)",
        "    pass",
    ),
    "dS has one buffer": ("backward_wide", "pipes.ds.index(i % 2)", "pipes.ds.index(0)"),
    "dQ is of this block's dS, not of that before": (
        "backward_wide",
        "start_wide_dq(i - 1, entry, 0",
        "start_wide_dq(i, entry, 0",
    ),
    "dQ is read while in flight": (
        "backward_wide",
        "halves(warpgroup_mma_wait(1, deps=(dq,)))",
        "halves(warpgroup_mma_wait(2, deps=(dq,)))",
    ),
    "the halves of dK are swapped": (
        "backward_wide",
        "left, right = halves(sums)",
        "right, left = halves(sums)",
    ),
}


TALL_FAULTS = {
    "queries are released before the product has read them": (
        "backward_steps",
        "    dk = warpgroup_mma_wait(0, deps=(dk,))\n    pipes.q.release(i)",
        "    pipes.q.release(i)\n    dk = warpgroup_mma_wait(0, deps=(dk,))",
    ),
    "dout is released before the product has read it": (
        "backward_steps",
        "    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))\n    pipes.dout.release(i)",
        "    pipes.dout.release(i)\n    dv, dk = warpgroup_mma_wait(0, deps=(dv, dk))",
    ),
    "keys are released before the product has read them": (
        "backward_steps",
        "    dq = warpgroup_mma_wait(1, deps=(dq,))\n    pipes.k.release(entry, i == span.last)\n",
        "    pipes.k.release(entry, i == span.last)\n    dq = warpgroup_mma_wait(1, deps=(dq,))\n",
    ),
    "nobody waits for the values": ("backward_steps", "    pipes.v.wait(entry, i == span.first)\n", ""),
    "nobody waits for dout": ("backward_steps", "first)\n    pipes.dout.wait(i)\n", "first)\n"),
    "half of S is read while in flight": (
        "backward_steps",
        "return warpgroup_mma_wait(0, deps=(s,))",
        "return warpgroup_mma_wait(1, deps=(s,))",
    ),
    "dP is read while in flight": (
        "backward_steps",
        "warpgroup_mma_wait(1, deps=(dp0,))",
        "warpgroup_mma_wait(2, deps=(dp0,))",
    ),
    "dQ is read while in flight": (
        "backward_steps",
        "warpgroup_mma_wait(1, deps=(dq,))",
        "warpgroup_mma_wait(2, deps=(dq,))",
    ),
    "a warpgroup reads dS before the other has written it": (
        "backward_steps",
        "    barrier_sync(mode.BARRIERS + WARPGROUP, WARPGROUPS)",
        "    pass",
    ),
    "dS is written where dQ has not left": ("backward_steps", "    pipes.outboxes[half].wait(payload)", "    pass"),
    "nobody releases the values": (
        "backward",
        "            pipes.v.release(entry)  # not before",
        "            pass  #",
    ),
    "values are released before dQ has left, so that a warpgroup may be two payloads ahead of the other's outbox": (
        "backward",
        "        outbox.wait(payload)\n        if mode.TALL:\n            pipes.v.release(entry)  # not before",
        "        if mode.TALL:\n            pipes.v.release(entry)\n        outbox.wait(payload)  #",
    ),
    "the parts of dQ are swapped": ("backward_steps", "left, right = halves(dq)", "right, left = halves(dq)"),
}

TURN_FAULTS = {
    "a warp does not wait for the one before it": (
        "backward_carry",
        "    mbarrier.wait(pipes.relay.index(CARRIERS * WARPGROUP + CARRIER), payload // CARRIERS & 1)\n",
        "",
    ),
    "a warp lets the next one wait beside it": (
        "backward_carry",
        "    pipes.outboxes[WARPGROUP].receive()\n    mbarrier.arrive("
        "pipes.relay.index(CARRIERS * WARPGROUP + (CARRIER + 1) % CARRIERS), count=1)\n",
        "    mbarrier.arrive(pipes.relay.index(CARRIERS * WARPGROUP + (CARRIER + 1) % CARRIERS), count=1)\n"
        "    pipes.outboxes[WARPGROUP].receive()\n",
    ),
    "the relay of one outbox is arrived at for both": (
        "backward_carry",
        "CARRIERS * WARPGROUP + (CARRIER",
        "0 + (CARRIER",
    ),
    "the parts of dQ are swapped": ("backward_carry", "+ warpgroup) * 2 + part\n", "+ warpgroup) * 2 + 1 - part\n"),
    "the parts of dK are swapped": ("backward_carry", "warpgroup, payload - start,", "warpgroup, start + 1 - payload,"),
    "an outbox is given back while it is carried": FAULTS["an outbox is given back while it is carried"],
    "turns are of the block before": (
        "backward_carry",
        "turn_of(block, work, grid, mode)\n",
        "turn_of(block, work, grid, mode) - 1\n",
    ),
    "queries come from the diagonal up, products as if from the last block down": (
        "backward_wide",
        "    if mode.BOTH_WAYS:\n",
        "    if False:\n",
    ),
    "all tiles take turns as those that walk down": (
        "key_schedule",
        "gl.where(from_diagonal(work, grid, mode), last - turn, turn)",
        "turn",
    ),
    "all heads' key blocks come in the order of their columns": (
        "key_schedule",
        "        number = gl.where(first_head + section < all_heads, blocks_n - 1 - number, number)\n",
        "        pass\n",
    ),
}


SHARED_FAULTS = {
    "dV and dK of a part are stored": ("backward", "if mode.SPLIT and is_part(work, mode)", "if 0"),
    "the rest of a range is left": ("key_schedule", "    elif left == 0:\n", "    else:\n"),
    "a part begins where its tile does": ("key_schedule", "end = work.end - first", "end = work.end"),
    "all parts of a tile lie in one place": (
        "key_schedule",
        "part = tile + (tile * blocks + blocks - work.end) // grid.steps",
        "part = tile",
    ),
    "dK is sent before dV has left": (
        "backward",
        "send_halves(dk, outbox, payload + 1)",
        "send_halves(dk, outbox, payload)",
    ),
    "a part has two payloads": (
        "backward",
        "    outbox.send()\n    send_halves(dk, outbox, payload + 1)\n",
        "    send_halves(dk, outbox, payload + 1)\n",
    ),
}


@pytest.mark.parametrize("fault", SHARED_FAULTS)
def test_a_planted_fault_is_caught_where_programs_share_tiles(fault):
    case = SMALL.but(seqlen_q=384, seqlen_k=640, head_dim=128, head_dim_v=128, num_heads=1, num_heads_k=1)
    expect_fault(SHARED_FAULTS[fault], case, share=2)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    expect_fault(FAULTS[fault], SMALL.but(seqlen_q=512, seqlen_k=512, num_heads=3, num_heads_k=3, softcap=3.0))


@pytest.mark.parametrize("fault", ALONE_FAULTS)
def test_a_planted_fault_is_caught_at_head_dim_64(fault):
    expect_fault(ALONE_FAULTS[fault], SMALL.but(seqlen_q=512, seqlen_k=512, num_heads=3, num_heads_k=3))


@pytest.mark.parametrize("fault", TALL_FAULTS)
def test_a_planted_fault_is_caught_at_head_dim_128(fault):
    expect_fault(TALL_FAULTS[fault], SMALL.but(seqlen_q=384, seqlen_k=1024, head_dim=128, head_dim_v=128))


@pytest.mark.parametrize("fault", WIDE_FAULTS)
def test_a_planted_fault_is_caught_at_head_dim_256(fault):
    expect_fault(WIDE_FAULTS[fault], SMALL.but(seqlen_q=256, seqlen_k=256, head_dim=256, head_dim_v=256))


@pytest.mark.parametrize("fault", TURN_FAULTS)
def test_a_planted_fault_is_caught_where_parts_take_turns(fault):
    expect_fault(TURN_FAULTS[fault], SMALL.but(**WIDE, seqlen_q=256, seqlen_k=256, causal=True), deterministic=True)


def expect_fault(fault: tuple[str, str, str], case: Case, **options) -> None:
    assert is_right_without_a_fault(case, **options)
    expect_wrong(lambda seed: is_right(Kernel(fault), case, seed, **options))


@functools.cache
def is_right_without_a_fault(case: Case, **options) -> bool:
    return is_right(Kernel(), case, seed=0, **options)


def is_right(kernel: Kernel, case: Case, seed: int, share: int = 0, **options) -> bool:
    call = build(case)
    call = call._replace(problem=dataclasses.replace(call.problem, **options))
    exact = run_reference(call, torch.float64)
    found = differentiate(kernel, call, seed=seed, share=share)
    return all(torch.allclose(x.double(), exact[name], atol=0.05) for name, x in found.items())
