"""Chance: the control that every scorer must beat. Seeded, so that a row alone and in a batch keeps the same."""

import torch
from torch import Tensor

from kvcache.scorers.base import Observation, Scorer


class Random(Scorer):
    """Score by chance."""

    def update(self, scores: Tensor, seen: Observation) -> None:
        generator = torch.Generator().manual_seed(seen.layer)
        scores.copy_(torch.rand(scores.shape, generator=generator))
