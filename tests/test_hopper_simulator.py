"""The Hopper kernel's own source on a CPU: what it computes, and that the simulator catches planted faults."""

import dataclasses
import itertools
import random

import pytest
import torch
from oracle import Case, assert_rule, build

from tileattn.reference import standard_attention

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
from hopper_simulator import Kernel, Scalar, expect_wrong

from tileattn.backends.hopper import launch

SMALL = Case(batch=1, seqlen_q=200, seqlen_k=300, head_dim=64, head_dim_v=64, dtype=torch.bfloat16)
CASES = {
    "full": {"seqlen_k": 384},
    "tail": {},
    "one_key": {"seqlen_k": 1},
    "causal": {"causal": True, "batch": 2},
    "more_keys": {"causal": True, "seqlen_k": 523},
    "more_queries": {"causal": True, "seqlen_k": 70},
    "gqa": {"num_heads": 6, "num_heads_k": 2, "causal": True},
    "head_dim_40_72": {"head_dim": 40, "head_dim_v": 72},
    "head_dim_96": {"head_dim": 96, "head_dim_v": 96, "causal": True},
    "head_dim_128": {"head_dim": 128, "head_dim_v": 128, "causal": True},
    "head_dim_192_128": {"head_dim": 192, "head_dim_v": 128, "causal": True},
    "head_dim_256": {"head_dim": 256, "head_dim_v": 256, "causal": True, "seqlen_k": 350},
    "float16": {"dtype": torch.float16, "causal": True},
    "right_window": {"window": (-1, 50)},
    "window": {"window": (100, 30)},
    "window_far_left": {"window": (20, 0), "seqlen_k": 90},
    "causal_window": {"causal": True, "window": (130, -1), "seqlen_k": 400},
    "softcap": {"softcap": 3.0, "causal": True},
    "alibi": {"alibi": True, "causal": True, "batch": 2},
    "sink": {"sink": True, "causal": True, "seqlen_k": 200},
    "packed_heads": {"seqlen_q": 20, "num_heads": 8, "num_heads_k": 2, "causal": True, "alibi": True, "sink": True},
    "packed_heads_of_three_groups": {"seqlen_q": 70, "num_heads": 6, "num_heads_k": 3, "batch": 2},
    "varlen": {"lengths_q": (70, 0, 129, 1, 300), "lengths_k": (70, 65, 64, 0, 300)},
    "varlen_causal": {"lengths_q": (64, 1, 130), "lengths_k": (100, 300, 65), "causal": True},
    "varlen_everything": {
        "lengths_q": (0, 67, 1, 140),
        "lengths_k": (12, 329, 40, 0),
        "num_heads": 4,
        "causal": True,
        "window": (150, -1),
        "softcap": 5.0,
        "alibi": True,
        "sink": True,
    },
    "varlen_head_dim_192": {"lengths_q": (64, 130), "lengths_k": (200, 65), "head_dim": 192, "head_dim_v": 128},
    "varlen_head_dim_256": {
        "lengths_q": (200, 1, 70),
        "lengths_k": (300, 65, 20),
        "head_dim": 256,
        "head_dim_v": 256,
        "causal": True,
    },
    "varlen_many": {"lengths_q": (3,) * 130, "lengths_k": (5,) * 40 + (2,) * 90, "num_heads": 2, "num_heads_k": 1},
    "everything": {"causal": True, "window": (150, -1), "softcap": 5.0, "alibi": True, "sink": True, "num_heads": 4},
}


@pytest.fixture
def three_warpgroups(monkeypatch):
    """In tiles of 192 rows, which long sequences get, whatever their length."""
    monkeypatch.setattr(launch, "suits_three_warpgroups", lambda problem: True)
    launch.plan_for.cache_clear()
    yield
    launch.plan_for.cache_clear()


def expect_rule(problem, inputs, found) -> None:
    exact, low = standard_attention(problem, inputs, torch.float64), standard_attention(problem, inputs)
    assert_rule("out", found.out, exact.out, low.out)
    assert_rule("lse", found.lse, exact.lse, low.lse)


@pytest.mark.parametrize("name", CASES)
def test_oracle_rule(name):
    problem, inputs, _, _ = build(SMALL.but(**CASES[name]))
    expect_rule(problem, inputs, Kernel().forward(problem, inputs))


@pytest.mark.parametrize(
    "name",
    ["tail", "causal", "more_keys", "more_queries", "right_window", "window", "window_far_left", "causal_window"],
)
@pytest.mark.parametrize("head_dim", [64, 96, 128])
def test_oracle_rule_of_three_warpgroups(name, head_dim, three_warpgroups):
    problem, inputs, _, _ = build(SMALL.but(**CASES[name]).but(head_dim=head_dim, head_dim_v=head_dim))
    assert launch.mode_of(problem).WARPGROUPS == 3
    expect_rule(problem, inputs, Kernel().forward(problem, inputs))


