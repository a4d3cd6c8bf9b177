"""What a model expects after a prompt, read through the cache that its policy leaves: how two policies are compared."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.engine_core import EngineCore
from engine.request import Request, Result
from engine.sequence import Sequence


class Reading:
    """A prompt that has been read; nothing more is cached, however much is asked."""

    def __init__(self, llm: EngineCore, sequence: Sequence, next_logits: Tensor):
        self._llm = llm
        self._sequence = sequence
        self._next_logits = next_logits  # [1, V]

    @property
    def kept_bytes(self) -> int:
        """Bytes of KV cache that the prompt holds."""
        return self._sequence.cache.kept_bytes

    def log_probs(self, token_ids: list[int]) -> Tensor:  # float32 [N, V]
        """Return the log-probabilities that stand before each of the tokens, were they to follow the prompt."""
        logits = (
            self._llm.runner.continuation_logits(self._sequence, token_ids[:-1])
            if len(token_ids) > 1
            else None
        )
        parts = [self._next_logits] if logits is None else [self._next_logits, logits]
        return torch.cat(parts).log_softmax(-1)

    def continued(self, token_ids: list[int], max_new_tokens: int) -> list[int]:
        """Return the likeliest tokens after the prompt and these tokens, one by one; none of them is cached."""
        found: list[int] = []
        for _ in range(max_new_tokens):
            logits = self._llm.runner.continuation_logits(self._sequence, token_ids + found)
            found.append(int(logits[-1].argmax()))
        return found


@contextmanager
def reading(llm: EngineCore, request: Request) -> Iterator[Reading]:
    """Read a request's prompt, alone in the engine, and stop where its first token would be chosen.

    Raises:
        ValueError: The request can never run; the message says why.
    """
    sequence, next_logits = llm.prefill(request)
    try:
        yield Reading(llm, sequence, next_logits)
    finally:
        llm.clear_cache()


def answer(llm: EngineCore, request: Request) -> tuple[Result, Tensor]:
    """Generate a request, alone in the engine.

    Returns:
        its result, and the log-probabilities by which each token was chosen, float32 `[N, V]`.

    Raises:
        ValueError: It could not be generated; the message says why.
    """
    seen: list[Tensor] = []
    [result] = llm.generate([request], observe=lambda _, logits: seen.append(logits))
    if result.finish_reason == "error":
        raise ValueError(result.error_message)
    return result, torch.stack(seen).log_softmax(-1)


@dataclass(frozen=True)
class Drift:
    """How far an answer from one cache is from what the full cache expects, on average over its tokens.

    Args:
        nll: mean negative log-likelihood of the tokens by the cache that they come from, in nats.
        full_nll: the same by the full cache.
        kl: mean divergence from the full cache's distribution, KL(full ‖ other), in nats.
        top1_agreement: share of the tokens before which both expect the same one most.
        first_divergence: the first token before which they do not; None: there is none.
    """

    nll: float
    full_nll: float
    kl: float
    top1_agreement: float
    first_divergence: int | None

    @property
    def nll_delta(self) -> float:
        """By how much less likely the full cache holds the answer to be."""
        return self.full_nll - self.nll


def drift(token_ids: list[int], log_probs: Tensor, full_log_probs: Tensor) -> Drift:
    """Compare the log-probabilities `[N, V]` that stood before each of an answer's tokens."""
    chosen = torch.tensor(token_ids, device=log_probs.device)[:, None]
    nll, full_nll = (-float(probs.gather(1, chosen).mean()) for probs in (log_probs, full_log_probs))
    kl = float((full_log_probs.exp() * (full_log_probs - log_probs)).sum(-1).mean())
    agree = log_probs.argmax(-1) == full_log_probs.argmax(-1)
    differing = (~agree).nonzero().flatten().tolist()
    return Drift(nll, full_nll, kl, float(agree.float().mean()), differing[0] if differing else None)
