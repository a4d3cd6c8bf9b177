"""Other forms of a layer's weights: in the rotated basis of its values, and in int8."""

from dataclasses import replace
from types import ModuleType

import torch
from torch import Tensor

from engine.kernels.int8 import Int8Weight, quantize_weight
from engine.kernels.packed import PackedWeight, pack_weight
from engine.models.basis import BasisTable
from engine.models.config import ModelConfig
from engine.models.weights import LayerWeights, Projection
from kvcache.quantize.pages import fold_value_rotation


def rotate_values(layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    """Return the layer with values in the rotated basis (`pages.rotation`), as it makes and as it takes them.

    Weights and bias are changed in place, but for those of a float32 model kept in bfloat16, which rotated ones do not
    fit.
    """
    qkv, output = _matrix(layer.qkv), _matrix(layer.output)
    fold_value_rotation(
        qkv,
        output,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=layer.qkv.bias,
    )
    dtype = layer.attention_norm.dtype
    return replace(
        layer, qkv=_with_weight(layer.qkv, qkv, dtype), output=_with_weight(layer.output, output, dtype)
    )


def _matrix(projection: Projection) -> Tensor:
    weight = projection.weight
    assert not isinstance(weight, Int8Weight), "int8 weights can no longer be rotated"
    return weight.dense() if isinstance(weight, PackedWeight) else weight


def _with_weight(projection: Projection, matrix: Tensor, dtype: torch.dtype) -> Projection:
    """Return a projection with `matrix` as its weight, packed if it was packed."""
    weight = projection.weight
    if not isinstance(weight, PackedWeight):  # `matrix` is the weight itself, changed in place
        return projection
    if weight.panels.dtype != dtype:
        return Projection(pack_weight(matrix, weight.panel), projection.bias)
    weight.put(0, matrix)
    return projection


def to_int8(layer: LayerWeights, config: ModelConfig, kernels: ModuleType, basis: BasisTable) -> LayerWeights:
    """Return the layer with its matrices in int8, each output's largest weight rounded to 127.

    Values go into their basis first: int8 weights can no longer be rotated.
    """
    if basis.values == "rotated":
        layer = rotate_values(layer, config)

    def convert(projection: Projection) -> Projection:
        bias = None if projection.bias is None else projection.bias.float()
        assert isinstance(projection.weight, Tensor), "packed weights are not converted to int8"
        return Projection(
            quantize_weight(projection.weight, kernels.int8_panel(), kernels.int8_group()), bias
        )

    return replace(
        layer,
        qkv=convert(layer.qkv),
        output=convert(layer.output),
        gate_up=convert(layer.gate_up),
        down=convert(layer.down),
    )
