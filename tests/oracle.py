"""The oracle rule, and the problems that every backend is tested on.

    max|x - exact| <= 2 max|low - exact| + one rounding

where exact is standard attention in float64 and low is standard attention in the dtype of the inputs, both by autograd.
A Case describes a call in plain sizes; `build` makes its tensors, `check` runs a backend on it, forward and backward,
and holds out, lse and every gradient to the rule.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from unittest import mock

import hypothesis
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import and_masks

from tileattn.backends import Backend
from tileattn.block_mask import BlockMask
from tileattn.mods import Mod, trace_mask_mod, trace_score_mod
from tileattn.problem import Gradients, Inputs, Problem, Wanted
from tileattn.reference import standard_attention

# which of (batch, num_heads, seqlen_q, seqlen_k) a bias or mask has in full; the others are 1
Dims = tuple[bool, bool, bool, bool]
ALL_DIMS: Dims = (True, True, True, True)


@dataclass(frozen=True)
class Case:
    """One attention call. lengths_q and lengths_k make it a varlen one (batch and seqlens are then theirs)."""

    batch: int = 2
    seqlen_q: int = 128
    seqlen_k: int = 128
    num_heads: int = 2
    num_heads_k: int = 2
    head_dim: int = 32
    head_dim_v: int = 32
    dtype: torch.dtype = torch.float32
    lengths_q: tuple[int, ...] | None = None
    lengths_k: tuple[int, ...] | None = None
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    scale: float | None = None
    softcap: float = 0.0
    bias: Dims | None = None
    bias_hides: bool = False  # a bias that is -inf in places, and on whole rows
    mask: Dims | None = None  # hides a third of the scores, and some rows whole
    alibi: bool = False
    sink: bool = False
    dropout_p: float = 0.0
    score_mod: str | None = None  # a name in SCORE_MODS
    mask_mod: str | None = None  # a name in MASK_MODS
    block_size: tuple[int, int] | None = None  # a block mask: of mask_mod if there is one, of mask, or else random
    # order in memory, "bhds" with rows last; "sliced": heads out of a wider tensor; "offset": rows out of one of NaN;
    # "strided": last stride 2
    layout: str = "bshd"
    magnitude: float = 1.0  # of q: large ones make sharp, near one-hot softmaxes
    seed: int = 0

    def but(self, **changes: object) -> Case:
        return replace(self, **changes)  # type: ignore[arg-type]


class Call(NamedTuple):
    """A case's tensors, with the gradients that flow into out and lse."""

    problem: Problem
    inputs: Inputs
    dout: Tensor
    dlse: Tensor


def build(case: Case, device: torch.device | str = "cpu") -> Call:
    """The tensors of a case, the same on every device."""
    draw = _Draw(case, device)
    lengths_q, lengths_k = case.lengths_q, case.lengths_k
    batch, seqlen_q, seqlen_k = case.batch, case.seqlen_q, case.seqlen_k
    rows_q: tuple[int, ...] = (batch, seqlen_q)
    rows_k: tuple[int, ...] = (batch, seqlen_k)
    options: dict[str, object] = {}
    if lengths_q is not None and lengths_k is not None:
        batch, seqlen_q, seqlen_k = len(lengths_q), max(lengths_q, default=0), max(lengths_k, default=0)
        rows_q, rows_k = (sum(lengths_q),), (sum(lengths_k),)
        options = {"cu_seqlens_q": _cumulative(lengths_q, device), "cu_seqlens_k": _cumulative(lengths_k, device)}
    scores = (batch, case.num_heads, seqlen_q, seqlen_k)
    options |= draw.mods(scores)
    problem, inputs = Problem.of(
        draw.data(rows_q, case.num_heads, case.head_dim).mul_(case.magnitude),
        draw.data(rows_k, case.num_heads_k, case.head_dim),
        draw.data(rows_k, case.num_heads_k, case.head_dim_v),
        causal=case.causal,
        window=case.window,
        scale=case.scale,
        softcap=case.softcap,
        bias=draw.bias(scores),
        alibi_slopes=draw.uniform(batch, case.num_heads) if case.alibi else None,
        sink=draw.normal(case.num_heads, 2)[:, 0] if case.sink else None,
        dropout_p=case.dropout_p,
        dropout_seed=case.seed - 17 if case.dropout_p else None,
        **options,  # type: ignore[arg-type]
    )
    lse_shape = (case.num_heads, *rows_q) if problem.varlen else (batch, case.num_heads, seqlen_q)
    dout = draw.data(rows_q, case.num_heads, case.head_dim_v)
    return Call(problem, inputs, dout, draw.normal(*lse_shape).to(problem.lse_dtype))


