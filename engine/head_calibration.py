"""How many tokens each lane of a model needs, measured while the model reads a text twice.

In the second reading, heads that copy attend to the tokens of the first one after the other. The largest attention that
a token receives is KVzip's score (Kim et al. 2025). How the scores divide over layers and heads is a property of the
model, so it is measured once, on words without meaning, and stored in the user's cache folder.
"""

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from engine.calibration import NUM_SINKS, calibration_tokens, measured_once, read_whole
from engine.models.decoder import Decoder
from kvcache.compress.lane_shares import STEPS, LaneShares


def lane_shares(model: Decoder, token_ids: Tokens[int] = ()) -> LaneShares:
    """Return the share of tokens that each lane needs, from the user's cache folder if the model was measured before.

    Args:
        token_ids: see `calibration_tokens`.
    """
    model = model.unrotated()
    tokens = calibration_tokens(model, token_ids)
    shape = (STEPS + 1, model.config.num_layers, model.config.num_kv_heads)

    def measure() -> Tensor:
        return LaneShares.from_scores(_scores(model, tokens)[..., min(NUM_SINKS, len(tokens) // 4) :]).table

    return LaneShares(measured_once("lane shares", model, tokens, shape, measure))


def _scores(model: Decoder, tokens: list[int]) -> Tensor:
    """Return the largest attention each token receives when the text is read again, `[L, KVH, N]`."""
    config, num_tokens = model.config, len(tokens)
    scores = torch.zeros(config.num_layers, config.num_kv_heads, num_tokens, device=model.device)

    def see(layer: int, chunk: slice, q: Tensor, keys: Tensor, largest: Tensor | None) -> None:
        if largest is not None:
            scores[layer] = scores[layer].maximum(largest[:, :num_tokens])

    read_whole(model, tokens * 2, see, scored_from=num_tokens)
    return scores.cpu()
