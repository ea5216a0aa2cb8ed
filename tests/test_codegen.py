"""Generated Triton functions against PyTorch running the same programs, in Triton's interpreter or on a GPU."""

import os

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from tileattn import trace_mask_mod, trace_score_mod
from tileattn.backends.portable import codegen
from tileattn.mods import Program

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"
pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs TRITON_INTERPRET=1 or a GPU"),
    *([] if INTERPRETED else [pytest.mark.gpu]),
    pytest.mark.filterwarnings("ignore"),  # numpy's, of the interpreter: divisions by zero, conversions
]
ROWS, COLS = 16, 32

table = torch.randn(7, 3, dtype=torch.bfloat16).to(DEVICE)
wide = torch.randn(COLS, 4, 2).to(DEVICE)[:, :, 1].T
numbers = (torch.arange(40, dtype=torch.int64) * 37 % 23 - 11).to(DEVICE)
flags = (torch.arange(40) % 3 == 0).to(DEVICE)
places = (torch.arange(ROWS * COLS).view(ROWS, COLS) * 5 % 23).to(DEVICE)  # rows are groups of 8
bytes_ = (torch.arange(40) * 29 % 251).to(torch.uint8).to(DEVICE)
number = torch.tensor(3, device=DEVICE)


def signed(r, c):
    return (r - 7) * 3 + (c - 11)


SCORE_MODS = {
    "arithmetic": lambda s, b, h, r, c: (s * 3 - r) / (c + 1) + 2 - -s * b + h,
    "int_division": lambda s, b, h, r, c: s + signed(r, c) // 5 + signed(r, c) // -5 + r // (c - 40),
    "int_remainder": lambda s, b, h, r, c: s + signed(r, c) % 5 + signed(r, c) % -5 + numbers[c] % (r - 40),
    "float_division": lambda s, b, h, r, c: (s.detach() * 7) // 0.5 + (s * 7) % 0.3 + (s * 7) % -0.3,
    "true_division_of_ints": lambda s, b, h, r, c: s + r / (c + 1) + 1 / (c - 50),
    "powers": lambda s, b, h, r, c: s**2 + s**3 - (1 + s.abs()) ** -2 + s**0 + (c - 9) ** 3 + 2 ** (c % 5),
    "float_powers": lambda s, b, h, r, c: (s.abs() + 0.1) ** 1.7 + 2.0 ** (-0.25 * (c + 1)) + s.abs() ** 0.5,
    "power_of_any": lambda s, b, h, r, c: (s.abs() + 0.1) ** (c % 4 - 1.5),
    "negative_base": lambda s, b, h, r, c: (c - 9.0) ** (r % 4 - 1 + (r % 4 == 1) * 2),
    "signs": lambda s, b, h, r, c: s.sign() + (r - c).sign() + torch.sgn(s) * (c - r).abs() - s.abs(),
    "functions": lambda s, b, h, r, c: s.erf() + s.sin() + s.cos() + s.exp() + s.exp2() + s.sigmoid() + s.tanh(),
    "logarithms": lambda s, b, h, r, c: (s.abs() + 0.1).log() + (c + 1).log2() + (c + 1).sqrt() + (c + 1.0).rsqrt(),
    "extrema": lambda s, b, h, r, c: (
        torch.maximum(s, c - r) + s.clamp(-1, 1) + torch.minimum(s, s * 2) + s.clamp(max=0)
    ),
    "logic": lambda s, b, h, r, c: s + ((r > c) & (s < 0)) + (r ^ c) + (~r) + (flags[c] | (h == 1)) * 2 + (r | 5),
    "bools_as_numbers": lambda s, b, h, r, c: s * (r >= c) + (r == c) * 0.5 + ((r > 3) + (c > 3)) * 1.0,
    "logical": lambda s, b, h, r, c: torch.where(torch.logical_and(r, torch.logical_not(s < 0)), s, c * 1.0),
    "logical_or": lambda s, b, h, r, c: torch.where(torch.logical_or(c % 2, s > 0), -1, s),
    "casts": lambda s, b, h, r, c: (s * 9).to(torch.int32) + s.half().float() + (s > 0).int() + s.bool(),
    "wide_casts": lambda s, b, h, r, c: s + (r * 100000).long() * 100000 % 7 + s.double(),
    "functions_far_out": lambda s, b, h, r, c: (
        0.01 * (100 * s).sigmoid() + (2e38 * s).sigmoid() + (-2e38 * s.abs()).exp()
    ),
    "indexing": lambda s, b, h, r, c: s * table[r % 7, h] + wide[h, c] + numbers[c - r] + bytes_[c] + flags[r] + number,
    "negative_indices": lambda s, b, h, r, c: s + table[-1, -3 + h] + table[r % 7 - 7, 2] + numbers[numbers[c]],
    "reads_ahead": lambda s, b, h, r, c: s * numbers[numbers[c - r] + r] + wide[(r + c) % 4, c] + places[c % ROWS, r],
    "reads_in_groups": lambda s, b, h, r, c: s + places[r, c],
    "reads_by_groups": lambda s, b, h, r, c: s + numbers[places[r, c]] - 2 * places[r, c],
    "reads_where_scores_say": lambda s, b, h, r, c: s + numbers[(4 * s).int() + numbers[r - c]] + numbers[r - c],
    "one_axis": lambda s, b, h, r, c: r * 0.5,
    "constant": lambda s, b, h, r, c: s * 0 + 4,
    "infinite": lambda s, b, h, r, c: torch.where(r >= c, s, -float("inf")),
    "activations": lambda s, b, h, r, c: torch.nn.functional.gelu(s) + torch.nn.functional.silu(s) + torch.relu(s),
    "softplus": lambda s, b, h, r, c: torch.nn.functional.softplus(s) - torch.nn.functional.leaky_relu(s) + s.square(),
}
if not INTERPRETED:  # which has no fused multiply-add, and so is one off where a quotient is all but whole
    SCORE_MODS["float_division_at_multiples"] = lambda s, b, h, r, c: s + (c * 0.1) // 0.1 + (c * 0.1) % 0.1
