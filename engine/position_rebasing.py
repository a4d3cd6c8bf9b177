"""Positions for a prompt beyond the model's context, all of them within the context.

The newest tokens, those in the prefill buffer, keep their distances to each other. The older tokens share the
positions before them: several neighbours get one position, in order and evenly; only the sinks, the first tokens, keep
one each. Distances are thus exact nearby and coarse far away, as in SelfExtend (Jin et al. 2024, arXiv:2401.01325),
where queries and keys are rotated twice. Here a key is rotated once more when it leaves the prefill buffer, before it
is quantized, and the keys that stay in the buffer move up behind it. So pages never change, and kernels need not know.

Pure integers, no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class StreamPositions:
    """Map the tokens that have left the prefill buffer to positions.

    Args:
        num_tokens: tokens of the whole prompt.
        num_sinks: first tokens, which keep their positions.
        num_positions: positions for all tokens that have left the prefill buffer.
    """

    num_tokens: int
    num_sinks: int
    num_positions: int

    def of(self, index: int) -> int:
        """Return the position of token `index`, or of the prefill buffer's first token if that is token `index`."""
        sinks = min(self.num_sinks, self.num_positions)
        if index <= sinks or self.num_positions >= self.num_tokens:
            return index
        return sinks + (index - sinks) * (self.num_positions - sinks) // (self.num_tokens - sinks)


def positions_left(max_context: int, prefill_buffer_tokens: int, new_tokens: int, probe_tokens: int) -> int:
    """Return the number of positions for tokens that have left the prefill buffer.

    The others are for the buffer, and behind it for the answer or, before that, the probes.
    """
    return max_context - prefill_buffer_tokens - max(new_tokens, probe_tokens)
