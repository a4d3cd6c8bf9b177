"""A GGUF file turned into a model directory: bf16 safetensors, configuration, tokenizer.

Weights are dequantized tensor by tensor into shards, so that memory holds one shard at most. transformers
reads GGUF too, but only with accelerate installed, three times over, and without the file's rope scaling.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf.gguf_reader import ReaderTensor
from gguf.quants import dequantize
from safetensors.torch import save_file

from engine.errors import ModelError
from engine.models.config import NAME_BY_TYPE, ModelConfig
from engine.models.weights import check_weights
from kvbatch.errors import ModelUnavailable
from kvbatch.model.gguf_file import GgufFile
from kvbatch.model.gguf_parts import gguf_parts
from kvbatch.model.gguf_tokenizer import write_tokenizer

KINDS = ("llama", "qwen2", "qwen3")  # the `general.architecture` of files that can be converted
SHARD_BYTES = 2 << 30

_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert_gguf(source: Path, out: Path, title: str | None = None) -> None:
    """Write the model of a GGUF file into an existing, empty directory, and check it there.

    Args:
        source: the file, or any part of a split one.
        title: what messages call it; its path by default.

    Raises:
        ModelUnavailable: the file is damaged or not whole, or holds something that cannot be converted exactly.
    """
    title = title or str(source)
    file = GgufFile(gguf_parts(source), title)
    try:
        config = _config(file.metadata, file.tensors)
        ends = write_tokenizer(file.metadata, out, max_context=config["max_position_embeddings"])
        config["eos_token_id"] = list(ends)
        generation = {
            key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id") if key in config
        }
        _write_weights(_tensors(file.tensors.values(), config), out)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ModelUnavailable(
            f"{title} contradicts itself ({error!r}); use another GGUF of the model"
        ) from error
    (out / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2), encoding="utf-8")
    _check(out, title)


def _check(out: Path, title: str) -> None:
    try:
        # Whether the job's context fits a window is the job's business: one position always does.
        check_weights(out, ModelConfig.from_pretrained(out, max_context=1))
    except ModelError as error:
        reason = str(error).removeprefix(f"{out}: ").partition(";")[0]
        raise ModelUnavailable(
            f"{title} does not hold the whole model: {reason}; use another GGUF of it"
        ) from error


def _config(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    kind, purpose = metadata["general.architecture"], metadata.get("general.type", "model")
    if purpose != "model":
        raise ModelUnavailable(f"the GGUF file holds no model, but is of type {purpose!r}; name the model's")
    if kind not in KINDS:
        raise ModelUnavailable(
            f"the GGUF file's architecture {kind!r} is not supported; supported: {', '.join(KINDS)}"
        )

    def field(name: str, default: Any = None) -> Any:
        return metadata.get(f"{kind}.{name}", default)

    if field("expert_count"):
        raise ModelUnavailable(f"mixture of experts ({kind}.expert_count) is not supported")
    heads, hidden = metadata[f"{kind}.attention.head_count"], metadata[f"{kind}.embedding_length"]
    head_dim = field("attention.key_length", hidden // heads)
    config = {
        "architectures": [NAME_BY_TYPE[kind]],
        "model_type": kind,
        "dtype": "bfloat16",
        "vocab_size": _vocabulary(tensors),
        "hidden_size": hidden,
        "intermediate_size": metadata[f"{kind}.feed_forward_length"],
        "num_hidden_layers": metadata[f"{kind}.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": float(
            f"{metadata[f'{kind}.attention.layer_norm_rms_epsilon']:.6g}"
        ),  # float32 in the file
        "max_position_embeddings": metadata[f"{kind}.context_length"],
        "tie_word_embeddings": "output.weight" not in tensors,
        "rope_parameters": _rope(field, tensors, head_dim),
    }
    if kind != "qwen2":
        config["attention_bias"] = "blk.0.attn_q.bias" in tensors
    if kind == "llama":
        config["mlp_bias"] = "blk.0.ffn_up.bias" in tensors
    if field("attention.sliding_window"):
        window = (
            {"architectures": [NAME_BY_TYPE["mistral"]], "model_type": "mistral"} if kind == "llama" else {}
        )
        config |= window | {"sliding_window": field("attention.sliding_window"), "use_sliding_window": True}
    for name, key in (("bos", "bos"), ("pad", "padding")):
        if f"tokenizer.ggml.{key}_token_id" in metadata:
            config[f"{name}_token_id"] = metadata[f"tokenizer.ggml.{key}_token_id"]
    return config


def _vocabulary(tensors: Mapping[str, Any]) -> int:
    if "token_embd.weight" not in tensors:
        raise ModelUnavailable(
            "the GGUF file does not hold tensor 'token_embd.weight'; use another GGUF of the model"
        )
    return int(tensors["token_embd.weight"].shape[1])


def _rope(field: Any, tensors: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    if field("rope.dimension_count", head_dim) != head_dim:
        raise ModelUnavailable(
            f"partial rotary embedding ({field('rope.dimension_count')} of {head_dim}) not supported"
        )
    rope = {"rope_type": "default", "rope_theta": float(field("rope.freq_base", 10000.0))}
    scaling, factor = field("rope.scaling.type", "none"), field("rope.scaling.factor", 1.0)
    if "rope_freqs.weight" in tensors:
        # Llama 3's scaling comes as one divisor for each frequency, which longrope can say in a config.json.
        divisors = [float(value) for value in tensors["rope_freqs.weight"].data]
        length = field("context_length")
        return rope | {
            "rope_type": "longrope",
            "short_factor": divisors,
            "long_factor": divisors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    if scaling == "none" or (scaling == "linear" and factor == 1.0):
        return rope
    if scaling == "linear":
        return rope | {"rope_type": "linear", "factor": float(factor)}
    if scaling == "yarn":
        original = field("rope.scaling.original_context_length")
        return rope | {
            "rope_type": "yarn",
            "factor": float(factor),
            "original_max_position_embeddings": original,
        }
    raise ModelUnavailable(
        f"the GGUF file's rope scaling {scaling!r} is not supported; supported: linear, yarn"
    )


def _tensors(
    tensors: Iterable[ReaderTensor], config: Mapping[str, Any]
) -> Iterator[tuple[str, torch.Tensor]]:
    permuted = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    for tensor in tensors:
        if tensor.name == "rope_freqs.weight":
            continue
        stem, _, suffix = tensor.name.rpartition(".")
        part = stem.rpartition(".")[2]
        values = dequantize(tensor.data, tensor.tensor_type)
        if config["model_type"] in ("llama", "mistral") and part in permuted:
            values = _halves(values, permuted[part])
        owned = np.array(values, dtype=np.float32)  # float32 tensors are views of the read-only file
        yield f"{_name(stem)}.{suffix}", torch.from_numpy(owned).to(torch.bfloat16)


def _name(stem: str) -> str:
    if stem in _OUTER:
        return _OUTER[stem]
    block, index, part = (stem.split(".", 2) + ["", ""])[:3]
    if block != "blk" or part not in _INNER:
        raise ModelUnavailable(f"the GGUF file holds a tensor {stem!r} that no supported architecture has")
    return f"model.layers.{index}.{_INNER[part]}"


def _halves(values: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's order of rotary pairs in llama files: interleaved (x0 y0 x1 y1) to halves (x0 x1 y0 y1)."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)


def _write_weights(tensors: Iterator[tuple[str, torch.Tensor]], out: Path) -> None:
    weight_map: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}

    def flush() -> None:
        name = f"model-{len(set(weight_map.values())) + 1:05d}.safetensors"
        save_file(shard, out / name, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(shard, name))
        shard.clear()

    for name, values in tensors:
        if shard and sum(tensor.nbytes for tensor in shard.values()) + values.nbytes > SHARD_BYTES:
            flush()
        shard[name] = values
    flush()
    files = set(weight_map.values())
    if len(files) == 1:
        (out / files.pop()).rename(out / "model.safetensors")
    else:
        index = {"metadata": {}, "weight_map": weight_map}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2), encoding="utf-8")