def wanted(inputs: Inputs) -> Wanted:
    """Every gradient that the inputs have."""
    return Wanted(
        bias=inputs.bias is not None, alibi_slopes=inputs.alibi_slopes is not None, sink=inputs.sink is not None
    )


def run(backend: Backend, call: Call) -> dict[str, Tensor]:
    """out, lse and the gradients by name, from a backend whose fresh memory holds NaN: what it never wrote shows."""
    problem, inputs, dout, dlse = call
    with fresh_memory_is_nan():
        forward = backend.forward(problem, inputs)
        gradients = backend.backward(problem, inputs, forward, dout, dlse, wanted(inputs))
    return _named(forward.out, forward.lse, gradients)


def run_reference(call: Call, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """The same from standard attention by autograd; dtype as in `standard_attention`."""
    problem, inputs, dout, dlse = call
    leaves = {
        name: getattr(inputs, name).detach().to(dtype or getattr(inputs, name).dtype).requires_grad_()
        for name in Wanted._fields
        if getattr(inputs, name) is not None
    }
    out, lse, _ = standard_attention(problem, inputs._replace(**leaves), dtype)
    outputs = [(x, dx.to(x.dtype)) for x, dx in ((out, dout), (lse, dlse)) if x.requires_grad]
    found: tuple[Tensor | None, ...] = (None,) * len(leaves)
    if outputs:
        xs, dxs = zip(*outputs, strict=True)
        found = torch.autograd.grad(xs, tuple(leaves.values()), dxs, allow_unused=True)
    grads = {
        f"d{name}": torch.zeros_like(leaf) if grad is None else grad
        for (name, leaf), grad in zip(leaves.items(), found, strict=True)
    }
    return _named(out.detach(), lse.detach(), Gradients(**grads))


def check(backend: Backend, case: Case, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Run a backend on a case, forward and backward, and assert the rule for everything it returns."""
    return check_call(backend, build(case, device))


def check_call(backend: Backend, call: Call) -> dict[str, Tensor]:
    """`check` of a call whose tensors are there already."""
    got = run(backend, call)
    exact, low = run_reference(call, torch.float64), run_reference(call, None)
    if call.problem.dtype == torch.float64:
        low = _scaled_errors(exact, run_reference(call, torch.float32))
    assert got.keys() == exact.keys(), f"returned {sorted(got)}, expected {sorted(exact)}"
    slack = _slack(call, got, exact)
    for name, x in got.items():
        expect_dtype = call.problem.lse_dtype if name == "lse" else low[name].dtype
        assert x.shape == exact[name].shape, f"{name}: shape {tuple(x.shape)}, expected {tuple(exact[name].shape)}"
        assert x.dtype == expect_dtype, f"{name}: {x.dtype}, expected {expect_dtype}"
        assert_rule(name, x, exact[name], low[name], slack.get(name, 0.0))
    return got


def assert_rule(name: str, x: Tensor, exact: Tensor, low: Tensor, slack: float = 0.0) -> None:
    """max|x - exact| <= 2 max|low - exact| + one rounding (+ slack). Infinities must be those of exact."""
    if x.numel() == 0:
        return
    exact, low, values = exact.double(), low.double(), x.double()
    assert not values.isnan().any(), f"{name}: {int(values.isnan().sum())} of {values.numel()} are NaN"
    infinite = exact.isinf()
    assert torch.equal(values.isinf(), infinite), f"{name}: infinite elsewhere than the oracle"
    assert torch.equal(values[infinite], exact[infinite]), f"{name}: infinities of the wrong sign"
    exact, low, values = (t.masked_fill(infinite, 0.0) for t in (exact, low, values))
    error, low_error = (values - exact).abs().max().item(), (low - exact).abs().max().item()
    budget = 2 * low_error + torch.finfo(x.dtype).eps * exact.abs().max().item() + slack
    assert error <= budget, f"{name}: error {error:.3e} above {budget:.3e} (standard attention: {low_error:.3e})"


def _scaled_errors(exact: dict[str, Tensor], low: dict[str, Tensor]) -> dict[str, Tensor]:
    """float64 has nothing more exact to be held against: float32's errors times the ratio of roundings, and twice that,
    since the oracle errs as well."""
    ratio = 2 * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
    return {k: exact[k] + ((low[k].double() - exact[k]) * ratio).nan_to_num(0.0) for k in exact}


def _slack(call: Call, got: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """What tiles cannot but lose, where standard attention may be luckier (one visible score) or need not lose at all
    (terms that cancel in a backward that recomputes P). Each is one rounding of an intermediate.

    The score, be it q.k or what modifiers made of it (as large as the lse of the scores alone, which a sink may exceed
    by far), and, in P = exp(s - lse), lse: both are errors relative to P, and so, in dV = P^T dout, to its terms, which
    may cancel: P^T |dout|. In dS = P (dP - delta), dP = dout.v, and delta = rowsum(dout out), which is that of out as
    forward rounded it: missing e of delta acts like a gradient e that flows into lse.
    """
    problem, inputs, dout, dlse = call
    if not (dout.numel() and inputs.v.numel()):
        return {}
    missing = (dout.double() * (exact["out"] - got["out"].double())).sum(-1).transpose(-1, -2)
    moved = run_reference(call._replace(dlse=dlse.double() + missing), torch.float64)
    terms = run_reference(call._replace(dout=dout.abs(), dlse=torch.zeros_like(dlse)), torch.float64)["dv"]
    eps, scale = torch.finfo(problem.lse_dtype).eps, abs(problem.scale)
    product = scale * _largest(inputs.q.double().norm(dim=-1)) * _largest(inputs.k.double().norm(dim=-1))
    alone = standard_attention(replace(problem, has_sink=False), inputs._replace(sink=None), torch.float64).lse
    of_s = eps * max(product, _largest(alone.nan_to_num(0.0, 0.0, 0.0)))
    of_p = of_s + eps * (1 + 2 * _largest(exact["lse"].nan_to_num(0.0, 0.0, 0.0)))
    of_dp = eps * _largest(dout.double().abs().sum(-1)) * _largest(inputs.v)
    of_ds = {
        "dq": of_dp * scale * _largest(inputs.k),
        "dk": of_dp * scale * _largest(inputs.q),
        "dbias": of_dp,
        "dalibi_slopes": of_dp * (problem.seqlen_q + problem.seqlen_k),
        "dsink": of_dp,
    }
    return {
        "lse": of_s,
        "out": of_s * _largest(exact["out"]),
        **{
            name: of_ds.get(name, 0.0)
            + of_p * _largest(terms if name == "dv" else exact[name])
            + _largest((moved[name] - exact[name]).nan_to_num())
            for name in exact
            if name not in ("lse", "out")
        },
    }


def _largest(x: Tensor) -> float:
    return x.double().abs().max().item() if x.numel() else 0.0


def _named(out: Tensor, lse: Tensor, gradients: Gradients) -> dict[str, Tensor]:
    return {"out": out, "lse": lse, **{k: g for k, g in gradients._asdict().items() if g is not None}}


@contextlib.contextmanager
def fresh_memory_is_nan() -> Iterator[None]:
    """torch.empty is filled with NaN (its deterministic mode), so an element never written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


class _Draw:
    """Random tensors of one case."""

    def __init__(self, case: Case, device: torch.device | str) -> None:
        self.case, self.device = case, device
        self.generator = torch.Generator().manual_seed(case.seed)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.case.dtype).to(self.device)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=torch.float64).to(self.case.dtype).to(self.device)

    def data(self, rows: tuple[int, ...], heads: int, head_dim: int) -> Tensor:
        """(*rows, heads, head_dim) in the case's layout."""
        *batch, seqlen = rows
        if self.case.layout == "bhsd":
            return self.normal(*batch, heads, seqlen, head_dim).transpose(-3, -2)
        if self.case.layout == "bhds":
            return self.normal(*batch, heads, head_dim, seqlen).movedim(-1, -3)
        if self.case.layout == "sliced":
            return self.normal(*rows, heads + 2, head_dim)[..., 1:-1, :]
        if self.case.layout == "offset":
            return F.pad(self.normal(*rows, heads, head_dim), (1, 2), value=float("nan"))[..., 1:-2]
        if self.case.layout == "strided":
            return self.normal(*rows, heads, 2 * head_dim)[..., ::2]
        return self.normal(*rows, heads, head_dim)

    def bias(self, scores: tuple[int, ...]) -> Tensor | None:
        if self.case.bias is None:
            return None
        bias = self.normal(*_sizes(self.case.bias, scores))
        if self.case.bias_hides and bias.numel():
            bias = bias.masked_fill(self._hidden(bias.shape), float("-inf"))
        return bias

    def mask(self, scores: tuple[int, ...]) -> Tensor | None:
        if self.case.mask is None:
            return None
        return ~self._hidden(_sizes(self.case.mask, scores))

    def mods(self, scores: tuple[int, ...]) -> dict[str, object]:
        """The arguments mask, score_mod, mask_mod and block_mask."""
        batch, heads, seqlen_q, seqlen_k = scores
        size, mask, block_mask = self.case.block_size, self.mask(scores), None
        score_mod = self.case.score_mod and self._score_mod(self.case.score_mod, heads)
        mask_mod = self.case.mask_mod and self._mask_mod(self.case.mask_mod, batch, max(seqlen_q, seqlen_k))
        if size is not None and mask_mod:
            block_mask = BlockMask.from_mod(mask_mod, batch, heads, seqlen_q, seqlen_k, size, self.device)
            mask_mod = None
        elif size is not None and mask is not None:
            mask, block_mask = None, BlockMask.from_mask(mask.expand(scores), size)
        elif size is not None:
            shape = (batch, heads, -(-seqlen_q // size[0]), -(-seqlen_k // size[1]))
            drawn = torch.rand(shape, generator=self.generator) < 0.4
            block_mask = BlockMask.from_blocks(drawn.to(self.device), size)
        return {"mask": mask, "score_mod": score_mod, "mask_mod": mask_mod, "block_mask": block_mask}

    def _score_mod(self, name: str, heads: int) -> Mod:
        far = 60  # a constant: programs, and so kernels, must not change with lengths
        slopes, table = self.uniform(heads), self.normal(heads, 2 * far + 1)
        functions = {
            "tanh": lambda s, b, h, r, c: 3 * torch.tanh(s / 3),
            "relative": lambda s, b, h, r, c: s - slopes[h] * (r - c).abs() + table[h, (c - r).clamp(-far, far) + far],
            "piecewise": lambda s, b, h, r, c: torch.where((r + b) % 3 > c % 2, s.clamp(-1, 0.7) * 0.5, s),
            "causal": lambda s, b, h, r, c: torch.where(r >= c, torch.sigmoid(s) * 2, -float("inf")),
            "constant": lambda s, b, h, r, c: torch.zeros_like(s),
        }
        return trace_score_mod(functions[name], self.device)

    def _mask_mod(self, name: str, batch: int, length: int) -> Mod:
        document = torch.arange(length, device=self.device) // 45
        limit = torch.randint(0, length + 1, (max(batch, 1),), generator=self.generator).to(self.device)
        functions = {
            "causal": lambda b, h, r, c: r >= c,
            "both": and_masks(lambda b, h, r, c: r >= c, lambda b, h, r, c: c != 3),
            "documents": lambda b, h, r, c: (document[r] == document[c]) & (c <= r + 20),
            "lengths": lambda b, h, r, c: (c < limit[b]) | (h == 1),
        }
        return trace_mask_mod(functions[name], self.device)

    def _hidden(self, shape: tuple[int, ...]) -> Tensor:
        """A third of the elements, and a seventh of the rows."""
        hidden = torch.rand(shape, generator=self.generator) < 1 / 3
        hidden |= torch.rand((*shape[:-1], 1), generator=self.generator) < 1 / 7
        return hidden.to(self.device)


def _sizes(dims: Dims, scores: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if full else 1 for full, size in zip(dims, scores, strict=True))


def _cumulative(lengths: tuple[int, ...], device: torch.device | str) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32).to(device)


# Each modifier alone, and together. Names are the tests' ids.
MODIFIERS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (40, 17)},
    "window_left": {"window": (33, -1)},
    "causal_window": {"causal": True, "window": (50, -1)},
    "scale": {"scale": 0.31},
    "negative_scale": {"scale": -0.2},
    "zero_scale": {"scale": 0.0},
    "softcap": {"softcap": 3.0},
    "bias": {"bias": ALL_DIMS},
    "bias_per_head": {"bias": (False, True, False, True)},
    "bias_of_rows": {"bias": (True, False, True, False)},
    "bias_hides": {"bias": ALL_DIMS, "bias_hides": True},
    "mask": {"mask": ALL_DIMS},
    "mask_of_keys": {"mask": (True, False, False, True)},
    "alibi": {"alibi": True},
    "sink": {"sink": True},
    "dropout": {"dropout_p": 0.3},
    "gqa": {"num_heads": 6, "num_heads_k": 2},
    "mqa": {"num_heads": 3, "num_heads_k": 1},
    "gqa_causal": {"num_heads": 6, "num_heads_k": 2, "causal": True},
    "head_dim_v": {"head_dim_v": 48},
    "bhsd": {"layout": "bhsd"},
    "sliced": {"layout": "sliced"},
    "offset": {"layout": "offset"},
    "strided": {"layout": "strided"},
    "sharp": {"magnitude": 30.0},
    "everything": {
        "num_heads": 4,
        "num_heads_k": 2,
        "head_dim_v": 24,
        "causal": True,
        "window": (90, -1),
        "softcap": 5.0,
        "bias": (False, True, True, True),
        "bias_hides": True,
        "mask": (True, False, True, True),
        "alibi": True,
        "sink": True,
        "dropout_p": 0.2,
    },
    "varlen": {"lengths_q": (70, 0, 129, 1), "lengths_k": (70, 65, 64, 0)},
    "varlen_causal": {"lengths_q": (64, 1, 130), "lengths_k": (100, 33, 65), "causal": True},
    "varlen_everything": {
        "lengths_q": (0, 67, 1, 40),
        "lengths_k": (12, 129, 40, 0),
        "num_heads": 4,
        "num_heads_k": 2,
        "causal": True,
        "window": (60, -1),
        "softcap": 4.0,
        "bias": (True, True, True, True),
        "mask": (True, False, False, True),
        "alibi": True,
        "sink": True,
        "dropout_p": 0.2,
    },
}

