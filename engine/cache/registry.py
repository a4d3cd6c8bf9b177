"""The cache that a policy needs."""

from engine.cache.base import CacheBackend
from engine.config import EngineConfig
from engine.memory_division import Budget
from engine.models.decoder import Decoder


def make_cache(budget: Budget, config: EngineConfig, model: Decoder) -> CacheBackend:
    """Return the cache for the engine's policy, its memory allocated."""
    if not config.cache.compresses:
        from engine.cache.full import FullCache

        return FullCache(budget, config, model)
    from engine.cache.compressed import CompressedBackend

    return CompressedBackend(budget, config, model)
