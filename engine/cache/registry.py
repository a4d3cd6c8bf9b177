"""Which cache a policy needs."""

import torch

from engine.budget import Budget
from engine.cache.base import CacheBackend
from engine.config import EngineConfig
from engine.models.decoder import Decoder


def make_cache(budget: Budget, config: EngineConfig, model: Decoder) -> CacheBackend:
    """Return the cache for the engine's policy, its memory taken."""
    whole_dtype = torch.bfloat16 if config.cache.dtype == "bfloat16" else model.dtype
    if not config.cache.compresses:
        from engine.cache.full import FullCache

        return FullCache(
            budget.layout,
            budget.capacity_pages,
            dtype=whole_dtype,
            device=model.device,
            attention=config.attention,
        )
    from engine.cache.compressed import CompressedBackend
    from engine.head_calibration import calibrate

    if config.cache.quantizes:
        model.rotate_heads()
    return CompressedBackend(
        budget.layout,
        budget.capacity_pages,
        prefill_buffer_tokens=budget.prefill_buffer_tokens,
        num_prefill_buffers=budget.num_prefill_buffers,
        overlaps_compression=budget.overlaps_compression,
        max_context=model.config.max_context,
        move_keys=model.move_keys,
        repeat_token_ids=config.repeat_token_ids,
        lane_shares=calibrate(model, config.calibration_token_ids)
        if config.cache.needs_calibration
        else None,
        output_weights=model.output_weights,
        dtype=model.dtype,
        whole_dtype=whole_dtype,
        device=model.device,
    )
