"""attn_implementation="tileattn" against eager, on small random models."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

transformers = pytest.importorskip("transformers")

from transformers import AutoModel, AutoModelForCausalLM, AutoModelForSeq2SeqLM, masking_utils  # noqa: E402

from tileattn.integrations.transformers import attention as integration  # noqa: E402
from tileattn.integrations.transformers import register  # noqa: E402
from tileattn.integrations.transformers.masks import StructuredMask, mask_forward  # noqa: E402

VOCAB, SEQLEN = 97, 24
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
DECODERS = {
    "llama": ("LlamaConfig", {}),
    "mistral_window": ("MistralConfig", {"sliding_window": 5}),
    "qwen3": ("Qwen3Config", {}),
    "gemma2_softcap_window": ("Gemma2Config", {"sliding_window": 6, "attn_logit_softcapping": 5.0}),
    "gpt_oss_sink_window": ("GptOssConfig", {"sliding_window": 7, **MOE}),
    "deepseek_v3_head_dim_v": (
        "DeepseekV3Config",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": 16,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "n_routed_experts": 2,
            "n_group": 1,
            "topk_group": 1,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 16,
        },
    ),
    # its attention is not told of the window: only the mask is
    "phimoe_window": ("PhimoeConfig", {"sliding_window": 5, **MOE}),
    "llama4_chunks": (
        "Llama4TextConfig",
        {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "num_local_experts": 2},
    ),
}
SEQ2SEQ = {
    "t5_position_bias": ("T5Config", {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "bart": (
        "BartConfig",
        {
            "d_model": 32,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "decoder_ffn_dim": 48,
            "init_std": 0.3,
        },
    ),
}
ENCODERS = {
    "bert": ("BertConfig", {}),
    "modernbert_window": (
        "ModernBertConfig",
        {"local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
}


@pytest.fixture(autouse=True, scope="module")
def _registered():
    register()


def pair(table, name, auto=AutoModelForCausalLM):
    """The same model twice: eager and tileattn."""
    config_name, options = table[name]
    models = []
    for implementation in ("eager", "tileattn"):
        config = getattr(transformers, config_name)(**{**SMALL, **options})
        torch.manual_seed(0)
        model = auto.from_config(config, attn_implementation=implementation, dtype=torch.float32).eval()
        if name.startswith("gpt_oss"):
            for layer in model.model.layers:
                torch.nn.init.normal_(layer.self_attn.sinks)
        models.append(model)
    models[1].load_state_dict(models[0].state_dict())
    return models


def tokens(batch=3, seqlen=SEQLEN, seed=1):
    return torch.randint(3, VOCAB, (batch, seqlen), generator=torch.Generator().manual_seed(seed))


def padding(side, batch=3, seqlen=SEQLEN):
    """(batch, seqlen) of 1 and 0, with a different length in each row."""
    mask = torch.ones(batch, seqlen, dtype=torch.long)
    for b, missing in enumerate((0, 3, 11)):
        if side in ("right", "both") and missing:
            mask[b, -missing:] = 0
        if side in ("left", "both"):
            mask[b, :missing] = 0
    return None if side == "none" else mask


def assert_close(actual, expected, where=None):
    assert not actual.isnan().any()
    if where is not None:
        actual, expected = actual[where.bool()], expected[where.bool()]
    size = max(expected.abs().max().item(), 1e-2)  # the gradient of a key's bias is zero but for rounding
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize("side", ["none", "left", "right", "both"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoder_equals_eager(name, side):
    eager, ours = pair(DECODERS, name)
    ids, mask = tokens(), padding(side)
    assert_close(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=mask).logits, mask)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder_equals_eager(name, side):
    eager, ours = pair(ENCODERS, name, AutoModel)
    ids, mask = tokens(), padding(side)
    outputs = [model(ids, attention_mask=mask).last_hidden_state for model in (ours, eager)]
    assert_close(*outputs, mask)


@pytest.mark.parametrize("side", ["none", "right"])
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_cross_attention_equals_eager_with_gradients(name, side):
    eager, ours = pair(SEQ2SEQ, name, AutoModelForSeq2SeqLM)
    mask = padding(side)
    for model in (eager, ours):
        out = model(tokens(), attention_mask=mask, labels=tokens(seqlen=9, seed=2))
        out.loss.backward()
        model.logits = out.logits
    assert_close(ours.logits, eager.logits)
    assert_gradients_close(ours, eager)


def assert_gradients_close(ours, eager):
    compared = 0
    for (name, a), (_, b) in zip(ours.named_parameters(), eager.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        if b.grad is not None:
            assert_close(a.grad, b.grad)
            compared += 1
    assert compared > 5


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["llama", "gemma2_softcap_window", "gpt_oss_sink_window"])
def test_training_gradients_equal_eager(name, side):
    eager, ours = pair(DECODERS, name)
    ids, mask = tokens(), padding(side)
    labels = ids
    if mask is not None:  # a row of padding predicts the first token, and eager attention gives such a row an average
        labels = ids.masked_fill((mask == 0) | (mask.cumsum(1) == 1), -100)
    for model in (eager, ours):
        model.train()
        model(ids, attention_mask=mask, labels=labels).loss.backward()
    assert_gradients_close(ours, eager)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(use_reentrant):
    plain, checkpointed = (pair(DECODERS, "mistral_window")[1].train() for _ in range(2))
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    mask = padding("left")
    for model in (plain, checkpointed):
        model(tokens(), attention_mask=mask, labels=tokens(), use_cache=False).loss.backward()
    assert_gradients_close(checkpointed, plain)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_softcap_window"])
def test_packed_sequences_equal_eager_and_each_alone(name, batch, spy):
    eager, ours = pair(DECODERS, name)
    ids = tokens(batch)
    lengths = (9, 1, 14)
    positions = torch.cat([torch.arange(n) for n in lengths])[None].expand(batch, -1)
    packed = ours(ids, position_ids=positions, use_cache=False).logits
    assert {call["function"] for call in spy} == {"attention_varlen"}
    assert_close(packed, eager(ids, position_ids=positions, use_cache=False).logits)
    alone = torch.cat([ours(part, use_cache=False).logits for part in ids.split(lengths, dim=1)], dim=1)
    assert_close(packed, alone)


@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_packing_by_cu_seqlens_holds_with_a_cache_too(name, spy):
    _, ours = pair(DECODERS, name)
    ids = tokens(1)
    cu_seqlens = torch.tensor([0, 10, SEQLEN], dtype=torch.int32)
    packing = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens, "max_length_q": 14, "max_length_k": 14}
    positions = torch.cat([torch.arange(10), torch.arange(14)])[None]
    packed = ours(ids, position_ids=positions, use_cache=True, **packing).logits
    assert {call["function"] for call in spy} == {"attention_varlen"}
    assert_close(packed, torch.cat([ours(part).logits for part in ids.split((10, 14), dim=1)], dim=1))


def test_a_mask_of_other_lengths_is_an_error():
    q, k = torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 9, 8)
    mask = mask_forward(batch_size=1, q_length=4, kv_length=8, q_offset=4, mask_function=PATTERNS["window"])
    assert isinstance(mask, StructuredMask)
    with pytest.raises(ValueError, match="does not broadcast"):
        integration.attention_forward(torch.nn.Identity(), q, k, k, mask)


@pytest.mark.parametrize("kind", ["bool", "float"])
def test_a_user_s_own_4d_mask_is_taken_as_it_is(kind):
    eager, ours = pair(DECODERS, "llama")
    ids = tokens()
    prefix_lm = torch.ones(SEQLEN, SEQLEN, dtype=torch.bool).tril() | (torch.arange(SEQLEN) < 6)
    additive = torch.zeros(SEQLEN, SEQLEN).masked_fill(~prefix_lm, torch.finfo(torch.float32).min)[None, None]
    mask = prefix_lm[None, None] if kind == "bool" else additive
    assert_close(ours(ids, attention_mask=mask).logits, eager(ids, attention_mask=additive).logits)


GENERATION = {
    "greedy": {},
    "static_cache": {"cache_implementation": "static"},
    "beams": {"num_beams": 3, "max_new_tokens": 8},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
    "no_cache": {"use_cache": False, "max_new_tokens": 6},
    "chunked_prefill": {"prefill_chunk_size": 5},
}


@pytest.mark.parametrize("how", GENERATION)
@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2_softcap_window", "gpt_oss_sink_window"])
def test_generates_what_eager_generates(name, how):
    alone = how == "prompt_lookup"  # assisted decoding takes a batch of one
    ids, mask = (tokens(1), None) if alone else (tokens(), padding("left"))
    if mask is not None:
        ids = ids * mask
    options = {"max_new_tokens": 16, "do_sample": False, **GENERATION[how]}
    eager, ours = (model.generate(ids, attention_mask=mask, **options) for model in pair(DECODERS, name))
    assert ours.tolist() == eager.tolist()


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_encoder_decoder_generates_what_eager_generates(name):
    options = {"max_new_tokens": 8, "do_sample": False}
    mask = padding("right")
    results = [m.generate(tokens(), attention_mask=mask, **options) for m in pair(SEQ2SEQ, name, AutoModelForSeq2SeqLM)]
    assert results[0].tolist() == results[1].tolist()


@pytest.fixture
def spy(monkeypatch):
    """What reaches tileattn: a list of {function, seqlen_q, seqlen_k, mask, bias, causal, window}."""
    calls = []

    def watched(function):
        def call(q, k, v, *args, mask=None, bias=None, causal=False, window=(-1, -1), **options):
            shape = None if mask is None else tuple(mask.shape)
            calls.append(
                {
                    "function": function.__name__,
                    "seqlen_k": k.shape[1],
                    "mask": shape,
                    "causal": causal,
                    "window": window,
                }
            )
            return function(q, k, v, *args, mask=mask, bias=bias, causal=causal, window=window, **options)

        return call

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(integration, name, watched(getattr(integration, name)))
    return calls


def test_no_mask_is_built_where_structure_says_it_all(spy):
    _, llama = pair(DECODERS, "llama")
    llama(tokens())
    llama(tokens(), attention_mask=torch.ones(3, SEQLEN))
    assert all(call["mask"] is None and call["causal"] for call in spy)
    spy.clear()
    llama(tokens(), attention_mask=padding("left"))
    assert all(call["mask"] == (3, 1, 1, SEQLEN) and call["window"] == (-1, 0) for call in spy)
    spy.clear()
    _, mistral = pair(DECODERS, "mistral_window")
    mistral(tokens())
    assert all(call["mask"] is None and call["window"] == (4, 0) for call in spy)


def test_prefill_of_a_static_cache_computes_no_unfilled_columns(spy):
    _, llama = pair(DECODERS, "llama")
    llama.generate(tokens(), max_new_tokens=2, do_sample=False, cache_implementation="static")
    assert spy[0]["seqlen_k"] == SEQLEN
    assert spy[0]["mask"] is None


def sequences(batch, seqlen):
    positions = torch.cat([torch.arange(3), torch.arange(seqlen - 3)])[None].expand(batch, -1)
    return masking_utils.packed_sequence_mask_function(masking_utils.find_packed_sequence_indices(positions))


PATTERNS = {
    "causal": masking_utils.causal_mask_function,
    "bidirectional": masking_utils.bidirectional_mask_function,
    "window": masking_utils.sliding_window_causal_mask_function(4),
    "bidirectional_window": masking_utils.sliding_window_bidirectional_mask_function(3),
    "packed": masking_utils.and_masks(masking_utils.causal_mask_function, sequences(3, 10)),
    "packed_window": masking_utils.and_masks(masking_utils.sliding_window_causal_mask_function(4), sequences(3, 10)),
    "prefix": masking_utils.or_masks(masking_utils.causal_mask_function, lambda b, h, q, k: k < 4),
    "chunks": masking_utils.chunked_causal_mask_function(4, torch.zeros(3, dtype=torch.int)),
}
# (seqlen_q, q_offset, kv_length, kv_offset): prefill, decode, a longer prefix, a static cache, sliding caches
PLACES = [(10, 0, 10, 0), (1, 9, 10, 0), (4, 6, 10, 0), (10, 0, 16, 0), (4, 6, 16, 0), (1, 9, 4, 6), (3, 9, 6, 6)]


# Transformers looks for packed sequences only without padding and cache.
MASKS = [
    (name, place, padded)
    for name, place, padded in itertools.product(PATTERNS, PLACES, (None, "left", "right"))
    if "packed" not in name or (place == PLACES[0] and not padded)
]


@pytest.mark.parametrize(("name", "place", "padded"), MASKS)
def test_mask_is_exactly_transformers_own(name, place, padded):
    seqlen_q, q_offset, kv_length, kv_offset = place
    attention_mask = None
    if padded or kv_length > q_offset + seqlen_q:
        attention_mask = torch.ones(3, q_offset + seqlen_q, dtype=torch.bool)
        attention_mask[1, slice(0, 4) if padded == "left" else slice(-4, None)] = not padded
    call = {
        "batch_size": 3,
        "kv_length": kv_length,
        "kv_offset": kv_offset,
        "mask_function": PATTERNS[name],
        "attention_mask": attention_mask,
        "q_length": seqlen_q,
        "q_offset": q_offset,
    }
    expected = masking_utils.sdpa_mask(**call, allow_is_causal_skip=False)
    mask = mask_forward(**call, allow_is_bidirectional_skip=True)
    if mask is None:
        causal = torch.ones(seqlen_q, kv_length, dtype=torch.bool).tril(kv_length - seqlen_q)
        mask = (torch.ones_like(causal) if name.startswith("bidirectional") else causal).expand(expected.shape)
    elif name in ("prefix", "chunks"):
        assert not isinstance(mask, StructuredMask)
    elif place == PLACES[0]:
        assert isinstance(mask, StructuredMask)  # and whatever a model does to it, it is that boolean tensor
        assert mask.shape == expected.shape
        assert torch.equal(mask[:, :, 2:], expected[:, :, 2:])
        assert torch.equal(mask.to("cpu").dense(), expected)
    assert torch.equal(mask & True, expected)


def test_compiles_without_graph_breaks():
    eager, ours = pair(DECODERS, "mistral_window")
    ids, mask = tokens(), padding("left")
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    assert_close(compiled(ids, use_cache=False).logits, eager(ids).logits)
    assert_close(
        compiled(ids, attention_mask=mask, use_cache=False).logits, eager(ids, attention_mask=mask).logits, mask
    )


def test_compiled_layers_take_a_structured_mask(spy):
    eager, ours = pair(DECODERS, "mistral_window")
    for layer in ours.model.layers:
        layer.compile(fullgraph=True, backend="aot_eager")
    for side in ("left", "right"):
        mask = padding(side)
        assert_close(ours(tokens(), attention_mask=mask).logits, eager(tokens(), attention_mask=mask).logits, mask)


def test_set_attn_implementation_switches_a_model():
    eager, ours = pair(DECODERS, "llama")
    eager.set_attn_implementation("tileattn")
    assert eager.config._attn_implementation == "tileattn"
    assert torch.equal(eager(tokens()).logits, ours(tokens()).logits)


def test_a_model_that_computes_attention_itself_is_refused():
    config = transformers.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=1, n_head=4)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="tileattn")
    with pytest.raises(ValueError, match=r'BloomAttention .* use attn_implementation="eager"'):
        model(tokens())


def test_selected_keys_are_refused():
    q = torch.zeros(1, 1, 4, 8)
    with pytest.raises(ValueError, match="block_indices"):
        integration.attention_forward(torch.nn.Identity(), q, q, q, None, block_indices=torch.zeros(1))


def test_register_twice_changes_nothing():
    functions = transformers.AttentionInterface._global_mapping
    before = functions["tileattn"]
    register()
    assert functions["tileattn"] is before


@pytest.mark.parametrize(("version", "message"), [(None, "not installed"), ("4.57.6", "4.57.6 is too old.*5.8")])
def test_register_without_a_usable_transformers(monkeypatch, version, message):
    if version is None:
        monkeypatch.setitem(sys.modules, "transformers", None)
    else:
        monkeypatch.setattr("transformers.__version__", version)
    with pytest.raises(ImportError, match=message):
        register()
