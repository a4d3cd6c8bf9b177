"""attention_max, raised by the pooled mean attention of the newest queries of each half chunk.

The peaks keep keys that one query needed once, the window keeps keys that the newest queries need; together they keep
more answers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.scorers.attention_max import AttentionMax
from kvcache.scorers.protocol import Observation, Scorer

WEIGHT = 4.0
WINDOW = 32
POOL = 5


class Mix(Scorer):
    """Score by attention_max joined with a recent window."""

    needs_weights = True

    def __init__(self) -> None:
        self._peaks = AttentionMax()

    def update(self, scores: Tensor, seen: Observation) -> None:
        self._peaks.update(scores, seen)
        half = max(WINDOW, seen.attention.shape[2] // 2)
        for queries in seen.attention.split(half, 2):
            recent = queries[:, :, -WINDOW:].mean((1, 2))
            pooled = F.avg_pool1d(recent[:, None], POOL, stride=1, padding=POOL // 2)[:, 0]
            scores.copy_(torch.maximum(scores, WEIGHT * pooled))
