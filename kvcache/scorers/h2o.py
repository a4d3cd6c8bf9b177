"""H2O: the attention a key received, summed over all queries (Zhang et al. 2023, "H2O: Heavy-Hitter Oracle")."""

from torch import Tensor

from kvcache.scorers.base import Observation


class H2O:
    """Score by accumulated attention."""

    needs_question = False
    needs_weights = True
    reconstructs = False
    distance = None

    def update(self, scores: Tensor, seen: Observation) -> None:
        """See `Scorer.update`."""
        scores += seen.weights.sum((1, 2))
