"""Every token whole, in pages of one size."""

import torch
from torch import Tensor

from engine.attention import get_backend
from engine.attention.cpu import attend_in_parts
from engine.cache.base import CacheBackend, RunUncached, whole_dtype
from engine.config import EngineConfig
from engine.memory_division import Budget
from engine.models.decoder import Attend, Decoder
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.pages.page_pool import PagePool
from kvcache.sequence.full import SequenceCache, slot_mapping
from kvcache.sizes.full import CacheLayout


class FullCache(CacheBackend[SequenceCache]):
    """Keep sequences in a `PagePool`."""

    def __init__(self, budget: Budget, config: EngineConfig, model: Decoder) -> None:
        layout = budget.layout
        assert isinstance(layout, CacheLayout), "the policy compresses"
        dtype = whole_dtype(config, model)
        self.pool = PagePool(layout, budget.capacity_pages, dtype=dtype, device=model.device)
        super().__init__(self.pool)
        self.backend = get_backend(config.attention, model.device)

    @property
    def num_available(self) -> int:
        return self.pool.num_free

    def open(self, num_blocks: int, num_tokens: int, prefix: SequenceCache | None) -> SequenceCache:
        return SequenceCache(self.pool, num_tokens, prefix)

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        return []  # nothing is scored

    def attend(self, plan: StepPlan) -> Attend:
        decodes = [s.cache for s in plan.decodes]
        spans = plan.drafts + plan.chunks
        chunks = [(span.sequence.cache, span.num_tokens) for span in spans]
        # The last layer's output is needed only where a token is chosen; other spans skip its attention.
        last_layer = self.pool.layout.num_layers - 1
        choices = [span.num_choices for span in spans]
        caches = decodes + [cache for cache, _ in chunks]
        slots = slot_mapping(caches, [1] * len(decodes) + [count for _, count in chunks])  # [L, KVH, T]
        decode = self.backend.open_decode(decodes) if decodes else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            num_tokens = slots.shape[-1]  # of the plan: the runner may have padded the step
            self.pool.store(slots[layer], k[:num_tokens], v[:num_tokens])
            out = torch.empty_like(q)  # [T, H, D]
            start = len(decodes)
            if decode:
                out[:start] = decode(layer, q[:start])[0]
            for (cache, count), num_choices in zip(chunks, choices, strict=True):
                span = slice(start, start + count)
                if layer < last_layer or num_choices:
                    out[span] = self.backend.prefill(layer, q[span], k[span], v[span], cache)[0]
                start += count
            return out

        return attend

    def attend_uncached(self, cache: SequenceCache) -> Attend:
        return lambda layer, q, k, v: attend_in_parts(layer, q, k, v, cache)[0]

    def advance(
        self, sequence: Sequence, num_tokens: int, run_uncached: RunUncached, *, prompt_ends: bool
    ) -> None:
        sequence.cache.advance(num_tokens)
