"""`default` keeps its promise at half the bytes on models unlike the demo's, or 8 bits with every token fail too."""

import pytest
import torch

from engine import EngineConfig
from engine.cache_loss import CheckText, LossMeter
from engine.key_basis import key_bases
from engine.models import Decoder, load_model
from engine.models.basis import ROTATED
from engine.promise import fit_policy
from kvcache.config import KVCacheConfig, Tier
from kvcache.promises import PROMISES
from tests.engine.planted import FIRST_TOKEN, PLANTED

CONFIG = EngineConfig(200_000_000)


def make_texts() -> list[CheckText]:
    """Return texts of random words, each seen many times, behind the token that may be massive."""
    chance = torch.Generator().manual_seed(5)
    texts = []
    for name in ("one", "two"):
        words = torch.randint(4, 199, (40, 5), generator=chance)
        tokens = words[torch.randint(0, 40, (400,), generator=chance)].flatten().tolist()
        texts.append(CheckText(name, (FIRST_TOKEN, *tokens[:1900]), tuple(tokens[1900:1960]), (), ()))
    return texts


@pytest.fixture(params=PLANTED)
def model(request, tmp_path, monkeypatch) -> Decoder:
    monkeypatch.setattr("engine.calibration.user_cache", lambda: tmp_path / "cache")
    with torch.no_grad():
        PLANTED[request.param]().save_pretrained(tmp_path)
    return load_model(tmp_path, dtype=torch.float32, basis=ROTATED)


def test_default_keeps_its_promise_at_half_the_bytes(model):
    meter = LossMeter(model, CONFIG, make_texts())
    # attention matters here: without the far tokens the model expects something else
    blind = KVCacheConfig("sparse", keep_ratio=0.05, scorer="streaming", tail_tokens=0, chunk_size=64)
    assert meter.measure(blind, "kl").value > 0.05
    promise = PROMISES["default"]
    fitted = fit_policy(
        promise,
        list(promise.policies("default")),
        lambda policy, limit: meter.measure(policy, "kl", limit),
    )
    if fitted.holds:
        assert fitted.kv_ratio <= 0.5
    else:
        whole = KVCacheConfig("quant", tiers=(Tier(1.0, 8, 8),))
        assert meter.measure(whole, "kl").value > promise.limit


def test_planted_outliers_keep_their_keys_plain(tmp_path, monkeypatch):
    monkeypatch.setattr("engine.calibration.user_cache", lambda: tmp_path / "cache")
    with torch.no_grad():
        PLANTED["key biases of 100"]().save_pretrained(tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, basis=ROTATED)
    assert all(basis == "plain" for row in key_bases(model) for basis in row)
    [text, _] = make_texts()
    policy = KVCacheConfig.preset("default")
    plain = LossMeter(model, CONFIG, [text]).measure(policy, "kl").value
    monkeypatch.setattr("engine.key_basis.key_bases", lambda *_: ROTATED.keys)
    rotated = LossMeter(model, CONFIG, [text]).measure(policy, "kl").value
    assert rotated > 3 * plain
