"""How many tokens each lane needs, learnt from a model once.

Heads differ in kind: some look back at any token of the text and need nearly all of them, most look at the first
tokens and the newest and need hardly any. Which is which belongs to the model, not to the text (shares measured on a
contract and on a log correlate at 0.95), and what a chunk's own attention shows of it is little: at keep ratio 0.3 and
equal bytes, scores compared across lanes lost 14 times the KL that the same scores lose within fixed shares.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

STEPS = 64


@dataclass(frozen=True)
class LaneShares:
    """For keep ratios i / STEPS of all tokens, the share of its own tokens that each lane keeps.

    Args:
        table: float32 `[STEPS + 1, L, KVH]`, rising from 0 to 1; the mean of row i is i / STEPS.
    """

    table: Tensor

    @classmethod
    def from_scores(cls, scores: Tensor) -> "LaneShares":
        """Return the shares of the best-scored tokens of all lanes together, scores `[L, KVH, N]`."""
        layers, heads, tokens = scores.shape
        order = scores.flatten().argsort(descending=True, stable=True)
        rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order))).view(scores.shape)
        bounds = torch.arange(STEPS + 1) * len(order) / STEPS
        return cls(torch.stack([(rank < bound).sum(-1) / tokens for bound in bounds]).float())

    def counts(self, ratio: float, num_tokens: int, floor_ratio: float) -> Tensor:
        """Return how many of `num_tokens` tokens each lane keeps, int64 `[L, KVH]`, `ratio` of all of them together.

        Args:
            floor_ratio: part of `ratio` that every lane keeps.
        """
        place = ratio * STEPS
        low = min(int(place), STEPS - 1)
        shares = torch.lerp(self.table[low].double(), self.table[low + 1].double(), place - low)
        exact = (floor_ratio * ratio + (1 - floor_ratio) * shares).flatten() * num_tokens
        counts = exact.floor()
        missing = max(0, round(ratio * num_tokens * len(exact)) - int(counts.sum()))
        # what rounding left over goes to the largest fractions
        counts[(exact - counts).argsort(descending=True, stable=True)[:missing]] += 1
        return counts.long().view(shares.shape)
