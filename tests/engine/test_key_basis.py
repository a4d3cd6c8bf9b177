"""Each lane's keys get the basis in which quantizing them disturbs scores less."""

import math
import random

import pytest
import torch

from engine import calibration
from engine.calibration import read_whole
from engine.key_basis import in_basis_of, key_noise
from engine.models import Decoder, load_model
from engine.models.basis import ROTATED
from kvcache.config import KVCacheConfig
from kvcache.quantize.pages import rotation
from tests.engine.models.tiny_models import save_tiny_model, tiny_model

TOKENS = random.Random(1).choices(range(199), k=16 + 3 * 64 + 20)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(calibration, "user_cache", lambda: tmp_path / "cache")


def model_with_key_bias(path, bias: float) -> Decoder:
    """Return a model whose first layer has a large key bias in two channels where queries are small."""

    model = tiny_model("qwen2", max_position_embeddings=600)
    head_dim, attention = 16, model.model.layers[0].self_attn
    pair = [0, head_dim // 2]  # two channels that turn together
    with torch.no_grad():
        attention.k_proj.bias.view(-1, head_dim)[-1, pair] = bias
        for part in (attention.q_proj.weight, attention.q_proj.bias):
            part.unflatten(0, (-1, head_dim))[-2:, pair] *= 1e-3
    model.save_pretrained(path)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


def test_noise_is_what_quantized_keys_do_to_scores(tmp_path):
    save_tiny_model(tmp_path, "llama", max_position_embeddings=600)
    model = load_model(tmp_path, dtype=torch.float32, basis=ROTATED).unrotated()
    noise = key_noise(model, TOKENS)
    assert noise.shape == (2, model.config.num_layers, model.config.num_kv_heads)
    seen = {}

    def see(layer, chunk, q, keys, largest):
        seen[layer] = (torch.cat([seen[layer][0], q.clone()]) if layer in seen else q.clone(), keys.clone())

    read_whole(model, TOKENS, see)
    q, keys = seen[1]
    queries = q.unflatten(1, (model.config.num_kv_heads, -1))[:, 1].flatten(0, 1)
    for place, turn in enumerate((torch.eye(keys.shape[2]), rotation(keys.shape[2]))):
        pages = (keys[1, 16 : 16 + 3 * 64] @ turn).unflatten(0, (3, 64))
        step = (pages.amax(1) - pages.amin(1)) / 7  # of eight codes
        # rounding to a grid errs by step / sqrt(12) on its own; compensation makes up for a part of it
        alone = ((queries @ turn) ** 2).mean(0) @ (step**2 / 12).mean(0) / keys.shape[2]
        assert 0.3 * alone < noise[place, 1, 1] < 1.2 * alone


def test_large_key_biases_keep_their_lane_plain(tmp_path):
    model = model_with_key_bias(tmp_path, 100.0)
    policy = KVCacheConfig.preset("default")
    table = in_basis_of(policy, model, TOKENS).basis
    assert table.values == "rotated"
    rotated = table.rotated_keys(model.config.num_layers, model.config.num_kv_heads)
    assert not rotated[0][-1] and any(any(row) for row in rotated)
    plain, turned = key_noise(model.unrotated(), TOKENS)[:, 0, -1].tolist()
    assert turned > 20 * plain and math.isfinite(turned)
    assert in_basis_of(KVCacheConfig(), model, TOKENS) is model


def test_a_text_shorter_than_a_page_leaves_keys_rotated(tmp_path):
    save_tiny_model(tmp_path, "llama", max_position_embeddings=600)
    model = load_model(tmp_path, dtype=torch.float32, basis=ROTATED)
    table = in_basis_of(KVCacheConfig.preset("default"), model, TOKENS[:50]).basis
    assert all(all(row) for row in table.rotated_keys(model.config.num_layers, model.config.num_kv_heads))
