"""The kernels of a cache compile for GPUs that are not here, and for Hopper within a budget of spills."""

import pytest
import torch

pytest.importorskip("triton")

import triton
from cache_compiling import compile_cache_call
from compiling import TARGETS, layouts_of_exponentials

from tileattn.backends.portable import kvcache
from tileattn.kvcache import CacheProblem

EVERYTHING = {
    "window": (100, 0),
    "softcap": 3.0,
    "alibi_slopes": torch.zeros(2, 8),
    "mask": torch.ones(4, 4, dtype=torch.bool),
    "sink": torch.zeros(8),
    "cache_leftpad": torch.zeros(2, dtype=torch.int32),
    "rotary_cos": torch.zeros(2000, 32),
    "rotary_sin": torch.zeros(2000, 32),
}


def problem(head_dim=128, rows=1, heads=8, heads_k=2, page_size=16, dtype=torch.bfloat16, **options):
    q = torch.zeros(2, rows, heads, head_dim, dtype=dtype)
    k = torch.zeros(2, rows, heads_k, head_dim, dtype=dtype)
    k_cache, v_cache = torch.zeros(2, 4, page_size, heads_k, head_dim, dtype=dtype).unbind(0)
    table = torch.zeros(2, 1024 // page_size, dtype=torch.int32)
    lengths = torch.zeros(2, dtype=torch.int32)
    return CacheProblem.of(q, k_cache, v_cache, k, k, cache_seqlens=lengths, block_table=table, **options)


def latent():
    """MLA: 128 query heads on one latent head, v in k's memory."""
    cache = torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)
    lengths, table = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 16, dtype=torch.int32)
    q, k = torch.zeros(2, 1, 128, 576, dtype=torch.bfloat16), torch.zeros(2, 1, 1, 576, dtype=torch.bfloat16)
    return CacheProblem.of(q, cache, cache[..., :512], k, cache_seqlens=lengths, block_table=table)


def table_of(target):
    return kvcache.HOPPER if target == "sm90" else kvcache.DEFAULT


def names(compiled):
    return [c.name for c in compiled]


@pytest.mark.parametrize(
    "target", [pytest.param(t, marks=[] if t in ("sm80", "gfx942") else pytest.mark.exhaustive) for t in TARGETS]
)
def test_decoding_compiles(target):
    compiled = compile_cache_call(*problem(causal=True), TARGETS[target], table_of(target))
    assert names(compiled) == ["append_kernel", "decode_kernel", "combine_kernel"]


def test_chunks_of_a_prompt_that_fill_the_device_without_splits_compile():
    compiled = compile_cache_call(*problem(rows=64, causal=True), TARGETS["sm90"], kvcache.HOPPER, multiprocessors=1)
    assert names(compiled) == ["append_kernel", "decode_kernel"]


@pytest.mark.parametrize("target", ["sm90", pytest.param("gfx942", marks=pytest.mark.exhaustive)])
def test_all_options_together_compile(target):
    compile_cache_call(*problem(64, rows=4, **EVERYTHING), TARGETS[target], table_of(target))


def test_exponentials_are_computed_once_beside_a_mask():
    tree = torch.ones(4, 4, dtype=torch.bool)
    *_, decode, _ = compile_cache_call(*problem(rows=4, mask=tree), TARGETS["sm90"], kvcache.HOPPER)
    assert layouts_of_exponentials(decode) == {"mma"}


@pytest.mark.exhaustive
@pytest.mark.parametrize("head_dim", [40, 64, 80, 192, 256, 512])
@pytest.mark.parametrize("target", TARGETS)
def test_other_head_dims_compile(target, head_dim):
    compile_cache_call(*problem(head_dim), TARGETS[target], table_of(target))


def test_float32_compiles():
    compile_cache_call(*problem(dtype=torch.float32), TARGETS["sm80"], kvcache.FLOAT32)


@pytest.mark.parametrize(("rows", "budget"), [(1, 32), (4, 32), (512, 32)])
def test_hopper_kernels_stay_in_registers(rows, budget):
    decode = compile_cache_call(*problem(rows=rows, causal=True), TARGETS["sm90"], kvcache.HOPPER)[1]
    assert decode.spills <= budget, f"{decode.spills} bytes spilled"
    assert decode.shared <= 227 * 1024
    assert any("LDGSTS" in line for line in decode.code), "keys are not loaded ahead"


def test_latent_attention_stays_in_registers_on_hopper():
    decode = compile_cache_call(*latent(), TARGETS["sm90"], kvcache.HOPPER)[1]
    budget = 72 if triton.__version__.startswith("3.8.") else 0  # 0 with 3.6, 3.7 and 3.9
    assert decode.spills <= budget, f"{decode.spills} bytes spilled"
    assert decode.shared <= 227 * 1024
