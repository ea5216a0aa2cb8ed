"""attn_implementation="tileattn" for Transformers models.

from tileattn.integrations.transformers import register

register()
model = AutoModelForCausalLM.from_pretrained(name, attn_implementation="tileattn")
"""

from __future__ import annotations

NAME = "tileattn"
MINIMUM = (5, 8)


def register() -> None:
    """Make `attn_implementation="tileattn"` known to from_pretrained, from_config and set_attn_implementation.

    Registers the attention function and, beside it, the mask function, without which Transformers would drop padding.
    Calling it again changes nothing. Raises ImportError when transformers is missing or older than 5.8.
    """
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            f"tileattn.integrations.transformers: transformers is not installed ({error}); "
            "pip install 'tileattn[transformers]'"
        ) from error
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) < MINIMUM:
        raise ImportError(
            f"tileattn.integrations.transformers: transformers {transformers.__version__} is too old, it needs "
            f"{'.'.join(map(str, MINIMUM))} or later; pip install -U 'tileattn[transformers]'"
        )
    from transformers.masking_utils import AttentionMaskInterface
    from transformers.modeling_utils import AttentionInterface

    from tileattn.integrations.transformers.attention import attention_forward
    from tileattn.integrations.transformers.masks import mask_forward

    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, mask_forward)
