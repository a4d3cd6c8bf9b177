"""The reference for all attention backends: plain torch on the device of the pages.

One lane at a time, its slots gathered through the block table, softmax in float32. Lanes may have any lengths.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.attention.base import Decode
from kvcache.sequence.full import SequenceCache


class ReferenceAttention:
    """Attend lane by lane."""

    def prefill(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, cache: SequenceCache
    ) -> tuple[Tensor, Tensor]:
        """See `AttentionBackend.prefill`; the chunk's keys and values are read from the pages."""
        num_new, num_heads, head_dim = q.shape
        num_kv_heads = cache.pages.shape[1]
        group = num_heads // num_kv_heads
        out = torch.empty_like(q)
        lse = q.new_empty(num_new, num_heads, dtype=torch.float32)
        for kv_head in range(num_kv_heads):
            length = int(cache.lengths[layer, kv_head])
            keys, values = _lane(cache, layer, kv_head, length + num_new)
            # All older tokens are visible, and of the chunk's own those up to the query's.
            slots = torch.arange(length + num_new, device=q.device)
            hidden = slots > length + torch.arange(num_new, device=q.device)[:, None]
            for head in range(kv_head * group, (kv_head + 1) * group):
                scores = (q[:, head].float() @ keys.T / head_dim**0.5).masked_fill(hidden, -torch.inf)
                out[:, head] = (scores.softmax(-1) @ values).to(q.dtype)
                lse[:, head] = scores.logsumexp(-1)
        return out, lse

    def open_decode(self, caches: Sequence[SequenceCache]) -> Decode:
        def decode(layer: int, q: Tensor) -> tuple[Tensor, Tensor]:
            results = [self.prefill(layer, q[i : i + 1], q, q, cache) for i, cache in enumerate(caches)]
            return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])

        return decode


def _lane(cache: SequenceCache, layer: int, kv_head: int, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of a lane's first tokens, float32 `[num_tokens, D]`."""
    pages = cache.pages[layer, kv_head].to(cache.pool.keys.device)
    keys, values = (
        slab[pages].flatten(0, 1)[:num_tokens].float() for slab in (cache.pool.keys, cache.pool.values)
    )
    return keys, values