# The same for mods and block masks.
MODS: dict[str, dict[str, object]] = {
    "score_mod": {"score_mod": "tanh"},
    "score_mod_table": {"score_mod": "relative", "num_heads": 4, "num_heads_k": 2},
    "score_mod_piecewise": {"score_mod": "piecewise", "softcap": 4.0, "bias": ALL_DIMS},
    "score_mod_causal": {"score_mod": "causal"},
    "score_mod_constant": {"score_mod": "constant", "mask_mod": "both"},
    "mask_mod": {"mask_mod": "documents"},
    "mask_mod_lengths": {"mask_mod": "lengths", "causal": True},
    "blocks": {"block_size": (32, 64)},
    "blocks_masked": {"block_size": (64, 32), "mask": (True, False, True, True)},
    "blocks_of_mod": {"block_size": (16, 32), "mask_mod": "documents", "score_mod": "relative"},
    "blocks_of_lengths": {"block_size": (64, 64), "mask_mod": "lengths", "num_heads": 4, "num_heads_k": 2},
    "mods_everything": {
        "num_heads": 4,
        "num_heads_k": 2,
        "window": (90, 30),
        "softcap": 5.0,
        "bias": (False, True, True, True),
        "alibi": True,
        "sink": True,
        "dropout_p": 0.2,
        "score_mod": "piecewise",
        "mask_mod": "documents",
        "block_size": (32, 32),
    },
    "varlen_mods": {
        "lengths_q": (70, 0, 129, 1),
        "lengths_k": (70, 65, 64, 0),
        "score_mod": "relative",
        "mask_mod": "documents",
        "block_size": (32, 32),
    },
}

