"""Triton functions from the programs of score_mod and mask_mod, with PyTorch's rules for dtypes.

A program becomes the source of one @triton.jit function of (score, b, h, row, col[, grad]; a mask_mod has no score),
of the tensors that it reads and of EXACT. Or of two: one reads what the other uses, before the scores are there. Names
are a digest of what they do: Triton tells functions by their names, in memory and in its cache on disk.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import linecache
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from tileattn.backends.portable.device import pointwise
from tileattn.backends.portable.device.rows import size, sized
from tileattn.mods import OPERATIONS, Program
from tileattn.problem import Inputs, Problem

BOOL, INT, FLOAT = torch.bool, torch.int32, torch.float32
_PLACE = "b", "h", "row", "col"
INPUTS = {"score": FLOAT, "grad": FLOAT, "b": INT, "h": INT, "row": INT, "col": INT}
# What a kernel knows of each tensor that a program may read when it is compiled: its dtype, for each dim a factor of
# the stride, or 0 if that is 1, and whether all rows are groups of 8 elements that begin at multiples of 8.
Layout = tuple[tuple[torch.dtype, tuple[int, ...], bool], ...]

_BOTH = frozenset(("row", "col"))
_SAME = {"abs": "tl.abs({})", "neg": "-{}", "sign": "sign({})"}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "bitwise_and": "&", "bitwise_or": "|", "bitwise_xor": "^"}
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_LOGICAL = {"logical_and": "&", "logical_or": "|", "add": "|", "mul": "&"}  # the latter two of bools
_OF_FLOAT = {
    **{name: f"tl.{name}({{}})" for name in ("cos", "erf", "exp2", "log", "log2", "rsqrt", "sin", "sqrt")},
    "log1p": "log1p({})",
    **{name: f"{name}({{}}, EXACT)" for name in ("exp", "sigmoid", "tanh")},
}
_EXTREMA = "tl.{}({}, {}, propagate_nan=tl.PropagateNan.ALL)"
_MOST_PRODUCTS = 64  # an integer power up to this is made of products


class Functions(NamedTuple):
    """Of one call; None for what it does not have. score_reads, mask_reads: what gives score_mod and mask_mod the tuple
    of what they read in the shape of the scores."""

    score_reads: Any = None
    score_mod: Any = None
    score_derivative: Any = None
    mask_reads: Any = None
    mask_mod: Any = None


NO_FUNCTIONS = Functions()


def functions_of(problem: Problem, inputs: Inputs) -> Functions:
    p = problem
    of_score, of_mask = layout_of(inputs.score_mod_tensors), layout_of(inputs.mask_mod_tensors)
    score_reads, score_mod = compiled_in_two(p.score_mod, of_score, 0) if p.score_mod else (None, None)
    mask_reads, mask_mod = compiled_in_two(p.mask_mod, of_mask, _places(of_score)) if p.mask_mod else (None, None)
    derivative = compiled(p.score_derivative, of_score, 0) if p.score_mod else None
    return Functions(score_reads, score_mod, derivative, mask_reads, mask_mod)


def captured_by(inputs: Inputs) -> tuple[Any, ...]:
    return captured_of(inputs.score_mod_tensors) + captured_of(inputs.mask_mod_tensors)


def captured_of(tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """What kernels get of tensors that programs read: each, then size and stride of each of its dims."""
    flat: list[Any] = []
    for tensor in tensors:
        flat.append(tensor)
        for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
            flat += [*sized(length), *sized(stride, align=_factor(stride) or 1)]
    return tuple(flat)


def layout_of(tensors: Sequence[Tensor]) -> Layout:
    return tuple((x.dtype, tuple(map(_factor, x.stride())), _in_groups(x)) for x in tensors)


def _in_groups(x: Tensor) -> bool:
    return x.dim() > 1 and x.stride(-1) == 1 and x.shape[-1] % 8 == 0 and all(s % 8 == 0 for s in x.stride()[:-1])


def _factor(stride: int) -> int:
    return 0 if stride == 1 else 8 if stride % 8 == 0 else 1


def _places(layout: Layout) -> int:
    """How many places of the captured tuple are theirs."""
    return sum(1 + 2 * len(factors) for _, factors, _ in layout)


@functools.lru_cache(maxsize=256)
def compiled(text: str, layout: Layout, first: int) -> Any:
    """The Triton function of a program; its tensors begin at place `first` of the kernel's captured tuple."""
    program = Program.parse(text)
    return _function((*program.inputs, "captured", "EXACT"), _Writer(program, layout, first).write())


