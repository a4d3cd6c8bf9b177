"""From scores to tiers: which tokens of a chunk are kept at which bits, and which are evicted.

A budget divides the number of kept tokens among the chunk's lanes; within a lane the highest scores are kept.
"""

import torch
from torch import Tensor

from kvcache.compress.lane_shares import LaneShares, scaled
from kvcache.config import BUDGETS

EVICTED = -1


def assign_tiers(
    scores: Tensor,  # [L, KVH, C] higher is kept; inf is kept before all others
    tier_ratios: tuple[float, ...],
    budget: str = "global",
    floor_ratio: float = 0.1,
    layer_weights: tuple[float, ...] | None = None,
    lane_shares: LaneShares | None = None,
) -> Tensor:
    """Return each token's tier, int64 `[L, KVH, C]`, or `EVICTED`.

    Args:
        tier_ratios: share of all tokens that each tier takes, best scores first; their sum is the keep ratio.
        budget: `calibrated` gives every lane the share measured for the model's heads, `global` keeps the best scores
            of all layers and heads, `per_head` the best of all heads of a layer, `uniform` gives every lane the same
            number, `layered` divides by layer weights and equally among the heads of a layer.
        floor_ratio: fraction of the uniform share that every lane keeps at least (not `uniform` and `layered`).
        layer_weights: for `layered`, one relative weight per layer.
        lane_shares: for `calibrated`.

    Raises:
        ValueError: An unknown budget, or weights that do not match the layers.
    """
    layers, heads, tokens = scores.shape
    shares = torch.ones(layers, dtype=torch.float64, device=scores.device)
    if budget == "layered":
        if layer_weights is None or len(layer_weights) != layers:
            given = None if layer_weights is None else len(layer_weights)
            raise ValueError(f"budget layered needs one weight per layer: {layers} layers, {given} weights")
        weights = torch.tensor(layer_weights, dtype=torch.float64, device=scores.device)
        shares = weights / weights.mean()
    elif budget not in BUDGETS:
        raise ValueError(f"budget {budget!r} is not known; use one of {', '.join(BUDGETS)}")
    tiers = torch.full_like(scores, EVICTED, dtype=torch.int64)
    order = scores.argsort(dim=-1, descending=True, stable=True)
    ranks = torch.empty_like(order)  # of a token within its lane
    ranks.scatter_(-1, order, torch.arange(tokens, device=scores.device).expand_as(order))
    kept_ratio = 0.0
    bounds = []
    for ratio in tier_ratios:
        kept_ratio = min(1.0, kept_ratio + ratio)
        if budget == "calibrated":
            assert lane_shares is not None, "the model was not calibrated"
            bounds.append(
                ranks < lane_shares.counts(kept_ratio, tokens, floor_ratio).to(scores.device)[..., None]
            )
        else:
            bounds.append(_places(scores, ranks, kept_ratio, budget, floor_ratio, shares))
    # worst tier first: better tiers overwrite
    for tier in reversed(range(len(tier_ratios))):
        tiers[bounds[tier]] = tier
    return tiers


def _places(
    scores: Tensor, ranks: Tensor, ratio: float, budget: str, floor_ratio: float, shares: Tensor
) -> Tensor:
    """Return a mask `[L, KVH, C]` of the `ratio` of tokens that a budget keeps."""
    layers, heads, tokens = scores.shape
    if budget in ("uniform", "layered"):
        if ratio >= 1:
            return torch.ones_like(scores, dtype=torch.bool)
        met = torch.full((layers, 1), ratio, dtype=torch.float64, device=scores.device)
        if budget == "layered":
            met = scaled(
                shares[None, :, None], torch.tensor([ratio], dtype=torch.float64, device=scores.device)
            )[0]
        return ranks < (met * tokens).round()[:, :, None]
    floor = int(floor_ratio * ratio * tokens)
    protected = ranks < floor
    lifted = scores.masked_fill(protected, torch.inf)
    groups = lifted.reshape(1, -1) if budget == "global" else lifted.reshape(layers, -1)
    count = round(ratio * groups.shape[1])
    # ties beyond the count are cut by position, so that exactly `count` places are given
    order = groups.argsort(dim=-1, descending=True, stable=True)[:, :count]
    mask = torch.zeros_like(groups, dtype=torch.bool)
    mask.scatter_(1, order, True)
    return mask.view(layers, heads, tokens)