# Odd sizes: none, one, and either side of a power of two.
SHAPES: dict[str, dict[str, object]] = {
    "square_63": {"seqlen_q": 63, "seqlen_k": 63},
    "square_65": {"seqlen_q": 65, "seqlen_k": 65},
    "127_129": {"seqlen_q": 127, "seqlen_k": 129},
    "129_64": {"seqlen_q": 129, "seqlen_k": 64},
    "decode": {"seqlen_q": 1, "seqlen_k": 200, "num_heads": 6, "num_heads_k": 2},
    "one_one": {"seqlen_q": 1, "seqlen_k": 1},
    "one_key": {"seqlen_q": 65, "seqlen_k": 1},
    "no_keys": {"seqlen_q": 5, "seqlen_k": 0},
    "no_queries": {"seqlen_q": 0, "seqlen_k": 5},
    "batch_0": {"batch": 0},
    "head_dim_1": {"head_dim": 1, "head_dim_v": 1, "layout": "bhds"},
    "head_dim_17": {"head_dim": 17, "head_dim_v": 33},
    "head_dim_59": {"head_dim": 59, "head_dim_v": 24, "layout": "offset", "lengths_q": (30, 40), "lengths_k": (50, 40)},
    "head_dim_80": {"head_dim": 80, "head_dim_v": 80},
    "head_dim_128": {"head_dim": 128, "head_dim_v": 128},
    "head_dim_256": {"batch": 1, "head_dim": 256, "head_dim_v": 256},
}


