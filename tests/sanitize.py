"""A few small calls, forward and backward, for compute-sanitizer to watch: make gpu-sanitize.

python tests/sanitize.py [BACKEND ...]; without any, all that the GPU has.
"""

import os
import sys

os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # so that every tensor is an allocation that has bounds

import torch

import tileattn
from tileattn.backends import hopper

# (seqlen_q, seqlen_k), head_dim, options
CALLS = [
    ((70, 130), 64, {"causal": True}),
    ((200, 129), 128, {}),
    ((65, 65), 80, {"window": (20, 5), "softcap": 5.0}),
]


def tensor(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)


def main(backends: list[str]) -> None:
    if not backends:
        backends = ["portable"] + ["hopper"] * hopper._is_hopper(torch.device("cuda", 0))
    for backend in backends:
        for (seqlen_q, seqlen_k), head_dim, options in CALLS:
            q, k, v = (
                tensor(1, seqlen_q, 2, head_dim),
                tensor(1, seqlen_k, 1, head_dim),
                tensor(1, seqlen_k, 1, head_dim),
            )
            out = tileattn.attention(q, k, v, backend=backend, **options)
            out.backward(torch.randn_like(out))
            torch.cuda.synchronize()
    if "portable" in backends:
        packed_with_everything()


def packed_with_everything() -> None:
    q, k, v = (tensor(75, 2, 64) for _ in range(3))
    cu_seqlens = torch.tensor([0, 40, 40, 75], device="cuda", dtype=torch.int32)
    extras = {"bias": tensor(2, 1, 40), "sink": tensor(2), "alibi_slopes": tensor(2), "dropout_p": 0.2}
    out = tileattn.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 40, 40, causal=True, backend="portable", **extras)
    out.backward(torch.randn_like(out))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main(sys.argv[1:])
