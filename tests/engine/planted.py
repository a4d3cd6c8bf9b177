"""Tiny random models with planted trouble: what real models have and a plain random one has not.

Attention matters in each: the next token's distribution is peaked and depends on distant tokens (`far_loss`), so that a
cache that loses something shows.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.models import Decoder
from engine.teacher_forcing import drift, reading
from kvcache.config import KVCacheConfig
from tests.engine.helpers import as_text
from tests.engine.models.tiny_models import tiny_model

HEAD_DIM = 64  # where the name of a model says no other
FIRST = 1  # the token that every text begins with, and that stands nowhere else
NUM_SINKS = 16
CONTEXT, CONTINUATION = 900, 60
_MASSIVE, _CONSTANT = 0, 1  # dimensions of the hidden state


def planted_tokens(count: int, seed: int = 5) -> list[int]:
    """Return a text of random tokens."""
    random = torch.Generator().manual_seed(seed)
    return [FIRST, *torch.randint(3, 199, (count - 1,), generator=random).tolist()]


def loss(model: Decoder, policy: KVCacheConfig) -> float:
    """Return KL(full cache ‖ policy) of a given continuation, mean in nats a token, read through both caches.

    Args:
        model: in a basis that suits the policy.
    """
    text = planted_tokens(CONTEXT + CONTINUATION)
    full, other = (_log_probs(model, cache, text) for cache in (KVCacheConfig(), policy))
    return drift(text[CONTEXT:], other, full).kl


def far_loss(model: Decoder) -> tuple[float, float]:
    """Return what a model loses when the far half of the context is hidden, and the entropy of its next token.

    Sinks stay visible. Both are means in nats; the loss is a KL as that of `loss`, and no cache takes part.
    """
    text = torch.tensor(planted_tokens(CONTEXT + CONTINUATION))
    seen = torch.ones(len(text) - 1, len(text) - 1, dtype=torch.bool).tril()
    near = seen.clone()
    near[CONTEXT - 1 :, NUM_SINKS : CONTEXT // 2] = False

    def log_probs(mask: Tensor) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
            return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, attn_mask=mask).transpose(0, 1)

        positions = torch.arange(len(text) - 1)
        hidden = model.forward(text[:-1], positions, attend, positions[CONTEXT - 1 :])
        return model.logits(hidden).log_softmax(-1)

    whole, half = log_probs(seen), log_probs(near)
    kl = (whole.exp() * (whole - half)).sum(-1).mean()
    return float(kl), -float((whole.exp() * whole).sum(-1).mean())


def _log_probs(model: Decoder, policy: KVCacheConfig, text: list[int]) -> Tensor:
    config = EngineConfig(
        60_000_000,
        cache=policy,
        max_sequences=1,
        prompt_lookup=False,
        calibration_token_ids=tuple(planted_tokens(1000, seed=6)),
    )
    with reading(
        EngineCore(model, config, as_text), Request(0, text[:CONTEXT], SamplingParams(1))
    ) as context:
        return context.log_probs(text[CONTEXT:])


def _attentive(name: str, **changes: Any) -> PreTrainedModel:
    """Build a model that attends to some of its tokens far more than to others, and still to many."""
    model = tiny_model(name, **{"head_dim": HEAD_DIM, "max_position_embeddings": 2048} | changes)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 5
        model.lm_head.weight *= 2
        for layer in model.model.layers:
            attention = layer.self_attn
            attention.q_proj.weight *= 0.7
            attention.k_proj.weight *= 0.7
            attention.o_proj.weight *= 0.4 * (HEAD_DIM / attention.head_dim) ** 0.5
            layer.mlp.down_proj.weight *= 0.3
    return model


def _saved(
    path: Path, name: str, plant: Callable[[PreTrainedModel], None] | None = None, **changes: Any
) -> Path:
    model = _attentive(name, **changes)
    if plant:
        with torch.no_grad():
            plant(model)
    model.save_pretrained(path)
    return path


def _heads(parameter: Tensor, head_dim: int = HEAD_DIM) -> Tensor:
    """Return a projection's weight or bias by head, `[heads, D, …]`."""
    return parameter.unflatten(0, (-1, head_dim))


def _plant_key_biases(model: PreTrainedModel) -> None:
    """Plant key biases of 100 in four channels of a lane: a slow pair, and a fast one, where queries are small."""
    fast, slow = [0, HEAD_DIM // 2], [HEAD_DIM // 2 - 1, HEAD_DIM - 1]
    for layer in model.model.layers:
        attention = layer.self_attn
        _heads(attention.k_proj.bias)[-1, fast + slow] = 100.0
        for parameter in (attention.q_proj.weight, attention.q_proj.bias):
            _heads(parameter)[-2:, fast] *= 0.02


def _plant_key_channel(model: PreTrainedModel) -> None:
    """Make one key channel of a lane a hundred times the others, and queries small where it turns."""
    pair = [HEAD_DIM // 2 - 1, HEAD_DIM - 1]
    for layer in model.model.layers:
        _heads(layer.self_attn.k_proj.weight)[-1, pair[1]] *= 100
        _heads(layer.self_attn.q_proj.weight)[-2:, pair] *= 0.01


def _plant_massive_first_token(model: PreTrainedModel) -> None:
    """Make the first token's hidden state hundreds of times the others: a sink, its key large and its value small.

    Half of all attention goes to it, so what attention adds is made larger.
    """
    embedding = model.model.embed_tokens.weight
    embedding[:, _MASSIVE] *= 0.1
    embedding[:, _CONSTANT] = 2.0  # by which all queries find the sink
    embedding[FIRST, _MASSIVE] = 500.0
    slow = [*range(27, 32), *range(59, 64)]
    for layer in model.model.layers:
        attention = layer.self_attn
        layer.input_layernorm.weight[[_MASSIVE, _CONSTANT]] = 1.0
        _heads(attention.q_proj.weight)[:, slow, _CONSTANT] = 0.4
        _heads(attention.k_proj.weight)[:, slow, _MASSIVE] = 1.5
        attention.v_proj.weight[:, _MASSIVE] *= 0.1
        attention.o_proj.weight *= 1.5


def _plant_qk_norms(model: PreTrainedModel) -> None:
    """Spread key norms over two orders of magnitude, pair by pair, with query norms that make up for them."""
    pairs = HEAD_DIM // 2
    for layer in model.model.layers:
        key = torch.logspace(-0.3, 1.7, pairs)[torch.randperm(pairs)].repeat(2)
        layer.self_attn.k_norm.weight.copy_(key)
        layer.self_attn.q_norm.weight.copy_(1.3 / key)


# By what is planted: save a model to a directory and return it.
PLANTED: dict[str, Callable[[Path], Path]] = {
    "key biases": partial(
        _saved,
        name="qwen2",
        plant=_plant_key_biases,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    ),
    "key channel": partial(_saved, name="llama", plant=_plant_key_channel),
    "massive first token": partial(_saved, name="llama", plant=_plant_massive_first_token),
    "qk norms": partial(_saved, name="qwen3", plant=_plant_qk_norms),
    "one kv head": partial(_saved, name="llama", num_key_value_heads=1),
    **{f"heads of {size}": partial(_saved, name="llama", head_dim=size) for size in (64, 80, 128, 256)},
}
