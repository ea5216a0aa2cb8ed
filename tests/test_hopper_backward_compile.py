"""What Triton and the assembler make of the Hopper backward kernel, on any machine."""

import re

import pytest
import torch

pytest.importorskip("tileattn.backends.hopper.launch", reason="needs Triton with Gluon", exc_type=ImportError)
import hopper_compiling
from hopper_compiling import MORE_SPILLS, call_of, compile_backward, packed
from machine_code import written_in_flight
from triton.compiler.errors import CompilationError

from tileattn.backends.entry import TRITON
from tileattn.backends.hopper import backward_launch
from tileattn.backends.hopper.backward_launch import BackwardTile
from tileattn.backends.hopper.ptx import first_barrier

# head_dim, seqlen_k, options; steps that are compiled, in the loop and behind it; bytes that may be spilled, outside
# the loop (but with a window, and where packed sequences' lengths are kept)
KERNELS = {
    "64_full": (64, 256, {}, 1, 0),
    "64_tail": (64, 300, {}, 1, 0),
    "64_causal": (64, 256, {"causal": True}, 2, 88),
    "64_window": (64, 256, {"window": (100, 30)}, 1, 136),
    "64_deterministic": (64, 256, {"causal": True, "deterministic": True}, 2, 96),
    "128_full": (128, 256, {}, 1, 0),
    "128_tail": (128, 300, {}, 1, 0),
    "128_causal": (128, 256, {"causal": True}, 2, 168),
    "128_unaligned": (128, 300, {"causal": True}, 2, 168),
    "128_window": (128, 256, {"window": (100, 30)}, 1, 128),
    "256_full": (256, 256, {}, 1, 48),
    "256_causal": (256, 256, {"causal": True}, 1, 56),
    "128_deterministic": (128, 256, {"causal": True, "deterministic": True}, 2, 168),
    "256_deterministic": (256, 256, {"causal": True, "deterministic": True}, 1, 56),
    "256_full_deterministic": (256, 256, {"deterministic": True}, 1, 16),
    "64_varlen": (64, 256, {"varlen": True}, 1, 96),
    "128_varlen": (128, 256, {"varlen": True}, 1, 0),
    "128_varlen_window": (128, 256, {"window": (100, 30), "varlen": True}, 1, 96),
    "128_varlen_causal": (128, 256, {"causal": True, "varlen": True}, 2, 176),
    "256_varlen": (256, 256, {"varlen": True}, 1, 64),
}


# Triton 3.9 spills more where every step hides scores; at what cost was not measured.
MORE_IN_WINDOWS = 128 if TRITON >= (3, 9) else 0


@pytest.mark.parametrize("name", KERNELS)
def test_products_stay_asynchronous_and_registers_suffice(name):
    head_dim, seqlen_k, options, steps, spills = KERNELS[name]
    varlen = options.get("varlen", False)
    options = {name: x for name, x in options.items() if name != "varlen"}
    call = call_of(256, seqlen_k, head_dim, head_dim, torch.bfloat16, **options)
    found = compile_backward(*(packed(call, **options) if varlen else call))
    serialised = [line for line in found.warnings if re.search("C75(10|11|12|14)", line)]
    assert serialised == []
    # k16 steps of wgmma in both warpgroups, for S, dP, dV, dQ and dK, and a wait for each; the assembler may wait
    # for S once more where products start from statistics. At head_dim 128 dP comes in halves, dV is waited for
    # with half of dK, and the first warpgroup waits for half of S. Where warpgroups share keys, dP and dK are of
    # one, S and dV of the other, whose first block is computed before the loop, and its half of the last one's dQ
    # behind it. At 64 there is one warpgroup, which computes half of its first S before the loop.
    products, waits = {64: (40, 6 * steps + 1), 128: (96, 13 * steps), 256: (72, 9 * steps)}[head_dim]
    assert found.count("HGMMA") == products * steps + (4 if head_dim == 64 else 0)
    assert waits <= sum("WARPGROUP.DEPBAR" in line for line in found.code) <= waits + steps
    assert found.spills <= spills + MORE_SPILLS + (MORE_IN_WINDOWS if "window" in options else 0)
    assert found.shared <= (113 if head_dim == 64 else 227) * 1024
    assert initialised_for_nobody(found.ttgir) == set()
    assert read_after_release(found.ptx) == []
    assert written_in_flight(found.code) == []


def test_a_register_written_in_flight_is_found():
    products = [
        "/*0010*/ HGMMA.64x64x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0 ;",
        "/*0020*/ HGMMA.64x128x16.F32.BF16 R88, gdesc[UR8], R88, gsb0 ;",
    ]
    operand, first, second, other = (f"/*0040*/ MOV R{n}, R0 ;" for n in (7, 55, 151, 8))
    assert written_in_flight([*products, operand, first, second, other]) == [operand, first, second]
    assert written_in_flight([*products, "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;", operand, first, second]) == [
        second
    ]
    assert written_in_flight([*products, "/*0030*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;", operand, first, second]) == []


