"""Every token whole, in pages of one size."""

import torch
from torch import Tensor

from engine.attention import get_backend
from engine.attention.cpu import attend_apart
from engine.cache.base import Attend, LookAhead
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.pages.page_pool import PagePool
from kvcache.sequence.full import SequenceCache, slot_mapping
from kvcache.sizes.full import CacheLayout


class FullCache:
    """Keep sequences in a `PagePool`.

    Args:
        dtype: of keys and values in the pages.
        attention: backend name, or None for the device's own.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        *,
        dtype: torch.dtype,
        device: torch.device,
        attention: str | None = None,
    ):
        self.pool = PagePool(layout, num_pages, dtype=dtype, device=device)
        self.backend = get_backend(attention or ("cpu" if device.type == "cpu" else "reference"))

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_available(self) -> int:
        return self.pool.num_free

    @property
    def allocated_bytes(self) -> int:
        return self.pool.allocated_bytes

    @property
    def used_bytes(self) -> int:
        return self.pool.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self.pool.peak_bytes

    @property
    def num_prefill_buffers(self) -> int:
        return 0

    def can_open(self, num_blocks: int, num_sequences: int = 1) -> bool:
        """See `CacheBackend.can_open`."""
        return num_blocks <= self.pool.num_free

    def open(self, num_blocks: int, num_tokens: int, prefix: SequenceCache | None) -> SequenceCache:
        """See `CacheBackend.open`."""
        return SequenceCache(self.pool, num_tokens, prefix)

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """See `CacheBackend.probe_tokens`; nothing is judged here."""
        return []

    def attend(self, plan: StepPlan) -> Attend:
        """See `CacheBackend.attend`."""
        decodes = [s.cache for s in plan.decodes]
        spans = plan.drafts + plan.chunks
        chunks = [(span.sequence.cache, span.num_tokens) for span in spans]
        # In the last layer only tokens that choose another are asked for their attention: the others end there.
        last_layer = self.pool.layout.num_layers - 1
        choices = [span.num_choices for span in spans]
        caches = decodes + [cache for cache, _ in chunks]
        slots = slot_mapping(caches, [1] * len(decodes) + [count for _, count in chunks])  # [L, KVH, T]
        decode = self.backend.open_decode(decodes) if decodes else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            num_tokens = slots.shape[-1]  # of the plan: a step may be filled up with more
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

    def attend_aside(self, cache: SequenceCache) -> Attend:
        """See `CacheBackend.attend_aside`."""
        return lambda layer, q, k, v: attend_apart(layer, q, k, v, cache)[0]

    def advance(
        self, sequence: Sequence, num_tokens: int, look_ahead: LookAhead, *, prompt_ends: bool
    ) -> None:
        """See `CacheBackend.advance`."""
        sequence.cache.advance(num_tokens)

    def check(self) -> None:
        """See `CacheBackend.check`."""
        self.pool.check()
