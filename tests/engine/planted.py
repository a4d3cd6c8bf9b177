"""Tiny models with planted trouble: what ruins quantized keys and values in some real models."""

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from tests.engine.models.tiny_models import tiny_model

FIRST_TOKEN = 3  # of a text whose first token is massive


def _model(name: str = "llama", **shape: int) -> PreTrainedModel:
    return tiny_model(name, max_position_embeddings=2048, **shape)


def _attentions(model: PreTrainedModel) -> list[torch.nn.Module]:
    return [layer.self_attn for layer in model.model.layers]


def key_biases() -> PreTrainedModel:
    """Bias two channels of each KV head by 100; they turn together, and queries are small there."""
    model = _model("qwen2")
    for attention in _attentions(model):
        attention.k_proj.bias.view(-1, 16)[:, [0, 8]] = 100.0
        for part in (attention.q_proj.weight, attention.q_proj.bias):
            part.unflatten(0, (-1, 16))[:, [0, 8]] *= 0.01
    return model


def large_channel() -> PreTrainedModel:
    """Make one key channel of each head a hundred times as large as the others, and its queries a hundredth."""
    model = _model()
    for attention in _attentions(model):
        attention.k_proj.weight.unflatten(0, (-1, 16))[:, 3] *= 100
        attention.q_proj.weight.unflatten(0, (-1, 16))[:, 3] *= 0.01
    return model


def massive_first_token() -> PreTrainedModel:
    """Let one token's hidden state be one large channel, which makes its keys and values ten times the others'."""
    model = _model()
    model.model.embed_tokens.weight[FIRST_TOKEN] = 0
    model.model.embed_tokens.weight[FIRST_TOKEN, 5] = 1000
    for attention in _attentions(model):
        for projection in (attention.k_proj, attention.v_proj):
            projection.weight[:, 5] *= 10
    return model


def large_head_norms() -> PreTrainedModel:
    """Normalize queries and keys to three times their size, so that attention is sharp."""
    model = _model("qwen3")
    for attention in _attentions(model):
        attention.q_norm.weight *= 3
        attention.k_norm.weight *= 3
    return model


PLANTED: dict[str, Callable[[], PreTrainedModel]] = {
    "key biases of 100": key_biases,
    "one channel a hundred times the others": large_channel,
    "a massive first token": massive_first_token,
    "large head norms": large_head_norms,
    "one KV head": lambda: _model(num_key_value_heads=1),
    **{f"heads of {size}": lambda size=size: _model(head_dim=size) for size in (64, 80, 128, 256)},
}