@functools.lru_cache(maxsize=256)
def compiled_in_two(text: str, layout: Layout, first: int) -> tuple[Any, Any]:
    """A function that gives the tuple of what the program reads ahead, or None; and the function of the program, which
    takes that tuple before the kernel's, or anything."""
    program = Program.parse(text)
    read = _read_ahead(program, layout)
    writer = _Writer(program, layout, first)
    reads = _function((*_PLACE, "captured", "EXACT"), writer.write_reads(read)) if read else None
    body = _Writer(program, layout, first, read).write()
    return reads, _function((*program.inputs, "read", "captured", "EXACT"), body)


def _read_ahead(program: Program, layout: Layout) -> tuple[str, ...]:
    """Steps that read a tensor for each row and column, an element at a time, whatever the scores are."""
    needs = {name: frozenset((name,)) for name in program.inputs}
    found = []
    for name, op, args in program.steps:
        needs[name] = frozenset().union(*(needs.get(a[1:], frozenset()) for a in args if isinstance(a, str)))
        if op == "index" and needs[name] >= _BOTH and needs[name] <= {*_PLACE}:
            *_, in_groups = layout[_tensor(args[0])]
            if not (in_groups and args[-1] == "%col"):
                found.append(name)
    return tuple(found)


def _function(names: tuple[str, ...], body: str) -> Any:
    parameters = f"({', '.join(names)})"
    digest = hashlib.sha256((parameters + body + inspect.getsource(pointwise)).encode()).hexdigest()[:24]
    name = f"mod_{digest}"
    source = f"def {name}{parameters}:\n{body}"
    path = f"<tileattn {name}>"
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path  # where inspect looks
    namespace = vars(pointwise) | {"__name__": __name__, "size": size}
    exec(compile(source, path, "exec"), namespace)
    return triton.jit(namespace[name])


class _Value(NamedTuple):
    """An expression. dtype: of all floats float32. axes: which of row and col it varies along."""

    code: str
    dtype: torch.dtype
    axes: frozenset[str]


