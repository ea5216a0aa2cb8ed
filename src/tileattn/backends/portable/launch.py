"""From a Problem and its tensors to the arguments of a kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, overload

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime.errors import OutOfResources
from triton.tools.tensor_descriptor import TensorDescriptor

from tileattn.backends import ahead
from tileattn.backends.entry import need_context, observed
from tileattn.backends.portable import tuning
from tileattn.backends.portable.codegen import NO_FUNCTIONS, Functions
from tileattn.backends.portable.device.rows import PAD, Rows, RowStats, Sequences, Workspace, sized
from tileattn.backends.portable.device.scores import Blocks, Modifiers
from tileattn.backends.portable.kept import Descriptor, Kept, allocate
from tileattn.backends.portable.tuning import Tile, block_dim_of
from tileattn.philox import threshold
from tileattn.problem import Inputs, Problem


class Mode(NamedTuple):
    """What a kernel is compiled for, every field a tl.constexpr.

    plain: scores are q.k times a positive scale, so that the scale folds into the exponent. exact: float32 inputs.
    precision: of float32 products. tma: rows are loaded through tensor descriptors made on the "host", through such as
    kernels make on the "device" (of packed sequences: rows past the end of one must be zeros), or not ("").
    held: see Tile. pad: a head dim is smaller than its block. left, right: the window bounds that side. score_reads to
    mask_mod: see Functions. ranges: walks go through ranges of tiles, some of which need no mask; else through lists
    (see Sparsity), or one range that needs it. listed, kinds: see Sparsity.
    """

    dim: Any
    dim_v: Any
    block_dim: Any
    block_dim_v: Any
    plain: Any
    exact: Any
    precision: Any
    tma: Any
    held: Any
    pad: Any
    left: Any
    right: Any
    score_reads: Any
    score_mod: Any
    score_derivative: Any
    mask_reads: Any
    mask_mod: Any
    ranges: Any
    listed: Any
    kinds: Any


class Sparsity(NamedTuple):
    """What a kernel knows of a block mask. listed: it walks through lists of tiles. kinds: what it looks up inside a
    tile: nothing, the kind "of a tile" or "of each score"."""

    blocks: Blocks = Blocks(None, 0, 0, 0, None, 0, 0, 0, 0, 0)
    listed: bool = False
    kinds: str = "nothing"


DENSE = Sparsity()


@functools.lru_cache(maxsize=1024)
def _mode(*fields: Any) -> Mode:
    return Mode(*(x if x is None else tl.constexpr(x) for x in fields))


def mode_of(
    problem: Problem, tile: Tile, *tensors: Tensor, functions: Functions = NO_FUNCTIONS, sparsity: Sparsity = DENSE
) -> Mode:
    """tensors: those that the kernel loads in rows."""
    p = problem
    block_dim, block_dim_v = block_dim_of(p.head_dim), block_dim_of(p.head_dim_v)
    left, right = window_of(p)
    ranges = tile.ranges or (left < 0 and right < 0)
    return _mode(
        p.head_dim,
        p.head_dim_v,
        block_dim,
        block_dim_v,
        p.scale > 0.0 and not (p.softcap or p.has_bias or p.has_alibi or p.score_mod),
        p.dtype == torch.float32,
        _precision(p),
        ("device" if p.varlen else "host") if tile.descriptors and all(map(_fits_descriptor, tensors)) else "",
        tile.held,
        (block_dim, block_dim_v) != (p.head_dim, p.head_dim_v),
        left >= 0,
        right >= 0,
        *functions,
        ranges and not (sparsity.listed or p.has_mask or p.mask_mod),
        sparsity.listed,
        sparsity.kinds,
    )


def _precision(problem: Problem) -> str:
    """allow_tf32 tells the same, but fails once fp32_precision has been set."""
    tf32 = problem.dtype == torch.float32 and torch.backends.cuda.matmul.fp32_precision == "tf32"
    return "tf32" if tf32 else "ieee"


def _fits_descriptor(x: Tensor) -> bool:
    """A tensor descriptor wants all but the last dim at multiples of 16 bytes, and elements apart."""
    unit = 16 // x.element_size()
    return x.numel() > 0 and x.data_ptr() % 16 == 0 and all(s > 0 and s % unit == 0 for s in _strides_of(x))


def _strides_of(x: Tensor) -> list[int]:
    """Of all dims but the last. Along a dim of size 1 any will do: one that descriptors take."""
    return [16 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride(), strict=False)]


def with_whole_pieces(problem: Problem, inputs: Inputs) -> tuple[Problem, Inputs]:
    """The call with q, k and v that can be loaded in pieces of 16 bytes; wider heads in them, if need be, whose results
    `narrowed` cuts."""
    p, (q, k, v) = problem, inputs[:3]
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr()
    if p.aligned and addresses % 16 == p.head_dim % 8 == p.head_dim_v % 8 == 0:
        return problem, inputs
    q, k, v = map(in_whole_pieces, (q, k, v))
    return replace(p, head_dim=q.shape[-1], head_dim_v=v.shape[-1]), inputs._replace(q=q, k=k, v=v)


def in_whole_pieces(x: Tensor) -> Tensor:
    """x, or a copy: rows that begin and end at multiples of 16 bytes. Those that do not are loaded element by element,
    whose addresses fill registers: kernels take several times as long, copies a small part of that."""
    unit = 16 // x.element_size()
    missing = -x.shape[-1] % unit
    at_pieces = x.is_contiguous() or not any(s % unit for s in _strides_of(x))
    if not missing and at_pieces and x.data_ptr() % 16 == 0:
        return x
    return F.pad(x, (0, missing)).contiguous()  # F.pad keeps rows last in memory, if head_dim is 1


@overload
def narrowed(x: Tensor, head_dim: int) -> Tensor: ...
@overload
def narrowed(x: None, head_dim: int) -> None: ...
def narrowed(x: Tensor | None, head_dim: int) -> Tensor | None:
    return x if x is None or x.shape[-1] == head_dim else x[..., :head_dim].contiguous()


def operands_of(mode: Mode, tile: Tile, q: Tensor, k: Tensor, v: Tensor, *like_q: Tensor) -> list[Any]:
    """The tensors that a kernel loads in blocks of rows, as it takes them."""
    pairs = (q, tile.block_m), (k, tile.block_n), (v, tile.block_n), *((x, tile.block_m) for x in like_q)
    return [operand_of(mode, x, block) for x, block in pairs]


def operand_of(mode: Mode, x: Tensor, block: int) -> Rows | TensorDescriptor:
    return _descriptor(x, block) if mode.tma.value == "host" else rows_of(x)


def _descriptor(x: Tensor, block: int) -> TensorDescriptor:
    batch, seqlen, heads, dim = x.shape
    stride_batch, stride_row, stride_head = _strides_of(x)
    strides = [stride_batch, stride_head, stride_row, 1]
    return Descriptor(x, [batch, heads, seqlen, dim], strides, [1, 1, block, block_dim_of(dim)])


def window_of(problem: Problem) -> tuple[int, int]:
    """The window, -1 also where it is too wide to hide anything."""
    p = problem
    left = -1 if p.window_left >= p.seqlen_k else p.window_left
    return left, -1 if p.window_right >= p.seqlen_q else p.window_right


_ALIGN = {n: tl.constexpr(n) for n in (1, 2, 4, 8, 16)}


def rows_of(x: Tensor) -> Rows:
    strides = x.stride()[:3] if x.dim() == 4 else (0, *x.stride()[:2])
    align = math.gcd(*strides, 16)
    batch, row, head = sized(*strides, align=align)
    return Rows(x, batch, row, head, _ALIGN[align])


def stats_of(x: Tensor | None) -> RowStats:
    if x is None:
        return RowStats(None, 0, 0)
    return RowStats(x, *(sized(*x.stride()[:2]) if x.dim() == 3 else sized(0, x.stride(0))))


empty_like = functools.partial(torch.empty_like, memory_format=torch.contiguous_format)


def workspace(problem: Problem, inputs: Inputs, fill: float) -> Tensor:
    """One float32 a row for kernels alone: (batch, heads, rows), varlen (heads, rows), room for every sequence padded.
    Kernels write what kernels read; fill is for what torch would read beside it."""
    p, q = problem, inputs.q
    if not p.varlen:
        return q.new_empty((p.batch, p.num_heads, -(-p.seqlen_q // PAD.value) * PAD.value), dtype=torch.float32)
    shape = p.num_heads, (q.shape[0] // PAD.value + p.batch + 1) * PAD.value
    return q.new_full(shape, fill, dtype=torch.float32) if p.has_sink else q.new_empty(shape, dtype=torch.float32)


def workspace_of(x: Tensor) -> Workspace:
    return Workspace(x, *x.stride()[:2]) if x.dim() == 3 else Workspace(x, None, x.stride(0))


def sequences_of(problem: Problem, inputs: Inputs) -> Sequences:
    p = problem
    total_q, total_k = (inputs.q.shape[0], inputs.k.shape[0]) if p.varlen else (0, 0)
    return Sequences(
        p.seqlen_q,
        p.seqlen_k,
        inputs.cu_seqlens_q,
        inputs.cu_seqlens_k,
        total_q,
        total_k,
        p.num_heads,
        *window_of(p),
    )


def modifiers_of(problem: Problem, inputs: Inputs) -> Modifiers:
    p = problem
    slopes, dropped = inputs.alibi_slopes, threshold(p.dropout_p)
    return Modifiers(
        scale=p.scale,
        softcap=p.softcap or None,
        alibi=slopes,
        bias=inputs.bias,
        mask=inputs.mask,
        seed=inputs.dropout_seed,
        threshold=dropped - 2**32 if dropped >= 2**31 else dropped,
        rescale=1.0 / (1.0 - p.dropout_p),
        alibi_batch=0 if slopes is None or slopes.shape[0] == 1 else sized(slopes.stride(0))[0],
        alibi_head=0 if slopes is None else slopes.stride(1),
        **_strides("bias", inputs.bias),
        **_strides("mask", inputs.mask),
    )


def _strides(name: str, x: Tensor | None) -> dict[str, Any]:
    """The fields of Modifiers that hold strides of a bias or mask: 0 along dims of size 1, so that they broadcast."""
    strides = [0] * 4 if x is None else [0 if n == 1 else stride for n, stride in zip(x.shape, x.stride(), strict=True)]
    columns = 0 if x is None or x.shape[3] == 1 else x.shape[3]
    align = 8 if math.gcd(*strides[:3], columns) % 8 == 0 else 1
    batch, head, row = sized(*strides[:3], align=align)
    return {
        f"{name}_batch": batch,
        f"{name}_head": head,
        f"{name}_row": row,
        f"{name}_col": strides[3],
        f"{name}_align": _ALIGN[align],
    }


class Launches:
    """Launches the kernels of one call.

    Binding arguments and looking up what Triton has compiled for them takes longer than a small kernel runs. Launches
    are kept, from the second on, for all calls that look alike: the same Problem, tensors of the same dtypes, shapes,
    strides and alignment. That is all that arguments are made of and that Triton specialises on; only addresses change.

    kept: those of calls like this one. tensors: of the call, in tuples or not; addresses: of those that there are.
    """

    def __init__(
        self, device: torch.device, kept: dict[Any, Kept | None], tensors: tuple[Any, ...], addresses: list[int]
    ) -> None:
        self.device, self.kept, self.tensors, self.addresses = device, kept, tensors, addresses
        self.elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
        self.watched = observed()

    def launch(self, kernel: Any, describe: Describe, *outputs: Tensor | None, role: Any = None) -> None:
        """Launch a kernel. describe(*tensors, *outputs) tells how; its tiles, the layout of outputs, and which are
        None, follow from what calls alike have in common, and from the role of a kernel that has several."""
        if self.elsewhere:
            with torch.cuda.device(self.device):
                self._launch(kernel, role, describe, outputs)
        else:
            self._launch(kernel, role, describe, outputs)

    def _launch(self, kernel: Any, role: Any, describe: Describe, outputs: tuple[Tensor | None, ...]) -> None:
        key = kernel.fn, role, tuning._lookup  # which a search for tiles exchanges
        kept = self.kept.get(key)
        if kept is not None and not self.watched:
            kept.launch(self.addresses + [x.data_ptr() for x in outputs if x is not None], self.device.index)
            return
        places: list[Tensor] = []
        launch = describe(*one_object_a_place((*self.tensors, *outputs), places))
        compiled = start(kernel, launch) if launch.programs else None
        if compiled is not None and key not in self.kept:
            self.kept[key] = None  # what comes once, as shapes that always change do, is not worth it
        elif compiled is not None:
            self.kept[key] = Kept(compiled, launch.programs, launch.args, {id(x): i for i, x in enumerate(places)})


class Launcher(Launches):
    """Launches the kernels of attention, described by (inputs, *others, *outputs)."""

    def __init__(self, problem: Problem, inputs: Inputs, *others: Tensor | None) -> None:
        if inputs.mask is not None:
            inputs = inputs._replace(mask=inputs.mask.view(torch.uint8))
        q, k, v, *modifiers, of_score, of_mask = inputs
        modifiers = [x for x in (*modifiers, *of_score, *of_mask) if x is not None]
        addresses = [x.data_ptr() for x in (q, k, v, *modifiers, *others) if x is not None]
        kept = _kept(
            problem,  # which says what inputs there are, and the dtype and shape of q, k and v
            _precision(problem),
            q.shape[0],  # but not how many rows packed sequences have
            k.shape[0],
            q.stride(),
            k.stride(),
            v.stride(),
            *[(x.dtype, x.shape, x.stride()) for x in modifiers],
            *[None if x is None else (x.dtype, x.stride()) for x in others],  # whose shapes follow
            *[address % 16 for address in addresses],
        )
        super().__init__(problem.device, kept, (inputs, *others), addresses)


class Anticipation(Launcher):
    """Launches nothing, but begins to compile what would be launched."""

    def launch(self, kernel: Any, describe: Describe, *outputs: Tensor | None, role: Any = None) -> None:
        launch = describe(*self.tensors, *outputs)
        if launch.programs:
            ahead.begin(self.device, functools.partial(compile_only, kernel, launch))


def one_object_a_place(tree: Any, places: list[Tensor]) -> Any:
    """The same tensors, in tuples or not, also appended to places, each an object of its own even where q is k.

    Not by a function inside, which would refer to itself and so keep the tensors until Python collects garbage.
    """
    if tree is None:
        return None
    if isinstance(tree, Tensor):
        places.append(tree.detach())
        return places[-1]
    visited = [one_object_a_place(x, places) for x in tree]
    return tree._make(visited) if hasattr(tree, "_make") else tuple(visited)


class Launch(NamedTuple):
    """How a kernel is launched."""

    programs: int
    tile: Tile
    args: tuple[Any, ...]


Describe = Callable[..., Launch]


@functools.lru_cache(maxsize=4096)
def _kept(*_alike: Any) -> dict[Any, Kept | None]:
    return {}


def start(kernel: Any, launch: Launch) -> Any:
    """`start_as_told`, with fewer stages than the tile says if what scores read, prefetched, takes more shared memory
    than there is."""
    tile = launch.tile
    try:
        return start_as_told(kernel, launch)
    except OutOfResources as error:
        if tile.num_stages == 1:
            raise
        error.__traceback__ = None  # one of Triton's frames refers to the error: all callers' tensors would stay
    return start(kernel, launch._replace(tile=tile._replace(num_stages=tile.num_stages - 1)))


def start_as_told(kernel: Any, launch: Launch) -> Any:
    """Launch by way of Triton's own look-up, which compiles if need be. Returns the compiled kernel; None from the
    interpreter."""
    need_context()
    triton.set_allocator(allocate)  # of this thread
    return kernel[(launch.programs,)](*launch.args, **compile_options(launch.tile))


def compile_only(kernel: Any, launch: Launch) -> Any:
    return kernel.warmup(*launch.args, grid=(launch.programs,), **compile_options(launch.tile))


def compile_options(tile: Tile) -> dict[str, int]:
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, "enable_fp_fusion": True}
    return options | {"maxnreg": tile.registers} if tile.registers else options
