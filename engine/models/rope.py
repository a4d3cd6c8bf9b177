"""Rotary position embedding: inverse frequencies of each scaling type, and the cos/sin tables.

The tables are made once, in float32, for every position of the context. Rotation happens in place in the
decoder. The scaling formulas come from transformers, so that they stay equal to the reference.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from engine.errors import ModelError, UnsupportedModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

SCALING_TYPES = ("default", "linear", "llama3", "yarn", "dynamic", "longrope")


@dataclass(frozen=True)
class RopeConfig:
    """The rotation of every position: frequencies after scaling, and the factor on cos and sin."""

    scaling: str
    inverse_frequencies: tuple[float, ...]  # head_dim / 2 values, exactly as float32
    attention_factor: float = 1.0


def rope_parameters(config: "PretrainedConfig") -> dict[str, Any]:
    """Return the rope parameters of a transformers config as one flat, checked dict.

    Raises:
        UnsupportedModelError: a scaling type or a partial rotation that the engine does not have.
    """
    parameters = dict(config.rope_parameters or {})
    if any(isinstance(value, dict) for value in parameters.values()):
        raise UnsupportedModelError("rope parameters that differ by layer type are not supported")
    scaling = parameters.get("rope_type") or parameters.get("type") or "default"
    if scaling not in SCALING_TYPES:
        known = ", ".join(SCALING_TYPES)
        raise UnsupportedModelError(f"rope scaling {scaling!r} is not supported; supported: {known}")
    partial = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    if partial != 1.0:
        raise UnsupportedModelError(
            f"partial rotary embedding (partial_rotary_factor={partial}) is not supported"
        )
    if parameters.get("mrope_section"):
        raise UnsupportedModelError("multimodal rope (mrope_section) is not supported")
    return parameters | {"rope_type": scaling}


def rope_context(config: "PretrainedConfig", parameters: dict[str, Any]) -> int:
    """Return the number of positions for which one fixed set of frequencies is right.

    `dynamic` and `longrope` change the frequencies of all positions once a sequence outgrows the original
    context; cached keys would be wrong from then on, so they end there. `yarn` stretches the original one.
    """
    context = int(config.max_position_embeddings)
    original = parameters.get("original_max_position_embeddings")
    match parameters["rope_type"]:
        case "longrope" if original:
            return min(context, int(original))
        case "yarn" if original:
            return max(context, int(original * parameters["factor"]))
    return context


def rope_config(config: "PretrainedConfig", parameters: dict[str, Any], head_dim: int) -> RopeConfig:
    """Compute the frequencies that transformers would use up to `rope_context`.

    Raises:
        ModelError: the rope parameters are incomplete.
    """
    scaling = parameters["rope_type"]
    try:
        # At its original context "dynamic" is exactly the default.
        if scaling in ("default", "dynamic"):
            exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
            frequencies, factor = 1.0 / (parameters["rope_theta"] ** exponents), 1.0
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[scaling](config, torch.device("cpu"))
    except (KeyError, TypeError, RuntimeError) as error:
        raise ModelError(f"config.json: bad rope parameters for {scaling!r}: {error!r}") from error
    if len(frequencies) * 2 != head_dim:
        raise ModelError(
            f"config.json: {scaling!r} rope gives {len(frequencies)} frequencies for head_dim {head_dim}"
        )
    return RopeConfig(scaling, tuple(frequencies.float().tolist()), float(factor))


def moved_keys(
    keys: Tensor,  # [..., n, D]
    offsets: Tensor,  # [n]
    rope: RopeConfig,
) -> Tensor:
    """Return keys as if each had been that much further on, float32: rotations add up."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float64, device=keys.device)
    angles = torch.outer(offsets.double(), frequencies)
    cos, sin = angles.cos().float(), angles.sin().float()
    first, second = keys.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rope_tables(rope: RopeConfig, num_positions: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each float32 [num_positions, head_dim / 2]."""
    frequencies = torch.tensor(rope.inverse_frequencies, dtype=torch.float32, device=device)
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32, device=device), frequencies)
    return angles.cos() * rope.attention_factor, angles.sin() * rope.attention_factor
