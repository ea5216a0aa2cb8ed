"""Exact, IO-aware attention for PyTorch, in pure Python."""

from tileattn.api import AttentionOutput, attention, attention_varlen, explain
from tileattn.block_mask import BlockMask
from tileattn.dispatch import Explanation
from tileattn.flops import register as _register_flops
from tileattn.integrations.sdpa import register as _register_sdpa
from tileattn.kvcache_api import attention_with_kvcache, explain_with_kvcache
from tileattn.kvcache_ops import CacheExplanation
from tileattn.mods import trace_mask_mod, trace_score_mod

__version__ = "0.1.0"

_register_flops()
_register_sdpa()

__all__ = [
    "AttentionOutput",
    "BlockMask",
    "CacheExplanation",
    "Explanation",
    "attention",
    "attention_varlen",
    "attention_with_kvcache",
    "explain",
    "explain_with_kvcache",
    "trace_mask_mod",
    "trace_score_mod",
]
