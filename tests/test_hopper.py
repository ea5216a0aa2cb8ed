"""What the Hopper backend serves and refuses, and how it plans, on any machine."""

import dataclasses

import pytest
import torch

import tileattn
from tileattn.backends import cpu, hopper
from tileattn.problem import Problem

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
from tileattn.backends.hopper.backward_launch import _addressable, backward_plan_for, backward_tile_for
from tileattn.backends.hopper.launch import _descriptor, pack_for, plan_for, tile_for

PLAIN = Problem(
    batch=2,
    seqlen_q=256,
    seqlen_k=256,
    num_heads=4,
    num_heads_k=2,
    head_dim=128,
    head_dim_v=128,
    dtype=torch.bfloat16,
    device=torch.device("cuda", 0),
    scale=0.1,
)
REFUSED = {
    "dtype": {"dtype": torch.float32},
    "head_dim_odd": {"head_dim": 100},
    "head_dim_large": {"head_dim_v": 264},
    "few_queries": {"seqlen_q": 8},
    "strides": {"aligned": False},
    "no_keys": {"seqlen_k": 0},
    "scale": {"scale": -0.1},
    "bias": {"has_bias": True},
    "mask": {"has_mask": True},
    "dropout": {"dropout_p": 0.1},
    "score_mod": {"score_mod": "a program"},
    "mask_mod": {"mask_mod": "a program"},
    "block_mask": {"block_size": (128, 128)},
}


@pytest.fixture
def on_hopper(monkeypatch):
    monkeypatch.setattr(hopper, "_is_hopper", lambda device: True)


def test_it_needs_the_chip():
    assert hopper.supports(dataclasses.replace(PLAIN, device=torch.device("cpu"))) == "needs a Hopper GPU (H100, H200)"


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("name", REFUSED)
def test_what_it_does_not_serve_is_refused_with_a_reason(name):
    assert hopper.supports(PLAIN) is None
    assert hopper.supports(dataclasses.replace(PLAIN, **REFUSED[name]))


@pytest.mark.parametrize(
    ("seqlen_q", "heads", "pack"),
    [
        (1024, (8, 1), 1),
        (1000, (8, 1), 1),
        (64, (8, 1), 2),
        (16, (8, 1), 8),
        (1, (6, 1), 2),
        (20, (12, 3), 4),
        (16, (8, 8), 1),
    ],
)
def test_heads_share_a_tile_where_that_fills_it(seqlen_q, heads, pack):
    problem = dataclasses.replace(PLAIN, seqlen_q=seqlen_q, num_heads=heads[0], num_heads_k=heads[1])
    assert pack_for(problem) == pack


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (70, 70)}, {"causal": True, "softcap": 20.0}], ids=str
)
def test_one_compiled_graph_serves_whatever_lengths_its_tiles_are_chosen_by(options, packed, monkeypatch):
    for name in ("forward", "backward"):
        monkeypatch.setattr(hopper, name, getattr(cpu, name))
    monkeypatch.setattr(hopper, "anticipate", lambda *_: None)
    torch._dynamo.reset()

    def attend(q, k, *lengths):
        if not packed:
            return tileattn.attention(q, k, k, backend="hopper", **options)
        return tileattn.attention_varlen(q, k, k, *lengths, backend="hopper", **options)

    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, seqlen_q, seqlen_k in ((3, 160, 176), (5, 200, 200), (2, 64, 320)):
        q, k, lengths = torch.randn(batch, seqlen_q, 8, 64), torch.randn(batch, seqlen_k, 2, 64), ()
        if packed:
            q, k = q.flatten(0, 1), k.flatten(0, 1)
            ends = (torch.arange(batch + 1, dtype=torch.int32) * n for n in (seqlen_q, seqlen_k))
            lengths = (*ends, seqlen_q, seqlen_k)
        q, k = (x.bfloat16().requires_grad_() for x in (q, k))
        with torch.compiler.set_stance("default" if batch == 3 else "fail_on_recompile"):
            got, want = compiled(q, k, *lengths), attend(q, k, *lengths)
        assert torch.equal(got, want)
        for g, w in zip(*(torch.autograd.grad(out.sum(), (q, k)) for out in (got, want)), strict=True):
            assert torch.equal(g, w)


