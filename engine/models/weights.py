"""Weights: from safetensors files into fused, checked tensors.

Q, K and V lie in one matrix, gate and up in another. Each is allocated once and filled tensor by tensor, so a
load never holds the model twice. Every shape is checked before anything is copied.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.errors import ModelError
from engine.kernels.int8 import Int8Weight
from engine.kernels.packed import PackedWeight
from engine.model_files import ADAPTER_FILE, described_stand_in, weight_files
from engine.models.config import ModelConfig

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
_COMPARED_ROWS = 4096  # at once
_COMPUTED = "rotary_emb.inv_freq"  # old checkpoints hold frequencies, which the configuration says too
_NAMED = 3  # unread tensors


@dataclass(frozen=True)
class Projection:
    """One linear layer; several of the checkpoint's matrices may be stacked in it."""

    weight: Tensor | PackedWeight | Int8Weight  # [out, in]
    bias: Tensor | None  # [out], float32 beside weights that are packed or int8


@dataclass(frozen=True)
class LayerWeights:
    """The weights of one decoder layer."""

    attention_norm: Tensor  # [hidden]
    qkv: Projection
    q_norm: Tensor | None  # [head_dim]
    k_norm: Tensor | None  # [head_dim]
    output: Projection
    mlp_norm: Tensor  # [hidden]
    gate_up: Projection
    down: Projection


@dataclass(frozen=True)
class Weights:
    """All weights of a decoder; `head` is `embedding` itself where the two are tied."""

    embedding: Tensor | PackedWeight  # [vocab, hidden]
    layers: tuple[LayerWeights, ...]
    norm: Tensor  # [hidden]
    head: Tensor | PackedWeight  # [vocab, hidden]


class Checkpoint:
    """The safetensors files of a model directory, opened together."""

    def __init__(self, path: Path) -> None:
        """Open every file and list its tensors.

        Raises:
            ModelError: no safetensors, a missing shard, a truncated or corrupt file.
        """
        self.path = path
        self._handles: dict[Path, Any] = {}
        self._stored: dict[str, tuple[Path, str]] = {}  # by name: the file, and the name there
        try:
            for file in weight_files(path):
                self._open(file)
                self._stored |= {name: (file, name) for name in self._handles[file].keys()}  # noqa: SIM118 it is no dict
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        """Return the checkpoint itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close every file."""
        self._close()

    def release(self) -> None:
        """Unmap the pages read so far: while they are mapped, they count as memory of the process.

        Raises:
            ModelError: a file is gone meanwhile.
        """
        self._close()
        for file in list(self._handles):
            self._open(file)

    def fitted(self, config: ModelConfig) -> ModelConfig:
        """Return the configuration with the head tied to the embedding only where the files agree.

        As in transformers: of two that differ both are used, and of a tied pair either may stand in the files.
        """
        if not config.tie_embeddings or _HEAD not in self._stored:
            return config
        if _EMBEDDING not in self._stored:
            self._stored[_EMBEDDING] = self._stored.pop(_HEAD)
            return config
        return replace(config, tie_embeddings=self._are_equal(_EMBEDDING, _HEAD))

    def check(self, config: ModelConfig) -> None:
        """Compare the files with the tensors that a fitted configuration asks for.

        Raises:
            ModelError: tensors are missing or have another shape, named.
        """
        shapes = _shapes(config)
        missing = [name for name in shapes if name not in self._stored]
        if missing == [_HEAD]:
            raise ModelError(
                f"{self.path}: {_HEAD} is missing, though config.json does not tie it to the embedding; "
                "set tie_word_embeddings to true there if the model was trained so"
            )
        if missing:
            others = self.unread(config)
            raise ModelError(
                f"{self.path}: {len(missing)} tensors are missing, the first is {missing[0]}; "
                + (f"{len(others)} others are there, the first is {others[0]}; " if others else "")
                + "take configuration and weights that belong together"
            )
        for name, wanted in shapes.items():
            found = tuple(self._slice(name).get_shape())
            if found != wanted:
                raise ModelError(
                    f"{self.path}: {name} has shape {list(found)}, config.json asks for {list(wanted)}; "
                    "the configuration belongs to other weights"
                )

    def unread(self, config: ModelConfig) -> list[str]:
        """Return the tensors that a model of a fitted configuration has no use for."""
        used = _shapes(config).keys() | ({_HEAD} if config.tie_embeddings else set())
        return sorted(name for name in self._stored.keys() - used if not name.endswith(_COMPUTED))

    def stacked(self, names: list[str], shapes: dict[str, tuple[int, ...]], like: Tensor) -> Tensor:
        """Copy the named tensors below one another into a new tensor of the type and place of `like`."""
        rows = [shapes[name][0] for name in names]
        out = like.new_empty((sum(rows), *shapes[names[0]][1:]))
        for part, name in zip(out.split(rows), names, strict=True):
            part.copy_(self._tensor(name))
        return out

    def packed(
        self, names: list[str], shapes: dict[str, tuple[int, ...]], like: Tensor, panel: int
    ) -> Tensor | PackedWeight:
        """Do as `stacked`, in panels, unless they are 0."""
        if not panel:
            return self.stacked(names, shapes, like)
        rows = [shapes[name][0] for name in names]
        is_bf16 = all(self._slice(name).get_dtype() == "BF16" for name in names)
        dtype = torch.bfloat16 if is_bf16 else like.dtype
        out = PackedWeight.empty(sum(rows), shapes[names[0]][1], panel, dtype)
        for first, name in zip(accumulate(rows, initial=0), names, strict=False):
            out.put(first, self._tensor(name))
        return out

    def _tensor(self, name: str) -> Tensor:
        file, stored_name = self._stored[name]
        return self._handles[file].get_tensor(stored_name)

    def _slice(self, name: str) -> Any:
        file, stored_name = self._stored[name]
        return self._handles[file].get_slice(stored_name)

    def _are_equal(self, first: str, second: str) -> bool:
        one, other = self._slice(first), self._slice(second)
        if (one.get_shape(), one.get_dtype()) != (other.get_shape(), other.get_dtype()):
            return False
        starts = range(0, one.get_shape()[0], _COMPARED_ROWS)
        return all(torch.equal(one[i : i + _COMPARED_ROWS], other[i : i + _COMPARED_ROWS]) for i in starts)

    def _close(self) -> None:
        for handle in self._handles.values():
            handle.__exit__(None, None, None)

    def _open(self, file: Path) -> None:
        try:
            self._handles[file] = safe_open(file, framework="pt", device="cpu")
        except FileNotFoundError:
            raise ModelError(f"{file} is missing; fetch it") from None
        except (OSError, SafetensorError) as error:
            stand_in = described_stand_in(file)
            raise ModelError(
                stand_in or f"{file} is truncated or corrupt ({error}); fetch it again"
            ) from error