def initialised_for_nobody(ttgir):
    """mbarriers that no partition is given. Triton takes those for dead and puts other things into their memory, where
    the hardware may still write what it knows of them."""
    mbarriers = re.findall(r"(%\S+) = ttg\.local_alloc : \(\) -> !ttg\.memdesc<\d+x1xi64", ttgir)
    assert mbarriers
    return set(mbarriers) - set(re.search(r"ttg\.warp_specialize\((.*?)\)", ttgir)[1].split(", "))


def read_after_release(ptx):
    """Loads of a tile's Work behind the arrival, one of 352 threads (a warpgroup alone: 192; deterministic at head_dim
    256: 384), that lets it be overwritten."""
    found, released, releases = [], False, 0
    for line in ptx.splitlines():
        if re.search(r"\bbar(?:rier)?\.\S*(?:sync|arrive)|try_wait|setmaxnreg", line):
            released = re.search(r"\bbar\.arrive %r\d+, (352|192|384);", line) is not None
            releases += released
        elif released and "ld.shared.b32" in line:
            found.append(line.strip())
    assert releases
    return found


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_all_warps_have_read_ds_before_dq_takes_its_place(options):
    """At head_dim 128 the second part of dQ is stored where the warpgroup's product has read dS. Each warp knows of
    itself that it is over, so a barrier of the warpgroup, which Triton puts in, has to stand in between."""
    ptx = compile_backward(*call_of(256, 256, 128, 128, torch.bfloat16, **options)).ptx
    events = re.findall(r"(w)gmma\.wait|(s)t\.shared(?:::cta)?\.v4|(b)ar\.sync\s+\d, 128;", ptx)
    events = "".join(map("".join, events))
    stores = [x for x in re.findall(r"ws[sb]{15,}", events) if x.count("s") == 16]  # sums of dV and dK are 32
    assert len(stores) == 4  # of both warpgroups' steps, of which one hides scores
    assert all(re.match(r"ws{8}b+s{8}", x) for x in stores)


def test_all_of_ds_is_there_before_its_own_warpgroup_multiplies_it():
    """At head_dim 256 the second warpgroup stores dS and multiplies it: a barrier of its warps has to stand in between,
    which Triton puts in, and behind the fence."""
    ptx = compile_backward(*call_of(256, 256, 256, 256, torch.bfloat16)).ptx
    step = ptx[ptx.rindex("ldmatrix") :]  # it alone loads P
    assert re.search(
        r"stmatrix.*fence\.proxy\.async.*bar\.sync\s+\d, 128;", step[: step.index("m64n128k16")], re.DOTALL
    )


ALIBI = {"alibi_slopes": torch.ones(1, 2)}


@pytest.mark.parametrize(
    ("head_dim", "options", "spills"),
    [
        (64, {"softcap": 3.0}, 0),
        (64, {"causal": True, **ALIBI}, 0),
        (128, ALIBI, 200),
        (256, {"causal": True, **ALIBI}, 80),
    ],
    ids=["64_softcap", "64_alibi", "128_alibi", "256_alibi"],
)
def test_softcap_and_alibi_fit(head_dim, options, spills):
    found = compile_backward(*call_of(256, 256, head_dim, head_dim, torch.bfloat16, **options))
    assert found.warnings == []
    assert found.spills <= spills + (MORE_SPILLS if spills else 0)


@pytest.mark.parametrize(("head_dim", "deterministic", "partitions"), [(64, False, 3), (128, False, 5), (256, True, 5)])
def test_named_barriers_of_triton_and_ours_are_apart(head_dim, deterministic, partitions):
    """The last has six partitions: Triton has a barrier for each, but uses those of more warps than one alone."""
    call = call_of(256, 256, head_dim, head_dim, torch.bfloat16, deterministic=deterministic)
    ptx = compile_backward(*call).ptx
    theirs = re.sub(r"// begin inline asm.*?// end inline asm", "", ptx, flags=re.DOTALL)
    used = {int(n) for n in re.findall(r"\bbar(?:rier)?\.(?:sync|arrive)\S*\s+(\d+)", theirs)}
    assert used
    assert max(used) < first_barrier(partitions)


def test_a_tile_with_more_named_barriers_than_there_are_is_refused(monkeypatch):
    tile = BackwardTile(64, 64, block_m=64, key_stages=2, dout_stages=3)
    monkeypatch.setattr(backward_launch, "BACKWARD_TILES", (tile,))
    monkeypatch.setattr(hopper_compiling, "backward_plan_for", backward_launch.backward_plan_for.__wrapped__)
    with pytest.raises(CompilationError, match="more named barriers"):
        compile_backward(*call_of(256, 256, 64, 64, torch.bfloat16))


@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=["full", "causal"])
def test_one_kernel_serves_all_sizes(options):
    """Sizes of 1, and those divisible by 16, are what Triton would specialise on."""
    sizes = ((128, 128), (256, 384), (1024, 1024))
    kernels = {compile_backward(*call_of(*lengths, 128, 128, torch.bfloat16, **options)).ptx for lengths in sizes}
    assert len(kernels) == 1