@pytest.mark.usefixtures("on_hopper")
def test_its_backward_serves_what_its_forward_does_but_alibi():
    assert hopper.supports(PLAIN, "backward") is None
    for refused in REFUSED.values():
        assert hopper.supports(dataclasses.replace(PLAIN, **refused), "backward")
    assert hopper.supports(dataclasses.replace(PLAIN, has_alibi=True)) is None
    assert hopper.supports(dataclasses.replace(PLAIN, has_alibi=True), "backward") == "has no backward through ALiBi"


@pytest.mark.parametrize(
    ("dims", "block_dims"),
    [
        ((64, 64), (64, 64)),
        ((40, 72), (96, 128)),
        ((104, 72), (128, 128)),
        ((192, 128), (192, 128)),
        ((128, 192), (256, 256)),
    ],
)
def test_head_dims_go_to_the_smallest_tile_that_holds_them(dims, block_dims):
    tile = tile_for(dataclasses.replace(PLAIN, head_dim=dims[0], head_dim_v=dims[1]))
    assert (tile.block_dim, tile.block_dim_v) == block_dims


@pytest.mark.parametrize(
    ("change", "rows"),
    [
        ({"seqlen_q": 16384}, 192),
        ({"seqlen_q": 1024, "batch": 64}, 128),
        ({"seqlen_q": 16384, "window_right": 0}, 192),
        ({"seqlen_q": 4096, "window_right": 0}, 128),
        ({"seqlen_q": 16384, "batch": 1, "num_heads": 2}, 128),
        ({"seqlen_q": 16384, "window_left": 100}, 128),
        ({"seqlen_q": 16384, "softcap": 3.0}, 128),
        ({"seqlen_q": 16384, "head_dim": 256}, 128),
    ],
    ids=str,
)
def test_many_long_sequences_go_to_tiles_of_three_warpgroups(change, rows):
    problem = dataclasses.replace(PLAIN, device=torch.device("cpu"), seqlen_k=16384, **change)
    assert tile_for(problem).rows == rows


@pytest.mark.parametrize(
    ("dims", "block_dims"),
    [((64, 64), (64, 64)), ((40, 72), (128, 128)), ((192, 128), (256, 128)), ((128, 192), (256, 256))],
)
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_backward_tiles_hold_the_head_dims_and_softcap_needs_one_that_has_registers_for_it(dims, block_dims, softcap):
    tile = backward_tile_for(dataclasses.replace(PLAIN, head_dim=dims[0], head_dim_v=dims[1], softcap=softcap))
    assert (tile.block_dim, tile.block_dim_v) == block_dims
    assert not (softcap and (tile.tall or tile.alone))


@pytest.mark.parametrize(
    ("changes", "masked"),
    [
        ({}, 1),
        ({"window_right": 0}, 1),
        ({"window_right": 0, "seqlen_k": 300}, 2),
        ({"window_right": 0, "head_dim": 256}, 1),
        ({"window_right": 0, "head_dim": 256, "seqlen_k": 300}, 2),
        ({"window_right": 0, "varlen": True}, 2),
        ({"window_right": 0, "seqlen_q": 16, "num_heads": 8, "num_heads_k": 1}, 1),
        ({"window_right": 0, "seqlen_q": 16, "seqlen_k": 255, "num_heads": 8, "num_heads_k": 1}, 2),
    ],
)
def test_how_many_blocks_the_diagonal_crosses(changes, masked):
    assert plan_for(dataclasses.replace(PLAIN, device=torch.device("cpu"), **changes)).mode.MASKED.value == masked


@pytest.mark.parametrize(
    ("changes", "masked"),
    [
        ({}, 0),
        ({"window_right": 0}, 1),
        ({"window_right": 0, "seqlen_k": 300}, 2),
        ({"window_right": 0, "head_dim": 64, "head_dim_v": 64}, 2),
        ({"window_right": 0, "head_dim": 64, "head_dim_v": 64, "seqlen_k": 300}, 3),
        ({"window_right": 0, "head_dim": 256}, 1),
        ({"window_right": 0, "window_left": 100}, 0),
        ({"window_right": 0, "varlen": True}, 2),
        ({"window_right": 0, "softcap": 3.0}, 2),
    ],
)
def test_how_many_blocks_of_queries_the_diagonal_crosses(changes, masked):
    plan = backward_plan_for(dataclasses.replace(PLAIN, device=torch.device("cpu"), **changes))
    assert plan.mode.MASKED.value == masked