def check_weights(path: Path, config: ModelConfig) -> tuple[ModelConfig, tuple[str, ...]]:
    """Prove by the files' headers that a model's weights are there, whole and of the configured shapes.

    Returns:
        The configuration as the weights have it, and what their user should know.

    Raises:
        ModelError: they are not.
    """
    with Checkpoint(path) as checkpoint:
        fitted = checkpoint.fitted(config)
        checkpoint.check(fitted)
        unread = checkpoint.unread(fitted)
    notes = []
    if fitted.tie_embeddings != config.tie_embeddings:
        notes.append(
            f"config.json ties {_HEAD} to {_EMBEDDING}, but the files hold two that differ; both are used, as "
            "transformers does; set tie_word_embeddings to false there to say so"
        )
    if (path / ADAPTER_FILE).exists():
        notes.append(
            f"{ADAPTER_FILE}: the adapter is not applied; to use it, merge it into the model and save that"
        )
    if unread:
        names = ", ".join(unread[:_NAMED]) + (", …" if len(unread) > _NAMED else "")
        notes.append(
            f"{len(unread):,} of the tensors in the files have no place in {config.architecture} with this "
            f"config.json and are not used: {names}"
        )
    return fitted, tuple(notes)


def count_weights(config: ModelConfig) -> int:
    """Return how many numbers a model's weights are."""
    return sum(math.prod(shape) for shape in _shapes(config).values())


def load_weights(
    path: Path,
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    device: torch.device,
    panel: int = 0,
    convert: Callable[[LayerWeights], LayerWeights] | None = None,
) -> Weights:
    """Load a model's weights in the given type.

    Args:
        panel: outputs that lie side by side in packed matrices; 0 packs none.
        convert: applied to each layer, which then is not packed, as it is loaded, so that no more than one lies in
            memory in both forms.

    Raises:
        ModelError: the files are missing or corrupt, or do not fit the configuration.
    """
    like = torch.empty(0, dtype=dtype, device=device)
    with Checkpoint(path) as checkpoint:
        config = checkpoint.fitted(config)
        checkpoint.check(config)
        shapes = _shapes(config)

        def tensor(*names: str) -> Tensor:
            return checkpoint.stacked(list(names), shapes, like)

        def projection(*names: str) -> Projection:
            has_bias = f"{names[0]}.bias" in shapes
            matrices = [f"{name}.weight" for name in names]
            weight = checkpoint.packed(matrices, shapes, like, 0 if convert else panel)
            if not has_bias:
                return Projection(weight, None)
            bias = tensor(*(f"{name}.bias" for name in names))
            return Projection(weight, bias.float() if isinstance(weight, PackedWeight) else bias)

        def layer(index: int) -> LayerWeights:
            checkpoint.release()
            at = f"model.layers.{index}"
            attention, mlp = f"{at}.self_attn", f"{at}.mlp"
            return LayerWeights(
                attention_norm=tensor(f"{at}.input_layernorm.weight"),
                qkv=projection(*(f"{attention}.{part}_proj" for part in "qkv")),
                q_norm=tensor(f"{attention}.q_norm.weight") if config.qk_norm else None,
                k_norm=tensor(f"{attention}.k_norm.weight") if config.qk_norm else None,
                output=projection(f"{attention}.o_proj"),
                mlp_norm=tensor(f"{at}.post_attention_layernorm.weight"),
                gate_up=projection(f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                down=projection(f"{mlp}.down_proj"),
            )

        head = checkpoint.packed([_EMBEDDING if config.tie_embeddings else _HEAD], shapes, like, panel)
        layers = map(layer, range(config.num_layers))
        return Weights(
            embedding=head if config.tie_embeddings else tensor(_EMBEDDING),
            layers=tuple(map(convert, layers) if convert else layers),
            norm=tensor("model.norm.weight"),
            head=head,
        )


def _shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor that the configuration asks for."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        _EMBEDDING: (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tie_embeddings:
        shapes[_HEAD] = (config.vocab_size, hidden)
    projections = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.output_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for index in range(config.num_layers):
        at = f"model.layers.{index}"
        shapes[f"{at}.input_layernorm.weight"] = (hidden,)
        shapes[f"{at}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{at}.self_attn.q_norm.weight"] = (config.head_dim,)
            shapes[f"{at}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, rows, columns, has_bias in projections:
            shapes[f"{at}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"{at}.{name}.bias"] = (rows,)
    return shapes
