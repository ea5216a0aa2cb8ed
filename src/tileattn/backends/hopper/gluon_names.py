"""Gluon's Hopper names under one spelling for Triton 3.6 to 3.9: the only file that knows how they changed."""

import triton
from triton._C.libtriton import ir
from triton.experimental.gluon.language._core import builtin, shared_memory_descriptor
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.core import _aggregate as aggregate

from tileattn.backends.entry import KNOWN, TRITON

__all__ = [
    "aggregate",
    "fence_async_shared",
    "mbarrier",
    "reinterpret",
    "store_wait",
    "tma_load",
    "tma_reduce_add",
    "tma_store",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]

if TRITON not in KNOWN:
    first, *_, last = (".".join(map(str, version)) for version in KNOWN)
    raise ImportError(
        f"Triton {triton.__version__}: this backend knows Gluon, which is experimental, of {first} to {last}"
    )

tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global
store_wait = tma.store_wait
if hasattr(shared_memory_descriptor, "reinterpret"):
    reinterpret = shared_memory_descriptor.reinterpret
else:
    reinterpret = shared_memory_descriptor._reinterpret

if hasattr(tma, "async_atomic_add"):
    tma_reduce_add = tma.async_atomic_add
else:

    @builtin
    def tma_reduce_add(desc, coord, src, _semantic=None):
        """Add a block of shared memory to global memory: an instruction that Triton 3.6 knows and Gluon does not."""
        coord = _semantic._convert_to_ir_values(coord, require_i64=False)
        _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, coord, src.handle)
