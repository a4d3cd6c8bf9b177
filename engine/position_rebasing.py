"""Positions for a prompt beyond the model's context, so that none lies outside of what the model was trained on.

The newest tokens, those in the prefill buffer, keep their distances to each other. What has left it shares the
positions before them: neighbours come to lie on one position, in order and evenly, the first tokens (sinks) apart.
Distances are so exact nearby and coarse far away, as in SelfExtend (Jin et al., 2024, arXiv:2401.01325), where
queries and keys are rotated twice. Here a key is rotated once more when it leaves the prefill buffer, before it is
quantized, and the prefill buffer's own keys move up behind it: what is in pages never changes, and every kernel
stays as it is.

Pure integers, no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamPositions:
    """Map tokens that left the prefill buffer to positions.

    Args:
        num_tokens: of the whole prompt.
        num_sinks: first tokens, which keep their positions.
        num_positions: that all tokens out of the prefill buffer may take.
    """

    num_tokens: int
    num_sinks: int
    num_positions: int

    def of(self, index: int) -> int:
        """Return the position of a token, or of the prefill buffer if that begins with it."""
        sinks = min(self.num_sinks, self.num_positions)
        if index <= sinks or self.num_positions >= self.num_tokens:
            return index
        return sinks + (index - sinks) * (self.num_positions - sinks) // (self.num_tokens - sinks)


def positions_left(max_context: int, prefill_buffer_tokens: int, new_tokens: int, probe_tokens: int) -> int:
    """Return the positions left for tokens out of the prefill buffer: the buffer, an answer and probes take theirs."""
    return max_context - prefill_buffer_tokens - max(new_tokens, probe_tokens)
