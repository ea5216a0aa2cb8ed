"""What comes before and after the Hopper backward kernel, in Triton's interpreter."""

import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# BLOCK_M, BLOCK_DIM, head_dim, seqlen_q: as in BACKWARD_TILES, with heads narrower than a block and a block too many
SHAPES = ((128, 64, 64, 300), (64, 64, 40, 130), (64, 128, 72, 100), (64, 256, 192, 70))


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

    batch, heads, blocks_m = 2, 3, -(-seqlen_q // block_m) + 1
    out = torch.randn(batch, seqlen_q, heads, head_dim)
    dout = torch.randn(batch, heads, seqlen_q, head_dim).transpose(1, 2)
    lse, dlse = torch.randn(2, batch, heads, seqlen_q)
    lse[0, 0, 3] = float("-inf")
    blocks = batch * heads * blocks_m
    statistics, sums = torch.full((blocks, 2, block_m), torch.nan), torch.full((blocks, block_m * block_dim), torch.nan)
    turns = torch.full((blocks * 2,), 7, dtype=torch.int32)
    prepare_kernel[(blocks,)](
        out, dout, *[stride // 8 for stride in dout.stride()[:3]], lse, dlse, statistics, sums, turns,
        seqlen_q, heads, blocks_m, -1.5, -1.0, head_dim, block_dim, block_dim, block_m,
    )  # fmt: skip
    found_lse, found_delta = statistics.view(batch, heads, blocks_m, 2, block_m).movedim(3, 0).flatten(3)
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
    """send_dq's order, by hand: a thread's elements of a warpgroup's product lie together, four at a time."""
    from tileattn.backends.hopper.backward_ends import finish_kernel

    batch, heads, blocks_m = 2, 3, -(-seqlen_q // block_m)
    dq = torch.randn(batch, heads, blocks_m * block_m, block_dim)
    columns = min(64, block_m * block_dim // 128)
    parts = dq.view(batch, heads, blocks_m, block_m // 64, 64, block_dim // columns, columns).transpose(4, 5)
    fragments = parts.reshape(-1, 4, 2, 8, columns // 8, 4, 2)  # warp, half, lane // 4, eighth, lane % 4, pair
    sums = fragments.permute(0, 4, 1, 3, 5, 2, 6).contiguous()
    found = torch.full((batch, seqlen_q, heads, head_dim), torch.nan)
    finish_kernel[(batch * heads * blocks_m,)](
        sums, found, seqlen_q, heads, blocks_m, 0.5, head_dim, block_dim, block_m
    )
    assert torch.equal(found, 0.5 * dq[:, :, :seqlen_q, :head_dim].transpose(1, 2))
