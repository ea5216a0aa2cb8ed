"""What Triton and the assembler make of the Hopper kernel, on any machine."""

import re

import pytest
import torch

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
from hopper_compiling import call_of, compile_forward

from tileattn.backends.hopper.ptx import FIRST_BARRIER

MODIFIERS = {"window": (100, -1), "softcap": 3.0, "alibi_slopes": torch.ones(2), "sink": torch.ones(2)}
# head dims, seqlen_k, options; k16 steps of wgmma in both warpgroups; bytes that may be spilled (outside loops)
KERNELS = {
    "64_full": (64, 64, 256, {}, 56, 16),
    "128_full": (128, 128, 256, {}, 80, 16),
    "128_causal": (128, 128, 256, {"causal": True}, 80, 32),
    "192_128_causal": (192, 128, 256, {"causal": True}, 152, 16),
    "256_causal": (256, 256, 256, {"causal": True}, 152, 160),
    "128_everything": (128, 128, 300, {"causal": True, **MODIFIERS}, 80, 160),
}


@pytest.mark.parametrize("name", KERNELS)
def test_products_stay_asynchronous_and_softmax_lies_between_the_waits(name):
    head_dim, head_dim_v, seqlen_k, options, products, spills = KERNELS[name]
    found = compile_forward(*call_of(256, seqlen_k, head_dim, head_dim_v, torch.bfloat16, **options))
    assert found.warnings == []
    assert found.count("HGMMA") == products
    assert found.spills <= spills
    assert found.shared <= 227 * 1024
    # Of S and of O, in each step; the exponentials of S run while O is in flight.
    waits = [int(code) for line in found.code for code in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line)]
    assert waits.count(1) == waits.count(0) - 2  # a program's first S has no O beside it, in either warpgroup
    exponentials = 0
    in_flight = False
    for line in found.code:
        if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line:
            in_flight, exponentials = True, 0
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line and in_flight:
            in_flight = False
            assert exponentials >= 32
        exponentials += "MUFU.EX2" in line


def test_named_barriers_of_triton_and_ours_are_apart():
    ptx = compile_forward(*call_of(256, 256, 128, 128, torch.bfloat16)).ptx
    ours = re.findall(r"// begin inline asm.*?// end inline asm", ptx, re.DOTALL)
    theirs = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    used = {int(n) for n in re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\S*\s+(\d+)", theirs)}
    assert used
    assert max(used) < FIRST_BARRIER
    assert all(int(n) >= FIRST_BARRIER for text in ours for n in re.findall(r"bar\.(?:sync|arrive) (\d+),", text))


def test_one_kernel_serves_all_sizes():
    """Sizes of 1, and those divisible by 16, are what Triton would specialise on."""
    sizes = ((128, 128), (256, 384), (1000, 1024))
    kernels = {compile_forward(*call_of(*lengths, 128, 128, torch.bfloat16)).ptx for lengths in sizes}
    assert len(kernels) == 1
