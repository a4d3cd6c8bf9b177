"""From logits to the next token.

Filters come in the order of transformers' warpers (temperature, top-k, top-p, min-p), so that settings mean the same.
"""

import torch
from torch import Tensor

from engine.request import SamplingParams


def make_random(params: SamplingParams, device: str | torch.device = "cpu") -> torch.Generator | None:
    """Return the sequence's own random stream, or None for a greedy sequence."""
    if params.temperature == 0:
        return None
    return torch.Generator(device=device).manual_seed(params.seed % (1 << 63))


def probabilities(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the distribution `[V]` to sample from, given float32 logits `[V]` and a temperature above 0."""
    logits = (logits - logits.max()) / params.temperature  # shifted: a tiny temperature must not overflow
    if 0 < params.top_k < len(logits):
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[-1], -torch.inf)
    probs = logits.softmax(-1)
    if params.top_p < 1:
        ordered, order = probs.sort(descending=True)
        # a token stays while those before it have not reached top_p; the first always stays
        dropped = ordered.cumsum(0) - ordered >= params.top_p
        probs = probs.index_fill(0, order[dropped], 0.0)
    if params.min_p > 0:
        probs = probs.masked_fill(probs < params.min_p * probs.max(), 0.0)
    return probs / probs.sum()


def sample(
    logits: Tensor,  # [N, V] float32
    params: list[SamplingParams],
    randoms: list[torch.Generator | None],
) -> list[int | None]:
    """Return each sequence's next token, or None where its logits are not numbers.

    Greedy takes the lowest of equally likely tokens, as argmax does. A sampled sequence draws one uniform number from
    its own stream and inverts the cumulative distribution, so its text does not depend on who shares the step.
    """
    best, tokens = logits.max(-1)
    chosen: list[int | None] = tokens.tolist()
    finite = torch.isfinite(best).tolist()
    for i, (param, random) in enumerate(zip(params, randoms, strict=True)):
        if not finite[i]:
            chosen[i] = None
        elif random is not None:
            cumulative = probabilities(logits[i], param).double().cumsum(0)
            draw = torch.rand(1, generator=random, dtype=torch.float64, device=logits.device) * cumulative[-1]
            # right: a draw of exactly 0 must not choose a token of probability 0
            chosen[i] = int(torch.searchsorted(cumulative, draw, right=True).clamp_(max=len(cumulative) - 1))
    return chosen
