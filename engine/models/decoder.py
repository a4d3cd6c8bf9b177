"""The decoder: token ids to hidden states to logits, for every supported architecture.

It has no caches and no sequences: all tokens of a step lie in one flat row, and the caller's `attend`
does the attention of each layer.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels import reference
from engine.kernels.int8 import Int8Weight
from engine.kernels.packed import PackedWeight
from engine.kernels.reference import KeyTurn
from engine.kernels.registry import float_panel, layer_kernels
from engine.models.basis import PLAIN, Basis, BasisTable
from engine.models.config import ModelConfig
from engine.models.layers import LayerPasses, Passes
from engine.models.rope import moved_keys, rope_tables
from engine.models.weight_transforms import rotate_values, to_int8
from engine.models.weights import Projection, Weights, load_weights
from kvcache.quantize.pages import rotation

# attend(layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> [T, H, D]; q and k after qk-norm and rope
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]

_SUMMED_ELEMENTS = 1 << 20


class Decoder:
    """A model ready to run. One thread uses it at a time, since calls share the workspace.

    Args:
        config: the model's.
        weights: loaded, their values in the basis of `basis`.
        basis: of queries, keys and values.

    Raises:
        ValueError: The basis is of another model.
    """

    def __init__(self, config: ModelConfig, weights: Weights, basis: BasisTable = PLAIN) -> None:
        self.config = config
        self.dtype = weights.norm.dtype
        self.device = weights.norm.device
        self.basis = basis
        self._weights = weights
        self._checksums: list[float] = []  # empty until they are asked for
        self._kernels = kernels_of(config, self.device)
        turned = basis.rotated_keys(config.num_layers, config.num_kv_heads)
        self._turned = torch.tensor(turned, dtype=torch.uint8, device=self.device)  # [L, KVH]
        self._turn = rotation(config.head_dim).to(self.device)  # its own inverse
        self._cos, self._sin = rope_tables(config.rope, config.max_context, self.device)
        self._passes = self._make_passes()

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights in memory."""
        return sum(tensor.nbytes for tensor in _tensors(self._weights))

    @property
    def has_int8_weights(self) -> bool:
        """Whether the layers' matrices are in int8."""
        return isinstance(self._weights.layers[0].down.weight, Int8Weight)

    @property
    def output_weights(self) -> Iterator[Tensor]:
        """The attention's output projection of every layer, `[hidden, H D]`."""
        weights = (layer.output.weight for layer in self._weights.layers)
        return (w if isinstance(w, Tensor) else w.dense() for w in weights)

    def move_keys(self, layer: int, keys: Tensor, offsets: Tensor) -> Tensor:
        """Return a layer's keys `[KVH, n, D]` as if each had been `offsets[i]` positions further on, float32."""
        plain = self._turn_keys(layer, keys.float())
        return self._turn_keys(layer, moved_keys(plain, offsets, self.config.rope))

    def with_keys(self, keys: tuple[tuple[Basis, ...], ...]) -> "Decoder":
        """Return the model with queries and keys in other bases (`BasisTable.keys`), over the same weights.

        Values stay in the basis of the weights.
        """
        model = Decoder(self.config, self._weights, replace(self.basis, keys=keys))
        model._checksums = self._checksums
        return model

    def unrotated(self) -> "Decoder":
        """Return the model with all queries and keys in the plain basis, over the same weights."""
        return self.with_keys(PLAIN.keys) if bool(self._turned.any()) else self

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
        config = self.config
        cos, sin = self._cos[positions], self._sin[positions]  # [T, D / 2]
        embedding = self._weights.embedding
        if isinstance(embedding, PackedWeight):
            hidden = embedding.rows(token_ids).to(self.dtype)
        else:
            hidden = embedding[token_ids]
        for index in range(config.num_layers):
            q, k, v = self._passes.before_attention(index, hidden, cos, sin)
            attended = attend(index, q, k, v).flatten(1)
            if rows is not None and index == config.num_layers - 1:
                hidden, attended = hidden[rows], attended[rows]
            self._passes.after_attention(index, hidden, attended)
        out = torch.empty_like(hidden)
        self._kernels.rms_norm(hidden, self._weights.norm, config.norm_eps, out)
        return out

    def checksums(self) -> list[float]:
        """Return the sum of every weight tensor, which tells models of one shape apart."""
        if self._checksums:
            return self._checksums
        self._checksums = [
            # torch copies what it sums in another type: an embedding at once would be four times its bytes
            math.fsum(
                float(part.sum(dtype=torch.float64)) for part in tensor.flatten().split(_SUMMED_ELEMENTS)
            )
            for tensor in _tensors(self._weights)
        ]
        return self._checksums

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:  # [N, hidden] -> float32 [N, vocab]
        """Return the scores of every vocabulary entry for each row."""
        head = self._weights.head
        if isinstance(head, Tensor):
            return F.linear(hidden, head).float()
        out = torch.empty(len(hidden), head.shape[0], dtype=torch.float32, device=hidden.device)
        self._kernels.float_product(hidden, head, out)
        return out

    def _make_passes(self) -> LayerPasses:
        layers = self._weights.layers
        turns = [KeyTurn(self._turn, row) if bool(row.any()) else None for row in self._turned]
        if self._kernels is not reference:
            from engine.models.compiled_layers import CompiledPasses, can_compile

            if can_compile(self.config, layers, turns):
                return CompiledPasses(self.config, layers, turns)
        return Passes(self.config, layers, self._kernels, turns)

    def _turn_keys(self, layer: int, keys: Tensor) -> Tensor:  # [KVH, n, D] into the basis of each, or back
        turned = self._turned[layer].bool()[:, None, None]
        return torch.where(turned, keys @ self._turn, keys) if bool(turned.any()) else keys


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    max_context: int | None = None,
    trust_remote_code: bool = False,
    weight_quant: str | None = None,
    basis: BasisTable = PLAIN,
) -> Decoder:
    """Load the model of a local directory.

    Args:
        weight_quant: `int8` keeps the layers' matrices in int8 and multiplies them by activations rounded to int8
            (`engine.models.weight_transforms`); embedding, vocabulary and norms stay.
        basis: of queries, keys and values; `basis_for` says which one a cache policy needs. Int8 weights are rounded in
            it.

    Raises:
        UnsupportedModelError: the engine cannot run it; the message names why.
        ModelError: its files are missing, corrupt or contradict each other.
    """
    assert weight_quant in (None, "int8"), weight_quant
    config = ModelConfig.from_pretrained(path, max_context=max_context, trust_remote_code=trust_remote_code)
    device = torch.device(device)
    kernels = kernels_of(config, device)
    weights = load_weights(
        Path(path),
        config,
        dtype=dtype,
        device=device,
        panel=float_panel(kernels, dtype),
        convert=partial(to_int8, config=config, kernels=kernels, basis=basis) if weight_quant else None,
    )
    config = replace(config, tie_embeddings=weights.head is weights.embedding)  # as the files have it
    if basis.values == "rotated" and not weight_quant:
        layers = list(weights.layers)
        weights = replace(weights, layers=())  # so that no more than one layer is in memory in both bases
        for index, layer in enumerate(layers):
            layers[index] = rotate_values(layer, config)
        weights = replace(weights, layers=tuple(layers))
    return Decoder(config, weights, basis)


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


def kernels_of(config: ModelConfig, device: torch.device) -> ModuleType:
    """Return the kernels of a model's layers; see `layer_kernels`."""
    return layer_kernels(device, config.head_dim, config.hidden_size, config.intermediate_size)
