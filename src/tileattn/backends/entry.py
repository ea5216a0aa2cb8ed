"""The shortest way into the driver that Triton is known to have, for kernels that are compiled.

Triton's runner builds metadata for hooks, calls both (empty) chains of them and encodes every tensor descriptor anew at
each launch, which takes longer than all the rest. An Entry calls the function in C below. Other versions than those
known, and launches that a hook wants to see, take Triton's way.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton

TRITON = tuple(map(int, triton.__version__.split(".")[:2]))
KNOWN = (3, 6), (3, 7), (3, 8), (3, 9)  # launchers, and Gluon
STREAM = 3  # place in Entry.head


class Entry(NamedTuple):
    """run(*head, *args) launches, args being addresses, numbers and, for a descriptor, its encoding, sizes and strides.

    formats: of descriptors by their place in args, for `encode`. scratch: bytes of memory that a program needs, which
    head takes at scratch_place.
    """

    run: Callable[..., None]
    head: list[Any]
    formats: dict[int, Any]
    scratch: int
    scratch_place: int


def entry_of(compiled: Any, programs: int) -> Entry | None:
    """None where Triton's internals are not those that are known."""
    try:
        return _entry_of(compiled, programs)
    except (AttributeError, KeyError, ValueError):
        return None


def _entry_of(compiled: Any, programs: int) -> Entry | None:
    launcher = compiled.run
    if TRITON not in KNOWN or type(launcher).__name__ != "CudaLauncher":
        return None
    run, formats = launcher.launch, {}
    if inspect.isfunction(run):  # around the one in C, to encode descriptors
        inside = inspect.getclosurevars(run).nonlocals
        run = inside["launcher"]
        places = inside["tensordesc_indices"] if "tensordesc_indices" in inside else _at_top(inside["relevant_paths"])
        formats = dict(zip(sorted(places), inside["tensordesc_meta"], strict=True))
    if launcher.profile_scratch_size or not inspect.isbuiltin(run) or None in formats.values():
        return None
    grid = programs, 1, 1, None, compiled.function, launcher.launch_cooperative_grid, launcher.launch_pdl
    hooks = None, None, None
    scratch = launcher.num_ctas * launcher.global_scratch_size
    if TRITON == (3, 6):
        return Entry(run, [*grid, None, None, compiled.packed_metadata, *hooks], formats, scratch, len(grid))
    if getattr(launcher, "gsan_enabled", False):
        return None
    described = launcher.arg_annotations, launcher.kernel_signature
    head = [*grid, compiled.packed_metadata, *hooks, None, None, *described]
    return Entry(_gathered(run, len(head)), head, formats, scratch, len(head) - 4)


def _at_top(paths: dict[int, Any]) -> list[int]:
    if any(paths.values()):
        raise ValueError("a descriptor inside a tuple")
    return list(paths)


def _gathered(run: Callable[..., None], length: int) -> Callable[..., None]:
    """Since Triton 3.7 one function launches every kernel, and takes what the kernel does as one argument."""

    def launch(*args: Any) -> None:
        run(*args[:length], args[length:])

    return launch


class Runner:
    """A compiled kernel, called with what Triton's own runner takes. Encodings of descriptors are kept."""

    MOST = 1024

    def __init__(self, compiled: Any) -> None:
        self.compiled, self.entry = compiled, entry_of(compiled, 1)
        self.encodings: dict[Any, Any] = {}

    def __call__(self, programs: int, args: tuple[Any, ...], stream: int) -> None:
        entry = self.entry
        if entry is None or entry.scratch or observed():
            need_context()
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
    need_context()
    from triton.backends.nvidia.driver import make_tensordesc_arg

    unused = () if TRITON < (3, 8) else (None,)
    return make_tensordesc_arg(descriptor, format, *unused)[0]


_thread = threading.local()


def need_context() -> None:
    """Whoever encodes a descriptor, Triton's runner too, needs a context of the driver. A thread has one once CUDA's
    runtime has worked in it, or a kernel was loaded there: not so in autograd's, if kernels were loaded elsewhere."""
    if not getattr(_thread, "has_context", False) and torch.cuda.is_initialized():
        torch.zeros(1, device="cuda")
        _thread.has_context = True


def observed() -> bool:
    """Whether somebody wants to be told of launches."""
    hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    return any(hook is not None and getattr(hook, "calls", True) for hook in hooks)  # chains, since Triton 3.6
