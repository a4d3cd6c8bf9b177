"""Scorers by name. A scorer's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.compressors.base import Scorer  # imports torch, which a policy does not need

# name -> module and class; one method, one file
SCORERS = {
    "attention_max": ("kvcache.compressors.attention_max", "AttentionMax"),
    "mix": ("kvcache.compressors.mix", "Mix"),
    "snapkv": ("kvcache.compressors.snapkv", "SnapKV"),
    "expected_attention": ("kvcache.compressors.expected_attention", "ExpectedAttention"),
    "h2o": ("kvcache.compressors.h2o", "H2O"),
    "tova": ("kvcache.compressors.tova", "TOVA"),
    "kvzip": ("kvcache.compressors.kvzip", "KVzip"),
    "keydiff": ("kvcache.compressors.keydiff", "KeyDiff"),
    "streaming": ("kvcache.compressors.streaming", "Streaming"),
    "random": ("kvcache.compressors.random", "Random"),
}


def get_scorer(name: str) -> Scorer:
    """Return the scorer of that name.

    Raises:
        ValueError: No scorer has that name.
    """
    if name not in SCORERS:
        raise ValueError(f"scorer {name!r} is not known; use one of {', '.join(SCORERS)}")
    module, class_name = SCORERS[name]
    return getattr(import_module(module), class_name)()
