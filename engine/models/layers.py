"""What a layer does before and after attention, kernel by kernel: the specification of `compiled_layers`.

What comes between the matrix products is one pass each (`engine.kernels`), into one workspace, kept between calls:
fresh memory costs page faults, which on a CPU are dearer than the arithmetic.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from engine.kernels.int8 import Int8Rows, Int8Weight
from engine.kernels.packed import PackedWeight
from engine.kernels.reference import HeadNorms, KeyTurn
from engine.models.config import ModelConfig
from engine.models.weights import LayerWeights, Projection


class LayerPasses(Protocol):
    """The passes of all layers. One thread uses them at a time, since calls share the workspace."""

    def before_attention(
        self,
        layer: int,
        hidden: Tensor,  # [T, hidden]
        cos: Tensor,  # float32 [T, D / 2]
        sin: Tensor,  # float32 [T, D / 2]
    ) -> tuple[Tensor, ...]:
        """Return queries `[T, H, D]`, keys and values `[T, KVH, D]`, views of the workspace."""
        ...

    def after_attention(
        self,
        layer: int,
        hidden: Tensor,  # [T, hidden]
        attended: Tensor,  # [T, H D]
    ) -> None:
        """Add the outputs of attention and then of the MLP to the hidden states, in place."""
        ...


class Passes:
    """Passes of any weights on any device.

    Args:
        kernels: `engine.kernels.ops` or its torch reference.
        turns: for each layer, what queries and keys are turned by; None: nothing.
    """

    def __init__(
        self,
        config: ModelConfig,
        layers: Sequence[LayerWeights],
        kernels: ModuleType,
        turns: Sequence[KeyTurn | None],
    ) -> None:
        self._config, self._layers, self._kernels, self._turns = config, layers, kernels, turns
        self._workspace: dict[str, Tensor] = {}

    def before_attention(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """See `LayerPasses`."""
        config, weights = self._config, self._layers[layer]
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        normed = self._rows("normed", hidden, weights.qkv)
        self._kernels.rms_norm(hidden, weights.attention_norm, config.norm_eps, normed)
        qkv = self._project("qkv", normed, weights.qkv, hidden).unflatten(-1, (-1, config.head_dim))
        self._kernels.rotate(
            qkv,
            *heads[:2],
            cos,
            sin,
            norms=HeadNorms(weights.q_norm, weights.k_norm, config.norm_eps),
            turn=self._turns[layer],
        )
        return qkv.split(heads, dim=1)

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        """See `LayerPasses`."""
        weights = self._layers[layer]
        self._add_projected(hidden, attended, weights.output)
        normed = self._rows("normed", hidden, weights.gate_up)
        self._kernels.rms_norm(hidden, weights.mlp_norm, self._config.norm_eps, normed)
        gate_up = self._project("gate_up", normed, weights.gate_up, hidden)
        product = self._rows("product", hidden, weights.down)
        self._kernels.silu_mul(gate_up, product)
        self._add_projected(hidden, product, weights.down)

    def _project(self, name: str, x: Tensor | Int8Rows, projection: Projection, like: Tensor) -> Tensor:
        """Multiply into the workspace: [T, in] -> [T, out]."""
        weight, bias = projection.weight, projection.bias
        out = self._buffer(name, like, weight.shape[0])
        if isinstance(x, Int8Rows):
            self._kernels.int8_product(x, weight, out, bias=bias)
        elif isinstance(weight, PackedWeight):
            self._kernels.float_product(x, weight, out, bias=bias)
        else:
            assert isinstance(weight, Tensor), "int8 weights take int8 rows"
            if bias is None:
                torch.mm(x, weight.t(), out=out)
            else:
                torch.addmm(bias, x, weight.t(), out=out)
        return out

    def _add_projected(self, residual: Tensor, x: Tensor | Int8Rows, projection: Projection) -> None:
        """Multiply and add to the residual in place, without a pass of its own."""
        weight, bias = projection.weight, projection.bias
        if isinstance(weight, Int8Weight):
            if isinstance(x, Tensor):
                codes = self._rows("attended", residual, projection)
                self._kernels.quantize_rows(x.contiguous(), codes)
            else:
                codes = x
            self._kernels.int8_product(codes, weight, residual, bias=bias, adds=True)
            return
        assert isinstance(x, Tensor), "int8 rows are for int8 weights"
        if isinstance(weight, PackedWeight):
            self._kernels.float_product(x.contiguous(), weight, residual, bias=bias, adds=True)
            return
        residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)

    def _rows(self, name: str, like: Tensor, projection: Projection) -> Tensor | Int8Rows:
        """Return room for what a projection takes: numbers, or codes where its weights are codes."""
        width = projection.weight.shape[1]
        if not isinstance(projection.weight, Int8Weight):
            return self._buffer(name, like, width)
        codes = self._buffer(name, like, width, torch.int8)
        return Int8Rows(codes, self._buffer(f"{name} scales", like, 1, torch.float32).flatten())

    def _buffer(self, name: str, like: Tensor, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return rows of a workspace tensor, as many as of `like`; it grows to the largest step seen."""
        held = self._workspace.get(name)
        if held is None or len(held) < len(like):
            self._workspace[name] = held = like.new_empty(len(like), width, dtype=dtype or like.dtype)
        return held[: len(like)]
