"""What Triton and the assembler make of the Hopper kernel, on any machine."""

import re

import pytest
import torch

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
import hopper_compiling
from hopper_compiling import MORE_SPILLS, call_of, compile_cached_ranking, compile_forward, compile_ranking, packed
from triton.compiler.errors import CompilationError

from tileattn.backends.entry import TRITON
from tileattn.backends.hopper import launch
from tileattn.backends.hopper.launch import Tile, mode_of

MODIFIERS = {"window": (100, -1), "softcap": 3.0, "alibi_slopes": torch.ones(2), "sink": torch.ones(2)}
LONG = {"seqlen_q": 32768}  # three warpgroups
# head dims, seqlen_k, options; k16 steps of wgmma in all warpgroups; bytes that may be spilled (outside loops)
KERNELS = {
    "64_full": (64, 64, 256, {}, 56, 16),
    "128_full": (128, 128, 256, {}, 64, 16),
    "128_causal": (128, 128, 256, {"causal": True}, 64, 96),
    "96_causal": (96, 96, 256, {"causal": True}, 56, 96),
    "192_128_causal": (192, 128, 256, {"causal": True}, 80, 192),
    "256_causal": (256, 256, 256, {"causal": True}, 80, 96),
    "128_everything": (128, 128, 300, {"causal": True, **MODIFIERS}, 96, 160),
    "128_window": (128, 128, 256, {"causal": True, "window": (100, -1)}, 64, 144),
    "128_packed_heads": (128, 128, 256, {"group": 16, "causal": True}, 64, 48),
    "64_long": (64, 64, 256, LONG, 60, 16),
    "64_long_causal": (64, 64, 256, {"causal": True, **LONG}, 60, 16),
    "128_long": (128, 128, 256, LONG, 72, 116),
    "128_long_causal": (128, 128, 256, {"causal": True, **LONG}, 72, 224),
    "128_varlen_causal": (128, 128, 256, {"causal": True, "varlen": True}, 96, 112),
}


@pytest.mark.parametrize("name", KERNELS)
def test_products_stay_asynchronous_and_softmax_lies_between_the_waits(name):
    head_dim, head_dim_v, seqlen_k, options, products, spills = KERNELS[name]
    options = dict(options)
    varlen = options.pop("varlen", False)
    seqlen_q = options.pop("seqlen_q", 256 // options.get("group", 1))
    call = call_of(seqlen_q, seqlen_k, head_dim, head_dim_v, torch.bfloat16, **options)
    found = compile_forward(*(packed(call, **options) if varlen else call))
    assert found.warnings == []
    assert found.count("HGMMA") == products
    assert found.spills <= spills + MORE_SPILLS
    assert found.shared <= 227 * 1024
    # Of S and of O, in each step; the exponentials of S run while O is in flight.
    waits = [int(code) for line in found.code for code in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", line)]
    # Of every warpgroup's S and O the first S stands alone, of a program or, as its last O does, of a tile.
    mode = mode_of(call[0])
    assert waits.count(1) == waits.count(0) - mode.WARPGROUPS * (1 if mode.AHEAD else 2)
    exponentials = 0
    in_flight = False
    for line in found.code:
        if "WARPGROUP.DEPBAR.LE gsb0, 0x1" in line:
            in_flight, exponentials = True, 0
        elif "WARPGROUP.DEPBAR.LE gsb0, 0x0" in line and in_flight:
            in_flight = False
            assert exponentials >= 32
        exponentials += "MUFU.EX2" in line


@pytest.mark.parametrize(
    ("head_dim", "seqlen_q", "exponentials"), [(64, 256, 64), (64, 32768, 32), (128, 256, 64), (256, 256, 32)]
)
def test_sums_stand_among_the_exponentials_and_conversions_behind_them(head_dim, seqlen_q, exponentials):
    call = call_of(seqlen_q, 256, head_dim, head_dim, torch.bfloat16)
    mode, code = mode_of(call[0]), compile_forward(*call).code
    runs = [[]]
    for line in code:
        name = re.search(r"\b(MUFU\.EX2|FADD|F2FP|VOTEU|WARPGROUP\.DEPBAR)\b", line)
        if name and name[1] in ("VOTEU", "WARPGROUP.DEPBAR"):
            runs.append([])
        elif name:
            runs[-1].append(name[1])
    # Of a thread's two rows. In each warpgroup a step, a tile's first block and, where that is another, a program's.
    found = [run for run in runs if run.count("MUFU.EX2") == exponentials and run.count("FADD") == exponentials - 2]
    assert sum("F2FP" not in run for run in found) >= mode.WARPGROUPS * (3 if mode.AHEAD else 2)
    for run in found:
        last = len(run) - run[::-1].index("MUFU.EX2")
        assert run[:last].count("FADD") >= exponentials - (8 if TRITON < (3, 8) else 12)
        assert "F2FP" not in run[run.index("MUFU.EX2") :]


def test_the_ranking_of_sequences_needs_no_shared_memory():
    found = compile_ranking()
    assert found.spills == found.shared == 0


@pytest.mark.parametrize(
    ("there", "dtype"), [((True,) * 3, torch.int64), ((True, True, False), torch.int32), ((False,) * 3, torch.int32)]
)
def test_the_ranking_of_sequences_in_a_cache_needs_no_shared_memory(there, dtype):
    found = compile_cached_ranking(*there, dtype)
    assert found.shared == 0
    assert found.spills <= MORE_SPILLS


@pytest.mark.parametrize("seqlen", [256, 32768])
def test_named_barriers_of_triton_and_ours_are_apart(seqlen):
    call = call_of(seqlen, seqlen, 64, 64, torch.bfloat16)
    first = mode_of(call[0]).BARRIERS
    ptx = compile_forward(*call).ptx
    theirs = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    used = {int(n) for n in re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\S*\s+(\d+)", theirs)}
    assert used
    assert max(used) < first


def test_a_tile_with_more_named_barriers_than_there_are_is_refused(monkeypatch):
    """The assembler takes it without a word, and the kernel dies of an illegal instruction."""
    tile = Tile(64, 64, block_n=64, stages=4, slots=2, columns=64, warpgroups=3)
    monkeypatch.setattr(launch, "TILES", (tile,))
    monkeypatch.setattr(hopper_compiling, "plan_for", launch.plan_for.__wrapped__)
    with pytest.raises(CompilationError, match="more named barriers"):
        compile_forward(*call_of(32768, 256, 64, 64, torch.bfloat16))


def test_one_kernel_serves_all_sizes():
    """Sizes of 1, and those divisible by 16, are what Triton would specialise on."""
    sizes = ((128, 128), (256, 384), (1000, 1024))
    kernels = {compile_forward(*call_of(*lengths, 128, 128, torch.bfloat16)).ptx for lengths in sizes}
    assert len(kernels) == 1
