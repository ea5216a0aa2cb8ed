"""Compile the kernels of a cache for GPUs that this machine does not have, through the launchers that users run."""

from __future__ import annotations

from unittest import mock

import triton
from compiling import Compiled, _Driver, _measure
from triton.backends.compiler import GPUTarget

from tileattn.backends.portable import kvcache, launch
from tileattn.backends.portable.launch import compile_options
from tileattn.kvcache import Append, CacheInputs, CacheProblem


def compile_cache_call(
    problem: CacheProblem, inputs: CacheInputs, target: GPUTarget, table: kvcache.Table, multiprocessors: int = 132
) -> list[Compiled]:
    """Every kernel of a call, appending first if it does."""
    found: list[Compiled] = []

    def record(kernel, call):
        options = compile_options(call.tile)
        compiled = kernel.run(*call.args, grid=(call.programs,), warmup=True, **options)
        found.append(_measure(kernel.__name__, compiled, target))

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(_Driver(target, True))
    try:
        with (
            mock.patch.object(launch, "start", record),
            mock.patch.object(kvcache, "_table_for", return_value=table),
            mock.patch.object(kvcache, "_multiprocessors", return_value=multiprocessors),
            mock.patch.object(kvcache, "_plan", kvcache._plan.__wrapped__),
        ):
            if inputs.k is not None:
                x, v_cache = inputs, None if inputs.v is None else inputs.v_cache
                where = x.table, x.cache_seqlens, x.cu_seqlens_k, x.rotary_cos, x.rotary_sin
                append = Append(x.k_cache, v_cache, x.k, x.v, *where, problem.batch, 0, problem.rotary_interleaved)
                kvcache.append(append)
            kvcache.attend(problem, inputs)
    finally:
        triton.runtime.driver._active = before
    return found
