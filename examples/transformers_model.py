"""A Transformers model with tileattn inside: a batch of different lengths, padded on the left, and generation.

Give the name or folder of a causal language model; without one, a small random model is made.
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from tileattn.integrations.transformers import register

register()
torch.manual_seed(0)
if len(sys.argv) > 1:
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[1], padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(sys.argv[1], attn_implementation="tileattn")
    batch = tokenizer(["The capital of France is", "Attention is"], return_tensors="pt", padding=True)
    written = model.generate(**batch, max_new_tokens=20, do_sample=False)
    print(*tokenizer.batch_decode(written, skip_special_tokens=True), sep="\n")
else:
    config = LlamaConfig(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tileattn")
    ids = torch.randint(3, 100, (2, 12))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    ours = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    model.set_attn_implementation("eager")
    assert torch.equal(ours, model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False))
    print("the same tokens as eager attention:", ours[:, 12:].tolist())
