"""Runs the Hopper kernels' own source on a CPU: one thread a partition, memory and products as late as they may be.

Triton's modules are replaced by the few names below. A load writes NaN at once and its data when no partition can go
on without; a product reads its shared memory then, a store when its buffer is about to be used again.
So a missing wait or an early release shows as a wrong result, a barrier that nobody completes as a deadlock.
"""

from __future__ import annotations

import importlib.util
import math
import random
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tileattn.backends.hopper.backward_launch import (
    BackwardPlan,
    backward_mode_of,
    backward_plan_for,
    num_tiles,
    places_for,
)
from tileattn.backends.hopper.kvcache import as_packed, by_sequence, packed_inputs, ranking
from tileattn.backends.hopper.launch import mode_of, plan_for, slopes_of
from tileattn.backends.hopper.ptx import NAMED_BARRIERS
from tileattn.backends.hopper.ranking import RANKED, TABLE_FIELDS
from tileattn.backends.hopper.schedule import FAR
from tileattn.kvcache import CacheInputs, CacheProblem
from tileattn.problem import Forward, Gradients, Inputs, Problem

PACKAGE = "tileattn.backends.hopper"
_here = threading.local()  # of a partition: name, threads, products and stores in flight


class FaultError(Exception):
    """What the kernel did wrong."""


def expect_wrong(is_right: Callable[[int], bool]) -> None:
    """A planted fault shows in one of a few simulations, which is_right tells by their seed; which, is up to chance."""

    def shows(seed: int) -> bool:
        try:
            return not is_right(seed)
        except (FaultError, ZeroDivisionError):
            return True

    assert any(map(shows, range(8))), "the result is right all the same"


class Scalar(int):
    def to(self, dtype: str) -> Scalar:
        return self


def _scalar_operator(name: str) -> Callable[..., Any]:
    def operator(self: Scalar, other: Any) -> Any:
        result = getattr(int, name)(self, other) if isinstance(other, int) else NotImplemented
        return Scalar(result) if isinstance(result, int) else result

    return operator


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "radd", "rsub", "rmul"):
    setattr(Scalar, f"__{_name}__", _scalar_operator(f"__{_name}__"))


