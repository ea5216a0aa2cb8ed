"""score_mod and mask_mod: users' functions of (score, batch, head, row, column), as FlexAttention knows them.

A function is traced into a Program: a few pointwise steps on tiles, written as text, so that an operator can carry it,
PyTorch can run it on a tile (`Program.run`) and a kernel can be generated from it. The derivative of a score_mod by its
score is traced the same way.
"""

from __future__ import annotations

import functools
import json
import math
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

SCORE_INPUTS = ("score", "b", "h", "row", "col")
MASK_INPUTS = SCORE_INPUTS[1:]

# What a step may do: name -> PyTorch function. Backends that generate code translate these names.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "abs": torch.abs,
    "add": torch.add,
    "bitwise_and": torch.bitwise_and,
    "bitwise_not": torch.bitwise_not,
    "bitwise_or": torch.bitwise_or,
    "bitwise_xor": torch.bitwise_xor,
    "cast": lambda x, dtype: x if (x.dtype, dtype) == (torch.float64, "float32") else x.to(getattr(torch, dtype)),
    "cos": torch.cos,
    "div": torch.true_divide,
    "eq": torch.eq,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "floordiv": torch.floor_divide,
    "ge": torch.ge,
    "gt": torch.gt,
    "index": lambda x, *at: x[tuple(i.long() for i in at)],
    "le": torch.le,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "logical_and": torch.logical_and,
    "logical_not": torch.logical_not,
    "logical_or": torch.logical_or,
    "lt": torch.lt,
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "mul": torch.mul,
    "ne": torch.ne,
    "neg": torch.neg,
    "pow": torch.pow,
    "remainder": torch.remainder,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "sign": torch.sign,
    "sin": torch.sin,
    "sqrt": torch.sqrt,
    "sub": torch.sub,
    "tanh": torch.tanh,
    "where": torch.where,
}
_SYNONYMS = {
    "prims::add": "add",
    "sgn": "sign",
    "floor_divide": "floordiv",
    "clamp_min": "maximum",
    "clamp_max": "minimum",
}
_REWRITTEN: dict[str, Callable[..., tuple[str, list[Any]]]] = {
    "masked_fill": lambda x, mask, y: ("where", [mask, y, x]),
    "reciprocal": lambda x: ("div", [1.0, x]),
    "relu": lambda x: ("maximum", [x, 0.0]),
    "rsub": lambda x, y: ("sub", [y, x]),
    "square": lambda x: ("mul", [x, x]),
}
_IDENTITIES = {"detach", "alias", "clone", "lift_fresh", "lift_fresh_copy", "expand", "view", "unsqueeze", "squeeze"}
_CONSTANTS = {"zeros_like", "new_zeros", "zeros", "_efficientzerotensor", "ones_like", "new_ones", "ones"}
_KEEP_SHAPE = {"detach", "alias", "clone", "lift_fresh", "lift_fresh_copy"}  # of a tensor that is indexed later


