"""The protocol of attention backends for a full cache.

A backend is called after the new tokens' keys and values were written to the pages and before the cache counts them:
`cache.lengths` is the fill of each lane without them, and new token `i` attends to `lengths + i + 1` slots. Besides the
output it returns the log-sum-exp, the natural logarithm of the softmax's denominator, by which partial results merge.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kvcache.sequence.full import SequenceCache

# decode(layer, q [B, H, D], one query per sequence) -> output [B, H, D] and log-sum-exp [B, H] (float32)
Decode = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class AttentionBackend(Protocol):
    """Attend from new tokens to all tokens of their sequence. The softmax scale is 1 / sqrt(head dim)."""

    def prefill(
        self,
        layer: int,
        q: Tensor,  # [C, H, D] queries of one sequence's chunk
        k: Tensor,  # [C, KVH, D] the chunk's own keys, as they were written
        v: Tensor,  # [C, KVH, D]
        cache: SequenceCache,
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output `[C, H, D]` and log-sum-exp `[C, H]` (float32) of one chunk."""
        ...

    def open_decode(self, caches: Sequence[SequenceCache]) -> Decode:
        """Return the function that attends, layer by layer, from the next token of each sequence."""
        ...
