"""What a scorer is shown of a prompt: probe tokens, queries of the last layer, the model's repetition of a chunk."""

from engine.cache.base import RunUncached
from engine.config import EngineConfig
from engine.models.decoder import Attend, Decoder
from engine.scheduler import Chunk
from engine.sequence import Sequence
from kvcache.scorers.registry import get_scorer
from kvcache.sizes.compressed import CompressedLayout

# A prompt token's output of the last layer is not used; its queries there only score keys. So of each LAST_LAYER_EVERY
# tokens only the last LAST_LAYER_QUERIES attend there, and the token that chooses the next (benchmarks/compression.md).
LAST_LAYER_QUERIES, LAST_LAYER_EVERY = 16, 64


class Scoring:
    """Choose what the scorer of a policy is shown, and when.

    Attributes:
        scorer: the policy's scorer; None where all tokens are kept alike.
        prompt_scorer: the scorer, if it looks at the prompt as it is read; None if at a repetition of it.
    """

    def __init__(self, layout: CompressedLayout, config: EngineConfig, model: Decoder) -> None:
        policy = config.cache
        self.scorer = get_scorer(policy.scorer) if policy.needs_scores else None
        self.reconstructs = self.scorer is not None and self.scorer.reconstructs
        self.prompt_scorer = None if self.reconstructs else self.scorer
        self._probes = policy.probe
        self._chunks = layout.chunks
        self._max_context = model.config.max_context
        self._repeat_token_ids = list(config.repeat_token_ids)
        # All queries are needed where the scorer looks at a chunk's queries together, where a key could be due before
        # any of the few queries attends to it, and where layers compete: the maximum over fewer queries is lower.
        is_early = layout.chunks.streaming and layout.chunks.delay_tokens < 2 * LAST_LAYER_EVERY
        self._needs_all_queries = layout.chunks.whole_chunks or is_early or policy.budget == "global"

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the question's tokens where a chunk or the prompt ends, if the context has positions for them."""
        if self.scorer is None or not self._probes:
            return []
        limit = self._chunks.step_limit(sequence.num_computed_tokens, sequence.num_prompt_tokens)
        question = sequence.request.probe_token_ids
        fits = sequence.position + num_tokens + len(question) <= self._max_context
        return list(question) if num_tokens == limit and fits else []

    def last_layer_queries(self, chunk: Chunk) -> list[slice]:
        """Return which of a chunk's tokens attend in the last layer.

        They depend on the tokens' positions alone, not on the steps in which the tokens are computed.
        """
        count = chunk.num_tokens
        if self.prompt_scorer and self._needs_all_queries:
            return [slice(0, count)]
        queries = []
        if self.prompt_scorer:
            end = LAST_LAYER_EVERY - chunk.sequence.num_computed_tokens % LAST_LAYER_EVERY
            for last in range(end, count + LAST_LAYER_QUERIES, LAST_LAYER_EVERY):
                queries.append(slice(max(0, last - LAST_LAYER_QUERIES), min(last, count)))
        if chunk.num_choices and (not queries or queries[-1].stop < count):
            queries.append(slice(count - 1, count))
        return queries

    def reconstruct(
        self, sequence: Sequence, num_tokens: int, run_uncached: RunUncached, attend: Attend
    ) -> None:
        """Let the model repeat the first `num_tokens` of the prefill buffer, a chunk in each pass.

        `attend` shows the scorer what the repetition attends to. Where the context has too few positions behind the
        sequence, a pass takes the last positions of the context, which the newest tokens have as well.
        """
        request, cache = self._repeat_token_ids, sequence.cache
        first = cache.num_tokens - cache.prefill_buffer.length
        end = first + num_tokens
        size = min(self._chunks.chunk_size, self._max_context - len(request))
        for start in range(first, end, size):
            tokens = request + sequence.token_ids[start : min(start + size, end)]
            run_uncached(tokens, min(sequence.position, self._max_context - len(tokens)), attend)
