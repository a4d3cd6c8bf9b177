"""SnapKV: the mean attention of a window of newest queries, pooled over neighbours (Li et al. 2024).

Here the window ends with each chunk, since a chunk is scored when the next one has been read.
"""

import torch.nn.functional as F
from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer

WINDOW = 64
POOL = 5


class SnapKV(Scorer):
    """Score by what the last queries attend to."""

    needs_weights = True

    def update(self, scores: Tensor, seen: Observation) -> None:
        recent = seen.attention[:, :, -WINDOW:].mean((1, 2))  # [KVH, N]
        scores.copy_(F.avg_pool1d(recent[:, None], POOL, stride=1, padding=POOL // 2)[:, 0])
