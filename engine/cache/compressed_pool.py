"""The memory of compressed sequences: blocks of pages, and a prefill buffer for each sequence in prefill."""

import torch

from engine.cache.base import whole_dtype
from engine.config import EngineConfig
from engine.head_calibration import lane_shares
from engine.memory_division import Budget
from engine.models.decoder import Decoder
from kvcache.compress.background import BackgroundCompressor
from kvcache.compress.compressor import Compressor
from kvcache.pages.block_pool import BlockPool
from kvcache.pages.prefill_buffer import PrefillBufferPool
from kvcache.quantize.error_compensation import compensation_weights, output_second_moments
from kvcache.sequence.compressed import CompressedCache
from kvcache.sizes.compressed import CompressedLayout


class CompressedPool:
    """Allocate blocks and prefill buffers once, and open sequences in them."""

    def __init__(
        self, layout: CompressedLayout, budget: Budget, config: EngineConfig, model: Decoder
    ) -> None:
        self.blocks = BlockPool(budget.capacity_pages, layout.page_bytes, device=model.device)
        self.prefill_buffers = PrefillBufferPool(
            budget.num_prefill_buffers,
            layout.num_layers,
            layout.num_kv_heads,
            budget.prefill_buffer_tokens,
            layout.head_dim,
            compensates=config.cache.compensates,
            dtype=model.dtype,
            device=model.device,
        )
        self._whole_dtype = whole_dtype(config, model)
        self._background = BackgroundCompressor(model.device) if budget.overlaps_compression else None
        self._compressor = Compressor(
            layout,
            lane_shares(model, config.calibration_token_ids) if config.cache.needs_calibration else None,
            _value_weights(layout, model) if config.cache.compensates else None,
        )

    @property
    def allocated_bytes(self) -> int:
        """Bytes of all blocks and prefill buffers."""
        return self.blocks.allocated_bytes + self.prefill_buffers.allocated_bytes

    def open(self, num_blocks: int, prefix: CompressedCache | None) -> CompressedCache:
        """Return a sequence's cache of up to `num_blocks`, which begins with the tokens of `prefix`."""
        return CompressedCache(
            self._compressor,
            self._whole_dtype,
            self.blocks,
            num_blocks,
            self.prefill_buffers,
            prefix,
            self._background,
        )

    def check(self) -> None:
        """See `CacheBackend.check`."""
        self.blocks.check()
        self.prefill_buffers.check()
        assert self.blocks.num_reserved == 0, "a reservation was not given back"


def _value_weights(layout: CompressedLayout, model: Decoder) -> torch.Tensor:
    """Return the `compensation_weights` of every lane's values, float32 `[lanes, D, D]`."""
    second_moments = (
        output_second_moments(weights, layout.num_kv_heads, layout.head_dim)
        for weights in model.output_weights
    )
    return torch.cat([compensation_weights(m) for m in second_moments])
