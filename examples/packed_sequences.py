"""Sequences of different lengths without padding: packed into one tensor, each attends within itself."""

import torch

from tileattn import attention, attention_varlen

torch.manual_seed(0)
lengths = [700, 3, 0, 1200]
cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()  # sequence b owns rows cu_seqlens[b] to cu_seqlens[b + 1]
q, k, v = (torch.randn(sum(lengths), 4, 64) for _ in range(3))  # (total, heads, head_dim)

out = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, causal=True)

for b, rows in enumerate(torch.arange(sum(lengths)).split(lengths)):
    if len(rows):
        alone = attention(q[None, rows], k[None, rows], v[None, rows], causal=True)[0]
        torch.testing.assert_close(out[rows], alone)
    print(f"sequence {b}: {len(rows)} tokens")
