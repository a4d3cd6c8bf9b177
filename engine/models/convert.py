"""Other forms of a layer's weights: in the rotated basis of its values, and in int8."""

from dataclasses import replace
from types import ModuleType

from engine.models.config import ModelConfig
from engine.models.weights import LayerWeights, Projection
from engine.native.int8 import quantise_weight
from engine.native.packed import PackedWeight, pack_weight
from kvcache.quant import fold_value_rotation


def rotate_values(layer: LayerWeights, config: ModelConfig) -> LayerWeights:
    """Return the layer with values in the rotated basis (`kvcache.quant.rotation`), as it makes and as it takes them.

    Dense weights and the bias are changed in place.
    """
    names = ("qkv", "output")
    weights = [getattr(layer, name).weight for name in names]
    dense = [w.dense() if isinstance(w, PackedWeight) else w for w in weights]
    fold_value_rotation(
        *dense,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        qkv_bias=layer.qkv.bias,
    )
    rotated = (
        pack_weight(d, w.panel) if isinstance(w, PackedWeight) else w
        for w, d in zip(weights, dense, strict=True)
    )
    return replace(
        layer, **{n: Projection(w, getattr(layer, n).bias) for n, w in zip(names, rotated, strict=True)}
    )


def to_int8(layer: LayerWeights, config: ModelConfig, kernels: ModuleType) -> LayerWeights:
    """Return the layer with its matrices in int8, each output's largest weight rounded to 127.

    Values are rotated first, since int8 weights can no more be; it also spreads their outliers.
    """
    layer = rotate_values(layer, config)

    def convert(projection: Projection) -> Projection:
        bias = None if projection.bias is None else projection.bias.float()
        return Projection(
            quantise_weight(projection.weight, kernels.int8_panel(), kernels.int8_group()), bias
        )

    names = ("qkv", "output", "gate_up", "down")
    return replace(layer, **{name: convert(getattr(layer, name)) for name in names})
