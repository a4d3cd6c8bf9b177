"""The largest attention a key ever receives from a query at least `distance` tokens behind it.

Peaks are rare, so every query counts: looking at every 8th one triples the divergence. In the last layer alone, where
nothing else wants them, the engine lets a quarter of the queries attend.
"""

import torch
from torch import Tensor

from kvcache.scorers.base import Observation, Scorer


class AttentionMax(Scorer):
    """Score by the largest attention ever received."""

    kernel_maxima = True
    distance = 64

    def update(self, scores: Tensor, seen: Observation) -> None:
        assert seen.weights is not None
        num_keys, num_queries = seen.keys.shape[1], seen.weights.shape[2]
        best = seen.weights.amax(1)  # over the group: [KVH, C, N]
        position = torch.arange(num_queries, device=scores.device)[:, None] + num_keys - num_queries
        near = position - torch.arange(num_keys, device=scores.device) < self.distance
        scores.copy_(torch.maximum(scores, best.masked_fill(near, 0).amax(1)))
