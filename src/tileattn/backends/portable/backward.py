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

from tileattn.backends import ahead
from tileattn.backends.portable.backward_bias import backward_bias_kernel
from tileattn.backends.portable.backward_kv import backward_kv_kernel
from tileattn.backends.portable.backward_q import backward_q_kernel, delta_kernel
from tileattn.backends.portable.codegen import captured_by, functions_of
from tileattn.backends.portable.device.rows import PAD, Rows, sized
from tileattn.backends.portable.launch import (
    Anticipation,
    Launch,
    Launcher,
    Mode,
    empty_like,
    in_whole_pieces,
    mode_of,
    modifiers_of,
    narrowed,
    operand_of,
    operands_of,
    rows_of,
    sequences_of,
    stats_of,
    with_whole_pieces,
    workspace,
    workspace_of,
)
from tileattn.backends.portable.sparsity import Along, list_tiles, sparsity_of, with_found_blocks
from tileattn.backends.portable.tuning import Tile, block_dim_of, tile_for
from tileattn.problem import Forward, Gradients, Inputs, Problem, Wanted


def backward(
    problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
) -> Gradients:
    ahead.wait()
    return Backward(problem, inputs, forward, dout, dlse).gradients(wanted)


def anticipate(
    problem: Problem, inputs: Inputs, forward: Forward, dout: Tensor | None, dlse: Tensor | None, wanted: Wanted
) -> None:
    Backward(problem, inputs, forward, dout, dlse, Anticipation).gradients(wanted)


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
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor | None,
        dlse: Tensor | None,
        launcher: type[Launcher] = Launcher,
    ) -> None:
        self.head_dims = problem.head_dim, problem.head_dim_v  # before they are padded
        problem, inputs = with_whole_pieces(problem, inputs)
        self.problem, self.inputs = problem, inputs = with_found_blocks(problem, inputs, launcher)
        out = in_whole_pieces(forward.out)
        if dout is None:
            dout = torch.zeros_like(out)
        dout = in_whole_pieces(dout if dout.stride(-1) == 1 else dout.contiguous())
        dlse = None if dlse is None else dlse.contiguous()
        self.launcher = launcher(problem, inputs, out, forward.lse.contiguous(), dout, dlse)
        self.lse, self.delta = (workspace(problem, inputs, fill) for fill in (math.inf, 0.0))

    def gradients(self, wanted: Wanted) -> Gradients:
        dq, dslopes = None, None
        if wanted.q or wanted.alibi_slopes:  # first: the others need the statistics of rows
            dq, dslopes = self.query_gradients()
        else:
            self.statistics()
        dk, dv = self.key_gradients(wanted)
        head_dim, head_dim_v = self.head_dims
        return Gradients(
            narrowed(dq, head_dim) if wanted.q else None,
            narrowed(dk, head_dim),
            narrowed(dv, head_dim_v),
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
        tile = tile._replace(num_stages=min(tile.num_stages, 2))  # holds nothing, so that stages take more room

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
        return -(probs * self.delta).sum(dims, dtype=torch.float64).to(sink.dtype)

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
        lists = list_tiles(self.launcher, p, self.inputs, tile, along) if p.block_size and along else None

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
