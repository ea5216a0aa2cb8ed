"""A Transformers model that generates from a paged KV cache: prompts of different lengths are read in chunks, then all
continue together, one token a step, from pages of one pool.

Give the name or folder of a causal language model (Llama-like: its attention layers call Transformers' attention
functions); without one, a small random model is made.
"""

import sys

import torch
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tileattn import attention_with_kvcache

PAGE_SIZE = 16


class PagedCache:
    """A pool of pages for every layer, and which of them each sequence has."""

    def __init__(self, config, capacity, batch, dtype=torch.float32, device="cpu"):
        per_sequence = -(-capacity // PAGE_SIZE)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        shape = config.num_hidden_layers, batch * per_sequence, PAGE_SIZE, config.num_key_value_heads, head_dim
        self.k, self.v = (torch.zeros(shape, dtype=dtype, device=device) for _ in range(2))
        # any order would do: the pages of a sequence need not be neighbours
        self.table = torch.randperm(batch * per_sequence).int().view(batch, per_sequence).to(device)
        self.lengths = torch.zeros(batch, dtype=torch.int32, device=device)
        self.active = slice(None)  # the sequences that the model now sees

    def attend(
        self, module, query, key, value, attention_mask, scaling=None, sliding_window=None, softcap=None, **kwargs
    ):
        """Transformers' attention function: (batch, heads, rows, head_dim), the new tokens' alone."""
        q, k, v = (x.transpose(1, 2) for x in (query, key, value))
        out = attention_with_kvcache(
            q,
            self.k[module.layer_idx],
            self.v[module.layer_idx],
            k,
            v,
            cache_seqlens=self.lengths[self.active],
            block_table=self.table[self.active],
            causal=True,
            window=(-1, -1) if sliding_window is None else (sliding_window - 1, 0),
            scale=scaling,
            softcap=softcap,
            sink=kwargs.get("s_aux"),
        )
        return out, None

    def read(self, model, ids, active=slice(None)):
        """Logits of the last of the new tokens ids (batch, rows), which go on from what the cache holds."""
        self.active = active
        positions = self.lengths[active, None] + torch.arange(ids.shape[1], device=ids.device)
        AttentionInterface.register("paged_cache", self.attend)
        model.set_attn_implementation("paged_cache")
        logits = model(ids, position_ids=positions, use_cache=False, logits_to_keep=1).logits[:, -1]
        self.lengths[active] += ids.shape[1]
        return logits


@torch.no_grad()
def generate(model, prompts, new_tokens, chunk=64):
    """Greedy continuations of prompts, lists of token ids."""
    longest = max(map(len, prompts)) + new_tokens
    cache = PagedCache(model.config, longest, len(prompts), model.dtype, model.device)
    last = []
    for b, prompt in enumerate(prompts):
        for some in torch.tensor([prompt], device=model.device).split(chunk, 1):
            logits = cache.read(model, some, slice(b, b + 1))
        last.append(logits.argmax(-1))
    written = [torch.stack(last)]  # (batch, 1)
    while len(written) < new_tokens:
        written.append(cache.read(model, written[-1]).argmax(-1, keepdim=True))
    return torch.cat(written, 1)


def standard(model, prompts, new_tokens):
    """The same by standard attention and Transformers' own cache."""
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False}
    written = [model.generate(torch.tensor([p], device=model.device), **options)[0, len(p) :] for p in prompts]
    return torch.stack(written)


if __name__ == "__main__":
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
        texts = ["The capital of France is", "FlashAttention computes attention without"]
        prompts = [tokenizer(text).input_ids for text in texts]
        for text, ids in zip(texts, generate(model, prompts, 24), strict=True):
            print(text + tokenizer.decode(ids))
    else:
        config = LlamaConfig(
            vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config).eval()
        prompts = [torch.randint(3, 100, (n,)).tolist() for n in (40, 7)]
        ours = generate(model, prompts, 12, chunk=16)
        assert torch.equal(ours, standard(model, prompts, 12))
        print("the same tokens as standard attention:", ours.tolist())
