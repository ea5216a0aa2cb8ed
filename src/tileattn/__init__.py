"""Exact, IO-aware attention for PyTorch, in pure Python."""

from tileattn.api import AttentionOutput, attention, attention_varlen, explain
from tileattn.dispatch import Explanation
from tileattn.flops import register as _register_flops

__version__ = "0.1.0"

_register_flops()

__all__ = ["AttentionOutput", "Explanation", "attention", "attention_varlen", "explain"]