# What kernels are compiled for. The rest of a Case (sizes, lengths, bounds, seeds) is met by kernels that are there.
_DIMS = tuple(itertools.product((False, True), repeat=4))
FAMILY: dict[str, tuple[object, ...]] = {
    "head_dim": (1, 8, 16, 33, 64),
    "head_dim_v": (1, 8, 16, 33, 64),
    "varlen": (False, True),
    "grouped": (False, True),
    "causal": (False, True),
    "bounded": ((False, False), (True, False), (False, True), (True, True)),  # sides of the window
    "softcap": (0.0, 0.0, 2.0),
    "bias": (None,) * len(_DIMS) + _DIMS,
    "mask": (None,) * len(_DIMS) + _DIMS,
    "alibi": (False, True),
    "sink": (False, True),
    "dropout_p": (0.0, 0.0, 0.25),
    "layout": ("bshd", "bhsd", "sliced", "strided"),
}
# The same for mods and block masks.
FAMILY_OF_MODS: dict[str, tuple[object, ...]] = {
    "score_mod": (None, "tanh", "relative", "piecewise", "causal"),
    "mask_mod": (None, "causal", "documents", "lengths"),
    "block_size": (None, (16, 32), (64, 64), (128, 128), (40, 7)),
}


def cases(dtypes: tuple[torch.dtype, ...] = (torch.float32,), max_seqlen: int = 140, mods: bool = False) -> Any:
    """Hypothesis strategy: any sizes up to max_seqlen with any modifiers together; with mods, those and block masks."""
    choices = FAMILY | {"dtype": dtypes} | (FAMILY_OF_MODS if mods else {})
    families = st.fixed_dictionaries({name: st.sampled_from(values) for name, values in choices.items()})
    return families.flatmap(lambda family: members(family, max_seqlen))


