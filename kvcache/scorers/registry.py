"""Scorers by name. A scorer's module is imported when it is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvcache.scorers.protocol import Scorer  # imports torch, which a policy does not need

# name -> module and class; one method, one file
SCORERS = {
    "attention_max": ("kvcache.scorers.attention_max", "AttentionMax"),
    "mix": ("kvcache.scorers.mix", "Mix"),
    "snapkv": ("kvcache.scorers.snapkv", "SnapKV"),
    "expected_attention": ("kvcache.scorers.expected_attention", "ExpectedAttention"),
    "h2o": ("kvcache.scorers.h2o", "H2O"),
    "tova": ("kvcache.scorers.tova", "TOVA"),
    "kvzip": ("kvcache.scorers.kvzip", "KVzip"),
    "keydiff": ("kvcache.scorers.keydiff", "KeyDiff"),
    "streaming": ("kvcache.scorers.streaming", "Streaming"),
    "random": ("kvcache.scorers.random", "Random"),
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