class Tile(np.ndarray):
    """A tensor in registers."""

    @property
    def type(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(layout=None)

    def to(self, dtype: str) -> Tile:
        return tile(_round(self, dtype))

    def permute(self, order: tuple[int, ...]) -> Tile:
        return self.transpose(order)


def tile(x: Any) -> Tile:
    return np.asarray(x).view(Tile)


def _round(x: Any, dtype: str) -> np.ndarray:
    kinds = {"bf16": torch.bfloat16, "fp16": torch.float16}
    if dtype not in kinds:
        return np.asarray(x)
    return torch.from_numpy(np.array(x, dtype=np.float32)).to(kinds[dtype]).float().numpy()


class Machine:
    """Partitions that wait for conditions, and notice when none can go on."""

    def __init__(self, seed: int) -> None:
        self.changed = threading.Condition()
        self.random = random.Random(seed)
        self.live = 0
        self.waiting: list[Callable[[], bool]] = []
        # Loads and products; one is done when no partition can go on without, of products first where the seed is odd.
        self.in_flight: list[Callable[[], None]] = []
        self.products_first = seed % 2 == 1
        self.fault: str | None = None
        self.barriers: dict[int, list[int]] = {}  # named barrier -> [arrived threads, generation]

    def wait_for(self, ready: Callable[[], bool], what: str) -> None:
        with self.changed:
            self.waiting.append(ready)
            while not ready():
                if len(self.waiting) == self.live and not any(other() for other in self.waiting):
                    if self.in_flight:
                        products = [x for x in self.in_flight if self.products_first and isinstance(x, Product)]
                        done = self.random.choice(products or self.in_flight)
                        self.in_flight.remove(done)
                        done()
                        self.changed.notify_all()
                        continue
                    self.fail(f"deadlock: {_here.name} waits for {what}")
                if self.fault is not None:
                    raise FaultError(self.fault)
                self.changed.wait(1.0)
            self.waiting.remove(ready)

    def fail(self, what: str) -> None:
        self.fault = self.fault or what
        self.changed.notify_all()

    def leave(self) -> None:
        with self.changed:
            self.live -= 1
            self.changed.notify_all()

    def arrive(self, barrier: int, threads: int) -> tuple[list[int], int]:
        """Arrive at a named barrier with all of this partition's threads."""
        with self.changed:
            if barrier >= NAMED_BARRIERS.value:
                raise FaultError(f"there is no named barrier {barrier}")
            state = self.barriers.setdefault(int(barrier), [0, 0])
            generation = state[1]
            state[0] += _here.threads
            if state[0] > threads:
                self.fail(f"named barrier {barrier}: {state[0]} arrivals of {threads}")
                raise FaultError(self.fault)
            if state[0] == threads:
                state[0] = 0
                state[1] += 1
                self.changed.notify_all()
            return state, generation


class MBarrier:
    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def init(self, count: int) -> None:
        self.count = self.pending = count
        self.bytes = self.phase = 0

    def arrive(self, count: int = 1, expected: int = 0) -> None:
        with self.machine.changed:
            self.bytes += expected
            self.pending -= count
            if self.pending < 0:
                self.machine.fail("mbarrier: more arrivals than it counts")
                raise FaultError(self.machine.fault)
            self.turn()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self.turn()

    def turn(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase ^= 1
            self.pending = self.count
            self.machine.changed.notify_all()


class Shared:
    """Shared memory. views: what else the same memory was called; what is stored under one name is NaN under the
    others."""

    def __init__(self, data: np.ndarray, dtype: str = "", views: list[np.ndarray] | None = None) -> None:
        self.data, self.dtype, self.views = data, dtype, [data] if views is None else views

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def index(self, i: int) -> Any:
        if not 0 <= int(i) < len(self.data):
            raise FaultError(f"shared memory: index {i} of {len(self.data)}")
        item = self.data[int(i)]
        return item[0] if item.dtype == object else Shared(item, self.dtype, self.views)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if not 0 <= start <= start + length <= self.data.shape[dim]:
            raise FaultError(f"shared memory: {start} to {start + length} of {self.data.shape[dim]}")
        return Shared(self.data[(slice(None),) * dim + (slice(start, start + length),)], self.dtype, self.views)

    def reshape(self, shape: list[int]) -> Shared:
        view = self.data.view()
        view.shape = tuple(shape)  # refuses to copy
        return Shared(view, self.dtype, self.views)

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.transpose(order), self.dtype, self.views)

    def reinterpret(self, dtype: str, shape: list[int], layout: Any) -> Shared:
        for view in self.views:
            if view.shape == tuple(shape):
                return Shared(view, dtype, self.views)
        self.views.append(np.full(shape, np.nan, np.float32))
        return Shared(self.views[-1], dtype, self.views)

    def store(self, value: Any) -> None:
        for view in self.views:
            if not np.may_share_memory(view, self.data):
                view[...] = np.nan
        self.data[...] = value

    def load(self, layout: Any) -> Tile:
        return tile(self.data.copy())


class Descriptor:
    """A tensor in global memory, read and written in blocks."""

    layout = None

    def __init__(self, data: np.ndarray, block: list[int], dtype: str) -> None:
        self.data, self.dtype, self.shape = data, dtype, tuple(map(Scalar, data.shape))
        nbytes = math.prod(block) * (4 if dtype == "float32" else 2)
        self.block_type = types.SimpleNamespace(shape=block, nbytes=nbytes)

    def window(self, at: list[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Where a block at these coordinates lies in the tensor, and which part of the block that is."""
        ours, theirs = [], []
        for start, block, size in zip(map(int, at), self.block_type.shape, self.data.shape, strict=True):
            first, last = max(start, 0), min(start + block, size)
            ours.append(slice(first, max(first, last)))
            theirs.append(slice(first - start, max(first, last) - start))
        return tuple(ours), tuple(theirs)


class PackedDescriptor(Descriptor):
    """Of packed sequences, (total, heads, head_dim): the dims that schedule.coordinates speaks of."""

    def __init__(self, data: np.ndarray, block: list[int], dtype: str) -> None:
        super().__init__(data, block, dtype)
        self.shape = (Scalar(len(data) + 1), FAR.value + 1, FAR.value, *self.shape[1:])

    def window(self, at: list[int]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        ours, theirs = [], []
        for start, block, size in zip(map(int, at), self.block_type.shape, self.shape, strict=True):
            first, last = max(start, 0), min(start + block, size)
            ours.append(slice(first, max(first, last)))
            theirs.append(slice(first - start, max(first, last) - start))
        first, count = int(at[0]) - int(at[1]) + ours[2].start, ours[2].stop - ours[2].start
        if ours[0].stop == ours[0].start:
            count = 0
        if count and not 0 <= first <= first + count <= len(self.data):
            raise FaultError(f"rows {first} to {first + count} of {len(self.data)} are addressed")
        rows = slice(first, first + count) if count else slice(0, 0)
        return (rows, *ours[3:]), (0, 0, slice(theirs[2].start, theirs[2].start + count), *theirs[3:])


class Pointer:
    def __init__(self, data: np.ndarray, offset: Any = 0) -> None:
        self.data, self.offset = data, offset

    def __add__(self, offset: Any) -> Pointer:
        return Pointer(self.data, self.offset + offset)


class Product:
    """An asynchronous product: computed when it is waited for. Its accumulator may be one in flight.

    A wait that leaves it in flight returns it as it is; whatever then uses it is at fault.
    """

    def __init__(self, a: Any, b: Any, accumulator: Any) -> None:
        self.a, self.b, self.accumulator = a, b, accumulator
        self.value: Tile | None = None

    def __call__(self) -> None:
        a = self.a.data if isinstance(self.a, Shared) else np.asarray(self.a)
        value = a.astype(np.float32) @ self.b.data.astype(np.float32)
        added = self.accumulator.value if isinstance(self.accumulator, Product) else self.accumulator
        self.value = tile(value if added is None else value + added)

    def _early(self, *args: Any) -> Any:
        raise FaultError("a product's result is used before it was waited for")

    __getattr__ = __array__ = __add__ = __sub__ = __mul__ = _early


class Store:
    """A block on its way to global memory, or into a sum there: read when it is waited for."""

    def __init__(self, desc: Descriptor, at: list[int], block: Shared, add: bool) -> None:
        self.desc, self.at, self.block, self.add = desc, at, block, add
        self.done = False

    def __call__(self) -> None:
        ours, theirs = self.desc.window(self.at)
        self.desc.data[ours] = self.block.data[theirs] + (self.desc.data[ours] if self.add else 0.0)
        self.done = True


def _triton(machine: Machine, program: int, programs: int) -> dict[str, Any]:
    """The modules that the kernel's files import, by name."""

    def allocate(dtype: str, shape: list[int], layout: Any) -> Shared:
        if layout == "mbarriers":
            data = np.empty(shape, dtype=object)
            for i in np.ndindex(*shape):
                data[i] = MBarrier(machine)
            return Shared(data)
        return Shared(np.full(shape, -1) if dtype == "int32" else np.full(shape, np.nan, np.float32), dtype)

    def tma_load(desc: Descriptor, at: list[int], barrier: MBarrier, block: Shared) -> None:
        block.data[...] = np.nan
        ours, theirs = desc.window(at)

        def land() -> None:
            block.data[...] = 0.0
            block.data[theirs] = desc.data[ours]
            barrier.complete(desc.block_type.nbytes)

        with machine.changed:
            machine.in_flight.append(land)

    def tma_store(desc: Descriptor, at: list[int], block: Shared) -> None:
        if any(start + size <= 0 for start, size in zip(at, desc.block_type.shape, strict=True)):
            raise FaultError("a block before the tensor is stored: an illegal instruction")
        _here.stores.append(Store(desc, at, block, False))

    def tma_reduce_add(desc: Descriptor, at: list[int], block: Shared) -> None:
        _here.stores.append(Store(desc, at, block, True))

    def store_wait(pending: int) -> None:
        while len(_here.stores) > pending:
            leave = _here.stores.pop(0)
            with machine.changed:
                machine.in_flight.append(leave)
            machine.wait_for(lambda leave=leave: leave.done, "a store")

    def multiply(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Product:
        if isinstance(a, Product):
            raise FaultError("a product's result is used before it was waited for")
        accumulator = (acc if isinstance(acc, Product) else np.array(acc)) if use_acc else None
        _here.products.append(Product(a, b, accumulator))
        return _here.products[-1]

    def multiply_wait(pending: int, deps: tuple[Product, ...]) -> Any:
        while len(_here.products) > pending:
            product = _here.products.pop(0)
            with machine.changed:
                machine.in_flight.append(product)
            machine.wait_for(lambda product=product: product.value is not None, "a product")
        values = tuple(x.value if isinstance(x, Product) and x.value is not None else x for x in deps)
        return values[0] if len(values) == 1 else values

    def wait(barrier: MBarrier, phase: int, pred: Any = True) -> None:
        if pred:
            machine.wait_for(lambda: barrier.phase != int(phase), f"an mbarrier's phase {int(phase)}")

    def load(pointer: Pointer, mask: Any = True, other: Any = None) -> Any:
        if not np.ndim(pointer.offset):
            value = pointer.data.reshape(-1)[int(pointer.offset)]
            return Scalar(value) if pointer.data.dtype.kind == "i" else value
        at, mask = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(mask))
        found = np.full(at.shape, 0 if other is None else other, pointer.data.dtype)
        found[mask] = pointer.data.reshape(-1)[at[mask]]
        return tile(found)

    def store(pointer: Pointer, value: Any, mask: Any = True) -> None:
        at, value, mask = np.broadcast_arrays(np.asarray(pointer.offset), np.asarray(value), np.asarray(mask))
        pointer.data.reshape(-1)[at[mask]] = value[mask]

    def atomic_add(pointer: Pointer, value: int, sem: str) -> Scalar:
        with machine.changed:
            old = Scalar(pointer.data[0])
            pointer.data[0] += value
        return old

    def static_assert(condition: bool, message: str) -> None:
        if not condition:
            raise FaultError(message)

    def specialize(functions: list[Any], warps: list[int], registers: list[int]) -> None:
        _run_partitions(machine, functions, [4, *warps])

    gl = types.SimpleNamespace(
        **{name: name for name in ("int32", "int64", "float32")},
        bfloat16="bf16",
        float16="fp16",
        constexpr=lambda x: x,
        shared_memory_descriptor=Shared,
        num_warps=lambda: _here.threads // 32,
        static_range=range,
        static_assert=static_assert,
        program_id=lambda axis: Scalar(program),
        num_programs=lambda axis: Scalar(programs),
        arange=lambda start, end, layout: tile(np.arange(start, end)),
        zeros=lambda shape, dtype, layout: tile(np.zeros(shape, np.float32)),
        full=lambda shape, value, dtype, layout: tile(np.full(shape, value)),
        where=lambda c, a, b: tile(np.where(c, a, b)) if np.ndim(c) else (a if c else b),
        maximum=lambda a, b: tile(np.maximum(a, b)) if np.ndim(a) else Scalar(max(a, b)),
        minimum=lambda a, b: tile(np.minimum(a, b)) if np.ndim(a) else Scalar(min(a, b)),
        max=lambda x, axis: tile(np.max(x, axis)) if x.ndim > 1 else Scalar(np.max(x)),
        sum=lambda x, axis: tile(np.sum(x, axis)) if x.ndim > 1 else Scalar(np.sum(x)),
        exp2=lambda x: tile(np.exp2(np.asarray(x, np.float32))),
        log=lambda x: tile(np.log(x)),
        abs=lambda x: tile(np.abs(x)),
        split=lambda x: (x[..., 0], x[..., 1]),
        load=load,
        convert_layout=lambda x, layout: x,
        allocate_shared_memory=allocate,
        atomic_add=atomic_add,
        store=store,
        NVMMASharedLayout=types.SimpleNamespace(get_default_for=lambda *args: None),
        warp_specialize=specialize,
        **dict.fromkeys(
            ("SliceLayout", "NVMMADistributedLayout", "DotOperandLayout", "BlockedLayout", "SwizzledSharedLayout"),
            lambda *args, **kwargs: None,
        ),
    )
    gluon = types.SimpleNamespace(
        jit=lambda fn=None, **options: fn or (lambda fn: fn), constexpr_function=lambda fn: fn, language=gl
    )
    names = types.SimpleNamespace(
        aggregate=lambda cls: cls,
        fence_async_shared=lambda: None,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=lambda: "mbarriers",
            init=lambda barrier, count: barrier.init(count),
            expect=lambda barrier, count: barrier.arrive(expected=count),
            arrive=lambda barrier, count: barrier.arrive(count),
            wait=wait,
        ),
        tma_load=tma_load,
        tma_store=tma_store,
        tma_reduce_add=tma_reduce_add,
        reinterpret=Shared.reinterpret,
        store_wait=store_wait,
        warpgroup_mma=multiply,
        warpgroup_mma_wait=multiply_wait,
    )
    return {
        "triton.experimental": types.SimpleNamespace(gluon=gluon),
        "triton.experimental.gluon": gluon,
        f"{PACKAGE}.gluon_names": names,
        f"{PACKAGE}.ptx": _ptx(machine),
    }


def _ptx(machine: Machine) -> types.SimpleNamespace:
    def sync(barrier: int, threads: int) -> None:
        state, generation = machine.arrive(barrier, threads)
        machine.wait_for(lambda: state[1] != generation, f"named barrier {int(barrier)}")

    def arrive(barrier: int, threads: int, pred: Any = True) -> None:
        if pred:
            machine.arrive(barrier, threads)

    def wait_for_turn(pointer: Pointer, turn: int) -> None:
        machine.wait_for(lambda: pointer.data[pointer.offset] == turn, f"turn {int(turn)}")

    def pass_turn(pointer: Pointer, turn: int, pending: int) -> None:
        with machine.changed:
            pointer.data[pointer.offset] = turn
            machine.changed.notify_all()

    return types.SimpleNamespace(
        NAMED_BARRIERS=NAMED_BARRIERS.value,
        wait_for_turn=wait_for_turn,
        pass_turn=pass_turn,
        opaque=lambda x: x,
        barrier_sync=sync,
        barrier_arrive=arrive,
        declare_flag=lambda: None,
        any_reaches=lambda x, limit: int(not np.all(x < limit)),
        boundary=lambda x: x,
        narrow=lambda x, dtype: tile(_round(x, dtype)),
        narrow_product=lambda p, x, dtype: tile(_round(p * (_round(x, dtype) if dtype == "bf16" else x), dtype)),
        reciprocal=lambda x: tile(1.0 / x),
    )


def _run_partitions(machine: Machine, functions: list[Any], warps: list[int]) -> None:
    errors: list[Exception] = []

    def run(function: Callable[..., None], args: tuple[Any, ...], num_warps: int) -> None:
        _here.name, _here.threads, _here.products, _here.stores = function.__name__, 32 * num_warps, [], []
        try:
            with np.errstate(all="ignore"):
                function(*args)
            if _here.products or _here.stores:
                raise FaultError("products or stores are left in flight")
        except Exception as error:
            errors.append(error)
            with machine.changed:
                machine.fail(str(error))
        finally:
            machine.leave()

    machine.live = len(functions)
    threads = [
        threading.Thread(target=run, args=(*function, num_warps), daemon=True)
        for function, num_warps in zip(functions, warps, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    for barrier, (arrived, _) in machine.barriers.items():
        if arrived:
            raise FaultError(f"named barrier {barrier} is left with {arrived} arrivals")


class Kernel:
    """The kernels' files, read with Triton replaced. edits: (file, old, new), each a fault to plant."""

    def __init__(self, *edits: tuple[str, str, str]) -> None:
        spec = importlib.util.find_spec("tileattn.backends")
        assert spec is not None
        folder = Path(str(spec.origin)).parent / "hopper"
        names = (
            "pipeline",
            "schedule",
            "ranking",
            "key_schedule",
            "softmax",
            "forward",
            "backward_steps",
            "backward_alone",
            "backward_wide",
            "backward_carry",
            "backward",
        )
        self.sources = {name: (folder / f"{name}.py").read_text() for name in names}
        for name, old, new in edits:
            assert self.sources[name].count(old) >= 1, f"{name}.py: {old!r} is not there"
            self.sources[name] = self.sources[name].replace(old, new)

    def forward(
        self, problem: Problem, inputs: Inputs, programs: int = 3, seed: int = 0, table: np.ndarray | None = None
    ) -> Forward:
        """The backend's forward, on up to this many programs, one after the other. table: of sequences in a cache."""
        plan, tile = plan_for(problem), mode_of(problem)
        programs = programs if problem.varlen else min(programs, plan.most_programs)
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[problem.dtype]
        *of_batch, rows, heads, _ = inputs.q.shape
        out = np.full((*of_batch, rows, heads, problem.head_dim_v), np.nan, np.float32)
        lse = np.full((*of_batch, heads, rows), np.nan, np.float32)
        counter = np.zeros(1, int)
        tensors = (*(x.float().numpy() for x in inputs[:3]), out)
        describe = PackedDescriptor if problem.varlen else Descriptor
        if problem.varlen and table is None:
            table = self.rank(inputs.cu_seqlens_q, inputs.cu_seqlens_k, heads // tile.PACK, tile.BLOCK_M)
        slopes, sink = slopes_of(inputs, problem.batch), None if inputs.sink is None else inputs.sink.float()
        for program in range(programs):
            modules = _triton(Machine(seed + program), program, programs)
            kernel = self._load("forward", modules)
            modifiers = modules[f"{PACKAGE}.softmax"].Modifiers(
                *plan.scales, *(None if x is None else Pointer(x.numpy()) for x in (slopes, sink))
            )
            kernel["attention_forward"](
                *(describe(x, block, dtype) for x, block in zip(tensors, plan.blocks, strict=True)),
                *(None if x is None else Pointer(x) for x in (lse, counter, table)),
                *map(Scalar, (problem.batch, *plan.sizes)),
                modifiers,
                kernel["Mode"](*tile),
            )
        if counter[0] != 0:
            raise FaultError(f"the tile counter is left at {counter[0]}")
        return Forward(torch.from_numpy(out).to(problem.dtype), torch.from_numpy(lse))

    def module(self, name: str) -> dict[str, Any]:
        """A file's names, for what needs no partitions."""
        return self._load(name, _triton(Machine(0), 0, 0))

    def rank(self, tiled: torch.Tensor | None, others: torch.Tensor | None, per_block: int, block: int) -> np.ndarray:
        """The table of packed sequences."""
        assert tiled is not None
        assert others is not None
        sequences = len(tiled) - 1
        table = np.full((TABLE_FIELDS, sequences + 1), -1)
        arguments = (tiled.numpy(), others.numpy(), table)
        for program in range(sequences // RANKED.value + 1):
            kernel = self._load("ranking", _triton(Machine(0), program, 0))
            kernel["rank_sequences"](*map(Pointer, arguments), *map(Scalar, (sequences, per_block, block)))
        return table

    def attend(self, problem: CacheProblem, inputs: CacheInputs) -> Forward:
        """The backend's attention to a cache."""
        table = torch.full((TABLE_FIELDS, problem.batch + 1), -1)
        arguments = ranking(problem, inputs, plan_for(as_packed(problem)), table)

        def memory(x: torch.Tensor) -> np.ndarray:
            """All that comes from its first element on."""
            size = x.untyped_storage().nbytes() // x.element_size() - x.storage_offset()
            return x.as_strided((size,), (1,)).numpy()

        for program in range(problem.batch // RANKED.value + 1):
            kernel = self._load("ranking", _triton(Machine(0), program, 0))
            kernel["rank_cached"](
                *(None if x is None else Pointer(memory(x)) for x in arguments[:4]),
                *map(Scalar, arguments[4:]),
            )
        out, lse = self.forward(as_packed(problem), packed_inputs(problem, inputs), table=table.numpy())
        return by_sequence(problem, out, lse)

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: torch.Tensor,
        dlse: torch.Tensor,
        programs: int = 3,
        seed: int = 0,
        share: int = 0,
    ) -> Gradients:
        """The backend's backward of q, k and v, on this many programs in turn: the first takes all tiles. share: steps
        of a range of the last round; else no tile is shared."""
        plan, mode = backward_plan_for(problem), backward_mode_of(problem)
        assert mode.SPLIT or not share
        plan = plan._replace(
            sizes=(*plan.sizes[:3], share or plan.query_blocks),
            shared=num_tiles(problem) % programs if share else 0,
        )
        dtype = {torch.bfloat16: "bf16", torch.float16: "fp16"}[problem.dtype]
        places = rows_by_place(problem, plan, inputs)
        statistics, sums = prepare(problem, plan, places, forward, dout, dlse)
        turns = np.zeros(problem.num_heads * len(places) * 2, int)
        dk, dv = (np.full(x.shape, np.nan, np.float32) for x in inputs[1:3])
        counter = np.zeros(1, int)
        tensors = (*(x.float().numpy() for x in (*inputs[:3], dout)), statistics, sums, dk, dv)
        dtypes = (*[dtype] * 4, "float32", "float32", dtype, dtype)
        of_rows, table = Descriptor, None
        if problem.varlen:
            of_rows = PackedDescriptor
            table = self.rank(inputs.cu_seqlens_k, inputs.cu_seqlens_q, problem.num_heads_k, mode.BLOCK_N)
        describe = (*[of_rows] * 4, Descriptor, Descriptor, of_rows, of_rows)
        slopes = slopes_of(inputs, problem.batch)
        for program in range(programs):
            kernel = self._load("backward", _triton(Machine(seed + program), program, programs))
            kernel["attention_backward"](
                *(of(*x) for of, *x in zip(describe, tensors, plan.blocks, dtypes, strict=True)),
                *(None if x is None else Pointer(x) for x in (turns, counter, table)),
                *map(Scalar, (problem.batch, *plan.sizes)),
                plan.scales._replace(slope=None if slopes is None else Pointer(slopes.numpy())),
                mode,
            )
        if counter[0] != 0:
            raise FaultError(f"the tile counter is left at {counter[0]}")
        of_parts = sums[len(sums) - plan.tile.sums * plan.parts * plan.tile.block_m * plan.tile.block_dim // 32 :]
        dq = finish(problem, plan, places, inputs, sums[: len(sums) - len(of_parts)])
        finish_tiles(problem, plan, of_parts, dk, dv)
        return Gradients(*(torch.from_numpy(x).to(problem.dtype) for x in (dq, dk, dv)))

    def _load(self, name: str, modules: dict[str, Any]) -> dict[str, Any]:
        def load(wanted: str, globals: Any = None, locals: Any = None, names: Any = (), level: int = 0) -> Any:
            if wanted in modules:
                return modules[wanted]
            prefix, _, own = wanted.rpartition(".")
            if prefix == PACKAGE:
                modules[wanted] = types.SimpleNamespace(**self._load(own, modules))
                return modules[wanted]
            return __import__(wanted, globals, locals, names, level)

        namespace: dict[str, Any] = {"__builtins__": {**vars(__import__("builtins")), "__import__": load}}
        namespace["__name__"] = f"simulated.{name}"
        exec(compile(self.sources[name], f"{name}.py", "exec"), namespace)
        return namespace


def rows_by_place(problem: Problem, plan: BackwardPlan, inputs: Inputs) -> torch.Tensor:
    """(places, block_m): rows of the tensors of queries, batch after batch; -1 past the end of a sequence."""
    p, block_m, blocks = problem, plan.tile.block_m, plan.query_blocks
    ends = torch.arange(p.batch + 1) * p.seqlen_q if inputs.cu_seqlens_q is None else inputs.cu_seqlens_q
    rows = torch.full((places_for(p, plan, inputs.q), block_m), -1)
    for sequence in range(p.batch):
        first, end = int(ends[sequence]), int(ends[sequence + 1])
        place = sequence * blocks + (first // block_m if p.varlen else 0)
        rows[place:].view(-1)[: end - first] = torch.arange(first, end)
    return rows


def prepare(
    problem: Problem,
    plan: BackwardPlan,
    places: torch.Tensor,
    forward: Forward,
    dout: torch.Tensor,
    dlse: torch.Tensor,
) -> tuple[np.ndarray, np.ndarray]:
    """What prepare_kernel makes: statistics, and the sums of dQ at 0."""
    heads, tile = problem.num_heads, plan.tile
    delta = (forward.out.float() * dout.float()).sum(-1).transpose(-1, -2) - dlse
    of_rows = (x.float().movedim(-2, 0).reshape(heads, -1)[:, places] for x in (forward.lse, delta))
    lse, delta = (x.masked_fill(places < 0, 0.0) for x in of_rows)
    lse = lse.masked_fill((places < 0) | (lse == float("-inf")), float("inf"))
    statistics = torch.stack([x * unit for x, unit in zip((lse, delta), plan.units, strict=True)], 2)
    rows = tile.block_m * tile.block_dim // 32  # of a block
    sums = np.full(((heads * len(places) + tile.sums * plan.parts) * rows, 32), np.nan, np.float32)
    sums[: heads * len(places) * rows] = 0.0
    return statistics.flatten().numpy(), sums


def finish(problem: Problem, plan: BackwardPlan, places: torch.Tensor, inputs: Inputs, sums: np.ndarray) -> np.ndarray:
    """What finish_kernel makes of the sums, before it rounds."""
    p = problem
    rows = in_rows(plan, sums).unflatten(0, (p.num_heads, -1)).flatten(1, 2)[:, places.view(-1) >= 0]
    dq = torch.empty(inputs.q.shape)
    dq.view(-1, p.num_heads, p.head_dim)[places[places >= 0]] = rows.transpose(0, 1)[..., : p.head_dim] * p.scale
    return dq.numpy()


def in_rows(plan: BackwardPlan, sums: np.ndarray) -> torch.Tensor:
    """(blocks, block_m, block_dim)."""
    tile = plan.tile
    columns = min(64, tile.block_m * tile.block_dim // 128)
    halves, parts = tile.block_m // 64, tile.block_dim // columns
    blocks = sums.reshape(-1, halves, parts, columns // 8, 4, 8, 4, 2, 2).transpose(0, 1, 4, 7, 5, 2, 3, 6, 8)
    return torch.from_numpy(blocks.reshape(-1, tile.block_m, tile.block_dim).copy())


def finish_tiles(problem: Problem, plan: BackwardPlan, sums: np.ndarray, dk: np.ndarray, dv: np.ndarray) -> None:
    """What finish_kernel makes of the parts of tiles that programs share."""
    p, block_n = problem, plan.tile.block_n
    parts = in_rows(plan, sums).reshape(-1, 2, block_n, plan.tile.block_dim)
    for tile in range(plan.shared):
        ranges = {step // plan.steps for step in range(tile * plan.query_blocks, (tile + 1) * plan.query_blocks)}
        head, block = divmod(num_tiles(p) - plan.shared + tile, -(-p.seqlen_k // block_n))
        rows = slice(block * block_n, min((block + 1) * block_n, p.seqlen_k))
        both = sum(parts[tile + n] for n in ranges)[:, : rows.stop - rows.start, : p.head_dim]
        for into, x in (dv, both[0]), (dk, both[1] * p.scale):
            into[head // p.num_heads, rows, head % p.num_heads] = x
