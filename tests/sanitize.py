"""Small calls that run every kernel, for compute-sanitizer to watch: make gpu-sanitize.

python tests/sanitize.py [PART ...]: portable, mods, packed, cache, hopper; without any, all that the GPU has.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that every tensor is an allocation that has bounds

import torch

import tileattn
from tileattn.backends import hopper
from tileattn.backends.portable import kept, launch

# (seqlen_q, seqlen_k), heads, head_dim, options
DENSE = [
    ((70, 130), 2, 64, {"causal": True}),
    ((200, 129), 2, 128, {}),
    ((65, 65), 2, 80, {"window": (20, 5), "softcap": 5.0}),
]
OF_HOPPER = [
    ((100, 300), 2, 256, {"deterministic": True}),
    ((2048, 2048), 26, 64, {}),  # three warpgroups
    *(((1024, 1024), 2, head_dim, {}) for head_dim in (64, 128, 256)),  # tiles that programs share
]


def written(size: int, *_: object) -> torch.Tensor:
    """Memory for descriptors. Kernels store them by exchanges, which read as well; what they read is dropped."""
    return torch.zeros(size, dtype=torch.int8, device="cuda")


kept.allocate = launch.allocate = written


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, device="cuda", dtype=torch.int32)


def differentiate(out: torch.Tensor) -> None:
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


def dense(backend: str) -> None:
    for (seqlen_q, seqlen_k), heads, head_dim, options in DENSE + OF_HOPPER * (backend == "hopper"):
        q, k, v = (tensor(1, n, h, head_dim) for n, h in ((seqlen_q, heads), (seqlen_k, 1), (seqlen_k, 1)))
        differentiate(tileattn.attention(q, k, v, backend=backend, **options))


def mods() -> None:
    """Through lists of the tiles that a block mask shows."""
    q, k, v = (tensor(1, 130, 2, 64) for _ in range(3))
    block_mask = tileattn.BlockMask.from_blocks(torch.ones(3, 3, device="cuda").tril() > 0, (64, 64))
    options = {"block_mask": block_mask, "score_mod": distance, "mask_mod": causal}
    differentiate(tileattn.attention(q, k, v, backend="portable", **options))


def distance(score, _b, _h, row, col):
    return score - 0.01 * (row - col)


def causal(_b, _h, row, col):
    return row >= col


def packed(backend: str) -> None:
    q, k, v = (tensor(165, 2, 64) for _ in range(3))
    cu_seqlens, options = indices(0, 90, 90, 165), {"causal": True, "sink": tensor(2)}
    if backend == "portable":
        options |= {"bias": tensor(2, 1, 90), "alibi_slopes": tensor(2), "dropout_p": 0.2}
    differentiate(tileattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 90, 90, backend=backend, **options))


@torch.no_grad()
def cache() -> None:
    """One token a sequence, whose keys are split, then a chunk; appended to pages, rotated."""
    (k_cache, v_cache), table = [tensor(12, 64, 1, 128) for _ in range(2)], indices(*range(12)).view(2, 6)
    rotary = {"rotary_cos": tensor(384, 64), "rotary_sin": tensor(384, 64)}
    for tokens, lengths, options in ((1, (300, 7), {"split_size": 128}), (130, (200, 7), {})):
        q, k, v = (tensor(2, tokens, heads, 128) for heads in (8, 1, 1))
        of_cache = {"cache_seqlens": indices(*lengths), "block_table": table, "causal": True}
        tileattn.attention_with_kvcache(q, k_cache, v_cache, k, v, **of_cache, **rotary, **options)
        torch.cuda.synchronize()


@torch.no_grad()
def chunk_on_hopper() -> None:
    """To a contiguous cache, behind left padding."""
    q, k_cache, v_cache = tensor(2, 130, 48, 64), tensor(3, 300, 1, 64), tensor(3, 300, 1, 64)
    where = {"cache_seqlens": indices(300, 140), "cache_batch_idx": indices(2, 0), "cache_leftpad": indices(5, 0)}
    tileattn.attention_with_kvcache(q, k_cache, v_cache, **where, causal=True, backend="hopper")
    torch.cuda.synchronize()


def main(names: list[str]) -> None:
    parts = {
        "portable": lambda: dense("portable"),
        "mods": mods,
        "packed": lambda: packed("portable"),
        "cache": cache,
    }
    if hopper._is_hopper(torch.device("cuda", 0)):
        parts["hopper"] = lambda: (dense("hopper"), packed("hopper"), chunk_on_hopper())
    for name in names or parts:
        parts[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
