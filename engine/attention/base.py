"""The protocol every attention backend follows.

Attention is called after the new tokens' keys and values were written to the pages and before the cache counts them:
`cache.lengths` is the fill of each lane without them, and new token `i` sees `lengths + i + 1` slots.
The second result is the natural logarithm of the softmax's denominator, by which partial results are merged.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from kvcache.sequence.full import SequenceCache

# decode(layer, q [B, H, D], one query per sequence) -> output [B, H, D] and log-sum-exp [B, H] (float32)
Decode = Callable[[int, Tensor], tuple[Tensor, Tensor]]


class AttentionBackend(Protocol):
    """Attend new tokens to cached ones. Softmax scale is 1 / sqrt(head dim)."""

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
        """Return what attends one token of each sequence in the step that begins, layer by layer."""
        ...
