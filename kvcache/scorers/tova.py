"""TOVA: the attention of the newest query alone (Oren et al. 2024, "Transformers are Multi-State RNNs")."""

from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class TOVA(Scorer):
    """Score by the last query's attention, averaged over the query heads."""

    needs_weights = True

    def update(self, scores: Tensor, seen: Observation) -> None:
        scores.copy_(seen.attention[:, :, -1].mean(1))
