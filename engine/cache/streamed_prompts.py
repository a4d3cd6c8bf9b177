"""Prompts beyond the model's context: how much of one is kept, and the positions of its keys."""

import torch

from engine.memory_division import Budget
from engine.models.decoder import Decoder
from engine.position_rebasing import StreamPositions, positions_left
from engine.sequence import Sequence
from kvcache.sizes.compressed import CompressedLayout


class StreamedPrompts:
    """Keep of a prompt beyond the context as much as of the longest prompt in it, at positions in it."""

    def __init__(self, layout: CompressedLayout, budget: Budget, model: Decoder) -> None:
        self._layout = layout
        self._buffer_tokens = budget.prefill_buffer_tokens
        self._max_context = model.config.max_context
        self._move_keys = model.move_keys

    def kept_length(self, sequence: Sequence) -> tuple[int | None, float]:
        """Return the length of the prompt that decides how much is kept, and the thinning of its chunks.

        Returns:
            Prompt tokens, None for a prefix, whose requests go on in different ways; and 1 where the prompt fits, else
            `CompressedLayout.thinning`.
        """
        if sequence.is_prefix:
            return None, 1.0
        num_prompt, longest = sequence.num_prompt_tokens, self._longest(sequence)
        if longest is None:
            return num_prompt, 1.0
        return longest, self._layout.thinning(num_prompt, longest)

    def rebase(self, sequence: Sequence, num_tokens: int) -> None:
        """Move the prefill buffer's keys before its first `num_tokens` leave it, if the prompt exceeds the context.

        The leaving keys get the positions at which they stay; the other keys and the sequence's next token move up
        behind them.
        """
        if self._longest(sequence) is None:
            return
        request, cache, prefill_buffer = sequence.request, sequence.cache, sequence.cache.prefill_buffer
        left = positions_left(
            self._max_context,
            self._buffer_tokens,
            request.sampling.max_new_tokens,
            len(request.probe_token_ids),
        )
        positions = StreamPositions(sequence.num_prompt_tokens, self._layout.config.warmup_tokens, left)
        first, length = cache.num_tokens - prefill_buffer.length, prefill_buffer.length
        moved = positions.of(first + num_tokens) - positions.of(first) - num_tokens
        offsets = [
            positions.of(first + i) - positions.of(first) - i if i < num_tokens else moved
            for i in range(length)
        ]
        if any(offsets):
            shift = torch.tensor(offsets, device=prefill_buffer.keys.device)
            # one layer at a time: float32 copies are large
            for layer, keys in enumerate(prefill_buffer.keys[:, :, :length]):
                keys.copy_(self._move_keys(layer, keys, shift))
            sequence.position += moved

    def _longest(self, sequence: Sequence) -> int | None:
        """Return the longest prompt that the context holds beside the answer; None where the sequence's prompt fits."""
        longest = self._max_context - sequence.request.sampling.max_new_tokens
        return longest if sequence.request.streams and sequence.num_prompt_tokens > longest else None
