"""Tiny random models of every supported architecture, saved the way transformers saves them."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.models import Decoder
from engine.models.decoder import kernels_of

CLASSES: dict[str, tuple[type, type[PreTrainedModel]]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
}


def tiny_model(name: str, **changes: Any) -> PreTrainedModel:
    """Build a random float32 model: hidden 64, 2 layers, 4 heads over 2 key/value heads."""
    shape = {
        "vocab_size": 199,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 2,
    }
    if name == "mistral":
        shape["sliding_window"] = None
    config_class, model_class = CLASSES[name]
    torch.manual_seed(0)
    model = model_class(config_class(**(shape | changes))).eval()
    with torch.no_grad():
        # Biases and norms are random too: at zero and one they would hide mistakes. Values of this size make
        # attention sharp, so that a wrong rotation shows. Rounded to bf16, a bf16 copy is the same model.
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.2)
            parameter.copy_(parameter.bfloat16())
    return model


def holds_once(decoder: Decoder, model: PreTrainedModel) -> bool:
    """Tell whether the decoder holds the model's float32 weights once, but for what fills up the kernels' panels."""
    size = sum(parameter.nbytes for parameter in model.parameters())
    panel = kernels_of(decoder.config, decoder.device).float_panel()
    row_bytes = sum(4 * parameter.shape[1] for parameter in model.parameters() if parameter.ndim == 2)
    return size <= decoder.weight_bytes <= size + panel * row_bytes


def save_tiny_model(path: Path, name: str, **changes: Any) -> PreTrainedModel:
    """Build a tiny model and save it to a directory."""
    model = tiny_model(name, **changes)
    model.save_pretrained(path)
    return model
