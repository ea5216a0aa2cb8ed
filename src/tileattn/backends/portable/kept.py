"""Launches that are repeated with other addresses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tileattn.backends.entry import STREAM, Entry, encode, entry_of, need_context


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
        entry = entry_of(compiled, programs)
        self.entered = entry is not None
        entry = entry or Entry(compiled[(programs, 1, 1)], [], {}, 0, 0)
        self.run, self.args, formats = entry.run, entry.head, entry.formats
        self.scratch, self.scratch_place = programs * entry.scratch, entry.scratch_place
        self.pointers: list[tuple[int, int]] = []
        self.opened: list[tuple[int, int, tuple[Any, ...]]] = []
        self.tuples: list[tuple[int, list[Any], list[tuple[int, int]]]] = []
        self.descriptors: list[tuple[int, int, dict[int, Any]]] = []
        for i, arg in enumerate(args):
            self._add(arg, number, formats.get(i))

    def _add(self, arg: Any, number: dict[int, int], format: Any) -> None:
        place = len(self.args)
        if isinstance(arg, Tensor):
            self.pointers.append((place, number[id(arg)]))
        elif isinstance(arg, TensorDescriptor):
            like = replace(arg, base=None)
            if format is not None:
                self.descriptors.append((place, number[id(arg.base)], _Encoded(like, format)))
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
        if self.entered:
            args[STREAM] = driver.active.get_current_stream(device)
            if self.scratch:
                args[self.scratch_place] = allocate(self.scratch)
        else:
            need_context()
            triton.set_allocator(allocate)
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
        if len(self) >= self.MOST:
            self.clear()
        self[address] = encoded = encode(super().__missing__(address), self.format)
        return encoded


def allocate(size: int, alignment: int = 0, stream: int | None = None) -> Tensor:
    """Memory for a kernel's descriptors, of the current device."""
    return torch.empty(size, dtype=torch.int8, device="cuda")
