"""Expected attention: what queries distributed like those seen give a key (Devoto et al. 2025, in kvpress).

Queries of a head are taken as Gaussian: the expectation of exp(q·k/√d) is exp(μ·k/√d + kᵀΣk/2d). It is weighted by
the value's norm, and summed over the query heads. The original averages the rotation over future positions; here the
statistics are of the newest chunk's rotated queries, the nearest to those that follow.
"""

import torch
from torch import Tensor

from kvcache.scorers.protocol import Observation, Scorer


class ExpectedAttention(Scorer):
    """Score by the attention that future queries are expected to give."""

    def update(self, scores: Tensor, seen: Observation) -> None:
        queries, keys = seen.queries.float(), seen.keys.float()
        dim = keys.shape[-1]
        mean = queries.mean(2)  # [KVH, G, D]
        centred = queries - mean[:, :, None]
        covariance = centred.transpose(2, 3) @ centred / max(1, queries.shape[2] - 1)  # [KVH, G, D, D]
        linear = torch.einsum("hgd,hnd->hgn", mean, keys) / dim**0.5
        quadratic = torch.einsum("hnd,hgde,hne->hgn", keys, covariance, keys) / (2 * dim)
        expected = (linear + quadratic).softmax(-1).sum(1)
        scores.copy_(expected * seen.values.float().norm(dim=-1))
