"""What a model expects after a prompt, read through the cache that its policy leaves: how two policies are compared."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, cat

from engine.llm import LLM
from engine.request import Request
from engine.sequence import Sequence


class Reading:
    """A prompt that has been read; nothing more is cached, however much is asked."""

    def __init__(self, llm: LLM, sequence: Sequence, next_logits: Tensor):
        self._llm = llm
        self._sequence = sequence
        self._next_logits = next_logits  # [1, V]

    @property
    def kept_bytes(self) -> int:
        """Bytes of KV cache that the prompt holds."""
        return self._sequence.cache.kept_bytes

    def log_probs(self, token_ids: list[int]) -> Tensor:  # float32 [N, V]
        """Return the log-probabilities that stand before each of the tokens, were they to follow the prompt."""
        logits = self._llm.runner.peek(self._sequence, token_ids[:-1]) if len(token_ids) > 1 else None
        parts = [self._next_logits] if logits is None else [self._next_logits, logits]
        return cat(parts).log_softmax(-1)


@contextmanager
def reading(llm: LLM, request: Request) -> Iterator[Reading]:
    """Read a request's prompt, alone in the engine, and stop where its first token would be chosen.

    Raises:
        ValueError: The request can never run; the message says why.
    """
    sequence, next_logits = llm.prefill(request)
    try:
        yield Reading(llm, sequence, next_logits)
    finally:
        llm.clear_cache()
