"""Backends: one folder each, none imports another. What each must offer is the protocol below.

A backend receives a Problem that has been checked and Inputs in canonical form; it never checks again. Which one serves
a Problem is decided in `tileattn.dispatch`.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

from torch import Tensor

from tileattn.kvcache import Append, CacheInputs, CacheProblem
from tileattn.problem import Forward, Gradients, Inputs, Problem, Wanted

Direction = Literal["forward", "backward"]


class Tiles(NamedTuple):
    """The tile of scores a kernel holds at once, block_m rows by block_n columns, and why that size."""

    block_m: int
    block_n: int
    why: str

    def __str__(self) -> str:
        return f"{self.block_m} x {self.block_n}: {self.why}"


class Backend(Protocol):
    def supports(self, problem: Problem, direction: Direction = "forward") -> str | None:
        """None: yes. Otherwise the reason, in words a user can act on."""

    def tiles(self, problem: Problem, direction: Direction = "forward") -> Tiles: ...

    def forward(self, problem: Problem, inputs: Inputs) -> Forward: ...

    def backward(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor | None,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> Gradients:
        """dout like out, any strides; dlse like lse. None stands for zeros, but never for both."""

    def anticipate(
        self,
        problem: Problem,
        inputs: Inputs,
        forward: Forward,
        dout: Tensor | None,
        dlse: Tensor | None,
        wanted: Wanted,
    ) -> None:
        """Begin to compile what `backward` of such tensors needs (these are on the "meta" device), and return."""


class CacheBackend(Protocol):
    """What a backend's module `kvcache` must offer to serve `attention_with_kvcache`. What the host cannot know of
    lengths and tables (their values, on a GPU) is not trusted: nothing outside the caches is read or written."""

    def supports(self, problem: CacheProblem) -> str | None:
        """As `Backend.supports`."""

    def tiles(self, problem: CacheProblem) -> Tiles:
        """Whose `why` also says how keys are shared out."""

    def attend(self, problem: CacheProblem, inputs: CacheInputs) -> Forward:
        """The new keys and values are in the cache already; inputs.k and v are not looked at."""


class CacheAppender(Protocol):
    """What the same module of a backend offers that writes to caches."""

    def append(self, append: Append) -> None: ...
