"""Prefill buffers: the newest chunks of sequences in prefill, contiguous, at the model's precision.

Leases are preallocated and equal; a sequence holds one from admission to the end of its prompt.
"""

import torch
from torch import Tensor

from kvcache.pages.block_allocator import BlockAllocator
from kvcache.quantize.error_compensation import compensation_weights

# One query of so many enters the second moments: a few hundred estimate them well (benchmarks/compression.md).
OBSERVED_EVERY = 16


class PrefillBufferPool(BlockAllocator):
    """Hold `num_leases` prefill buffers of `num_tokens` tokens each."""

    def __init__(
        self,
        num_leases: int,
        num_layers: int,
        num_kv_heads: int,
        num_tokens: int,
        head_dim: int,
        *,
        compensates: bool,
        dtype: torch.dtype,
        device: str | torch.device = "cpu",
    ):
        super().__init__(num_leases)
        shape = (num_leases, num_layers, num_kv_heads, num_tokens)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.scores = torch.zeros(shape, dtype=torch.float32, device=device)
        second_moments_dim = head_dim if compensates else 0
        self.second_moments = torch.zeros(*shape[:3], second_moments_dim, second_moments_dim, device=device)

    @property
    def allocated_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes + self.scores.nbytes + self.second_moments.nbytes


class PrefillBuffer:
    """One lease: the last `length` tokens of a sequence.

    Attributes:
        keys, values: `[L, KVH, capacity, D]`; scores: `[L, KVH, capacity]`, 0 for a key that no query has attended to.
        second_moments: sum of q qᵀ over every sixteenth of the sequence's queries so far, float32 `[L, KVH, D, D]`;
            empty if errors are not compensated.
        length: tokens held.
    """

    def __init__(self, pool: PrefillBufferPool):
        self._pool = pool
        self._lease = pool.allocate(1).flatten()
        index = int(self._lease)
        self.keys, self.values, self.scores = pool.keys[index], pool.values[index], pool.scores[index]
        self.second_moments = pool.second_moments[index].zero_()
        self._key_weights: Tensor | None = None
        self.length = 0

    @property
    def capacity(self) -> int:
        return self.keys.shape[2]

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write one layer's new keys and values `[C, KVH, D]` behind those held; `extend` counts them."""
        end = self.length + len(keys)
        assert end <= self.capacity, "a chunk outgrew its prefill buffer"
        self.keys[layer, :, self.length : end] = keys.transpose(0, 1)
        self.values[layer, :, self.length : end] = values.transpose(0, 1)
        self.scores[layer, :, self.length : end] = 0

    def observe(self, layer: int, queries: Tensor) -> None:
        """Add one layer's new queries `[C, H, D]` to the second moments."""
        if self.second_moments.numel():
            seen = queries[
                -self.length % OBSERVED_EVERY :: OBSERVED_EVERY
            ]  # the same queries however a chunk is cut into steps
            rows = seen.float().unflatten(1, (self.second_moments.shape[1], -1)).transpose(0, 1).flatten(1, 2)
            self.second_moments[layer].baddbmm_(rows.mT, rows)
            self._key_weights = None

    @property
    def key_weights(self) -> Tensor | None:
        """`compensation_weights` of each lane's keys by the queries so far, `[lanes, D, D]`."""
        if self._key_weights is None and self.second_moments.numel():
            self._key_weights = compensation_weights(self.second_moments.flatten(0, 1))
        return self._key_weights

    def extend(self, num_tokens: int) -> None:
        """Count tokens that every layer has written."""
        self.length += num_tokens

    def drop_front(self, num_tokens: int) -> None:
        """Remove the oldest tokens."""
        rest = self.length - num_tokens
        for tensor in (self.keys, self.values, self.scores):
            for layer in tensor:  # layer by layer, since a copy within the processor's cache is cheap
                left = layer[:, num_tokens : self.length]
                layer[:, :rest] = left if rest <= num_tokens else left.clone()  # where they overlap
        self.length = rest
        self._key_weights = None  # as large as the second moments; only those are in the memory plan

    def copy_from(self, other: "PrefillBuffer") -> None:
        """Copy another prefill buffer's tokens, scores and second moments."""
        self.length = other.length
        for mine, theirs in zip(
            (self.keys, self.values, self.scores), (other.keys, other.values, other.scores), strict=True
        ):
            mine[:, :, : self.length] = theirs[:, :, : self.length]
        self.second_moments.copy_(other.second_moments)

    def free(self) -> None:
        """Return the lease."""
        self._pool.release(self._lease)