def draw_family(seed: int, choices: dict[str, tuple[object, ...]]) -> dict[str, Any]:
    """One of FAMILY, or of a like table."""
    generator = random.Random(seed)
    return {name: generator.choice(values) for name, values in choices.items()}


def meet(problems: Any, number: int, seed: int, holds: Callable[[Case], object]) -> None:
    """Call `holds` with as many different cases, which are the same in every process with this version of Hypothesis.
    It has no setting against what it likes to draw: numbers in the source of such modules as happen to be loaded."""
    # Not its public interface: what a version lacks shall fail here, and not every test that imports this file.
    from hypothesis.internal.cache import LRUCache
    from hypothesis.internal.conjecture import providers

    met = set()

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number, deadline=None, suppress_health_check=list(hypothesis.HealthCheck), database=None
    )
    @hypothesis.given(case=problems)
    def holds_for(case: Case) -> None:
        met.add(repr(case))
        holds(case)

    nothing = mock.patch.object(providers, "_get_local_constants", providers.Constants)
    with nothing, mock.patch.object(providers, "CONSTANTS_CACHE", LRUCache(1024)):
        holds_for()
    assert len(met) == number


@st.composite
def members(draw: st.DrawFn, family: dict[str, Any], max_seqlen: int) -> Case:
    """Hypothesis strategy: the cases of a family."""
    fields = dict(family)
    length, bound = st.integers(0, max_seqlen), st.integers(0, max_seqlen // 2)
    if fields.pop("varlen"):
        lengths = draw(st.lists(st.tuples(length, length), max_size=3))
        fields |= {"lengths_q": tuple(a for a, _ in lengths), "lengths_k": tuple(b for _, b in lengths)}
    num_heads_k = draw(st.integers(1, 2))
    group = draw(st.integers(2, 3)) if fields.pop("grouped") else 1
    left, right = fields.pop("bounded")
    if fields["layout"] == "bshd":
        fields["layout"] = draw(st.sampled_from(("bshd", "offset", "bhds")))  # which are copied to be like it
    return Case(
        batch=draw(st.integers(1, 2)),
        seqlen_q=draw(length),
        seqlen_k=draw(length),
        num_heads=num_heads_k * group,
        num_heads_k=num_heads_k,
        window=(draw(bound) if left else -1, draw(bound) if right else -1),
        bias_hides=draw(st.booleans()),
        magnitude=draw(st.sampled_from((1.0, 1.0, 10.0))),
        seed=draw(st.integers(0, 2**16)),
        **fields,
    )
