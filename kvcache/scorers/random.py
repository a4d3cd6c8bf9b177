"""Random scores: the control that every scorer must beat. Seeded, so that a sequence keeps the same in any batch."""

import torch
from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class Random(Scorer):
    """Score at random."""

    def update(self, scores: Tensor, seen: Observation) -> None:
        generator = torch.Generator(device="cpu").manual_seed(seen.layer)
        scores.copy_(torch.rand(scores.shape, generator=generator, device="cpu"))
