"""The inner loops over tiles where the window is the only modifier, in the part of Python that TorchScript takes.

Between two operators Python threads take turns, and on many small operators they wait more than they work. A scripted
function runs from end to end without the interpreter. Where TorchScript cannot be had, the same functions run as
Python.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tileattn.backends.cpu.gemm import linear

MAX_ROW_SUM = 2.0**24  # beyond it m is too small to stand for the maximum
MAX_RETRIES = 3  # of a block of rows; after so many it stays with the textbook step


def _scripted(function: Callable[..., Any]) -> Callable[..., Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of its deprecation, which the fallback answers
            return torch.jit.script(function)
    except Exception:
        return function


def add_windows(s: Tensor, windows: list[tuple[int, int, Tensor]]) -> Tensor:
    """s [*, cols, rows]; each window [cols, some rows] of 0 and -inf, for the rows from start to stop."""
    for start, stop, window in windows:
        s[..., start:stop].add_(window)
    return s


def finite(m: Tensor) -> Tensor:
    """m to subtract: -inf would give NaN."""
    return m.clamp(min=-1.7976931348623157e308 if m.dtype == torch.float64 else -3.4028234663852886e38)


def _values(v: Tensor, p: Tensor) -> Tensor:
    """[*, head_dim_v, rows]."""
    return linear(v.transpose(-1, -2), p.to(v.dtype).transpose(-1, -2))


def textbook_step(s: Tensor, m: Tensor, l: Tensor, acc: Tensor) -> Tensor:
    """Online softmax: from scores s [*, cols, rows], which it overwrites, to probabilities not yet normalised. m and l
    [*, rows] and acc [*, head_dim_v, rows] are brought to the new maximum."""
    m_new = torch.maximum(m, s.amax(-2))
    shift = finite(m_new)
    alpha = (m - shift).exp2_()
    p = s.sub_(shift.unsqueeze(-2)).exp2_()
    l.mul_(alpha).add_(p.sum(-2))
    acc.mul_(alpha.unsqueeze(-2))
    m.copy_(m_new)
    return p


def _shifted_step(
    k: Tensor,
    v: Tensor,
    q: Tensor,
    neg_m: Tensor,
    l: Tensor,
    acc: Tensor,
    windows: list[tuple[int, int, Tensor]],
    max_row_sum: float = MAX_ROW_SUM,
) -> bool:
    """False, and nothing has changed, when m is too small."""
    p = add_windows(linear(k, q, neg_m), windows).exp2_()
    l_new = p.sum(-2).add_(l)
    if not bool(l_new.amax() <= max_row_sum):  # also when it is NaN
        return False
    l.copy_(l_new)
    acc.add_(_values(v, p))
    return True


def rows_between(x: Tensor, start: int, stop: int) -> Tensor:
    """Positions start to stop of [seqlen_q, group, dim] or [batches, heads, seqlen_q, group, dim]: [*, rows, dim]."""
    x = x[..., start:stop, :, :].flatten(-3, -2)
    return x.contiguous() if x.dim() == 2 else x.flatten(0, 1)


def _computing(x: Tensor) -> Tensor:
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)


def _attend(
    q: Tensor,
    q_scale: float,
    start: int,
    stop: int,
    k: Tensor,
    v: Tensor,
    v_dtype: torch.dtype,
    tiles: list[tuple[int, int, int, int]],
    windows: list[list[tuple[int, int, Tensor]]],
    max_retries: int = MAX_RETRIES,
) -> tuple[Tensor, Tensor, Tensor]:
    """m, l and acc of positions start to stop, after tiles (first and last row, first and last key).

    q as `rows_between` takes it, q_scale brings its scores to units of log2; k, v: [seqlen_k, dim] or [batches, heads,
    seqlen_k, dim].
    """
    q = _computing(rows_between(q, start, stop)) * q_scale
    m = torch.full_like(q.select(-1, 0), float("-inf"))
    l = torch.zeros_like(m)
    acc = q.new_zeros(list(q.shape[:-2]) + [v.size(-1), q.size(-2)])  # noqa: RUF005  (TorchScript cannot unpack)
    neg_m = -m
    settled = False  # every row has a finite m
    retries = 0
    for i, (r0, r1, c0, c1) in enumerate(tiles):
        k_tile, v_tile = k[..., c0:c1, :].to(q.dtype), v[..., c0:c1, :].to(v_dtype)
        if k.dim() == 4:
            k_tile, v_tile = k_tile.flatten(0, 1), v_tile.flatten(0, 1)
        q_tile, l_tile, acc_tile = q[..., r0:r1, :], l[..., r0:r1], acc[..., r0:r1]
        if settled and retries < max_retries:
            if _shifted_step(k_tile, v_tile, q_tile, neg_m[..., r0:r1], l_tile, acc_tile, windows[i]):
                continue
            retries += 1
        s = add_windows(linear(k_tile, q_tile), windows[i])
        p = textbook_step(s, m[..., r0:r1], l_tile, acc_tile)
        acc_tile.add_(_values(v_tile, p))
        torch.neg(m, out=neg_m)
        settled = settled or bool(m.amin() > float("-inf"))
    return m, l, acc


def _write(out: Tensor, lse: Tensor, m: Tensor, l: Tensor, acc: Tensor) -> None:
    """Normalise, 0 where nothing was seen. out [.., rows, group, head_dim_v], lse [.., rows, group]."""
    normalised = acc / l.clamp(min=1e-37).unsqueeze(-2)
    out.copy_(normalised.transpose(-1, -2).reshape(out.shape))
    lse.copy_(((m + l.log2()) * 0.6931471805599453).reshape(lse.shape))


def _differentiate(
    q: Tensor,
    dout: Tensor,
    low: torch.dtype,
    q_scale: float,
    neg_lse: Tensor,
    neg_delta: Tensor,
    k: Tensor,
    v: Tensor,
    low_k: Tensor,
    dq: Tensor | None,
    dk: Tensor | None,
    dv: Tensor | None,
    blocks: list[tuple[int, int]],
    tiles: list[list[tuple[int, int, int, int]]],
    windows: list[list[list[tuple[int, int, Tensor]]]],
) -> None:
    """Add what tiles of a block of keys give to its dk and dv [*, cols, dim] and to dq [*, dim, rows].

    q, dout as `rows_between` takes them, in blocks of positions, each with its tiles: first and last row of the block,
    first and last key of k, v and low_k, which are [*, cols, dim], low_k in dtype `low`. neg_lse, neg_delta: of all
    rows.
    """
    for b, (start, stop) in enumerate(blocks):
        low_q, low_dout = rows_between(q, start, stop).to(low), rows_between(dout, start, stop).to(low)
        scaled_q, high_dout = _computing(low_q) * q_scale, _computing(low_dout)
        first = start * q.size(-2)
        for i, (r0, r1, c0, c1) in enumerate(tiles[b]):
            s = linear(k[..., c0:c1, :], scaled_q[..., r0:r1, :], neg_lse[..., first + r0 : first + r1])
            p = add_windows(s, windows[b][i]).exp2_()
            dp = linear(v[..., c0:c1, :], high_dout[..., r0:r1, :], neg_delta[..., first + r0 : first + r1])
            ds = dp.mul_(p).to(low)
            if dv is not None:
                dv[..., c0:c1, :].add_(linear(p.to(low), low_dout[..., r0:r1, :].transpose(-1, -2)))
            if dk is not None:
                dk[..., c0:c1, :].add_(linear(ds, low_q[..., r0:r1, :].transpose(-1, -2)))
            if dq is not None:
                dq_tile = dq[..., first + r0 : first + r1]
                dq_tile.add_(linear(low_k[..., c0:c1, :].transpose(-1, -2), ds.transpose(-1, -2)))


attend = _scripted(_attend)
write = _scripted(_write)
differentiate = _scripted(_differentiate)
