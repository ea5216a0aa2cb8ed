"""The order of sequences, longest first, as a table that is made on the GPU: the host never waits for lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

TABLE_FIELDS = 6  # of a sequence: its first tile's number, batch index, first row and length of q, those of k
RANKED = gl.constexpr(128)  # sequences that a program of rank_sequences places


class Cached(NamedTuple):
    """Where sequences have their keys in a cache: each in a page of it.

    lengths, pages, leftpad: `kvcache.CacheInputs`' cache_seqlens, table and leftpad, None for what a call does not
    have. length: without lengths. page_rows: from a page's first row to the next one's.
    """

    lengths: Any
    pages: Any
    leftpad: Any
    pages_stride: Any
    length: Any
    new: Any
    capacity: Any
    page_rows: Any
    num_pages: Any


@gluon.jit
def packed_rows(cu_ptr, offs, sequences):
    """First rows and lengths of packed sequences; those of sequences that there are not: 0."""
    there = offs < sequences
    first = gl.load(cu_ptr + offs, mask=there, other=0)
    return first, gl.load(cu_ptr + offs + 1, mask=there, other=0) - first


@gluon.jit
def equal_rows(length, offs, sequences):
    """As packed_rows, where all sequences have one length."""
    there = offs < sequences
    return gl.where(there, offs * length, 0), gl.where(there, length, 0)


@gluon.jit
def cached_rows(cached, offs, sequences):
    """As packed_rows; inside the cache whatever its tables hold."""
    there = offs < sequences
    length = offs * 0 + cached.length
    if cached.lengths is not None:
        length = gl.load(cached.lengths + offs, mask=there, other=0)
    end = gl.minimum(gl.maximum(length + cached.new, 0), cached.capacity).to(gl.int32)
    page = offs
    if cached.pages is not None:
        page = gl.load(cached.pages + offs * cached.pages_stride, mask=there, other=0)
    page = gl.minimum(gl.maximum(page, 0), cached.num_pages - 1).to(gl.int32)
    pad = offs * 0
    if cached.leftpad is not None:
        pad = gl.load(cached.leftpad + offs, mask=there, other=0)
        pad = gl.minimum(gl.maximum(pad, 0), end).to(gl.int32)
    return page * cached.page_rows + pad, gl.where(there, end - pad, 0)


@gluon.jit(do_not_specialize=["sequences", "packs", "block_m"], do_not_specialize_on_alignment=["cu_q_ptr", "cu_k_ptr"])
def rank_sequences(cu_q_ptr, cu_k_ptr, table_ptr, sequences, packs, block_m):
    """Fill the table for packed sequences. Tiles are blocks of queries; with queries and keys exchanged, of keys."""
    _rank(packed_rows, cu_q_ptr, packed_rows, cu_k_ptr, table_ptr, sequences, packs, block_m)


CACHED_SIZES = [
    "sequences", "packs", "block_m", "seqlen_q", "pages_stride", "length", "new", "capacity", "page_rows", "num_pages"
]  # fmt: skip


@gluon.jit(do_not_specialize=CACHED_SIZES, do_not_specialize_on_alignment=["lengths_ptr", "pages_ptr", "leftpad_ptr"])
def rank_cached(
    lengths_ptr, pages_ptr, leftpad_ptr, table_ptr, sequences, packs, block_m, seqlen_q, pages_stride, length, new,
    capacity, page_rows, num_pages,
):  # fmt: skip
    """Fill the table for seqlen_q queries of each sequence of a cache."""
    cached = Cached(lengths_ptr, pages_ptr, leftpad_ptr, pages_stride, length, new, capacity, page_rows, num_pages)
    _rank(equal_rows, seqlen_q, cached_rows, cached, table_ptr, sequences, packs, block_m)


@gluon.jit
def _rank(
    rows_q: gl.constexpr, of_q, rows_k: gl.constexpr, of_k, table_ptr, sequences, packs, block_m,
):  # fmt: skip
    """Fill the table, int32 (TABLE_FIELDS, sequences + 1): sequences by falling number of keys, then an empty one.
    rows_q(of_q, ..) tells where they have their queries, rows_k(of_k, ..) their keys.

    A sequence's place is the number of those that come before it, and its first tile the number of their tiles.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0])
    offs = gl.program_id(0) * RANKED + gl.arange(0, RANKED, gl.SliceLayout(1, layout))
    first_q, seqlen_q = rows_q(of_q, offs, sequences)
    first_k, seqlen_k = rows_k(of_k, offs, sequences)
    place = offs * 0
    first_tile = offs * 0
    all_tiles = sequences * 0
    for start in range(0, sequences, 32):
        others = start + gl.arange(0, 32, gl.SliceLayout(0, layout))
        _, other_q = rows_q(of_q, others, sequences)
        _, other_k = rows_k(of_k, others, sequences)
        tiles = (other_q + block_m - 1) // block_m * packs
        longer = other_k[None, :] > seqlen_k[:, None]
        earlier = (other_k[None, :] == seqlen_k[:, None]) & (others[None, :] < offs[:, None])
        before = ((longer | earlier) & (others < sequences)[None, :]).to(gl.int32)
        place += gl.sum(before, 1)
        first_tile += gl.sum(before * tiles[None, :], 1)
        all_tiles += gl.sum(tiles, 0)
    last = offs == sequences
    place = gl.where(last, sequences, place)
    first_tile = gl.where(last, all_tiles, first_tile)
    known = offs <= sequences
    gl.store(table_ptr + place, first_tile, mask=known)
    gl.store(table_ptr + place + (sequences + 1), gl.where(last, 0, offs), mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 2, first_q, mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 3, seqlen_q, mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 4, first_k, mask=known)
    gl.store(table_ptr + place + (sequences + 1) * 5, seqlen_k, mask=known)