MASK_MODS = {
    "causal": lambda b, h, r, c: r >= c,
    "reads_ahead": lambda b, h, r, c: flags[r + c // 2] & (places[r, c] > numbers[c - r]),
    "documents": lambda b, h, r, c: (numbers[r] == numbers[c]) | ((r - c).abs() < 3) & ~flags[c],
    "everything": lambda b, h, r, c: (r < 0) | True,
    "number": lambda b, h, r, c: (r - c).bool(),
}


@triton.jit
def read_ahead(b, h, row, col, captured, chosen):
    if len(chosen) == 2:
        return chosen[1](b, h, row, col, captured, True)
    else:  # noqa: RET505 (a return under a constexpr condition needs its else)
        return 0


@triton.jit(do_not_specialize=["b", "h"])  # they come out of a program's place
def run_score_mod(
    out, score, grad, b, h, captured, chosen, DERIVATIVE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr
):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    places = row * COLS + col
    s = tl.load(score + places)
    if DERIVATIVE:
        result = chosen[0](s, b, h, row, col, tl.load(grad + places), captured, True)
    else:
        result = chosen[0](s, b, h, row, col, read_ahead(b, h, row, col, captured, chosen), captured, True)
    tl.store(out + places, result)


@triton.jit(do_not_specialize=["b", "h"])
def run_mask_mod(out, b, h, captured, chosen, ROWS: tl.constexpr, COLS: tl.constexpr):
    row, col = tl.arange(0, ROWS)[:, None], tl.arange(0, COLS)[None, :]
    read = read_ahead(b, h, row, col, captured, chosen)
    tl.store(out + row * COLS + col, (col >= 0) & chosen[0](b, h, row, col, read, captured, True))


def function_of(text, tensors, derivative=False):
    """A program as kernels take it, behind a place of the captured tuple that is another program's. And what reads
    ahead for it, if anything does."""
    layout = codegen.layout_of(tensors)
    if derivative:
        return (tl.constexpr(codegen.compiled(text, layout, 1)),)
    reads, function = codegen.compiled_in_two(text, layout, 1)
    return tuple(map(tl.constexpr, (function, reads) if reads else (function,)))


def indices(b, h):
    row, col = (torch.arange(n, dtype=torch.int32, device=DEVICE) for n in (ROWS, COLS))
    return *(torch.full((1, 1), i, dtype=torch.int32, device=DEVICE) for i in (b, h)), row[:, None], col


@pytest.mark.parametrize("derivative", [False, True], ids=["function", "derivative"])
@pytest.mark.parametrize("name", SCORE_MODS)
def test_a_score_mod_and_its_derivative_do_what_pytorch_does(name, derivative):
    mod = trace_score_mod(SCORE_MODS[name], DEVICE)
    text = mod.derivative if derivative else mod.program
    score, grad = torch.randn(2, ROWS, COLS).to(DEVICE)
    values = (score, *indices(3, 1), *([grad] if derivative else []))
    expected = Program.parse(text).run(values, mod.tensors, torch.float32).float().expand(ROWS, COLS)
    got = torch.empty_like(score)
    captured = (0, *codegen.captured_of(mod.tensors))
    function = function_of(text, mod.tensors, derivative)
    run_score_mod[(1,)](got, score, grad, 3, 1, captured, function, derivative, ROWS, COLS)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("name", MASK_MODS)
def test_a_mask_mod_does_what_pytorch_does(name):
    mod = trace_mask_mod(MASK_MODS[name], DEVICE)
    expected = Program.parse(mod.program).run(indices(3, 1), mod.tensors, torch.float32).expand(ROWS, COLS)
    got = torch.empty(ROWS, COLS, dtype=torch.int8, device=DEVICE)
    captured = (0, *codegen.captured_of(mod.tensors))
    run_mask_mod[(1,)](got, 3, 1, captured, function_of(mod.program, mod.tensors), ROWS, COLS)
    assert torch.equal(got != 0, expected)


def test_an_index_outside_of_a_tensor_reads_inside_it():
    """The CPU would raise; a kernel must not touch what is not the tensor's."""
    padded = torch.full((3, 10), float("nan"), device=DEVICE)
    padded[1] = torch.arange(10.0)
    middle = padded[1]
    mod = trace_score_mod(lambda s, b, h, r, c: s + middle[c * 1000 - r * 1000], DEVICE)
    score = torch.zeros(ROWS, COLS, device=DEVICE)
    got = torch.empty_like(score)
    function = function_of(mod.program, mod.tensors)
    run_score_mod[(1,)](got, score, score, 0, 0, (0, *codegen.captured_of(mod.tensors)), function, False, ROWS, COLS)
    assert not got.isnan().any()


def test_what_is_read_an_element_at_a_time_for_each_row_and_column_is_read_ahead():
    functions = {name: trace_score_mod(SCORE_MODS[name], DEVICE) for name in SCORE_MODS}
    found = {name for name, mod in functions.items() if len(function_of(mod.program, mod.tensors)) == 2}
    assert found == {"indexing", "reads_ahead", "reads_by_groups", "reads_where_scores_say"}


def test_source_and_name_are_the_same_in_every_process():
    """Triton finds compiled kernels on disk by them."""
    mod = trace_score_mod(SCORE_MODS["indexing"], DEVICE)
    layout = codegen.layout_of(mod.tensors)
    first = codegen.compiled(mod.program, layout, 0)
    codegen.compiled.cache_clear()
    again = codegen.compiled(mod.program, layout, 0)
    assert first is not again
    assert first.__name__ == again.__name__
    assert codegen.compiled(mod.program, layout, 1).__name__ != first.__name__
    if not INTERPRETED:
        assert first.cache_key == again.cache_key