class _Writer:
    """Writes the body of a function. Constants stay Python numbers, which do not decide a dtype, as in PyTorch."""

    def __init__(self, program: Program, layout: Layout, first: int, read: tuple[str, ...] = ()) -> None:
        """read: names of steps whose values there are already, in a tuple."""
        self.program, self.layout, self.read = program, layout, read
        axes = {"score": _BOTH, "grad": _BOTH, "row": frozenset(("row",)), "col": frozenset(("col",))}
        self.known: dict[str, Any] = {
            name: _Value(name, INPUTS[name], axes.get(name, frozenset())) for name in program.inputs
        }
        self.places = [first + _places(layout[:i]) for i in range(len(layout))]

    def write(self) -> str:
        lines = self.lines(self.program.output)
        return _body(*lines, f"return {self.output()}")

    def write_reads(self, names: tuple[str, ...]) -> str:
        lines = self.lines(*(f"%{name}" for name in names))
        return _body(*lines, f"return ({', '.join(names)},)")

    def lines(self, *wanted: Any) -> list[str]:
        """The steps that these values take."""
        needed = set(wanted)
        for name, _, args in reversed(self.program.steps):
            if f"%{name}" in needed and name not in self.read:
                needed.update(args)
        lines = []
        for name, op, args in self.program.steps:
            if f"%{name}" not in needed:
                continue
            if name in self.read:
                self.known[name] = _Value(f"read[{self.read.index(name)}]", self.dtype_of(_tensor(args[0])), _BOTH)
                continue
            result = self.step(op, args)
            if isinstance(result, _Value):
                lines.append(f"{name} = {result.code}")
                result = result._replace(code=name)
            self.known[name] = result
        return lines

    def output(self) -> str:
        found = self.value(self.program.output)
        if "score" not in self.program.inputs:
            return _cast(found, BOOL) if isinstance(found, _Value) else "row >= 0" if found else "row < 0"
        code = _cast(found, FLOAT)
        return code if isinstance(found, _Value) and len(found.axes) == 2 else f"tl.zeros_like(score) + {code}"

    def value(self, arg: Any) -> Any:
        return self.known[arg[1:]] if isinstance(arg, str) else arg

    def step(self, op: str, args: tuple[Any, ...]) -> Any:
        if op == "index":
            return self.index(_tensor(args[0]), [self.value(a) for a in args[1:]])
        if op == "cast":
            return _cast_to(self.value(args[0]), getattr(torch, args[1]))
        values = [self.value(a) for a in args]
        if not any(isinstance(x, _Value) for x in values):
            return OPERATIONS[op](*map(torch.tensor, values)).item()
        code, dtype = _translate(op, values)
        return _Value(code, dtype, _axes(values))

    def dtype_of(self, tensor: int) -> torch.dtype:
        dtype = self.layout[tensor][0]
        return FLOAT if dtype.is_floating_point else dtype

    def index(self, tensor: int, at: list[Any]) -> _Value:
        (dtype, factors, in_groups), place = self.layout[tensor], self.places[tensor]
        pointer = f"captured[{place}]"
        for i, factor, at_size in zip(at, factors, range(place + 1, place + 1 + 2 * len(at), 2), strict=True):
            length = f"size(captured[{at_size}])"
            if not isinstance(i, _Value):
                code = f"{i}" if i >= 0 else f"({length} - {-i})"
            else:
                code = _cast(i, INT if i.dtype in (BOOL, torch.uint8) else i.dtype)
                if code not in ("b", "h", "row", "col"):  # those are never negative
                    code = f"tl.where({code} < 0, {code} + {length}, {code})"
            # never outside of the tensor, whatever the function computes for scores that are hidden in the end
            if code == "col" and not factor and in_groups:  # loads of 8
                code = f"(tl.minimum(col // 8, {length} // 8 - 1) * 8 + col % 8)"
            else:
                code = f"tl.maximum(tl.minimum({code}, {length} - 1), 0)"
            pointer += f" + {code}.to(tl.int64)"
            pointer += f" * (size(captured[{at_size + 1}]) * {factor})" if factor else ""
        code = f"tl.load({pointer})" + (".to(tl.float32)" if dtype.is_floating_point else "")
        return _Value(code, self.dtype_of(tensor), _axes(at))


def _body(*lines: str) -> str:
    return "".join(f"    {line}\n" for line in lines)


def _tensor(arg: str) -> int:
    return int(arg.removeprefix("%t"))


