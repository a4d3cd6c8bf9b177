"""Decoder models: configuration, weights, rope, forward pass. Imports: errors, model_files, kernels, kvcache."""

from engine.models.config import ModelConfig
from engine.models.decoder import Attend, Decoder, load_model

__all__ = ["Attend", "Decoder", "ModelConfig", "load_model"]