@pytest.mark.parametrize(
    ("seqlen", "changes", "shared", "steps"),
    [
        (16384, {"batch": 1, "num_heads": 16}, 68, 66),  # 15.52 rounds of 132 programs
        (4096, {"batch": 4, "num_heads": 16}, 68, 17),
        (1024, {"batch": 16, "num_heads": 16}, 0, 8),  # 5 of 8 steps would be more than they save
        (16384, {"batch": 1, "num_heads": 33}, 0, 128),  # no tiles left
        (1024, {"batch": 1, "num_heads": 8}, 64, 4),
        (128, {"batch": 1, "num_heads": 1}, 0, 1),
        (4096, {"batch": 4, "num_heads": 16, "window_right": 0}, 0, 32),
        (4096, {"batch": 4, "num_heads": 16, "deterministic": True}, 0, 32),
        (4096, {"batch": 4, "num_heads": 16, "num_heads_k": 4}, 0, 32),
        (4096, {"batch": 4, "num_heads": 16, "softcap": 3.0}, 0, 64),
        (4096, {"batch": 4, "num_heads": 8, "head_dim": 256, "head_dim_v": 256}, 68, 33),
        (4096, {"batch": 4, "num_heads": 8, "head_dim": 192}, 0, 64),
        (4096, {"batch": 4, "num_heads": 32, "head_dim": 64, "head_dim_v": 64}, 136, 33),  # two on each of 132
    ],
)
def test_programs_share_the_tiles_of_the_last_round_where_that_saves_time(seqlen, changes, shared, steps):
    same = {"num_heads_k": changes["num_heads"], "seqlen_q": seqlen, "seqlen_k": seqlen}
    plan = backward_plan_for(dataclasses.replace(PLAIN, device=torch.device("cpu"), **{**same, **changes}))
    assert (plan.shared, plan.sizes[3]) == (shared, steps)


@pytest.mark.parametrize("plan_of", [plan_for, backward_plan_for])
def test_a_window_of_any_width_fits_a_32_bit_argument(plan_of):
    plan = plan_of(dataclasses.replace(PLAIN, device=torch.device("cpu"), window_left=2**40, window_right=2**40))
    assert not plan.mode.LEFT.value
    assert not plan.mode.CAUSAL.value
    assert all(abs(size) < 2**31 for size in plan.sizes)


def test_only_what_starts_between_multiples_of_16_bytes_is_copied():
    x = torch.arange(4 * 10 * 2 * 16, dtype=torch.float32).to(torch.bfloat16)
    fits = x.view(4, 10, 2, 16)
    assert _descriptor(fits.transpose(1, 2), [1, 2, 1, 16], None).base.data_ptr() == fits.data_ptr()
    odd = x[1:1153].view(4, 9, 2, 16)
    copied = _descriptor(odd, [1, 2, 1, 16], None)
    assert copied.base.data_ptr() % 16 == 0
    assert torch.equal(copied.base, odd)


def test_a_dout_is_copied_only_where_tma_cannot_step_through_it():
    x = torch.arange(4 * 10 * 2 * 16, dtype=torch.bfloat16).view(4, 10, 2, 16)
    assert _addressable(x) is x
    swapped = x.transpose(1, 2)
    assert _addressable(swapped) is swapped
    for odd in (x[:, :, :1].expand(-1, -1, 2, -1), x[..., ::2], x.flatten(2)[..., :30].unflatten(2, (2, 15))):
        assert torch.equal(_addressable(odd), odd)
        assert _addressable(odd).is_contiguous()


@pytest.mark.usefixtures("on_hopper")
def test_few_queries_and_alibi_are_differentiated_elsewhere():
    few = dataclasses.replace(PLAIN, seqlen_q=16, num_heads=16)
    for problem in (few, dataclasses.replace(PLAIN, has_alibi=True)):
        assert hopper.supports(problem) is None
        assert hopper.supports(problem, "backward")
