"""TOVA: the attention of the newest query alone (Oren et al. 2024, "Transformers are Multi-State RNNs")."""

from torch import Tensor

from kvcache.scorers.base import Observation


class TOVA:
    """Score by the last query's attention, averaged over the query heads."""

    needs_question = False
    needs_weights = True
    reconstructs = False
    distance = None

    def update(self, scores: Tensor, seen: Observation) -> None:
        """See `Scorer.update`."""
        scores.copy_(seen.weights[:, :, -1].mean(1))
