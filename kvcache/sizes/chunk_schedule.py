"""When the chunks of a prompt are computed, scored and compressed.

Scheduler, forecast, budget, scoring and the sequence's cache all ask here. Pure integers.
"""

from dataclasses import dataclass

from kvcache.config import KVCacheConfig


@dataclass(frozen=True)
class ChunkSchedule:
    """Cut a prompt into chunks, and say when a chunk is due to be scored and to leave the prefill buffer.

    Without arguments it is the schedule of a full cache: a step may end anywhere, and no token is ever due.

    Args:
        chunk_size: tokens of a chunk.
        delay: whole chunks that must have been read behind a chunk before it is due.
        recent_tokens: newest tokens that are not due at the prompt's end.
        streaming: chunks are due while the prompt is read; otherwise all tokens are due at its end.
        whole_chunks: a chunk must be computed in one step, since its scorer looks at the chunk's queries together.
    """

    chunk_size: int = 1
    delay: int = 0
    recent_tokens: int = 0
    streaming: bool = False
    whole_chunks: bool = False

    @classmethod
    def of(cls, config: KVCacheConfig) -> "ChunkSchedule":
        """Return the schedule of a compressing policy."""
        whole_chunks = False
        if config.needs_scores:
            from kvcache.scorers.registry import get_scorer

            whole_chunks = get_scorer(config.scorer).needs_whole_chunks
        return cls(config.chunk_size, config.delay, config.recent_tokens, config.streaming, whole_chunks)

    @property
    def delay_tokens(self) -> int:
        """Tokens that must have been read behind a chunk before it is due."""
        return self.delay * self.chunk_size

    def step_limit(self, num_computed: int, num_prompt: int) -> int:
        """Return the most tokens of a prompt that one step may compute: to the end of its chunk or of the prompt."""
        left = num_prompt - num_computed
        if not self.streaming and not self.whole_chunks:
            return left
        return min(left, self.chunk_size - num_computed % self.chunk_size)

    def completes_chunk(self, num_computed: int) -> bool:
        """Tell whether a chunk ends with the first `num_computed` tokens, so that another may become due."""
        return self.streaming and num_computed % self.chunk_size == 0

    def due_tokens(self, num_buffered: int) -> int:
        """Return how many of the prefill buffer's oldest tokens are due while the prompt goes on."""
        is_due = self.streaming and num_buffered >= self.buffer_tokens(overlaps=False)
        return self.chunk_size if is_due else 0

    def due_tokens_at_end(self, num_buffered: int) -> int:
        """Return how many of the prefill buffer's oldest tokens are due when the prompt has ended."""
        return max(0, num_buffered - self.recent_tokens)

    def compressed_tokens(self, num_computed: int) -> int:
        """Return how many tokens have left the prefill buffer, if it is not the prompt's end and nothing overlaps."""
        if not self.streaming:
            return 0
        return max(0, num_computed // self.chunk_size - self.delay) * self.chunk_size

    def buffer_tokens(self, *, overlaps: bool) -> int:
        """Return the tokens that a prefill buffer must hold in streaming mode.

        Args:
            overlaps: a chunk stays in the buffer while it is compressed in the background.
        """
        return self.delay_tokens + (1 + overlaps) * self.chunk_size
