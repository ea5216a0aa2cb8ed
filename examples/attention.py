"""Causal attention with grouped heads, a sliding window and its gradients, against PyTorch's own."""

import torch
import torch.nn.functional as F

from tileattn import attention, explain

torch.manual_seed(0)
q = torch.randn(2, 1000, 8, 64, requires_grad=True)  # (batch, seqlen, heads, head_dim)
k = torch.randn(2, 1000, 2, 64, requires_grad=True)  # each key head serves four query heads
v = torch.randn(2, 1000, 2, 64, requires_grad=True)

out = attention(q, k, v, causal=True)
expected = F.scaled_dot_product_attention(
    q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, enable_gqa=True
).transpose(1, 2)
torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)

# The last 256 positions, its own among them. Tiles outside the window are not computed.
windowed = attention(q, k, v, causal=True, window=(255, 0))
windowed.square().mean().backward()
print("out", tuple(windowed.shape), "dq", tuple(q.grad.shape), "dk", tuple(k.grad.shape))
print(explain(q, k, v, causal=True, window=(255, 0)))
