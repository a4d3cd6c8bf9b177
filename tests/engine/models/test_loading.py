"""Directories that hold no usable model are refused by name, with what to do."""

import json
from pathlib import Path

import pytest
import torch

from engine.errors import ModelError, UnsupportedModelError
from engine.models import ModelConfig, load_model
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
