"""KeyDiff: keys unlike the others score highest: minus the cosine to the lane's mean key (Park et al. 2025)."""

import torch.nn.functional as F
from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class KeyDiff(Scorer):
    """Score by how far a key's direction is from the mean direction."""

    def update(self, scores: Tensor, seen: Observation) -> None:
        directions = F.normalize(seen.keys.float(), dim=-1)
        scores.copy_(-F.cosine_similarity(directions, directions.mean(1, keepdim=True), dim=-1))
