"""PyTorch's context parallelism, which merges FlashAttention's results over parts of the keys, on tileattn's."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    restore_flash_attention_impl,
    sdpa_kernel,
)

ring = pytest.importorskip("torch.distributed.tensor.experimental._context_parallel._attention")
from torch.distributed.device_mesh import init_device_mesh  # noqa: E402

from tileattn import ops  # noqa: E402
from tileattn.integrations import sdpa  # noqa: E402

RANKS = 2


def compare_ring_with_the_whole(rank, store):
    """One of RANKS processes, each with its part of every sequence."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    library = torch.library.Library("aten", "IMPL")  # what is registered for CUDA, where those operators have no kernel
    library.impl("_scaled_dot_product_flash_attention", sdpa._sdpa_forward, "CPU")
    library.impl("_scaled_dot_product_flash_attention_backward", sdpa._sdpa_backward, "CPU")
    for causal, balanced in ((False, False), (True, False), (True, True)):
        ring._cp_options.enable_load_balance = balanced
        mine = torch.tensor([rank, 2 * RANKS - 1 - rank] if balanced else [2 * rank, 2 * rank + 1])

        def part(x, mine=mine):
            return x.unflatten(2, (2 * RANKS, -1))[:, :, mine].flatten(2, 3).contiguous()

        torch.manual_seed(0)  # the same on every rank
        *qkv, dout = (torch.randn(2, 3, 48, 16) for _ in range(4))
        whole = [x.clone().requires_grad_() for x in qkv]
        with sdpa_kernel(SDPBackend.MATH):
            out = F.scaled_dot_product_attention(*whole, is_causal=causal)
        expected = out.detach(), *torch.autograd.grad(out, whole, dout)

        tensors = tuple(map(part, qkv))
        found, lse, *rest = ring._scaled_dot_product_ring_flash_attention(mesh, *tensors, 0.0, causal)
        saved = *tensors, found, lse, *rest[:4], 0.0, causal, *rest[4:6]
        gradients = ring._scaled_dot_product_ring_flash_attention_backward(mesh, part(dout), *saved)
        for got, of_whole in zip((found, *gradients[:3]), expected, strict=True):
            torch.testing.assert_close(got, part(of_whole), rtol=1e-4, atol=1e-5)
    dist.barrier()  # nobody leaves while another still sends
    os._exit(0)  # threads of gloo at times abort a process that takes its leave


@pytest.mark.slow
def test_parts_of_a_sequence_attend_as_the_whole(tmp_path):
    torch.multiprocessing.spawn(compare_ring_with_the_whole, (tmp_path / "store",), RANKS)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_context_parallel_is_ours_on_a_gpu(causal, tmp_path, monkeypatch):
    from torch.distributed.tensor.experimental import context_parallel

    seen, run = [], ops.run
    monkeypatch.setattr(ops, "run", lambda problem, *rest: seen.append(problem) or run(problem, *rest))
    torch.manual_seed(0)
    tensors = [torch.randn(2, 3, 256, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3)]
    dout = torch.randn_like(tensors[0])

    def out_and_gradients():
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
        return out, *torch.autograd.grad(out, leaves, dout)

    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            leaves = [x.clone().requires_grad_() for x in tensors]
            expected = out_and_gradients()
            activate_flash_attention_impl("tileattn")
            monkeypatch.setattr(ring._cp_options, "enable_load_balance", causal)
            with context_parallel(mesh, buffers=tensors, buffer_seq_dims=[2, 2, 2]):
                got = out_and_gradients()
    finally:
        restore_flash_attention_impl()
        dist.destroy_process_group()
    assert len(seen) == 1
    for g, e in zip(got, expected, strict=True):
        torch.testing.assert_close(g, e, rtol=2e-2, atol=2e-2)
