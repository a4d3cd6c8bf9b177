"""How fast this CPU computes a layer's products in each precision, by the very path that a model takes."""

import json
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.models import Decoder, load_model
from engine.models.config import NAME_BY_TYPE

NUM_TOKENS = 256
_LAYER = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
_ROUNDS, _LEAST_S = 3, 0.015  # of each precision in turn, so that a busy moment meets both


def product_speeds(
    dtypes: tuple[torch.dtype, ...], weight_quant: str | None = None
) -> dict[torch.dtype, float]:
    """Return GFLOP/s of a layer of a bfloat16 checkpoint in each precision; takes about a tenth of a second.

    Raises:
        OSError: There is no place for a temporary file.
    """
    with tempfile.TemporaryDirectory(prefix="kvbatch-") as folder:
        num_flops = 2 * NUM_TOKENS * _save_layer(Path(folder))
        models = {dtype: load_model(folder, dtype=dtype, weight_quant=weight_quant) for dtype in dtypes}
    for model in models.values():
        _forward(model)  # compiles, allocates, lays weights out
    best = dict.fromkeys(dtypes, float("inf"))
    for _ in range(_ROUNDS):
        for dtype, model in models.items():
            best[dtype] = min(best[dtype], _seconds(model))
    return {dtype: num_flops / seconds / 1e9 for dtype, seconds in best.items()}


def _seconds(model: Decoder) -> float:
    """Return how long a pass takes: the fastest of a few, more of them if they are short."""
    best, until = float("inf"), time.perf_counter() + _LEAST_S
    while best == float("inf") or time.perf_counter() < until:
        started = time.perf_counter()
        _forward(model)
        best = min(best, time.perf_counter() - started)
    return best


def _forward(model: Decoder) -> None:
    tokens = torch.arange(NUM_TOKENS, device=model.device)
    model.forward(tokens, tokens, lambda layer, q, k, v: q)  # no attention: the products alone


def _save_layer(folder: Path) -> int:
    """Write a checkpoint of one layer; return how many weights are multiplied."""
    config = {
        "architectures": [NAME_BY_TYPE["llama"]],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": NUM_TOKENS,
        "max_position_embeddings": NUM_TOKENS,
        "tie_word_embeddings": True,
        **_LAYER,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    hidden, inner = _LAYER["hidden_size"], _LAYER["intermediate_size"]
    at = "model.layers.0"
    matrices = {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in "qkvo"}
    matrices |= {f"{at}.mlp.{name}_proj.weight": (inner, hidden) for name in ("gate", "up")}
    matrices[f"{at}.mlp.down_proj.weight"] = (hidden, inner)
    norms = ["model.norm", f"{at}.input_layernorm", f"{at}.post_attention_layernorm"]
    generator = torch.Generator("cpu").manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator, device="cpu").mul_(0.02).to(torch.bfloat16)
        for name, shape in {**matrices, "model.embed_tokens.weight": (NUM_TOKENS, hidden)}.items()
    }
    tensors |= {f"{name}.weight": torch.ones(hidden, dtype=torch.bfloat16, device="cpu") for name in norms}
    save_file(tensors, folder / "model.safetensors")
    return sum(rows * columns for rows, columns in matrices.values())
