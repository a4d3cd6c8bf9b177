"""Scored, tiered, quantized: sequences in a compressed cache."""

from engine.attention.compressed_step import ChunkSpan, CompressedAttention
from engine.cache.base import CacheBackend, RunUncached, whole_dtype
from engine.cache.compressed_pool import CompressedPool
from engine.cache.scoring import Scoring
from engine.cache.streamed_prompts import StreamedPrompts
from engine.config import EngineConfig
from engine.memory_division import Budget
from engine.models.decoder import Attend, Decoder
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.sequence.compressed import CompressedCache
from kvcache.sizes.compressed import CompressedLayout


class CompressedBackend(CacheBackend[CompressedCache]):
    """Keep sequences in a block pool and, while in prefill, in prefill buffers.

    Attributes:
        pool: the memory.
        attention: what a step's tokens attend with.
        scoring: what the scorer is shown.
        streamed: what is done about prompts beyond the context.
    """

    def __init__(self, budget: Budget, config: EngineConfig, model: Decoder) -> None:
        layout = budget.layout
        assert isinstance(layout, CompressedLayout), "the policy does not compress"
        self.pool = CompressedPool(layout, budget, config, model)
        super().__init__(self.pool.blocks)
        self.attention = CompressedAttention(layout, self.pool.blocks, whole_dtype(config, model))
        self.scoring = Scoring(layout, config, model)
        self.streamed = StreamedPrompts(layout, budget, model)

    @property
    def num_available(self) -> int:
        return self.pool.blocks.num_available

    @property
    def allocated_bytes(self) -> int:
        return self.pool.allocated_bytes

    @property
    def num_prefill_buffers(self) -> int:
        return self.pool.prefill_buffers.num_used

    def can_open(self, num_blocks: int, num_sequences: int = 1) -> bool:
        return super().can_open(num_blocks) and num_sequences <= self.pool.prefill_buffers.num_free

    def open(self, num_blocks: int, num_tokens: int, prefix: CompressedCache | None) -> CompressedCache:
        return self.pool.open(num_blocks, prefix)

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        return self.scoring.probe_tokens(sequence, num_tokens)

    def attend(self, plan: StepPlan) -> Attend:
        decodes = [(s.cache, 1) for s in plan.decodes] + [
            (d.sequence.cache, d.num_tokens) for d in plan.drafts
        ]
        chunks = [
            ChunkSpan(
                c.sequence.cache,
                c.num_tokens,
                len(self.scoring.probe_tokens(c.sequence, c.num_tokens)),
                self.scoring.last_layer_queries(c),
            )
            for c in plan.chunks
        ]
        return self.attention.step(decodes, chunks, self.scoring.prompt_scorer)

    def attend_uncached(self, cache: CompressedCache) -> Attend:
        return self.attention.uncached(cache)

    def advance(
        self, sequence: Sequence, num_tokens: int, run_uncached: RunUncached, *, prompt_ends: bool
    ) -> None:
        cache = sequence.cache
        if not cache.prefill_buffer:
            cache.count_decoded()
            return
        cache.extend(num_tokens, prompt_ends=prompt_ends)
        if self.scoring.reconstructs:
            num_scored = cache.num_due(prompt_ends=prompt_ends)
            attend = self.attention.uncached(cache, self.scoring.scorer)
            self.scoring.reconstruct(sequence, num_scored, run_uncached, attend)
        if num_due := cache.num_due(prompt_ends=False):
            self.streamed.rebase(sequence, num_due)
        prompt_tokens, thinning = self.streamed.kept_length(sequence)
        cache.compress(prompt_tokens, thinning=thinning, prompt_ends=prompt_ends)

    def check(self) -> None:
        self.pool.check()