def test_a_warpgroup_without_rows_passes_over_all_blocks_but_the_first(three_warpgroups):
    problem, inputs, _, _ = build(SMALL)
    in_step = "    too_large = any_reaches"
    edit = "forward", in_step, f"    assert rows.position.min() < grid.seqlen_q\n{in_step}"
    expect_rule(problem, inputs, Kernel(edit).forward(problem, inputs))
    release = "    keys.release(block)\n    values.wait(unread)"
    expect_fault(problem, inputs, ("forward", release, "    values.wait(unread)"))


def test_a_warpgroup_passes_over_blocks_that_hide_all_its_scores(three_warpgroups):
    problem, inputs, _, _ = build(SMALL.but(causal=True, head_dim=128, head_dim_v=128))
    assert launch.mode_of(problem).STAGGERED
    power = "\n    p, parts = exponentials("  # also taken, in vain, where there is no further tile: of column -BLOCK_N
    seen = "(s != float('-inf')).any() and rows.position.min() < grid.seqlen_q"
    edit = "forward", power, f"\n    assert column < 0 or rows.position.max() < 0 or ({seen}){power}"
    expect_rule(problem, inputs, Kernel(edit).forward(problem, inputs))


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
def test_what_warpgroups_pass_over_is_hidden_and_what_they_do_not_mask_is_seen(head_dim, three_warpgroups):
    """Every row is in one tile; values that stay unreleased over what is passed over leave the ring room."""
    kernel, draw = Kernel(), random.Random(head_dim)
    schedule, hidden_blocks = kernel.module("schedule"), kernel.module("forward")["hidden_blocks"]
    base, _, _, _ = build(SMALL.but(causal=True, head_dim=head_dim, head_dim_v=head_dim))
    passed = set()
    for _ in range(100):
        seqlen_q, seqlen_k = (draw.choice([draw.randint(200, 900), 64 * draw.randint(4, 12)]) for _ in range(2))
        right = draw.choice([0, 64, draw.randint(0, 150)])
        problem = dataclasses.replace(base, seqlen_q=seqlen_q, seqlen_k=seqlen_k, window_right=right)
        mode = launch.mode_of(problem)
        assert mode.STAGGERED
        heads, rows, met = problem.num_heads // mode.PACK, launch.ROWS.value // mode.PACK, []
        grid = schedule["Grid"](problem.num_heads, problem.group, seqlen_q, seqlen_k, 1, 0, right + 1, 4096, 0)
        for tile in range(heads * -(-seqlen_q // mode.BLOCK_M)):
            work = schedule["locate"](Scalar(tile), 0, None, grid, mode)
            for warpgroup in range(mode.WARPGROUPS):
                first = work.row + warpgroup * rows
                those = [row for row in range(first, first + rows) if 0 <= row < seqlen_q]
                met += [(work.head, row) for row in those]
                hidden = hidden_blocks(work, warpgroup, grid, mode)
                passed.add(int(hidden))
                assert hidden <= min(mode.STAGES - 1, work.blocks - mode.MASKED)
                if those:
                    ends = [min(row + seqlen_k - seqlen_q + right + 1, seqlen_k) for row in (those[0], those[-1])]
                    begun = work.end - hidden
                    assert ends[1] <= begun * mode.BLOCK_N
                    assert begun == mode.MASKED or ends[0] >= (begun - mode.MASKED) * mode.BLOCK_N
        assert sorted(met) == [(head * mode.PACK, row) for head in range(heads) for row in range(seqlen_q)]
    assert passed == set(range(mode.WARPGROUPS))


def test_nothing_is_stored_before_the_first_row(three_warpgroups):
    problem, inputs, _, _ = build(SMALL.but(causal=True))
    expect_fault(problem, inputs, ("forward", "gl.where(row < 0, work.seqlen_q, row)", "row"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("growth", [20.0, 300.0])
def test_logits_that_grow_from_block_to_block(growth, dtype):
    """The last block is visited first, so every block raises the maximum."""
    problem, inputs, _, _ = build(SMALL.but(seqlen_k=1024, dtype=dtype))
    inputs = inputs._replace(k=inputs.k * torch.linspace(growth, 0.01, 1024)[:, None, None].to(dtype))
    expect_rule(problem, inputs, Kernel().forward(problem, inputs))


FAULTS = {
    "keys are released before the product has read them": (
        "forward",
        "    s = warpgroup_mma_wait(1, deps=(s_token,))\n    keys.release(block, more)",
        "    keys.release(block, more)\n    s = warpgroup_mma_wait(1, deps=(s_token,))",
    ),
    "values are released before the product has read them": (
        "forward",
        "    o = warpgroup_mma_wait(0, deps=(o_token,))\n    values.release(block - 1)",
        "    values.release(block - 1)\n    o = warpgroup_mma_wait(0, deps=(o_token,))",
    ),
    "queries are released a block too soon": ("forward", "i + 1 == work.blocks", "i + 2 == work.blocks"),
    "nobody waits for the values": ("forward", "    values.wait(block - passed - 1)\n", ""),
    "nobody waits for the keys": ("forward", "    keys.wait(block, more)\n", ""),
    "nobody releases the values": ("forward", "    values.release(block - 1)\n", ""),
    "the next block is written without asking": ("forward", "            keys.acquire(block)\n", ""),
    "the phase is swapped": ("pipeline", "(i // self.STAGES) & 1", "((i // self.STAGES) & 1) ^ 1"),
    "the phase turns too seldom": ("pipeline", "(i // self.STAGES) & 1", "(i // self.STAGES // 2) & 1"),
    "the wait leaves S in flight": ("forward", "warpgroup_mma_wait(1,", "warpgroup_mma_wait(2,"),
    "O is read while in flight": ("forward", "    o = warpgroup_mma_wait(0, deps=(o_token,))\n", "    o = o_token\n"),
    "the output buffer is overwritten": ("forward", "    store_wait(0)  #", "    #"),
    "a turn is not passed on": ("forward", "(WARPGROUP + 1) % mode.WARPGROUPS, 2 * WARP", "WARPGROUP, 2 * WARP"),
    "turns and keys share a barrier": ("forward", "mode.BARRIERS + mode.WARPGROUPS\n", "mode.BARRIERS + 1\n"),
    "too few bytes are expected": ("pipeline", "* self.ROW_PARTS * self.COLUMN_PARTS + MORE)", ")"),
    "the counter is not set back": ("schedule", "    gl.store(counter_ptr, 0, mask=taken == num_tiles - 1)\n", ""),
}


PACKED_FAULTS = {
    "a sequence's end is not minded": ("schedule", "gl.minimum(gl.maximum(length - row, 0), ROWS)", "ROWS"),
    "tiles are counted from the first sequence": ("schedule", "tile - first_tile, 0)", "tile, 0)"),
    "a program has no tile": (
        "schedule",
        "gl.maximum(gl.load(table_ptr + sequences), gl.num_programs(0))",
        "gl.load(table_ptr + sequences)",
    ),
    "equal lengths share a place": ("ranking", "(longer | earlier)", "longer"),
}


def expect_fault(problem, inputs, edit) -> None:
    exact = standard_attention(problem, inputs, torch.float64).out

    def is_right(seed: int) -> bool:
        return torch.allclose(Kernel(edit).forward(problem, inputs, seed=seed).out.double(), exact, atol=0.02)

    expect_wrong(is_right)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_caught(fault):
    case = SMALL.but(seqlen_k=1024, num_heads=3, num_heads_k=3, head_dim=192, head_dim_v=128)
    problem, inputs, _, _ = build(case)
    expect_fault(problem, inputs, FAULTS[fault])


@pytest.mark.parametrize("fault", PACKED_FAULTS)
def test_a_fault_planted_in_packed_sequences_is_caught(fault):
    lengths = (60, 100) if fault != "equal lengths share a place" else (100, 100)
    problem, inputs, _, _ = build(SMALL.but(lengths_q=lengths, lengths_k=lengths, num_heads=1, num_heads_k=1))
    expect_fault(problem, inputs, PACKED_FAULTS[fault])


def test_sequences_do_not_touch():
    problem, inputs, _, _ = build(SMALL.but(lengths_q=(100, 60, 130), lengths_k=(100, 60, 130)))
    expected = Kernel().forward(problem, inputs)
    for x in inputs[:3]:
        x[100:160] = float("nan")
    found = Kernel().forward(problem, inputs)
    for rows in (slice(0, 100), slice(160, None)):
        assert torch.equal(found.out[rows], expected.out[rows])
        assert torch.equal(found.lse[:, rows], expected.lse[:, rows])


@pytest.mark.parametrize(("heads", "sections"), [(1, [1]), (3, [3]), (5, [5]), (6, [3, 3]), (16, [3, 3, 3, 3, 4])])
def test_causal_tiles_come_longest_first_in_sections_none_of_which_is_small(heads, sections):
    problem, _, _, _ = build(SMALL.but(num_heads=heads, num_heads_k=heads, seqlen_q=1024, seqlen_k=1024, causal=True))
    schedule = Kernel().module("schedule")
    mode = launch.mode_of(problem)
    blocks_m = -(-1024 // mode.BLOCK_M)
    grid = schedule["Grid"](heads, 1, 1024, 1024, 1, 0, 1, 3 * 1024, heads * blocks_m)
    tiles = iter([schedule["locate"](Scalar(i), 0, None, grid, mode) for i in range(heads * blocks_m)])
    first = 0
    for section in sections:
        found = [(work.row, work.head) for work in itertools.islice(tiles, section * blocks_m)]
        rows = [block * mode.BLOCK_M for block in reversed(range(blocks_m))]
        assert found == [(row, first + head) for row in rows for head in range(section)]
        first += section
    assert next(tiles, None) is None
