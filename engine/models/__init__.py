"""Decoder models: configuration, weights, rope and the forward pass. They know no cache and no scheduler."""

from engine.models.config import ModelConfig
from engine.models.decoder import Attend, Decoder, load_model

__all__ = ["Attend", "Decoder", "ModelConfig", "load_model"]
