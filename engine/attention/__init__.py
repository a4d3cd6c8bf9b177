"""Attention of new tokens over a sequence's pages. Imports: models, kvcache."""

from engine.attention.base import AttentionBackend
from engine.attention.registry import get_backend

__all__ = ["AttentionBackend", "get_backend"]
