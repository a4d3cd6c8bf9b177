"""What a model's lanes need: measured as the definition says, once, and kept."""

import random

import pytest
import torch

from engine import calibration
from engine.calibration import NUM_TOKENS
from engine.head_calibration import lane_shares
from engine.models import Decoder, load_model
from engine.models.basis import ROTATED
from kvcache.compress.lane_shares import LaneShares
from tests.engine.models.tiny_models import save_tiny_model, tiny_model

SHAPE = {"max_position_embeddings": 700}


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    # the kernels stay in the folder they are compiled to
    monkeypatch.setattr(calibration, "user_cache", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "calibration"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", **SHAPE)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


def test_the_shares_are_those_of_what_a_second_reading_attends_to(model):
    tokens = random.Random(1).choices(range(model.config.vocab_size), k=300)
    plain = tiny_model("llama", **SHAPE)
    plain.set_attn_implementation("eager")
    with torch.no_grad():
        attentions = plain(torch.tensor([tokens * 2]), output_attentions=True).attentions
    heads = model.config.num_kv_heads
    received = [
        weights[0, :, 300:, 16:300].amax(1).unflatten(0, (heads, -1)).amax(1) for weights in attentions
    ]
    expected = LaneShares.from_scores(torch.stack(received)).table
    torch.testing.assert_close(lane_shares(model, tokens).table, expected, rtol=0, atol=2 / 284)


def test_a_model_is_measured_once(model, cache, monkeypatch):
    first = lane_shares(model)
    assert first.table.shape == (65, model.config.num_layers, model.config.num_kv_heads)
    forward, calls = Decoder.forward, []
    monkeypatch.setattr(Decoder, "forward", lambda *args: calls.append(1) or forward(*args))
    assert torch.equal(lane_shares(model).table, first.table) and not calls
    (kept,) = cache.iterdir()
    kept.write_bytes(b"not a table")
    assert torch.equal(lane_shares(model).table, first.table) and calls
    lane_shares(model, range(99))
    assert len(list(cache.iterdir())) == 2  # another text is another measurement


def test_a_cache_that_cannot_be_written_costs_time_only(model, cache, caplog):
    cache.parent.mkdir()
    cache.write_text("a file in the folder's place")
    assert lane_shares(model, range(50)).table[-1].eq(1).all()
    assert "cannot be stored" in caplog.text


def test_the_text_has_enough_tokens_for_any_tokenizer():
    words = calibration.calibration_text().split()
    assert len(words) == NUM_TOKENS and len(set(words)) > 200
