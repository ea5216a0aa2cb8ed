"""FlashAttention-2 backward, deterministic: one kernel walks down a block of keys, one along a block of rows.

With P the probabilities, dP = dout v^T and delta = rowsum(dout * out) - dlse:

    dS = P * (dP - delta);  dq = scale dS k;  dk = scale dS^T q;  dv = P^T dout

Every block recomputes P from q, k and lse, and every gradient is summed by one program in one order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tileattn.backends.portable.backward_bias import backward_bias_kernel
from tileattn.backends.portable.codegen import captured_by, functions_of
from tileattn.backends.portable.device.dropout import keep_tile
from tileattn.backends.portable.device.gradients import probabilities, row_statistics, score_gradient
from tileattn.backends.portable.device.masks import tile_at, visible, walk_of
from tileattn.backends.portable.device.rows import (
    PAD,
    SIZES,
    Rows,
    Sequences,
    load_block,
    load_rows,
    locate,
    open_rows,
    sized,
    span,
    store_block,
    workspace_at,
)
from tileattn.backends.portable.device.scores import (
    distance,
    open_head,
    score_tile,
    score_unit,
    uncap,
    unmodify,
)
from tileattn.backends.portable.launch import (
    Launch,
    Launcher,
    Mode,
    block_dim_of,
    empty_like,
    mode_of,
    modifiers_of,
    operand_of,
    operands_of,
    rows_of,
    sequences_of,
    stats_of,
    workspace,
    workspace_of,
)
from tileattn.backends.portable.sparsity import Along, list_tiles, sparsity_of, with_found_blocks
from tileattn.backends.portable.tuning import Tile, tile_for
from tileattn.problem import Forward, Gradients, Inputs, Problem, Wanted


@triton.jit(do_not_specialize=SIZES)
def delta_kernel(
    out,
    dout,
    lse,
    dlse,
    based_lse,
    delta,
    seqlen_q,
    seqlen_k,
    cu_seqlens_q,
    cu_seqlens_k,
    total_q,
    total_k,
    num_heads,
    window_left,
    window_right,
    mode,
    BLOCK_M: tl.constexpr,
):
    """The statistics of rows for other kernels, where `backward_q_kernel` does not run."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    block, head, batch = locate(tl.program_id(0), tl.cdiv(seqs.seqlen_q, PAD) * (PAD // BLOCK_M), seqs.num_heads)
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_m = block * BLOCK_M
    offs_m = start_m + tl.arange(0, BLOCK_M)
    out_tile = load_block(out, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    dout_tile = load_block(dout, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    row_lse, row_delta = row_statistics(
        out_tile, dout_tile, lse, dlse, batch, head, start_q, offs_m, seqlen_q, mode
    )  # fmt: skip
    padded = offs_m < tl.cdiv(seqlen_q, PAD) * PAD
    tl.store(workspace_at(based_lse, batch, head, start_q) + offs_m, row_lse, mask=padded)
    tl.store(workspace_at(delta, batch, head, start_q) + offs_m, row_delta, mask=padded)


@triton.jit
def _walk_rows(
    dk, dv, lo, hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows, lse_ptr, delta_ptr, in_head, seqs, mods, mode,
    WANT_K: tl.constexpr, WANT_V: tl.constexpr, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the rows at the places [lo, hi) give to the gradients of a block of keys. Score tiles are transposed:
    keys down."""
    unit = score_unit(mods, mode)
    ahead = tile_at(lo, tiles, mode, BLOCK_M)
    for place in tl.range(lo, hi, BLOCK_M):
        start_m = place
        if mode.listed:
            start_m = ahead
            ahead = tile_at(place + BLOCK_M, tiles, mode, BLOCK_M)
        offs_m = start_m + tl.arange(0, BLOCK_M)
        rows = offs_m[None, :]
        cols = (start_n + tl.arange(0, BLOCK_N))[:, None]
        q_tile = load_rows(q_rows, start_m, mode, True)  # [BLOCK_M, BLOCK_DIM]
        qk = tl.dot(k_tile, q_tile.T, input_precision=mode.precision)  # [BLOCK_N, BLOCK_M]
        row_lse = tl.load(lse_ptr + offs_m)
        s, capped, raw = score_tile(qk, rows, cols, in_head, mods, mode, True)
        p = probabilities(s, unit, row_lse[None, :], mode)
        if MASKED:
            p = tl.where(visible(rows, cols, start_m, start_n, in_head, seqs, mods, mode), p, 0.0)
        dout_tile = load_rows(dout_rows, start_m, mode, True)  # [BLOCK_M, BLOCK_DV]
        dropped = p
        if mods.seed is not None:
            keep = keep_tile(offs_m, start_n, in_head, mods, BLOCK_M, BLOCK_N).T
            dropped = tl.where(keep, p * mods.rescale, 0.0)
        if WANT_V:
            dv = tl.dot(dropped.to(dout_tile.dtype), dout_tile, dv, input_precision=mode.precision)
        if WANT_K:
            dp = tl.dot(v_tile, dout_tile.T, input_precision=mode.precision)
            if mods.seed is not None:
                dp = tl.where(keep, dp * mods.rescale, 0.0)
            row_delta = tl.load(delta_ptr + offs_m)
            ds = unmodify(p * (dp - row_delta[None, :]), p, raw, rows, cols, in_head, mode)
            ds = uncap(ds, capped, mods)
            dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=mode.precision)
    return dk, dv


@triton.jit(do_not_specialize=SIZES)
def backward_kv_kernel(
    q,
    k,
    v,
    dout,
    based_lse,
    delta,
    dk,
    dv,
    seqlen_q,
    seqlen_k,
    cu_seqlens_q,
    cu_seqlens_k,
    total_q,
    total_k,
    num_heads,
    window_left,
    window_right,
    mods,
    blocks,
    captured,
    mode,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dk and dv of one block of keys (those that are not None), over all rows of all the query heads that read it."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    block, head_k, batch = locate(tl.program_id(0), tl.cdiv(seqs.seqlen_k, BLOCK_N), seqs.num_heads // group)
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_k, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
    start_n = block * BLOCK_N
    WANT_K: tl.constexpr = dk is not None
    WANT_V: tl.constexpr = dv is not None
    if seqs.cu_seqlens_k is not None and start_n >= seqlen_k:
        return

    k_tile = load_block(k, batch, head_k, start_k, start_n, seqlen_k, mode, mode.dim, mode.block_dim, BLOCK_N)
    v_tile = load_block(v, batch, head_k, start_k, start_n, seqlen_k, mode, mode.dim_v, mode.block_dim_v, BLOCK_N)
    dk_tile = tl.zeros([BLOCK_N, mode.block_dim], tl.float32)
    dv_tile = tl.zeros([BLOCK_N, mode.block_dim_v], tl.float32)

    for member in tl.range(0, group, num_stages=1):  # the walk inside is what to pipeline
        head = head_k * group + member
        q_rows = open_rows(q, batch, head, start_q, seqlen_q, mode, mode.dim, mode.block_dim, BLOCK_M)
        dout_rows = open_rows(dout, batch, head, start_q, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
        lse_ptr = workspace_at(based_lse, batch, head, start_q)
        delta_ptr = workspace_at(delta, batch, head, start_q)
        in_head = open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k)
        # rows past the end need no mask: they are zeros, of probability 0
        left_lo, left_hi, whole_lo, whole_hi, right_lo, right_hi, tiles = walk_of(
            block, start_n, tl.cdiv(seqlen_q, BLOCK_M) * BLOCK_M, seqlen_q - seqlen_k,
            seqs.window_right, seqs.window_left, in_head, mode, mode.right, mode.left, BLOCK_N, BLOCK_M,
        )  # fmt: skip
        if mode.right and mode.ranges:
            dk_tile, dv_tile = _walk_rows(
                dk_tile, dv_tile, left_lo, left_hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows,
                lse_ptr, delta_ptr, in_head, seqs, mods, mode, WANT_K, WANT_V, True, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if mode.ranges or mode.listed:
            dk_tile, dv_tile = _walk_rows(
                dk_tile, dv_tile, whole_lo, whole_hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows,
                lse_ptr, delta_ptr, in_head, seqs, mods, mode, WANT_K, WANT_V, False, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        if mode.left or not mode.ranges:
            dk_tile, dv_tile = _walk_rows(
                dk_tile, dv_tile, right_lo, right_hi, tiles, k_tile, v_tile, start_n, q_rows, dout_rows,
                lse_ptr, delta_ptr, in_head, seqs, mods, mode, WANT_K, WANT_V, True, BLOCK_M, BLOCK_N,
            )  # fmt: skip

    if WANT_K:
        dk_tile *= mods.scale
        store_block(dk, dk_tile, batch, head_k, start_k, start_n, seqlen_k, mode.dim, mode.block_dim, BLOCK_N)
    if WANT_V:
        store_block(dv, dv_tile, batch, head_k, start_k, start_n, seqlen_k, mode.dim_v, mode.block_dim_v, BLOCK_N)


@triton.jit
def _walk_keys(
    dq, dslope, lo, hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m, k_rows, v_rows, in_head, seqs, mods,
    mode, MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Add what the keys at the places [lo, hi) give to the gradients of a block of rows and of its ALiBi slope."""
    ahead = tile_at(lo, tiles, mode, BLOCK_N)
    for place in tl.range(lo, hi, BLOCK_N):
        start_n = place
        if mode.listed:
            start_n = ahead
            ahead = tile_at(place + BLOCK_N, tiles, mode, BLOCK_N)
        k_tile = load_rows(k_rows, start_n, mode, MASKED)  # [BLOCK_N, BLOCK_DIM]
        v_tile = load_rows(v_rows, start_n, mode, MASKED)  # [BLOCK_N, BLOCK_DV]
        ds, dqk = score_gradient(
            q_tile, k_tile, v_tile, dout_tile, row_lse, row_delta, start_m, start_n, in_head, seqs, mods, mode,
            MASKED, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if mods.alibi is not None:
            rows = (start_m + tl.arange(0, BLOCK_M))[:, None]
            cols = (start_n + tl.arange(0, BLOCK_N))[None, :]
            dslope -= tl.sum(ds * distance(rows, cols, in_head.seqlen_q, in_head.seqlen_k), 1)
        dq = tl.dot(dqk.to(k_tile.dtype), k_tile, dq, input_precision=mode.precision)  # [BLOCK_M, BLOCK_DIM]
    return dq, dslope


@triton.jit(do_not_specialize=SIZES)
def backward_q_kernel(
    q,
    k,
    v,
    dout,
    based_lse,
    delta,
    out,
    lse,
    dlse,
    dq,
    dslope,
    seqlen_q,
    seqlen_k,
    cu_seqlens_q,
    cu_seqlens_k,
    total_q,
    total_k,
    num_heads,
    window_left,
    window_right,
    mods,
    blocks,
    captured,
    mode,
    group,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """dq of one block of rows, its statistics for other kernels, and its share of the gradient of the ALiBi slope:
    dslope (batch, heads, blocks)."""
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    pid = tl.program_id(0)
    blocks_m = tl.cdiv(seqs.seqlen_q, BLOCK_M)
    block, head, batch = locate(pid, blocks_m, seqs.num_heads)
    if mode.right:
        reverse = blocks_m - 1 - block
        pid += reverse - block
        block = reverse
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_k, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
    start_m = block * BLOCK_M
    if seqs.cu_seqlens_q is not None and start_m >= seqlen_q:
        if dslope is not None:
            tl.store(dslope + pid, 0.0)
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)

    k_rows = open_rows(k, batch, head // group, start_k, seqlen_k, mode, mode.dim, mode.block_dim, BLOCK_N)
    v_rows = open_rows(v, batch, head // group, start_k, seqlen_k, mode, mode.dim_v, mode.block_dim_v, BLOCK_N)
    in_head = open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k)

    q_tile = load_block(q, batch, head, start_q, start_m, seqlen_q, mode, mode.dim, mode.block_dim, BLOCK_M)
    dout_tile = load_block(dout, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    out_tile = load_block(out, batch, head, start_q, start_m, seqlen_q, mode, mode.dim_v, mode.block_dim_v, BLOCK_M)
    row_lse, row_delta = row_statistics(
        out_tile, dout_tile, lse, dlse, batch, head, start_q, offs_m, seqlen_q, mode
    )  # fmt: skip
    lse_ptr = workspace_at(based_lse, batch, head, start_q)
    delta_ptr = workspace_at(delta, batch, head, start_q)
    tl.store(lse_ptr + offs_m, row_lse)
    tl.store(delta_ptr + offs_m, row_delta)
    if start_m + BLOCK_M >= seqlen_q:  # the padding, which no block of rows covers
        beyond = start_m + BLOCK_M + tl.arange(0, PAD)
        padding = beyond < tl.cdiv(seqlen_q, PAD) * PAD
        tl.store(lse_ptr + beyond, float("inf"), mask=padding)
        tl.store(delta_ptr + beyond, 0.0, mask=padding)
    dq_tile = tl.zeros([BLOCK_M, mode.block_dim], tl.float32)
    slope_tile = tl.zeros([BLOCK_M], tl.float32)

    left_lo, left_hi, whole_lo, whole_hi, right_lo, right_hi, tiles = walk_of(
        block, start_m, seqlen_k, seqlen_k - seqlen_q, seqs.window_left, seqs.window_right, in_head, mode,
        mode.left, mode.right, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if mode.left and mode.ranges:
        dq_tile, slope_tile = _walk_keys(
            dq_tile, slope_tile, left_lo, left_hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m,
            k_rows, v_rows, in_head, seqs, mods, mode, True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if mode.ranges or mode.listed:
        dq_tile, slope_tile = _walk_keys(
            dq_tile, slope_tile, whole_lo, whole_hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m,
            k_rows, v_rows, in_head, seqs, mods, mode, False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    dq_tile, slope_tile = _walk_keys(
        dq_tile, slope_tile, right_lo, right_hi, tiles, q_tile, dout_tile, row_lse, row_delta, start_m,
        k_rows, v_rows, in_head, seqs, mods, mode, True, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    dq_tile *= mods.scale
    store_block(dq, dq_tile, batch, head, start_q, start_m, seqlen_q, mode.dim, mode.block_dim, BLOCK_M)
    if dslope is not None:
        tl.store(dslope + pid, tl.sum(slope_tile, 0))


def backward(
    problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    return Backward(problem, inputs, forward, dout, dlse).gradients(wanted)


class _Walk(NamedTuple):
    """What sets a kernel apart from others that recompute P. outputs: what it takes after the statistics of rows, most
    of it to write. extra: arguments at its end that others do not take."""

    programs: int
    outputs: tuple[Any, ...]
    extra: tuple[Any, ...] = ()


class _Saved(NamedTuple):
    """What forward left, its gradients, and how they are loaded."""

    mode: Mode
    out: Tensor
    lse: Tensor
    dlse: Tensor | None


class Backward:
    """The launches of one backward call, over what they share."""

    def __init__(
        self, problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None
    ) -> None:
        self.problem, self.inputs = problem, inputs = with_found_blocks(problem, inputs)
        if dout is None:
            dout = torch.zeros_like(forward.out)
        dout = dout if dout.stride(-1) == 1 else dout.contiguous()
        dlse = None if dlse is None else dlse.contiguous()
        self.launcher = Launcher(problem, inputs, forward.out, forward.lse.contiguous(), dout, dlse)
        self.lse, self.delta = (workspace(problem, inputs, fill) for fill in (math.inf, 0.0))

    def gradients(self, wanted: Wanted) -> Gradients:
        dq, dslopes = None, None
        if wanted.q or wanted.alibi_slopes:  # first: the others need the statistics of rows
            dq, dslopes = self.query_gradients()
        else:
            self.statistics()
        dk, dv = self.key_gradients(wanted)
        return Gradients(
            dq if wanted.q else None,
            dk,
            dv,
            self._bias_gradient() if wanted.bias else None,
            dslopes if wanted.alibi_slopes else None,
            self._sink_gradient() if wanted.sink else None,
        )

    def statistics(self) -> None:
        p = self.problem

        def describe(
            inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Any, based_lse: Tensor, delta: Tensor
        ) -> Launch:
            tile = Tile(max(16, min(128, 8192 // block_dim_of(p.head_dim_v))), 0, 4, 1)
            return Launch(
                p.batch * p.num_heads * triton.cdiv(p.seqlen_q, PAD.value) * (PAD.value // tile.block_m),
                tile,
                (
                    rows_of(out),
                    rows_of(dout),
                    stats_of(lse),
                    stats_of(dlse),
                    workspace_of(based_lse),
                    workspace_of(delta),
                    *sequences_of(p, inputs),
                    mode_of(replace(p, window_left=-1, window_right=-1), tile, out, dout),
                    tile.block_m,
                ),
            )

        self.launcher.launch(delta_kernel, describe, self.lse, self.delta)

    def key_gradients(self, wanted: Wanted) -> tuple[Tensor | None, Tensor | None]:
        p = self.problem
        dk = empty_like(self.inputs.k) if wanted.k else None
        dv = empty_like(self.inputs.v) if wanted.v else None
        tile = tile_for(p, "backward_kv")
        if tile.dv is None:
            self._walk_down(tile, dk, dv)
        else:
            self._walk_down(tile, dk, None)
            self._walk_down(tile.dv, None, dv)
        return dk, dv

    def _walk_down(self, tile: Tile, dk: Tensor | None, dv: Tensor | None) -> None:
        def describe(_: _Saved, dk: Tensor | None, dv: Tensor | None) -> _Walk:
            programs = self.problem.batch * self.problem.num_heads_k * triton.cdiv(self.problem.seqlen_k, tile.block_n)
            return _Walk(programs, tuple(None if x is None else rows_of(x) for x in (dk, dv)))

        if dk is not None or dv is not None:
            self._walk(backward_kv_kernel, tile, "rows", describe, dk, dv)

    def query_gradients(self) -> tuple[Tensor, Tensor | None]:
        p, slopes = self.problem, self.inputs.alibi_slopes
        tile = tile_for(p, "backward_q")
        blocks_m = -(-p.seqlen_q // tile.block_m)
        dq = empty_like(self.inputs.q)
        dslope = None if slopes is None else self.delta.new_empty(p.batch, p.num_heads, blocks_m)

        def describe(saved: _Saved, dq: Tensor, dslope: Tensor | None) -> _Walk:
            out = operand_of(saved.mode, saved.out, tile.block_m)
            outputs = out, stats_of(saved.lse), stats_of(saved.dlse), rows_of(dq), dslope
            return _Walk(p.batch * p.num_heads * blocks_m, outputs)

        self._walk(backward_q_kernel, tile, "keys", describe, dq, dslope)
        if slopes is None or dslope is None:
            return dq, None
        dslope = dslope.sum(-1)
        return dq, (dslope.sum(0, keepdim=True) if slopes.shape[0] == 1 else dslope).to(slopes.dtype)

    def _bias_gradient(self) -> Tensor:
        p, bias = self.problem, self.inputs.bias
        assert bias is not None
        dbias, tile = empty_like(bias), tile_for(p, "backward_q")

        def describe(_: _Saved, dbias: Tensor) -> _Walk:
            batch, heads, rows, cols = dbias.shape
            shared_rows, shared_cols = rows == 1, cols == 1
            blocks_m = 1 if shared_rows else triton.cdiv(p.seqlen_q, tile.block_m)
            blocks_n = 1 if shared_cols else triton.cdiv(p.seqlen_k, tile.block_n)
            return _Walk(
                batch * heads * blocks_m * blocks_n,
                (Rows(dbias, 0, sized(cols)[0], sized(rows * cols)[0], tl.constexpr(1)),),
                (p.batch // max(batch, 1), p.num_heads // heads, shared_rows, shared_cols),
            )

        self._walk(backward_bias_kernel, tile, None, describe, dbias)
        return dbias

    def _sink_gradient(self) -> Tensor:
        """The sink is one more score, with probability exp(sink - lse) and no value: its dP is 0."""
        sink = self.inputs.sink
        assert sink is not None
        base = 1.0 if self.problem.dtype == torch.float32 else math.log(2.0)
        probs = torch.exp(sink.to(torch.float32)[:, None] - self.lse * base)
        dims = (1,) if self.problem.varlen else (0, 2)
        return -(probs * self.delta).sum(dims).to(sink.dtype)

    def _walk(
        self,
        kernel: Any,
        tile: Tile,
        along: Along | None,
        describe_outputs: Callable[..., _Walk],
        *outputs: Tensor | None,
    ) -> None:
        """Launch a kernel that recomputes P; describe_outputs(saved, *outputs) tells what sets it apart from others.
        along: which way it walks, None if not through lists."""
        p = self.problem
        lists = None if along is None else list_tiles(self.launcher, p, self.inputs, tile, along)

        def describe(
            inputs: Inputs, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None, based_lse: Tensor,
            delta: Tensor, lists: Tensor | None, *outputs: Any,
        ) -> Launch:  # fmt: skip
            q, k, v = inputs[:3]
            sparsity = sparsity_of(p, inputs, tile, lists)
            mode = mode_of(p, tile, q, k, v, dout, out, functions=functions_of(p, inputs), sparsity=sparsity)
            walk = describe_outputs(_Saved(mode, out, lse, dlse), *outputs)
            return Launch(
                walk.programs,
                tile,
                (
                    *operands_of(mode, tile, q, k, v, dout),
                    workspace_of(based_lse),
                    workspace_of(delta),
                    *walk.outputs,
                    *sequences_of(p, inputs),
                    modifiers_of(p, inputs),
                    sparsity.blocks,
                    captured_by(inputs),
                    mode,
                    p.group,
                    *walk.extra,
                    tile.block_m,
                    tile.block_n,
                ),
            )

        role = tuple([x is None for x in outputs])
        self.launcher.launch(kernel, describe, self.lse, self.delta, lists, *outputs, role=role)
