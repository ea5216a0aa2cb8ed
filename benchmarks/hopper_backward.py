"""The Hopper backward beside its peers: same tensors, one process, alternating rounds, medians.

    python benchmarks/hopper_backward.py out.json [--head-dims 64,128,256] [--seqlens 1024,4096,16384] [--rounds 5]

16,384 tokens, heads * head_dim = 2,048, bfloat16, random data. Ours is called through `tileattn.attention` and
autograd, with all that comes before and after the kernel. FLOPs are counted 2.5 times those of forward. cuDNN comes
with torch; FA4 (package flash-attn-4) and FA3 (package flash-attn3-jax, through JAX, which needs
XLA_PYTHON_CLIENT_PREALLOCATE=false) are measured where they are installed and take the call. Head dim 128 comes last
packed, 17 sequences of which most are short.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from common import TOKENS, WIDTH, backward_of, measure, rows_of, write
from hopper import LENGTHS
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tileattn import attention, attention_varlen

Run = Callable[[], Any]


def tileattn(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, ends: Tensor | None = None, **options: Any
) -> Run:
    """ends: of packed sequences of LENGTHS."""
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    if ends is None:
        out = attention(*leaves, causal=causal, **options)
    else:
        out = attention_varlen(*leaves, ends, ends, max(LENGTHS), max(LENGTHS), causal=causal, **options)
    return backward_of(out, leaves, dout)


def cudnn(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Run:
    """With tensors in the order that it prefers, (batch, heads, seqlen, head_dim)."""
    leaves = tuple(x.transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v))
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
        out = F.scaled_dot_product_attention(*leaves, is_causal=causal)
    return backward_of(out, leaves, dout.transpose(1, 2).contiguous())


def fa4(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, ends: Tensor | None = None) -> Run:
    from flash_attn.cute import flash_attn_func, flash_attn_varlen_func

    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    if ends is None:
        out = flash_attn_func(*leaves, causal=causal)[0]
    else:
        packing = {
            "cu_seqlens_q": ends,
            "cu_seqlens_k": ends,
            "max_seqlen_q": max(LENGTHS),
            "max_seqlen_k": max(LENGTHS),
        }
        out = flash_attn_varlen_func(*leaves, **packing, causal=causal)[0]
    return backward_of(out, leaves, dout)


def fa3(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool) -> Run:
    """JAX has a stream of its own: handing a result to torch makes torch's stream, where time is taken, wait for it."""
    if q.shape[-1] != 128:
        raise ValueError("the package's backward ends the process at other head dims than 128")
    import jax
    from flash_attn3_jax.flash import _flash_mha_bwd, _flash_mha_fwd

    options = {"softmax_scale": q.shape[-1] ** -0.5, "is_causal": causal, "window_size": (-1, -1)}
    torch.cuda.synchronize()
    arrays = [jax.dlpack.from_dlpack(x) for x in (q, k, v, dout)]
    out, lse = jax.jit(functools.partial(_flash_mha_fwd, **options))(*arrays[:3])
    backward = jax.jit(functools.partial(_flash_mha_bwd, **options))
    return lambda: torch.from_dlpack(backward(arrays[3], *arrays[:3], out, lse)[0])


IMPLEMENTATIONS: dict[str, Callable[..., Run]] = {
    "tileattn": tileattn,
    "tileattn-deterministic": functools.partial(tileattn, deterministic=True),
    "cudnn": cudnn,
    "fa4": fa4,
    "fa3": fa3,
}


PACKED: dict[str, Callable[..., Run]] = {
    "tileattn": tileattn,
    "tileattn-deterministic": functools.partial(tileattn, deterministic=True),
    "tileattn-portable": functools.partial(tileattn, backend="portable"),
    "fa4": fa4,
}


def runs_of(implementations: dict[str, Callable[..., Run]], *call: Any) -> dict[str, Run]:
    """Of those that are installed and take the call."""
    runs = {}
    for name, implementation in implementations.items():
        with contextlib.ExitStack() as stack:
            if not name.startswith("tileattn"):
                stack.enter_context(left_out(name))
            run = implementation(*call)
            run()
            runs[name] = run
    return runs


@contextlib.contextmanager
def left_out(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # packages of others raise what they like
        print(f"{name} is left out: {type(error).__name__} {str(error)[:100]}")


def tensors(rows: tuple[int, ...], head_dim: int) -> list[Tensor]:
    """q, k, v and dout."""
    shape = *rows, WIDTH // head_dim, head_dim
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]


def cell(seqlen: int, head_dim: int, causal: bool, rounds: int) -> list[dict[str, Any]]:
    found = measure(runs_of(IMPLEMENTATIONS, *tensors((TOKENS // seqlen, seqlen), head_dim), causal), rounds)
    return rows_of(found, "backward", seqlen, head_dim, causal, "", seqlen**2 / (2 if causal else 1))


def packed_cell(head_dim: int, causal: bool, rounds: int) -> list[dict[str, Any]]:
    ends = torch.tensor((0, *LENGTHS), device="cuda").cumsum(0).to(torch.int32)
    found = measure(runs_of(PACKED, *tensors((TOKENS,), head_dim), causal, ends), rounds)
    scores = sum(n**2 for n in LENGTHS) / (2 if causal else 1)
    return rows_of(found, "backward", TOKENS, head_dim, causal, "packed", scores)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    numbers = lambda text: [int(x) for x in text.split(",")]  # noqa: E731
    parser.add_argument("path")
    parser.add_argument("--head-dims", type=numbers, default=[64, 128, 256])
    parser.add_argument("--seqlens", type=numbers, default=[1024, 4096, 16384])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", default=None, help="where git is not at hand")
    options = parser.parse_args()
    sizes = *itertools.product(options.head_dims, options.seqlens), *((d, None) for d in options.head_dims if d == 128)
    rows: list[dict[str, Any]] = []
    for (head_dim, seqlen), causal in itertools.product(sizes, (False, True)):
        if seqlen is None:
            found = packed_cell(head_dim, causal, options.rounds)
        else:
            found = cell(seqlen, head_dim, causal, options.rounds)
        figures = "  ".join(f"{r['impl']} {r['tflops']:.0f}" for r in found)
        print(f"d{head_dim} {seqlen or 'packed'} {'causal' if causal else 'full':6} {figures}", flush=True)
        rows += found
        write(options.path, rows, options.commit)


if __name__ == "__main__":
    main()
