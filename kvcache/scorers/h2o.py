"""H2O: the attention that a key receives, summed over all queries (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle")."""

from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class H2O(Scorer):
    """Score by accumulated attention."""

    needs_weights = True

    def update(self, scores: Tensor, seen: Observation) -> None:
        scores += seen.attention.sum((1, 2))
