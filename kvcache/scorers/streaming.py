"""Sinks and the newest tokens (Xiao et al. 2023, StreamingLLM): a baseline that must lose to every scorer.

Within a chunk the later tokens win; sinks are kept by the cache itself (`warmup_tokens`).
"""

import torch
from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class Streaming(Scorer):
    """Score by position."""

    def update(self, scores: Tensor, seen: Observation) -> None:
        scores.copy_(
            torch.arange(scores.shape[1], dtype=scores.dtype, device=scores.device).expand_as(scores)
        )
