"""FlashAttention-2 forward: one program a block of query rows, which stays on the chip while k and v pass by."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from tileattn.backends.portable.codegen import captured_by, functions_of
from tileattn.backends.portable.device.dropout import keep_tile
from tileattn.backends.portable.device.masks import entry_at, read_for_mask, tile_of, visible, walk_of
from tileattn.backends.portable.device.rows import (
    SIZES,
    Sequences,
    held,
    load_block,
    load_rows,
    locate,
    open_rows,
    span,
    stats_at,
    store_block,
)
from tileattn.backends.portable.device.scores import open_head, read_for_scores, score_tile, score_unit
from tileattn.backends.portable.device.softmax import add_sink, from_natural, logsumexp, online_softmax
from tileattn.backends.portable.launch import (
    Launch,
    Launcher,
    mode_of,
    modifiers_of,
    narrowed,
    operands_of,
    rows_of,
    sequences_of,
    stats_of,
    with_whole_pieces,
)
from tileattn.backends.portable.sparsity import list_tiles, sparsity_of, with_found_blocks
from tileattn.backends.portable.tuning import tile_for
from tileattn.problem import Forward, Inputs, Problem


@triton.jit
def _attend(
    acc, m_i, l_i, lo, hi, tiles, q_tile, start_m, k_rows, v_rows, in_head, seqs, mods, mode,
    MASKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Fold the tiles of k and v at the places [lo, hi) into the accumulator, the row maxima and the row sums."""
    unit = score_unit(mods, mode)
    offs_m = start_m + tl.arange(0, BLOCK_M)
    rows = offs_m[:, None]
    ahead = entry_at(lo, tiles, mode, BLOCK_N)
    for place in tl.range(lo, hi, BLOCK_N):
        start_n, full = tile_of(place, ahead, mode, BLOCK_N)
        ahead = entry_at(place + BLOCK_N, tiles, mode, BLOCK_N)
        cols = (start_n + tl.arange(0, BLOCK_N))[None, :]
        for_scores = read_for_scores(rows, cols, in_head, mods, mode, MASKED)
        if MASKED:
            for_mask = read_for_mask(rows, cols, in_head, mods, mode)
        k_tile = load_rows(k_rows, start_n, mode, MASKED)
        qk = tl.dot(held(q_tile, mode), k_tile.T, input_precision=mode.precision)  # [BLOCK_M, BLOCK_N]
        s, _, _ = score_tile(qk, for_scores, rows, cols, start_m, in_head, mods, mode, MASKED)
        if MASKED:
            s = tl.where(visible(for_mask, rows, cols, full, in_head, seqs, mods, mode), s, float("-inf"))
        p, alpha, m_i, l_i = online_softmax(s, m_i, l_i, unit, mode)
        acc = acc * alpha[:, None]
        if mods.seed is not None:
            p = tl.where(keep_tile(offs_m, start_n, in_head, mods, BLOCK_M, BLOCK_N), p, 0.0)
        v_tile = load_rows(v_rows, start_n, mode, MASKED)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=mode.precision)  # [BLOCK_M, BLOCK_DV]
    return acc, m_i, l_i


