"""Scored, tiered, quantised: sequences in a compressed cache."""

import torch
from torch import Tensor

from engine.attention.compressed import attend_aside, attend_chunk, attend_token
from engine.cache.base import Attend
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.arena import ArenaPool
from kvcache.compressed_cache import CompressedCache
from kvcache.compressed_layout import CompressedLayout
from kvcache.compressors.registry import get_scorer
from kvcache.frames import FramePool
from kvcache.quant import rotation


class CompressedBackend:
    """Keep sequences in a frame pool and, while in prefill, in arenas.

    Args:
        arena_tokens: size of an arena; what an eviction in one go at the prompt's end needs is the whole prompt.
        num_arenas: the most sequences in prefill at once.
        max_context: positions the model has.
    """

    def __init__(
        self,
        layout: CompressedLayout,
        num_frames: int,
        *,
        arena_tokens: int,
        num_arenas: int,
        max_context: int,
        dtype: torch.dtype,
        whole_dtype: torch.dtype,
        device: torch.device,
    ):
        config = layout.config
        self.layout = layout
        self.frames = FramePool(num_frames, layout.page_bytes, device=device)
        self.arenas = ArenaPool(
            num_arenas,
            layout.num_layers,
            layout.num_kv_heads,
            arena_tokens,
            layout.head_dim,
            dtype=dtype,
            device=device,
        )
        self._whole_dtype = whole_dtype
        self._max_context = max_context
        tiers = config.resolved_tiers
        judges = len(tiers) > 1 or tiers[0].ratio < 1
        self.scorer = get_scorer(config.scorer) if judges else None
        self._rotation = rotation(layout.head_dim).to(device, dtype) if config.quantises else None

    @property
    def num_blocks(self) -> int:
        return self.frames.num_blocks

    @property
    def num_available(self) -> int:
        return self.frames.num_available

    @property
    def allocated_bytes(self) -> int:
        return self.frames.allocated_bytes + self.arenas.allocated_bytes

    @property
    def used_bytes(self) -> int:
        return self.frames.used_bytes

    @property
    def peak_bytes(self) -> int:
        return self.frames.peak_bytes

    def can_open(self, num_blocks: int) -> bool:
        """See `CacheBackend.can_open`."""
        return num_blocks <= self.frames.num_available and self.arenas.num_free > 0

    def open(self, num_blocks: int, num_tokens: int, prefix: CompressedCache | None) -> CompressedCache:
        """See `CacheBackend.open`."""
        return CompressedCache(self.layout, self._whole_dtype, self.frames, num_blocks, self.arenas, prefix)

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """See `CacheBackend.probe_tokens`: the question, just before a chunk is judged."""
        left = sequence.num_prompt_tokens - sequence.num_computed_tokens
        judges = num_tokens in (sequence.cache.open_chunk_tokens, left)
        fits = sequence.position + num_tokens + len(sequence.request.probe_token_ids) <= self._max_context
        if self.scorer is None or not self.layout.config.probe or not judges or not fits:
            return []
        return list(sequence.request.probe_token_ids)

    def attend(self, plan: StepPlan) -> Attend:
        """See `CacheBackend.attend`."""
        decodes = [s.cache for s in plan.decodes]
        chunks = [
            (c.sequence.cache, c.num_tokens, len(self.probe_tokens(c.sequence, c.num_tokens)))
            for c in plan.chunks
        ]
        slots = [cache.recent.open_slots() for cache in decodes]
        heads = self.layout.num_kv_heads

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            out = torch.empty_like(q)  # [T, H, D]
            lanes = slice(layer * heads, (layer + 1) * heads)
            for i, (cache, (key_slots, value_slots)) in enumerate(zip(decodes, slots, strict=True)):
                cache.recent.write_pieces(key_slots[lanes], k[i])
                cache.recent.write_pieces(value_slots[lanes], v[i])
                out[i] = attend_token(layer, q[i], cache)
            start = len(decodes)
            for cache, count, num_probes in chunks:
                span = slice(start, start + count + num_probes)
                out[span] = attend_chunk(layer, q[span], k[span], v[span], cache, self.scorer, num_probes)
                start = span.stop
            return out

        return self._rotated(attend)

    def attend_aside(self, cache: CompressedCache) -> Attend:
        """See `CacheBackend.attend_aside`."""
        return self._rotated(lambda layer, q, k, v: attend_aside(layer, q, k, v, cache))

    def _rotated(self, attend: Attend) -> Attend:
        """Attend in the rotated basis, in which outliers are spread and few bits do; attention is the same in any."""
        if self._rotation is None:
            return attend
        turn = self._rotation
        return lambda layer, q, k, v: attend(layer, q @ turn, k @ turn, v @ turn) @ turn.T

    def advance(self, sequence: Sequence, num_tokens: int, *, prompt_ends: bool) -> None:
        """See `CacheBackend.advance`."""
        if sequence.cache.arena:
            sequence.cache.extend(num_tokens, prompt_ends=prompt_ends and not sequence.is_prefix)
        else:
            sequence.cache.count_decoded()

    def check(self) -> None:
        """See `CacheBackend.check`."""
        self.frames.check()
        self.arenas.check()
        assert self.frames.num_reserved == 0, "a reservation was not given back"
