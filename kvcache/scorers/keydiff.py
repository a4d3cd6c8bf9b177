"""KeyDiff: keys unlike the others are kept (Park et al. 2025): minus the cosine to the mean key of the lane."""

import torch.nn.functional as F
from torch import Tensor

from kvcache.scorers.base import Observation


class KeyDiff:
    """Score by how far a key's direction is from the mean direction."""

    needs_question = False
    needs_weights = False
    reconstructs = False
    distance = None

    def update(self, scores: Tensor, seen: Observation) -> None:
        """See `Scorer.update`."""
        directions = F.normalize(seen.keys.float(), dim=-1)
        scores.copy_(-F.cosine_similarity(directions, directions.mean(1, keepdim=True), dim=-1))
