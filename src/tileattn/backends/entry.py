"""The shortest way into the driver that Triton is known to have, for kernels that are compiled.

Triton 3.6's runner builds metadata for hooks, calls both (empty) chains of them and encodes every tensor descriptor
anew at each launch, which takes longer than all the rest. An Entry calls the function in C below. Other versions, and
launches that a hook wants to see, take Triton's way.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import triton

STREAM, SCRATCH = 3, 7  # places in Entry.head


class Entry(NamedTuple):
    """run(*head, *args) launches, args being addresses, numbers and, for a descriptor, its encoding, sizes and strides.

    formats: of descriptors by their place in args, for `encode`. scratch: bytes of memory that a program needs.
    """

    run: Callable[..., None]
    head: list[Any]
    formats: dict[int, Any]
    scratch: int


def entry_of(compiled: Any, programs: int) -> Entry | None:
    """None where Triton's internals are not those that are known."""
    try:
        return _entry_of(compiled, programs)
    except (AttributeError, KeyError, ValueError):
        return None


def _entry_of(compiled: Any, programs: int) -> Entry | None:
    launcher = compiled.run
    if not triton.__version__.startswith("3.6.") or type(launcher).__name__ != "CudaLauncher":
        return None
    run, formats = launcher.launch, {}
    if inspect.isfunction(run):  # around the one in C, to encode descriptors
        inside = inspect.getclosurevars(run).nonlocals
        run = inside["launcher"]
        formats = dict(zip(sorted(inside["tensordesc_indices"]), inside["tensordesc_meta"], strict=True))
    if launcher.profile_scratch_size or not inspect.isbuiltin(run) or None in formats.values():
        return None
    mode = launcher.launch_cooperative_grid, launcher.launch_pdl
    head = [programs, 1, 1, None, compiled.function, *mode, None, None, compiled.packed_metadata, None, None, None]
    return Entry(run, head, formats, launcher.num_ctas * launcher.global_scratch_size)


class Runner:
    """A compiled kernel, called with what Triton's own runner takes. Encodings of descriptors are kept."""

    MOST = 1024

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.entry = compiled, entry_of(compiled, 1)
        self.encodings: dict[Any, Any] = {}

    def __call__(self, programs: int, args: tuple[Any, ...], stream: int) -> None:
        entry = self.entry
        if entry is None or entry.scratch or observed():
            self.compiled[(programs, 1, 1)](*args, stream=stream)
            return
        final = entry.head.copy()
        final[0], final[STREAM] = programs, stream
        for place, arg in enumerate(args):
            format = entry.formats.get(place)
            if format is None:
                final.append(arg)
                continue
            key = place, arg.base.data_ptr(), *arg.shape, *arg.strides
            encoded = self.encodings.get(key)
            if encoded is None:
                if len(self.encodings) >= self.MOST:
                    self.encodings.clear()
                self.encodings[key] = encoded = encode(arg, format)
            final += (encoded, *arg.shape, *arg.strides)
        entry.run(*final)


def encode(descriptor: Any, format: Any) -> Any:
    """A descriptor as the driver takes it."""
    from triton.backends.nvidia.driver import make_tensordesc_arg

    return make_tensordesc_arg(descriptor, format)[0]


def observed() -> bool:
    """Whether somebody wants to be told of launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)  # chains, since Triton 3.6
