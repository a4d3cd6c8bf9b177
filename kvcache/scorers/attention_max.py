"""The largest attention a key ever receives from a query at least `distance` tokens behind it.

Peaks are rare, so every query counts: looking at every 8th one triples the divergence. Only in the last layer, whose
output nothing but these scores needs, the engine lets a quarter of the queries attend.
"""

import torch
from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class AttentionMax(Scorer):
    """Score by the largest attention ever received."""

    needs_weights = True
    needs_whole_chunks = False
    scored_by_kernels = True
    distance = 64

    def update(self, scores: Tensor, seen: Observation) -> None:
        num_keys, num_queries = seen.keys.shape[1], seen.attention.shape[2]
        best = seen.attention.amax(1)  # over the group: [KVH, C, N]
        position = torch.arange(num_queries, device=scores.device)[:, None] + num_keys - num_queries
        near = position - torch.arange(num_keys, device=scores.device) < self.distance
        scores.copy_(torch.maximum(scores, best.masked_fill(near, 0).amax(1)))
