"""In which basis each lane's keys are quantized with the least noise in their scores, measured while a model reads.

A key's error `e` changes the score of a query `q` by `q · e`, so a lane's noise is the mean of `eᵀ E[q qᵀ] e` over its
keys, with the errors that the page format really makes. The rotated basis spreads what one key channel has in excess
over all of them, also over those where queries are large: a model with large key biases has lanes whose noise it
multiplies by a hundred, beside lanes that need it.
"""

from collections.abc import Sequence as Tokens

import torch
from torch import Tensor

from engine.calibration import NUM_SINKS, calibration_tokens, measured_once, read_whole
from engine.errors import EngineError
from engine.models.basis import Basis, keys_from_mask
from engine.models.decoder import Decoder
from kvcache.config import KVCacheConfig
from kvcache.quantize.error_compensation import Compensation, compensation_weights
from kvcache.quantize.pages import dequantize_pages, quantize_pages, rotation
from kvcache.sizes.page_format import PageFormat

_PAGE_TOKENS, _KEY_BITS = 64, 3
# The plain basis must have less than half the noise: the text is short, and other texts' outliers are larger. Mean KL
# of a contract, a log and a code file of 3,000 tokens under `default`: a factor of 2 gives 0.0018 on
# Qwen2.5-Coder-0.5B (rotated everywhere 0.272, plain everywhere 0.0115) and 0.00067 on SmolLM2-135M (rotated everywhere
# 0.00064).
_MARGIN = 2.0


def in_basis_of(policy: KVCacheConfig, model: Decoder, token_ids: Tokens[int] = ()) -> Decoder:
    """Return the model with the keys of each lane in the basis in which a policy's pages keep them best.

    Args:
        token_ids: see `calibration_tokens`.

    Raises:
        EngineError: The policy quantizes, and the model was loaded with values in the plain basis.
    """
    if not model.basis.suits(policy):
        raise EngineError(
            f"cache {policy.compress_method} quantizes and needs a model in the rotated basis; load it with "
            "load_model(…, basis=basis_for(cache))"
        )
    return model.with_keys(key_bases(model, token_ids)) if policy.quantizes else model


def key_bases(model: Decoder, token_ids: Tokens[int] = ()) -> tuple[tuple[Basis, ...], ...]:
    """Return the basis for each lane's keys (`BasisTable.keys`), from the user's cache folder if measured before.

    Args:
        token_ids: see `calibration_tokens`.
    """
    model = model.unrotated()
    tokens = calibration_tokens(model, token_ids)
    shape = (2, model.config.num_layers, model.config.num_kv_heads)
    plain, rotated = measured_once("key noise", model, tokens, shape, lambda: key_noise(model, tokens))
    return keys_from_mask((rotated <= _MARGIN * plain).tolist())


def key_noise(model: Decoder, tokens: list[int]) -> Tensor:
    """Return the noise of each lane's scores with quantized keys, in the plain and in the rotated basis.

    Args:
        model: its keys in the plain basis.

    Returns:
        the mean square of a score's error, float32 `[2, L, KVH]`; zeros if the tokens do not fill a page.
    """
    config = model.config
    noise = torch.zeros(2, config.num_layers, config.num_kv_heads)
    sinks = min(NUM_SINKS, len(tokens) // 4)
    end = len(tokens) - (len(tokens) - sinks) % _PAGE_TOKENS
    shape = (config.num_layers, config.num_kv_heads, config.head_dim, config.head_dim)
    moments = torch.zeros(shape, device=model.device)
    turn = rotation(config.head_dim).to(model.device)

    def see(layer: int, chunk: slice, q: Tensor, keys: Tensor, largest: Tensor | None) -> None:
        queries = (
            q.float().unflatten(1, (config.num_kv_heads, -1)).transpose(0, 1).flatten(1, 2)
        )  # [KVH, C G, D]
        moments[layer] += queries.mT @ queries / (len(tokens) * q.shape[1] // config.num_kv_heads)
        if chunk.stop == len(tokens) and end > sinks:
            for place, basis in enumerate((None, turn)):
                noise[place, layer] = _noise(keys[:, sinks:end].float(), moments[layer], basis).cpu()

    read_whole(model, tokens, see)
    return noise


def _noise(
    keys: Tensor,  # [KVH, N, D] N a multiple of the page
    moments: Tensor,  # [KVH, D, D]
    turn: Tensor | None,
) -> Tensor:  # [KVH]
    if turn is not None:
        keys, moments = keys @ turn, turn @ moments @ turn
    num_lanes, _, head_dim = keys.shape
    pages = keys.unflatten(1, (-1, _PAGE_TOKENS)).flatten(0, 1)
    weights = compensation_weights(moments)
    lanes = torch.arange(num_lanes, device=keys.device).repeat_interleave(len(pages) // num_lanes)
    page_format = PageFormat(_KEY_BITS, 2, _PAGE_TOKENS, head_dim)
    coded = quantize_pages(pages, torch.zeros_like(pages), page_format, Compensation(weights, weights, lanes))
    errors = (dequantize_pages(coded, page_format)[0] - pages).unflatten(0, (num_lanes, -1)).flatten(1, 2)
    return ((errors @ moments) * errors).sum(-1).mean(-1) / head_dim
