"""The decoder: token ids to hidden states to logits, for every supported architecture.

It knows nothing of caches or sequences: all tokens of a step lie in one flat row, and the caller's `attend`
does the attention of each layer. What comes between the matrix products is one pass each (`engine.native`), into one
workspace, kept between calls: fresh memory costs page faults, which on a CPU are dearer than the arithmetic.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.config import ModelConfig
from engine.models.convert import rotate_values, to_int8
from engine.models.rope import moved_keys, rope_tables
from engine.models.weights import LayerWeights, Projection, Weights, load_weights
from engine.native.int8 import Int8Rows, Int8Weight
from engine.native.packed import PackedWeight
from engine.native.registry import layer_kernels
from kvcache.quant import rotation

# attend(layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> [T, H, D]; q and k after qk-norm and rope
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


class Decoder:
    """A model ready to run. One thread uses it at a time, since calls share the workspace.

    Attributes:
        is_rotated: heads are in the rotated basis; attention is the same in any.
    """

    def __init__(self, config: ModelConfig, weights: Weights, *, is_rotated: bool = False) -> None:
        """Take loaded weights and prepare the rope tables for the whole context.

        Args:
            is_rotated: the weights make values in the rotated basis.
        """
        self.config = config
        self.dtype = weights.norm.dtype
        self.device = weights.norm.device
        self.is_rotated = is_rotated
        self._weights = weights
        self._kernels = layer_kernels(config, self.device)
        self._turn = rotation(config.head_dim).to(self.device)
        self._cos, self._sin = rope_tables(config.rope, config.max_context, self.device)
        self._workspace: dict[str, Tensor | Int8Rows] = {}

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(tensor.nbytes for tensor in _tensors(self._weights))

    @property
    def output_weights(self) -> Iterator[Tensor]:
        """The attention's output projection of every layer, `[hidden, H D]`."""
        weights = (layer.output.weight for layer in self._weights.layers)
        return (w if isinstance(w, Tensor) else w.dense() for w in weights)

    def move_keys(self, keys: Tensor, offsets: Tensor) -> Tensor:
        """Return keys `[..., n, D]` as if each had been `offsets[i]` positions further on, float32."""
        if not self.is_rotated:
            return moved_keys(keys, offsets, self.config.rope)
        turn = self._turn  # its own inverse
        return moved_keys(keys.float() @ turn, offsets, self.config.rope) @ turn

    def rotate_heads(self) -> None:
        """Compute queries, keys and values in the rotated basis from now on, in which few bits do.

        What the model computes stays the same but for rounding; keys and values cached before are of no use any more.
        Values are rotated by the weights, queries and keys by the pass that rotates them by position.
        """
        if not self.is_rotated:
            layers = list(self._weights.layers)
            self._weights = replace(self._weights, layers=())  # so that one alone is there in both forms
            for index, layer in enumerate(layers):
                layers[index] = rotate_values(layer, self.config)
            self._weights = replace(self._weights, layers=tuple(layers))
            self.is_rotated = True

    @torch.inference_mode()
    def forward(
        self,
        token_ids: Tensor,  # [T] int64
        positions: Tensor,  # [T] int64, each below config.max_context
        attend: Attend,
        rows: Tensor | None = None,  # [N] int64, the tokens whose hidden states are wanted; None: all
    ) -> Tensor:  # [N, hidden], after the final norm
        """Run all layers over the tokens of one step.

        The last layer goes on with the wanted rows alone: of a prompt's chunk nothing is needed there but keys
        and values, which saves nearly a layer of a prompt's work.

        Args:
            attend: Called once a layer, in order. Its q, k and v are views of the workspace, overwritten by
                the next layer: copy what must stay.
        """
        config, kernels, eps = self.config, self._kernels, self.config.norm_eps
        cos, sin = self._cos[positions], self._sin[positions]  # [T, D / 2]
        embedding = self._weights.embedding
        hidden = embedding.rows(token_ids) if isinstance(embedding, PackedWeight) else embedding[token_ids]
        for index, layer in enumerate(self._weights.layers):
            normed = self._rows("normed", layer.qkv, len(hidden))
            kernels.rms_norm(hidden, layer.attention_norm, eps, normed)
            q, k, v = self._qkv(normed, layer, cos, sin)
            attended = attend(index, q, k, v).flatten(1)
            if rows is not None and index == config.num_layers - 1:
                hidden, attended = hidden[rows], attended[rows]
            self._add_projected(hidden, attended, layer.output)
            normed = self._rows("normed", layer.gate_up, len(hidden))
            kernels.rms_norm(hidden, layer.mlp_norm, eps, normed)
            gate_up = self._project("gate_up", normed, layer.gate_up)
            product = self._rows("product", layer.down, len(hidden))
            kernels.silu_mul(gate_up, product)
            self._add_projected(hidden, product, layer.down)
        out = torch.empty_like(hidden)
        kernels.rms_norm(hidden, self._weights.norm, eps, out)
        return out

    def checksums(self) -> list[float]:
        """Return the sum of every weight tensor, which tells models of one shape apart."""
        return [float(tensor.sum(dtype=torch.float64)) for tensor in _tensors(self._weights)]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:  # [N, hidden] -> float32 [N, vocab]
        """Return the scores of every vocabulary entry for each row."""
        head = self._weights.head
        if isinstance(head, Tensor):
            return F.linear(hidden, head).float()
        out = torch.empty(len(hidden), head.shape[0])
        self._kernels.float_product(hidden, head, out)
        return out

    def _qkv(
        self, normed: Tensor | Int8Rows, layer: LayerWeights, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = self._project("qkv", normed, layer.qkv).unflatten(-1, (-1, config.head_dim))
        self._kernels.rotate(
            qkv,
            *heads[:2],
            cos,
            sin,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            eps=config.norm_eps,
            turn=self._turn if self.is_rotated else None,
        )
        return qkv.split(heads, dim=1)

    def _project(self, name: str, x: Tensor | Int8Rows, projection: Projection) -> Tensor:
        """Multiply into the workspace: [T, in] -> [T, out]."""
        weight, bias = projection.weight, projection.bias
        if isinstance(x, Int8Rows):
            out = self._buffer(name, len(x.codes), weight.shape[0])
            self._kernels.int8_product(x, weight, out, bias=bias)
            return out
        out = self._buffer(name, len(x), weight.shape[0])
        if isinstance(weight, PackedWeight):
            self._kernels.float_product(x, weight, out, bias=bias)
            return out
        if bias is None:
            return torch.mm(x, weight.t(), out=out)
        return torch.addmm(bias, x, weight.t(), out=out)

    def _add_projected(self, residual: Tensor, x: Tensor | Int8Rows, projection: Projection) -> None:
        """Multiply and add to the residual in place, without a pass of its own."""
        weight, bias = projection.weight, projection.bias
        if isinstance(weight, Int8Weight):
            if isinstance(x, Tensor):
                x, dense = self._rows("attended", projection, len(x)), x
                self._kernels.quantise_rows(dense.contiguous(), x)
            self._kernels.int8_product(x, weight, residual, bias=bias, adds=True)
            return
        if isinstance(weight, PackedWeight):
            self._kernels.float_product(x.contiguous(), weight, residual, adds=True)
        else:
            residual.addmm_(x, weight.t())
        if bias is not None:
            residual.add_(bias)

    def _rows(self, name: str, projection: Projection, num_rows: int) -> Tensor | Int8Rows:
        """Return room for what a projection takes: numbers, or codes where its weights are codes."""
        width = projection.weight.shape[1]
        if not isinstance(projection.weight, Int8Weight):
            return self._buffer(name, num_rows, width)
        codes = self._buffer(name, num_rows, width, torch.int8)
        return Int8Rows(codes, self._buffer(f"{name} scales", num_rows, 1, torch.float32).flatten())

    def _buffer(self, name: str, num_rows: int, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return the first rows of a workspace tensor, which grows to the largest step seen."""
        held = self._workspace.get(name)
        if held is None or len(held) < num_rows:
            shape = (num_rows, width)
            self._workspace[name] = held = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return held[:num_rows]


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    max_context: int | None = None,
    trust_remote_code: bool = False,
    weight_quant: str | None = None,
) -> Decoder:
    """Load the model of a local directory.

    Args:
        weight_quant: `int8` keeps the layers' matrices in int8 and multiplies them by activations rounded to int8
            (`engine.models.convert`); embedding, vocabulary and norms stay.

    Raises:
        UnsupportedModelError: the engine cannot run it; the message names why.
        ModelError: its files are missing, corrupt or contradict each other.
    """
    assert weight_quant in (None, "int8"), weight_quant
    config = ModelConfig.from_pretrained(path, max_context=max_context, trust_remote_code=trust_remote_code)
    device = torch.device(device)
    kernels = layer_kernels(config, device)
    weights = load_weights(
        Path(path),
        config,
        dtype=dtype,
        device=device,
        panel=kernels.float_panel() if dtype == torch.float32 else 0,
        convert=partial(to_int8, config=config, kernels=kernels) if weight_quant else None,
    )
    return Decoder(config, weights, is_rotated=bool(weight_quant))


def _tensors(weights: Weights) -> list[Tensor]:
    """Return every tensor of the weights, a tied one once."""
    tensors = _parts(weights.embedding) + [weights.norm]
    if weights.head is not weights.embedding:
        tensors += _parts(weights.head)
    for layer in weights.layers:
        for part in vars(layer).values():
            tensors += _parts(part)
    return tensors


def _parts(part: Tensor | Projection | PackedWeight | Int8Weight | None) -> list[Tensor]:
    match part:
        case Tensor():
            return [part]
        case Projection():
            return _parts(part.weight) + _parts(part.bias)
        case PackedWeight():
            return [part.panels]
        case Int8Weight():
            return [part.codes, part.scales, part.starts]
    return []
