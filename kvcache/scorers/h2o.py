"""H2O: the attention a key received, summed over all queries (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle")."""

from torch import Tensor

from kvcache.scorers.base import Observation, Scorer


class H2O(Scorer):
    """Score by accumulated attention."""

    needs_weights = True

    def update(self, scores: Tensor, seen: Observation) -> None:
        assert seen.weights is not None
        scores += seen.weights.sum((1, 2))
