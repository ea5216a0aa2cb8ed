"""Launches that are repeated with other addresses, by the shortest way into the driver that Triton is known to have."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor


class Descriptor(TensorDescriptor):
    def __post_init__(self) -> None:
        """Whoever makes one has seen to what is checked here."""


class Kept:
    """A compiled kernel and its arguments but for addresses, which come by the number of their tensor.

    pointers: (place in args, tensor). opened: (place, tensor, rest), of a tuple that begins with a pointer.
    tuples: (place, fields of such a tuple, [(field, tensor), ...]), of any other. descriptors: (place, tensor, what a
    descriptor of that tensor is, by address).
    """

    def __init__(self, compiled: Any, programs: int, args: tuple[Any, ...], number: dict[int, int]) -> None:
        entry = _entry(compiled, programs)
        self.run, self.args, self.scratch = entry.run, entry.head.copy(), entry.scratch
        self.begins_in_driver = bool(entry.head)
        self.pointers: list[tuple[int, int]] = []
        self.opened: list[tuple[int, int, tuple[Any, ...]]] = []
        self.tuples: list[tuple[int, list[Any], list[tuple[int, int]]]] = []
        self.descriptors: list[tuple[int, int, dict[int, Any]]] = []
        formats = iter(entry.formats)
        for arg in args:
            self._add(arg, number, formats)

    def _add(self, arg: Any, number: dict[int, int], formats: Any) -> None:
        place = len(self.args)
        if isinstance(arg, Tensor):
            self.pointers.append((place, number[id(arg)]))
        elif isinstance(arg, TensorDescriptor):
            like = replace(arg, base=None)
            if self.begins_in_driver:
                self.descriptors.append((place, number[id(arg.base)], _Encoded(like, next(formats))))
                self.args += [None, *arg.shape, *arg.strides]
                return
            self.descriptors.append((place, number[id(arg.base)], _Described(like)))
        elif isinstance(arg, tuple) and any(isinstance(x, Tensor) for x in arg):
            fields = [(j, number[id(x)]) for j, x in enumerate(arg) if isinstance(x, Tensor)]
            if [j for j, _ in fields] == [0]:
                self.opened.append((place, fields[0][1], arg[1:]))
            else:
                self.tuples.append((place, [None if isinstance(x, Tensor) else x for x in arg], fields))
        else:
            self.args.append(arg)
            return
        self.args.append(None)

    def launch(self, addresses: list[int], device: int | None) -> None:
        args = self.args.copy()
        for i, number in self.pointers:
            args[i] = addresses[number]
        for i, number, rest in self.opened:
            args[i] = (addresses[number], *rest)
        for i, template, fields in self.tuples:
            values = template.copy()
            for j, number in fields:
                values[j] = addresses[number]
            args[i] = tuple(values)
        for i, number, by_address in self.descriptors:
            args[i] = by_address[addresses[number]]
        if self.begins_in_driver:
            args[_STREAM] = driver.active.get_current_stream(device)
            if self.scratch:
                args[_SCRATCH] = allocate(self.scratch)
        self.run(*args)


class _Address(int):
    """What a descriptor asks of its tensor."""

    def data_ptr(self) -> int:
        return self


class _Described(dict[int, Any]):
    """A descriptor by address."""

    def __init__(self, like: TensorDescriptor) -> None:
        self.like = like

    def __missing__(self, address: int) -> Descriptor:
        return Descriptor(_Address(address), self.like.shape, self.like.strides, self.like.block_shape)


class _Encoded(_Described):
    """A descriptor as the driver takes it, by address. It is an encoding of numbers alone, and addresses come again."""

    MOST = 64

    def __init__(self, like: TensorDescriptor, format: Any) -> None:
        super().__init__(like)
        self.format = format

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) >= self.MOST:
            self.clear()
        self[address] = encoded = make_tensordesc_arg(super().__missing__(address), self.format)[0]
        return encoded


class _Entry(NamedTuple):
    """What is called with [*head, *args]. formats: of descriptors, to be encoded. scratch: bytes that a launch needs.
    Without a head it is Triton's own runner, which sees to all of that."""

    run: Callable[..., None]
    head: list[Any]
    formats: list[Any]
    scratch: int


_STREAM, _SCRATCH = 3, 7  # in head


def _entry(compiled: Any, programs: int) -> _Entry:
    """Triton 3.6's runner, launcher and hooks take longer than to encode arguments: its function in C, if there are no
    surprises on the way there."""
    runner = _Entry(compiled[(programs, 1, 1)], [], [], 0)
    launcher = compiled.run
    if not triton.__version__.startswith("3.6.") or type(launcher).__name__ != "CudaLauncher":
        return runner
    run, formats = launcher.launch, []
    if inspect.isfunction(run):  # around the one in C, to encode descriptors
        inside = inspect.getclosurevars(run).nonlocals
        run, formats = inside["launcher"], inside["tensordesc_meta"]
    if launcher.profile_scratch_size or not inspect.isbuiltin(run) or None in formats:
        return runner
    mode = launcher.launch_cooperative_grid, launcher.launch_pdl
    head = [programs, 1, 1, None, compiled.function, *mode, None, None, compiled.packed_metadata, None, None, None]
    return _Entry(run, head, formats, programs * launcher.num_ctas * launcher.global_scratch_size)


def observed() -> bool:
    """Whether somebody wants to be told of launches, which Triton's runner does."""
    hooks = triton.knobs.runtime
    return any(
        hook is not None and getattr(hook, "calls", True) for hook in (hooks.launch_enter_hook, hooks.launch_exit_hook)
    )


def allocate(size: int, alignment: int = 0, stream: int | None = None) -> Tensor:
    """Memory for a kernel's descriptors, of the current device."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
