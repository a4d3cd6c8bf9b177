"""Directories that hold no usable model are refused by name, with what to do."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine.errors import ModelError, UnsupportedModelError
from engine.models import ModelConfig, load_model
from engine.models.weights import check_weights
from tests.engine.models.tiny_models import holds_once, save_tiny_model, tiny_model


def edit_config(path: Path, **changes: object) -> None:
    """Change keys of a saved config.json."""
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["PhiForCausalLM"]}, "PhiForCausalLM.*LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "mamba"}, "mamba"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"rope_parameters": {"rope_type": "proportional", "rope_theta": 1e4}}, "proportional"),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor=0.5",
        ),
    ],
)
def test_what_the_engine_lacks_is_refused_by_name(tmp_path: Path, changes: dict, message: str) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, **changes)
    with pytest.raises(UnsupportedModelError, match=message):
        ModelConfig.from_pretrained(tmp_path)


def test_end_tokens_come_from_the_generation_config(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (7, 9)
    (tmp_path / "generation_config.json").unlink()
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == (2,)


def test_old_rope_scaling_field_is_read(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["rope_parameters"]
    (tmp_path / "config.json").write_text(
        json.dumps(raw | {"rope_theta": 100.0, "rope_scaling": {"type": "linear", "factor": 2.0}})
    )
    rope = ModelConfig.from_pretrained(tmp_path).rope
    assert (rope.scaling, rope.inverse_frequencies[:1]) == ("linear", (0.5,))
    assert rope.inverse_frequencies[4] == pytest.approx(100.0**-0.5 / 2)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors"])
def test_missing_file_is_named(tmp_path: Path, missing: str) -> None:
    save_tiny_model(tmp_path, "llama")
    (tmp_path / missing).unlink()
    with pytest.raises(ModelError, match=missing):
        load_model(tmp_path, dtype=torch.float32)


@pytest.mark.parametrize("keep_ratio", [0.0, 0.001, 0.9])
def test_truncated_weights_are_refused(tmp_path: Path, keep_ratio: float) -> None:
    save_tiny_model(tmp_path, "llama")
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * keep_ratio)])
    with pytest.raises(ModelError, match="truncated or corrupt"):
        load_model(tmp_path, dtype=torch.float32)


def test_broken_config_is_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaFor')
    with pytest.raises(ModelError, match=r"config.json cannot be read"):
        ModelConfig.from_pretrained(tmp_path)


def test_weights_of_another_shape_are_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_config(tmp_path, intermediate_size=128)
    with pytest.raises(ModelError, match=r"gate_proj.weight has shape \[96, 64\]"):
        load_model(tmp_path, dtype=torch.float32)
    edit_config(tmp_path, intermediate_size=96, num_hidden_layers=3)
    with pytest.raises(ModelError, match=r"9 tensors are missing, the first is model.layers.2"):
        load_model(tmp_path, dtype=torch.float32)


def test_sharded_weights_load_and_a_missing_shard_is_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    assert holds_once(load_model(tmp_path, dtype=torch.float32), model)
    shards[1].unlink()
    with pytest.raises(ModelError, match=shards[1].name):
        load_model(tmp_path, dtype=torch.float32)


def edit_weights(path: Path, **changes: torch.Tensor | None) -> None:
    """Set tensors of a saved model, or take them out."""
    names = {"head": "lm_head.weight", "embedding": "model.embed_tokens.weight"}
    weights = load_file(path / "model.safetensors")
    for key, tensor in changes.items():
        weights.pop(names.get(key, key), None)
        if tensor is not None:
            weights[names.get(key, key)] = tensor
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("files", ["head of its own", "same head twice", "head alone"])
def test_head_is_tied_where_transformers_ties_it(tmp_path: Path, files: str) -> None:
    model = save_tiny_model(tmp_path, "llama", tie_word_embeddings=True)
    embedding = model.model.embed_tokens.weight.detach()
    is_tied = files != "head of its own"
    edit_weights(tmp_path, head=embedding.clone() if is_tied else embedding.flip(0).contiguous())
    if files == "head alone":
        edit_weights(tmp_path, embedding=None)
    wanted = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    ours = load_model(tmp_path, dtype=torch.float32)
    assert holds_once(ours, wanted)
    assert ours.config.tie_embeddings == is_tied
    hidden = torch.randn(3, 64)
    torch.testing.assert_close(ours.logits(hidden), wanted.lm_head(hidden).detach())
    config, notes = check_weights(tmp_path, ModelConfig.from_pretrained(tmp_path))
    assert config.tie_embeddings == is_tied
    assert [("tie_word_embeddings to false" in note) for note in notes] == [True] * (not is_tied)


def test_missing_head_is_refused_with_the_key_that_would_tie_it(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    edit_weights(tmp_path, head=None)
    with pytest.raises(ModelError, match=r"lm_head.weight is missing.*tie_word_embeddings"):
        load_model(tmp_path, dtype=torch.float32)


def test_tensors_without_a_use_are_named(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama")
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}
    edit_weights(tmp_path, **frequencies)
    assert check_weights(tmp_path, ModelConfig.from_pretrained(tmp_path))[1] == ()
    edit_weights(tmp_path, **{f"model.layers.{i}.self_attn.q_proj.bias": torch.ones(64) for i in range(2)})
    (note,) = check_weights(tmp_path, ModelConfig.from_pretrained(tmp_path))[1]
    assert note.startswith("2 of the tensors") and "model.layers.0.self_attn.q_proj.bias" in note
    edit_config(tmp_path, num_hidden_layers=1)
    (note,) = check_weights(tmp_path, ModelConfig.from_pretrained(tmp_path))[1]
    assert note.startswith("11 of the tensors")
