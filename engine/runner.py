"""Executes a step plan in one forward pass over all its tokens; decides nothing."""

import torch
from torch import Tensor

from engine.cache.base import CacheBackend
from engine.models.decoder import Attend, Decoder
from engine.scheduler import Chunk, StepPlan
from engine.sequence import Sequence


class Runner:
    """Run a model over a cache.

    Args:
        num_decodes: pad every decode step to this number of tokens, so that the model's arithmetic is the same
            however many sequences decode; 0: no padding.
    """

    def __init__(self, model: Decoder, cache: CacheBackend, num_decodes: int = 0) -> None:
        self.model = model
        self.cache = cache
        self._num_decodes = num_decodes

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> tuple[list[Sequence], Tensor]:
        """Compute a step's tokens, cache their keys and values, and count all but draft tokens (`count_draft_token`).

        Returns:
            The sequences for which a token can now be chosen, in the plan's order, and logits, float32 `[N, V]`: one
            row for each sequence, followed by one for each of its draft tokens.
        """
        spans = [Chunk(s, 1) for s in plan.decodes] + list(plan.drafts + plan.chunks)
        tokens: list[int] = []
        positions: list[int] = []
        rows: list[int] = []
        # Before the step is counted, since the numbers depend on the tokens computed so far.
        choices = [span.num_choices for span in spans]
        for span, num_choices in zip(spans, choices, strict=True):
            sequence = span.sequence
            tokens += span.token_ids
            rows += range(len(tokens) - num_choices, len(tokens))
            if sequence.in_prefill:  # probe tokens take the positions behind the chunk
                tokens += self.cache.probe_tokens(sequence, span.num_tokens)
            positions += range(sequence.position, sequence.position + len(tokens) - len(positions))
        device = self.model.device
        attend, num_filled, num_rows = self.cache.attend(plan), 0, len(rows)
        if plan.decodes and self._num_decodes:
            num_filled = self._num_decodes - len(tokens)
            attend = _padded(attend, len(tokens))
            rows += range(len(tokens), self._num_decodes)
        hidden = self.model.forward(
            torch.tensor(tokens + [0] * num_filled, device=device),
            torch.tensor(positions + [0] * num_filled, device=device),
            attend,
            torch.tensor(rows, dtype=torch.int64, device=device),
        )
        for span, num_choices in zip(spans, choices, strict=True):
            is_chunk = span.sequence.in_prefill
            num_certain = span.num_tokens if is_chunk else 1
            self._count(span.sequence, num_certain, prompt_ends=is_chunk and num_choices > 0)
        ready = [span.sequence for span, num_choices in zip(spans, choices, strict=True) if num_choices]
        return ready, self.model.logits(hidden)[:num_rows]

    @torch.inference_mode()
    def count_draft_token(self, sequence: Sequence) -> None:
        """Count a draft token of the last step that was accepted."""
        self._count(sequence, 1, prompt_ends=False)

    def _count(self, sequence: Sequence, num_tokens: int, *, prompt_ends: bool) -> None:
        sequence.advance(num_tokens)
        self.cache.advance(sequence, num_tokens, self._run_uncached, prompt_ends=prompt_ends)

    @torch.inference_mode()
    def is_batch_invariant(self) -> bool:
        """Tell whether a token's logits are the same to the bit at every place of a decode step.

        They are where a matrix product sums each of its rows in the same order, which depends on the library.
        """
        count, device = self._num_decodes, self.model.device
        ids = torch.full((count,), self.model.config.vocab_size // 2, device=device)
        hidden = self.model.forward(ids, torch.ones_like(ids), lambda layer, q, k, v: q)
        logits = self.model.logits(hidden)
        return bool((logits == logits[0]).all())

    @torch.inference_mode()
    def continuation_logits(self, sequence: Sequence, token_ids: list[int]) -> Tensor:
        """Return logits, float32 `[len(token_ids), V]`, after each of some tokens that continue a sequence.

        The tokens are not cached.
        """
        attend = self.cache.attend_uncached(sequence.cache)
        return self.model.logits(self._run(token_ids, sequence.position, attend))

    def _run_uncached(self, token_ids: list[int], position: int, attend: Attend) -> None:
        """Run tokens for their attention alone."""
        self._run(token_ids, position, attend, torch.empty(0, dtype=torch.int64, device=self.model.device))

    def _run(self, token_ids: list[int], position: int, attend: Attend, rows: Tensor | None = None) -> Tensor:
        """Return the hidden states of consecutive tokens."""
        device = self.model.device
        positions = torch.arange(position, position + len(token_ids), device=device)
        return self.model.forward(torch.tensor(token_ids, device=device), positions, attend, rows)


def _padded(attend: Attend, num_tokens: int) -> Attend:
    """Return an `attend` that gives padding, the tokens behind the first `num_tokens`, an output of 0."""

    def attend_first(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(layer, q, k, v)
        out[num_tokens:] = 0
        return out

    return attend_first