@triton.jit(do_not_specialize=SIZES)
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    sink,
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
    seqs = Sequences(
        seqlen_q, seqlen_k, cu_seqlens_q, cu_seqlens_k, total_q, total_k, num_heads, window_left, window_right
    )
    blocks_m = tl.cdiv(seqs.seqlen_q, BLOCK_M)
    block, head, batch = locate(tl.program_id(0), blocks_m, seqs.num_heads)
    if mode.right:  # the last blocks see most: begin with them
        block = blocks_m - 1 - block
    start_q, seqlen_q = span(seqs.cu_seqlens_q, batch, seqs.total_q, seqs.seqlen_q)
    start_k, seqlen_k = span(seqs.cu_seqlens_k, batch, seqs.total_k, seqs.seqlen_k)
    start_m = block * BLOCK_M
    if seqs.cu_seqlens_q is not None and start_m >= seqlen_q:
        return
    offs_m = start_m + tl.arange(0, BLOCK_M)

    k_rows = open_rows(k, batch, head // group, start_k, seqlen_k, mode, mode.dim, mode.block_dim, BLOCK_N)
    v_rows = open_rows(v, batch, head // group, start_k, seqlen_k, mode, mode.dim_v, mode.block_dim_v, BLOCK_N)
    in_head = open_head(mods, blocks, captured, batch, head, seqlen_q, seqlen_k)

    q_tile = load_block(q, batch, head, start_q, start_m, seqlen_q, mode, mode.dim, mode.block_dim, BLOCK_M)
    acc = tl.zeros([BLOCK_M, mode.block_dim_v], tl.float32)
    m_i = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_i = tl.zeros([BLOCK_M], tl.float32)

    left_lo, left_hi, whole_lo, whole_hi, right_lo, right_hi, tiles = walk_of(
        block, start_m, seqlen_k, seqlen_k - seqlen_q, seqs.window_left, seqs.window_right, in_head, mode,
        mode.left, mode.right, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    if mode.left and mode.ranges:
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, left_lo, left_hi, tiles, q_tile, start_m, k_rows, v_rows, in_head, seqs, mods, mode,
            True, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    if mode.ranges or mode.listed:
        acc, m_i, l_i = _attend(
            acc, m_i, l_i, whole_lo, whole_hi, tiles, q_tile, start_m, k_rows, v_rows, in_head, seqs, mods, mode,
            False, BLOCK_M, BLOCK_N,
        )  # fmt: skip
    acc, m_i, l_i = _attend(
        acc, m_i, l_i, right_lo, right_hi, tiles, q_tile, start_m, k_rows, v_rows, in_head, seqs, mods, mode,
        True, BLOCK_M, BLOCK_N,
    )  # fmt: skip

    m_i *= score_unit(mods, mode)
    if sink is not None:
        alpha, m_i, l_i = add_sink(m_i, l_i, from_natural(tl.load(sink + head).to(tl.float32), mode), mode)
        acc *= alpha[:, None]
    inverse = 1.0 / tl.where(l_i == 0.0, 1.0, l_i)
    if mods.seed is not None:
        inverse *= mods.rescale
    out_tile = acc * inverse[:, None]
    store_block(out, out_tile, batch, head, start_q, start_m, seqlen_q, mode.dim_v, mode.block_dim_v, BLOCK_M)
    lse_ptrs = stats_at(lse, batch, head, start_q) + offs_m
    tl.store(lse_ptrs, logsumexp(m_i, l_i, mode), mask=offs_m < seqlen_q)


def forward(problem: Problem, inputs: Inputs) -> Forward:
    p, inputs = with_found_blocks(*with_whole_pieces(problem, inputs))
    out, lse = Forward.unwritten(inputs.q, p.head_dim_v)

    def describe(inputs: Inputs, out: Tensor, lse: Tensor, lists: Tensor | None) -> Launch:
        q, k, v = inputs[:3]
        tile = tile_for(p, "forward")
        sparsity = sparsity_of(p, inputs, tile, lists)
        mode = mode_of(p, tile, q, k, v, functions=functions_of(p, inputs), sparsity=sparsity)
        return Launch(
            p.batch * p.num_heads * triton.cdiv(p.seqlen_q, tile.block_m),
            tile,
            (
                *operands_of(mode, tile, q, k, v),
                rows_of(out),
                stats_of(lse),
                inputs.sink,
                *sequences_of(p, inputs),
                modifiers_of(p, inputs),
                sparsity.blocks,
                captured_by(inputs),
                mode,
                p.group,
                tile.block_m,
                tile.block_n,
            ),
        )

    launcher = Launcher(p, inputs)
    lists = list_tiles(launcher, p, inputs, tile_for(p, "forward"), "keys") if p.block_size else None
    launcher.launch(forward_kernel, describe, out, lse, lists)
    return Forward(narrowed(out, problem.head_dim_v), lse)
