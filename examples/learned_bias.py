"""A learned relative position bias (T5, Swin): its gradient is summed over the batch that shares it."""

import torch

from tileattn import attention

torch.manual_seed(0)
batch, heads, seqlen, head_dim = 4, 2, 256, 32
q, k, v = (torch.randn(batch, seqlen, heads, head_dim) for _ in range(3))
target = torch.randn(batch, seqlen, heads, head_dim)

distance = torch.arange(seqlen)[None, :] - torch.arange(seqlen)[:, None]
table = torch.zeros(heads, 2 * seqlen - 1, requires_grad=True)  # one number for each head and distance
optimizer = torch.optim.Adam([table], lr=0.1)

losses = []
for _ in range(10):
    bias = table[:, distance + seqlen - 1]  # (heads, seqlen, seqlen), broadcast over the batch
    loss = (attention(q, k, v, bias=bias) - target).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())
print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")
assert losses[-1] < losses[0]
