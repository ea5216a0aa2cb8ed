"""What comes before and after the Hopper backward kernel, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# BLOCK_M, BLOCK_DIM, head_dim, seqlen_q: as in BACKWARD_TILES, with heads narrower than a block
SHAPES = ((128, 64, 64, 300), (64, 64, 40, 130), (64, 128, 72, 100), (64, 256, 192, 70))
# of packed sequences: as many that a program looks them up in two steps, some of them empty
LENGTHS = (0, 70, 0, 0, 129, 64, *[3] * 140, 0)


@pytest.mark.skipif(INTERPRETED, reason="starts the others")
def test_the_ends_in_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize(("block_m", "block_dim", "head_dim", "seqlen_q"), SHAPES)
def test_statistics_are_padded_and_the_sums_start_at_zero(block_m, block_dim, head_dim, seqlen_q):
    from tileattn.backends.hopper.backward_ends import prepare_kernel

    batch, heads, blocks_m = 2, 3, -(-seqlen_q // block_m) + 1  # one too many
    out = torch.randn(batch, seqlen_q, heads, head_dim)
    dout = torch.randn(batch, heads, seqlen_q, head_dim).transpose(1, 2)
    lse, dlse = torch.randn(2, batch, heads, seqlen_q)
    lse[0, 0, 3] = float("-inf")
    blocks = batch * heads * blocks_m
    statistics, sums = torch.full((blocks, 2, block_m), torch.nan), torch.full((blocks, block_m * block_dim), torch.nan)
    turns = torch.full((blocks * 2,), 7, dtype=torch.int32)
    prepare_kernel[(blocks,)](
        out, dout, *[stride // 8 for stride in dout.stride()[:3]], lse, dlse, statistics, sums, turns,
        None, batch, seqlen_q, heads, blocks_m, -1.5, -1.0, head_dim, block_dim, block_dim, block_m,
    )  # fmt: skip
    found = statistics.view(heads, batch, blocks_m, 2, block_m).transpose(0, 1)
    found_lse, found_delta = found.movedim(3, 0).flatten(3)
    assert torch.equal(found_lse[..., :seqlen_q], torch.where(lse.isinf(), torch.inf, lse) * -1.5)
    assert (found_lse[..., seqlen_q:] == -torch.inf).all()
    delta = (out * dout).sum(-1).transpose(1, 2) - dlse
    assert torch.allclose(found_delta[..., :seqlen_q], -delta, atol=1e-4)
    assert (found_delta[..., seqlen_q:] == 0).all()
    assert not sums.any()
    assert not turns.any()


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize(("block_m", "block_dim", "head_dim", "seqlen_q"), SHAPES)
def test_sums_come_back_in_rows(block_m, block_dim, head_dim, seqlen_q):
    """keep_dq's order, by hand: a thread's elements of a warpgroup's product lie together, four at a time."""
    from tileattn.backends.hopper.backward_ends import finish_kernel

    batch, heads, blocks_m = 2, 3, -(-seqlen_q // block_m)
    dq = torch.randn(batch, heads, blocks_m * block_m, block_dim)
    columns = min(64, block_m * block_dim // 128)
    found = torch.full((batch, seqlen_q, heads, head_dim), torch.nan)
    finish_kernel[(batch * heads * blocks_m,)](
        _as_sent(dq.transpose(0, 1), block_m, columns), found, found, found, 1, 0, 0, 1, None, batch, seqlen_q,
        heads, blocks_m, 0.5, head_dim, block_dim, block_m, 2,
    )  # fmt: skip
    assert torch.equal(found, 0.5 * dq[:, :, :seqlen_q, :head_dim].transpose(1, 2))


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize("steps", [1, 2, 3])
@pytest.mark.parametrize(
    ("block_m", "block_n", "block_dim", "head_dim"), [(64, 128, 64, 64), (128, 128, 128, 96), (64, 64, 256, 200)]
)
def test_parts_of_the_last_tiles_are_summed_behind_dq(block_m, block_n, block_dim, head_dim, steps):
    from tileattn.backends.hopper.backward_ends import finish_kernel

    batch, heads, blocks_q, seqlen_k, last = 2, 3, 4, 300, 7
    seqlen_q, blocks_k = blocks_q * block_m - 20, -(-seqlen_k // block_n)
    columns = min(64, block_m * block_dim // 128)
    dq = torch.randn(heads, batch, blocks_q * block_m, block_dim)
    parts = torch.randn(last + -(-last * blocks_q // steps) - 1, 2, block_n, block_dim)  # of dV and dK
    sums = torch.cat([_as_sent(x, block_m, columns).view(-1, 4) for x in (dq, parts.flatten(0, 1)[None])])
    found = [torch.full((batch, n, heads, head_dim), torch.nan) for n in (seqlen_q, seqlen_k, seqlen_k)]
    tiles, tile_sums = batch * heads * blocks_k, 2 * block_n // block_m
    finish_kernel[(heads * batch * blocks_q + tile_sums * last,)](
        sums, *found, seqlen_k, tiles - last, tile_sums * last, steps, None, batch, seqlen_q, heads, blocks_q, 0.5,
        head_dim, block_dim, block_m, tile_sums,
    )  # fmt: skip
    assert torch.equal(found[0], 0.5 * dq[..., :seqlen_q, :head_dim].permute(1, 2, 0, 3))
    dv, dk = torch.full((2, tiles, block_n, block_dim), torch.nan)
    for tile in range(last):
        ranges = range(tile * blocks_q // steps, ((tile + 1) * blocks_q - 1) // steps + 1)
        dv[tiles - last + tile], dk[tiles - last + tile] = sum(parts[tile + n] for n in ranges)
    for x, expected in zip(found[1:], (0.5 * dk, dv), strict=True):
        expected = expected.view(batch, heads, -1, block_dim)[:, :, :seqlen_k, :head_dim].transpose(1, 2)
        assert torch.equal(x.nan_to_num(7.0), expected.nan_to_num(7.0))


def _as_sent(dq, block_m, columns):
    """dq, (heads, ..., rows, block_dim), in the order of backward_steps.keep_dq."""
    parts = dq.reshape(dq.shape[0], -1, block_m // 64, 64, dq.shape[-1] // columns, columns).transpose(3, 4)
    fragments = parts.reshape(-1, 4, 2, 8, columns // 8, 4, 2)  # warp, half, lane // 4, eighth, lane % 4, pair
    return fragments.permute(0, 4, 1, 3, 5, 2, 6).contiguous()


@pytest.mark.skipif(not INTERPRETED, reason="runs in the interpreter")
@pytest.mark.parametrize(("block_m", "least"), [(64, 1), (64, 3), (128, 2)])
def test_packed_sequences_have_places_of_their_own(block_m, least):
    from tileattn.backends.hopper.backward_ends import finish_kernel, prepare_kernel

    heads, dim, total = 2, 64, sum(LENGTHS)
    ends = torch.tensor((0, *LENGTHS)).cumsum(0).int()
    out, dout = torch.randn(2, total, heads, dim)
    lse = torch.randn(heads, total)
    places = total // block_m + len(LENGTHS) * least
    statistics, sums = (torch.full((heads, places, n), torch.nan) for n in (2 * block_m, block_m * dim))
    sizes = ends, len(LENGTHS), total, heads, least
    prepare_kernel[(heads * places,)](
        out, dout, 2**30, *[stride // 8 for stride in dout.stride()[:2]], lse, None, statistics, sums, None,
        *sizes, 1.0, 1.0, dim, dim, dim, block_m,
    )  # fmt: skip
    found_lse, found_delta = statistics.view(heads, places, 2, block_m).movedim(2, 0)
    delta = (out * dout).sum(-1).T
    dq = torch.randn(heads, places, block_m, dim)
    found = torch.full((total, heads, dim), torch.nan)
    columns = min(64, block_m * dim // 128)
    finish_kernel[(heads * places,)](
        _as_sent(dq, block_m, columns), found, found, found, 1, 0, 0, 1, *sizes, 2.0, dim, dim, block_m, 2
    )
    taken = 0
    for sequence, length in enumerate(LENGTHS):
        rows, place = slice(ends[sequence], ends[sequence + 1]), int(ends[sequence]) // block_m + sequence * least
        assert place >= taken
        taken = place + max(least, -(-length // block_m))
        of_lse, of_delta, of_dq = (x[:, place:taken].flatten(1, 2) for x in (found_lse, found_delta, dq))
        assert torch.equal(of_lse[:, :length], lse[:, rows])
        assert torch.allclose(of_delta[:, :length], delta[:, rows], atol=1e-4)
        assert torch.equal(found[rows], 2.0 * of_dq[:, :length].transpose(0, 1))
    assert taken <= places
    assert (found_lse == torch.inf).sum() == heads * (places * block_m - total)
    assert not sums.any()