class Program(NamedTuple):
    """Steps (name, operation, arguments) from inputs to one output. An argument "%x" is a value, else a constant.

    Inputs are those of a mod, and "grad" for a derivative. A value "%t0", "%t1", ... is a tensor that was read;
    it only occurs as the first argument of "index", which has one more for each of its dims.
    """

    inputs: tuple[str, ...]
    steps: tuple[tuple[str, str, tuple[Any, ...]], ...]
    output: Any

    @property
    def text(self) -> str:
        """A one-line form: hashable, printable, the same in every process."""
        return json.dumps(self)

    @staticmethod
    @functools.lru_cache(maxsize=256)
    def parse(text: str) -> Program:
        inputs, steps, output = json.loads(text)
        return Program(tuple(inputs), tuple((name, op, tuple(args)) for name, op, args in steps), output)

    def reads_by(self, name: str) -> bool:
        """Whether it reads a tensor at an index that depends on this input."""
        dependent = {f"%{name}"}
        for step, op, args in self.steps:
            if not dependent.isdisjoint(args):
                if op == "index":
                    return True
                dependent.add(f"%{step}")
        return False

    def run(self, values: Sequence[Tensor], tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Run on tensors that broadcast together (tile by tile, or whole). dtype: of floating constants, and of what
        is read from tensors, so that a product of two is not rounded to their dtype."""
        device = values[0].device
        known = dict(zip(self.inputs, values, strict=True)) | {f"t{i}": t for i, t in enumerate(tensors)}

        def value(arg: Any) -> Any:
            if isinstance(arg, str):
                return known[arg[1:]] if arg.startswith("%") else arg
            return torch.tensor(arg, dtype=dtype if isinstance(arg, float) else None, device=device)

        for name, op, args in self.steps:
            result = OPERATIONS[op](*map(value, args))
            known[name] = result.to(dtype) if op == "index" and result.is_floating_point() else result
        return value(self.output)


class Mod(NamedTuple):
    """A traced function, to be passed wherever the function may be, saving the time (some 50 ms) to trace it again.

    program: text of its Program. derivative: of a score_mod by its score, times the incoming gradient; "" for a
    mask_mod. tensors: what the function read beside its arguments; their values are read anew in every call.
    """

    kind: str
    program: str
    derivative: str
    tensors: tuple[Tensor, ...]


def trace_score_mod(score_mod: Callable[..., Tensor] | Mod, device: torch.device | str = "cpu") -> Mod:
    """Trace score_mod(score, b, h, row, col) -> score, for tensors on `device`. Raises ValueError for what no tile can
    do."""
    return _traced("score_mod", score_mod, _device(device), _trace_score_mod)


def trace_mask_mod(mask_mod: Callable[..., Tensor] | Mod, device: torch.device | str = "cpu") -> Mod:
    """Trace mask_mod(b, h, row, col) -> bool, for tensors on `device`. Raises ValueError for what no tile can do."""
    return _traced("mask_mod", mask_mod, _device(device), _trace_mask_mod)


def _device(device: torch.device | str) -> torch.device:
    """With its index, as tensors have it."""
    device = torch.device(device)
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def _traced(
    argument: str, function: Any, device: torch.device, trace: Callable[[Callable[..., Tensor], torch.device], Mod]
) -> Mod:
    if isinstance(function, Mod):
        if function.kind != argument:
            raise TypeError(f"{argument}: got a traced {function.kind}; trace it with tileattn.trace_{argument}")
        mod = function
    elif not callable(function):
        raise TypeError(f"{argument}: got {type(function).__name__}, expected a function or a traced one")
    elif torch.compiler.is_compiling():
        raise ValueError(
            f"{argument}: a function cannot be traced inside torch.compile; trace it outside, with "
            f"tileattn.trace_{argument}(function, device), and pass what that returns"
        )
    else:
        mod = _cached(argument, function, device, trace)
    for tensor in mod.tensors:
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{argument}: reads a tensor of shape {tuple(tensor.shape)} that requires a gradient, which is not "
                f"computed; detach() it, or pass what is to be learned as bias="
            )
        if tensor.device != device:
            raise ValueError(f"{argument}: reads a tensor on {tensor.device}, but q is on {device}; move it there")
    return mod


def _trace_score_mod(function: Callable[..., Tensor], device: torch.device) -> Mod:
    def derivative(score: Tensor, b: Tensor, h: Tensor, row: Tensor, col: Tensor, grad: Tensor) -> Tensor:
        with torch.enable_grad():
            score = score.detach().requires_grad_()
            modified = function(score, b, h, row, col)
            if not modified.requires_grad:
                return torch.zeros_like(grad)
            (found,) = torch.autograd.grad(modified, score, grad.to(modified.dtype), allow_unused=True)
        return torch.zeros_like(grad) if found is None else found

    tensors: list[Tensor] = []
    program = _trace("score_mod", function, SCORE_INPUTS, device, tensors)
    backward = _trace("score_mod", derivative, (*SCORE_INPUTS, "grad"), device, tensors)
    return Mod("score_mod", program.text, backward.text, tuple(tensors))


def _trace_mask_mod(function: Callable[..., Tensor], device: torch.device) -> Mod:
    tensors: list[Tensor] = []
    program = _trace("mask_mod", function, MASK_INPUTS, device, tensors)
    return Mod("mask_mod", program.text, "", tuple(tensors))


_cache: weakref.WeakKeyDictionary[Any, tuple[Any, Mod]] = weakref.WeakKeyDictionary()


def _cached(
    argument: str,
    function: Callable[..., Tensor],
    device: torch.device,
    trace: Callable[[Callable[..., Tensor], torch.device], Mod],
) -> Mod:
    """What was traced last for this very function, if everything it reads is what it was then."""
    if not isinstance(function, types.FunctionType):
        return trace(function, device)
    try:
        key = (argument, device, torch.get_default_dtype(), _reads(function, ()))
    except _UnknownError:
        return trace(function, device)
    known = _cache.get(function)
    if known is None or known[0] != key:
        known = _cache[function] = key, trace(function, device)
    return known[1]


class _UnknownError(Exception):
    """A function reads something that may change unnoticed."""


class _Same:
    """Equal to itself alone; keeps x alive, so that its id stays its own."""

    def __init__(self, x: Any) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.x is other.x

    __hash__ = None  # type: ignore[assignment]


def _reads(function: types.FunctionType, seen: tuple[types.FunctionType, ...]) -> Any:
    """All that a function and the functions it calls read, to be compared."""
    if function in seen:
        return "recursion"
    seen = (*seen, function)
    names = _names(function.__code__)
    read = [function.__globals__[name] for name in names if name in function.__globals__]
    try:
        read += [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:
        raise _UnknownError from None
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    return function.__code__, names, [_fingerprint(x, seen) for x in read]


def _names(code: types.CodeType) -> tuple[str, ...]:
    inner = (_names(c) for c in code.co_consts if isinstance(c, types.CodeType))
    return (*code.co_names, *(name for names in inner for name in names))


def _fingerprint(x: Any, seen: tuple[types.FunctionType, ...]) -> Any:
    if isinstance(x, Tensor):
        return float(x) if x.dim() == 0 and x.device.type == "cpu" else _Same(x)
    if x is None or isinstance(x, (bool, int, float, str, torch.dtype, torch.device)):
        return type(x), x
    if isinstance(x, types.FunctionType):
        return _Same(x), None if x.__module__.split(".")[0] == "torch" else _reads(x, seen)
    if x is torch or x is math or x is torch.nn.functional or isinstance(x, types.BuiltinFunctionType):
        return _Same(x)
    if isinstance(x, tuple):
        return [_fingerprint(y, seen) for y in x]
    raise _UnknownError


def _trace(
    argument: str,
    function: Callable[..., Tensor],
    inputs: tuple[str, ...],
    device: torch.device,
    tensors: list[Tensor],
) -> Program:
    # make_fx costs a tenth of a second to import: only those who use mods pay.
    from torch.fx.experimental.proxy_tensor import make_fx

    floating = ("score", "grad")
    examples = [
        torch.zeros(1, dtype=torch.float32 if name in floating else torch.int32, device=device) for name in inputs
    ]
    try:
        traced = make_fx(function, _decompositions(), tracing_mode="fake", _allow_non_fake_inputs=True)(*examples)
    except Exception as error:
        raise ValueError(
            f"{argument}: cannot be traced ({type(error).__name__}: {str(error).splitlines()[0]}); it must be made of "
            f"pointwise PyTorch operations on {', '.join(inputs[: len(SCORE_INPUTS)])} and of indexing, without Python "
            f"control flow on their values"
        ) from error
    return _Reader(argument, inputs, traced, tensors).read()


@functools.cache
def _decompositions() -> dict[Any, Any]:
    aten = torch.ops.aten
    return torch._decomp.get_decompositions(
        [
            *(aten.tanh_backward, aten.sigmoid_backward, aten.threshold_backward, aten.silu, aten.silu_backward),
            *(aten.gelu, aten.gelu_backward, aten.softplus, aten.softplus_backward, aten.logit, aten.logit_backward),
            *(aten.leaky_relu, aten.leaky_relu_backward, aten.hardtanh, aten.hardtanh_backward),
        ]
    )


class _Reader:
    """Turns a traced graph into a Program. tensors: what programs read, of this one and of those before it."""

    def __init__(
        self, argument: str, inputs: tuple[str, ...], traced: torch.fx.GraphModule, tensors: list[Tensor]
    ) -> None:
        self.argument, self.inputs, self.traced, self.tensors = argument, inputs, traced, tensors
        self.values: dict[torch.fx.Node, Any] = {}
        self.steps: list[tuple[str, str, tuple[Any, ...]]] = []

    def read(self) -> Program:
        names = iter(self.inputs)
        output: Any = None
        for node in self.traced.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = f"%{next(names)}"
            elif node.op == "get_attr":
                self.values[node] = self.tensor(getattr(self.traced, str(node.target)))
            elif node.op == "call_function":
                self.values[node] = self.call(node)
            else:
                output = self.output(node.args[0])
        return Program(self.inputs, tuple(self.steps), output)

    def output(self, node: Any) -> Any:
        if not isinstance(node, torch.fx.Node):
            raise self.refuse(f"returns {node!r}, expected one tensor")
        meta = node.meta.get("val")
        if isinstance(meta, Tensor) and meta.numel() != 1:
            raise self.refuse(
                f"returns {tuple(meta.shape)} for one score; a tensor is to be indexed by all of its dims at once: "
                f"t[h, row], not t[h][row]"
            )
        if self.argument == "mask_mod" and isinstance(meta, Tensor) and meta.dtype != torch.bool:
            raise self.refuse(f"returns {meta.dtype}, expected torch.bool (True = attend)")
        return self.scalar(node)

    def tensor(self, tensor: Tensor) -> Any:
        """A number, or a tensor to be indexed."""
        if tensor.dim() == 0 and tensor.device.type == "cpu" and not tensor.requires_grad:
            return tensor.item()
        for i, known in enumerate(self.tensors):
            if known is tensor:
                return _Indexed(i, (None,) * tensor.dim())
        self.tensors.append(tensor)
        return _Indexed(len(self.tensors) - 1, (None,) * tensor.dim())

    def scalar(self, arg: Any) -> Any:
        """An argument that stands for one number a score."""
        value = self.values[arg] if isinstance(arg, torch.fx.Node) else arg
        if not isinstance(value, _Indexed):
            return value
        sizes = self.tensors[value.tensor].shape
        at = [0 if i is None and size == 1 else i for i, size in zip(value.at, sizes, strict=True)]
        if None in at:
            raise self.refuse(
                f"uses a tensor of shape {tuple(sizes)} as a whole; index it by all of its dims at once: t[h, row]"
            )
        return self.step("index", (f"%t{value.tensor}", *at))

    def call(self, node: torch.fx.Node) -> Any:
        schema = node.target._schema
        op = schema.name.removeprefix("aten::")
        if schema.is_mutable:  # of what it computed itself; derivatives of PyTorch do so
            self.values[node.args[0]] = self.mutate(op.rstrip("_"), node)  # type: ignore[index]
            return self.values[node.args[0]]  # type: ignore[index]
        first = self.values.get(node.args[0]) if node.args and isinstance(node.args[0], torch.fx.Node) else None
        if op == "index":
            if not isinstance(first, _Indexed):
                raise self.refuse("indexes what is computed; only tensors from outside can be indexed")
            return self.index(first, node.args[1])
        if isinstance(first, _Indexed) and op == "select":
            free = [place for place, i in enumerate(first.at) if i is None]
            return first.fill(free[node.args[1]], node.args[2])  # type: ignore[index]
        if isinstance(first, _Indexed) and op in _KEEP_SHAPE:
            return first
        args = [self.scalar(a) for a in node.args if not isinstance(a, (list, tuple))]
        if op in _CONSTANTS:
            return torch.tensor("ones" in op, device="cpu").to(node.meta["val"].dtype).item()
        return self.pointwise(op, args, node.kwargs)

    def mutate(self, op: str, node: torch.fx.Node) -> Any:
        if node.args[0].op != "call_function":
            raise self.refuse(f"changes a tensor in place ({op}_); use what returns a new one")
        return self.pointwise(op, [self.scalar(a) for a in node.args], node.kwargs)

    def index(self, indexed: _Indexed, at: Any) -> Any:
        free = [place for place, i in enumerate(indexed.at) if i is None]
        for place, i in zip(free, at, strict=False):
            if i is not None:
                indexed = indexed.fill(place, self.scalar(i))
        return indexed if None in indexed.at else self.scalar(indexed)

    def pointwise(self, op: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        if op in _IDENTITIES:
            return args[0]
        if op in ("scalar_tensor", "full", "full_like"):
            return args[-1]
        if op == "_to_copy":
            dtype = kwargs.get("dtype")
            return args[0] if dtype is None else self.step("cast", (args[0], str(dtype).removeprefix("torch.")))
        if op == "div" and kwargs.get("rounding_mode") is not None:
            op = {"floor": "floordiv"}.get(str(kwargs["rounding_mode"]), "div with rounding_mode='trunc'")
        elif op in ("add", "sub") and kwargs.get("alpha", 1) != 1:
            args[1] = self.step("mul", (args[1], kwargs["alpha"]))
        elif op == "clamp":
            low, high = (*args[1:], None, None)[:2]
            low, high = kwargs.get("min", low), kwargs.get("max", high)
            raised = args[0] if low is None else self.step("maximum", (args[0], low))
            return raised if high is None else self.step("minimum", (raised, high))
        elif op in _REWRITTEN:
            op, args = _REWRITTEN[op](*args)
        op = _SYNONYMS.get(op, op)
        if op not in OPERATIONS:
            raise self.refuse(f"operation {op} is not pointwise on a tile; use of: {', '.join(sorted(OPERATIONS))}")
        return self.step(op, tuple(args))

    def step(self, op: str, args: tuple[Any, ...]) -> Any:
        name = f"v{len(self.steps)}"
        self.steps.append((name, op, args))
        return f"%{name}"

    def refuse(self, why: str) -> ValueError:
        return ValueError(f"{self.argument}: {why}")


class _Indexed(NamedTuple):
    """A tensor read by a function, some of its dims indexed, None for the others."""

    tensor: int
    at: tuple[Any, ...]

    def fill(self, place: int, i: Any) -> _Indexed:
        return self._replace(at=(*self.at[:place], i, *self.at[place + 1 :]))
