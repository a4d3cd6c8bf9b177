"""`engine.models.layers` in one compiled call each, for weights that the kernels multiply themselves."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels import ops
from engine.kernels.int8 import Int8Weight
from engine.kernels.packed import PackedWeight
from engine.kernels.reference import KeyTurn
from engine.models.config import ModelConfig
from engine.models.weights import LayerWeights, Projection


# The structs of layer.cpp.
class _Matrix(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("panels", "scales", "starts", "bias")),
        *((name, ctypes.c_int) for name in ("kind", "depth", "width")),
    )


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "q_norm", "k_norm", "mlp_norm", "turned")),
        *((name, _Matrix) for name in ("qkv", "output", "gate_up", "down")),
    )


class _Model(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("is_bf16", "hidden", "num_q", "num_k", "head_dim")),
        ("eps", ctypes.c_float),
    )


class _Room(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_void_p) for name in ("normed", "qkv", "gate_up", "product", "codes", "scales")
    )


class CompiledPasses:
    """Passes of packed and int8 weights on a CPU; see `engine.models.layers.LayerPasses`."""

    def __init__(
        self, config: ModelConfig, layers: Sequence[LayerWeights], turns: Sequence[KeyTurn | None]
    ) -> None:
        """Note where everything lies.

        Args:
            turns: for each layer, what queries and keys are turned by; None: nothing.
        """
        assert can_compile(config, layers, turns)
        first = layers[0]
        self._dtype = first.attention_norm.dtype
        self._num_heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        self._weights, self._turns = layers, turns  # the structs point into them
        self._layers = [
            ctypes.byref(_layer(weights, turn, config, self._dtype))
            for weights, turn in zip(layers, turns, strict=True)
        ]
        self._head_dim, self._hidden_size = config.head_dim, config.hidden_size
        heads = (config.num_heads, config.num_kv_heads, config.head_dim)
        is_bf16 = self._dtype == torch.bfloat16
        self._model = ctypes.byref(_Model(is_bf16, config.hidden_size, *heads, config.norm_eps))
        matrices = [m.weight for w in layers for m in (w.qkv, w.output, w.gate_up, w.down)]
        coded = [m.depth for m in matrices if isinstance(m, Int8Weight)]
        dense = len(coded) < len(matrices)
        assert not is_bf16 or all(
            m.panels.dtype == self._dtype for m in matrices if isinstance(m, PackedWeight)
        )
        self._widths = {  # of the room's rows, in the order of `_Room`
            "normed": (dense * config.hidden_size, self._dtype),
            "qkv": (first.qkv.weight.shape[0], self._dtype),
            "gate_up": (first.gate_up.weight.shape[0], self._dtype),
            "product": (dense * config.intermediate_size, self._dtype),
            "codes": (max(coded, default=0), torch.int8),
            "scales": (1, torch.float32),
        }
        self._tensors: dict[str, Tensor] = {}
        self._room, self._num_rows = ctypes.byref(_Room()), 0
        self._qkv: tuple[Tensor, ...] = ()
        library = ops.library()
        assert library is not None, "the kernels are not compiled"
        self._before, self._after = library.kvb_before_attention, library.kvb_after_attention

    def before_attention(self, layer: int, hidden: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
        """See `LayerPasses.before_attention`."""
        num_rows = len(hidden)
        if layer == 0:  # the other layers' rows are as many
            self._make_room(num_rows)
        assert num_rows == len(self._qkv[0])
        for table in (cos, sin):
            assert table.is_contiguous() and table.dtype == torch.float32
            assert table.shape == (num_rows, self._head_dim // 2)
        self._before(
            self._model,
            self._layers[layer],
            self._room,
            num_rows,
            self._at(hidden, self._hidden_size),
            cos.data_ptr(),
            sin.data_ptr(),
            torch.get_num_threads(),
        )
        return self._qkv

    def after_attention(self, layer: int, hidden: Tensor, attended: Tensor) -> None:
        """See `LayerPasses.after_attention`."""
        attended = attended.contiguous()
        assert len(attended) == len(hidden) <= self._num_rows
        self._after(
            self._model,
            self._layers[layer],
            self._room,
            len(hidden),
            self._at(hidden, self._hidden_size),
            self._at(attended, self._num_heads[0] * self._head_dim),
            torch.get_num_threads(),
        )

    def _at(self, rows: Tensor, width: int) -> int:
        assert rows.is_contiguous() and rows.dtype == self._dtype and rows.shape[1] == width
        return rows.data_ptr()

    def _make_room(self, num_rows: int) -> None:
        if num_rows > self._num_rows:
            self._tensors, self._qkv = {}, ()  # the smaller room goes first
            self._tensors = {
                name: torch.empty(num_rows, width, dtype=dtype, device="cpu")
                for name, (width, dtype) in self._widths.items()
            }
            self._room = ctypes.byref(_Room(*map(_at, self._tensors.values())))
            self._num_rows = num_rows
        qkv = self._tensors["qkv"][:num_rows].unflatten(1, (-1, self._head_dim))
        self._qkv = qkv.split(self._num_heads, dim=1)


def can_compile(config: ModelConfig, layers: Sequence[LayerWeights], turns: Sequence[KeyTurn | None]) -> bool:
    """Tell whether the compiled kernels, which are there, take all of these weights."""
    is_hadamard = config.head_dim & (config.head_dim - 1) == 0
    projections = [p for w in layers for p in (w.qkv, w.output, w.gate_up, w.down)]
    return (is_hadamard or not any(turns)) and all(map(_is_packed, projections))


def _is_packed(projection: Projection) -> bool:
    weight = projection.weight
    if isinstance(weight, Int8Weight):
        return weight.codes.shape[2:] == (ops.int8_panel(), ops.int8_group()) and weight.width % 8 == 0
    return isinstance(weight, PackedWeight) and weight.panel == ops.float_panel()


def _layer(weights: LayerWeights, turn: KeyTurn | None, config: ModelConfig, dtype: torch.dtype) -> _Layer:
    norms = (weights.attention_norm, weights.q_norm, weights.k_norm, weights.mlp_norm)
    for norm in norms:
        assert norm is None or (norm.is_contiguous() and norm.dtype == dtype)
    projections = (weights.qkv, weights.output, weights.gate_up, weights.down)
    turned = None if turn is None else turn.turned
    if turned is not None:
        assert turned.is_contiguous() and turned.dtype == torch.uint8 and len(turned) == config.num_kv_heads
    return _Layer(*map(_at, (*norms, turned)), *map(_matrix, projections))


def _matrix(projection: Projection) -> _Matrix:
    weight, bias = projection.weight, projection.bias
    width, depth = weight.shape
    assert bias is None or (bias.is_contiguous() and bias.dtype == torch.float32 and len(bias) == width)
    parts: tuple[Tensor | None, ...]
    if isinstance(weight, Int8Weight):
        parts, kind = (weight.codes, weight.scales, weight.starts), 2
    else:
        assert isinstance(weight, PackedWeight)
        parts, kind = (weight.panels, None, None), int(weight.panels.dtype == torch.bfloat16)
    assert all(part is None or part.is_contiguous() for part in parts)
    return _Matrix(*map(_at, (*parts, bias)), kind, depth, width)


def _at(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