def _translate(op: str, values: list[Any]) -> tuple[str, torch.dtype]:
    """The code of an operation, and the dtype of what it gives."""
    common = _promoted(values[1:] if op == "where" else values)
    same = [_cast(x, common) for x in values[op == "where" :]]
    if op in _OF_FLOAT:
        return _OF_FLOAT[op].format(_cast(values[0], FLOAT)), FLOAT
    if op in _COMPARE:
        return f"({same[0]} {_COMPARE[op]} {same[1]})", BOOL
    if op in ("logical_and", "logical_or") or (common == BOOL and op in _LOGICAL):
        x, y = (_cast(v, BOOL) for v in values)
        return f"({x} {_LOGICAL[op]} {y})", BOOL
    if op == "logical_not":
        return f"({same[0]} == 0)", BOOL
    if op == "bitwise_not":
        return (f"({same[0]} == 0)" if common == BOOL else f"~{same[0]}"), common
    if op in _INFIX:
        return f"({same[0]} {_INFIX[op]} {same[1]})", common
    if op == "div":
        return f"({_cast(values[0], FLOAT)} / {_cast(values[1], FLOAT)})", FLOAT
    if op in ("floordiv", "remainder"):
        return f"{'float' if common == FLOAT else 'int'}_{op}({same[0]}, {same[1]})", common
    if op in ("maximum", "minimum"):
        return _EXTREMA.format(op, *same), common
    if op == "pow":
        return _power(values, common)
    if op == "where":
        return f"tl.where({_cast(values[0], BOOL)}, {same[0]}, {same[1]})", common
    return _SAME[op].format(same[0]), common


def _power(values: list[Any], common: torch.dtype) -> tuple[str, torch.dtype]:
    base, exponent = values
    if isinstance(exponent, (int, float)) and exponent == int(exponent) and abs(exponent) <= _MOST_PRODUCTS:
        if exponent == 0:
            return f"({_cast(base, common)} * 0 + 1)", common
        code = _product(_cast(base, common), abs(int(exponent)))
        return (code, common) if exponent > 0 else (f"(1.0 / {code})", FLOAT)
    code = f"power_of({_cast(base, FLOAT)}, {_cast(exponent, FLOAT)})"
    if common == FLOAT:
        return code, FLOAT
    return f"tl.floor({code} + 0.5).to({_triton(common)})", common


def _product(x: str, n: int) -> str:
    """x ** n by squaring."""
    if n == 1:
        return x
    half = _product(x, n // 2)
    return f"({half} * {half})" if n % 2 == 0 else f"({half} * {half} * {x})"


def _promoted(values: list[Any]) -> torch.dtype:
    """The dtype that PyTorch gives an operation; a number only counts if it is of a higher kind."""
    dtypes = [x.dtype for x in values if isinstance(x, _Value)]
    numbers = [x for x in values if not isinstance(x, _Value)]
    if any(isinstance(x, float) for x in numbers):
        dtypes.append(FLOAT)
    if not all(isinstance(x, bool) for x in numbers) and all(dtype == BOOL for dtype in dtypes):
        dtypes.append(INT)
    return functools.reduce(torch.promote_types, dtypes, BOOL)


def _axes(values: list[Any]) -> frozenset[str]:
    return frozenset().union(*(x.axes for x in values if isinstance(x, _Value)))


def _cast(x: Any, dtype: torch.dtype) -> str:
    """Code of x as `dtype`."""
    if not isinstance(x, _Value):
        number = {BOOL: bool, FLOAT: float}.get(dtype, int)(x)
        return repr(number) if math.isfinite(number) else f'float("{number}")'
    if x.dtype == dtype:
        return x.code
    return f"({x.code} != 0)" if dtype == BOOL else f"{x.code}.to({_triton(dtype)})"


def _cast_to(x: Any, dtype: torch.dtype) -> Any:
    """An explicit cast: to a float of fewer bits it rounds, and the value stays a float32."""
    if not isinstance(x, _Value):
        return torch.tensor(x, device="cpu").to(dtype).item()
    if not dtype.is_floating_point:
        return x._replace(code=_cast(x, dtype), dtype=dtype)
    code = _cast(x, FLOAT)
    if dtype in (torch.float16, torch.bfloat16):
        code = f"{code}.to({_triton(dtype)}).to(tl.float32)"
    return x._replace(code=code, dtype=FLOAT)


def _triton(dtype: torch.dtype) -> str:
    return f"tl.{str(dtype).removeprefix('torch.')}"
