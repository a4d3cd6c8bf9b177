"""A preset keeps its promise on any model, or says that it cannot: fitted once, by real readings of the check texts."""

import json
import logging

import pytest
import torch

from engine import EngineConfig, kept_policies
from engine.cache_loss import Loss, LossMeter, check_texts_of
from engine.calibration import keep_file
from engine.errors import EngineError
from engine.kept_policies import PolicyKey, find_policy, fit_kept_policy, policy_of_preset
from engine.models import Decoder, load_model
from engine.models.basis import ROTATED
from engine.promise import FittedPolicy, fit_policy
from kvcache.config import PRESETS, KVCacheConfig, Tier
from kvcache.promises import PROMISES
from tests.engine.models.tiny_models import tiny_model

CONFIG = EngineConfig(80_000_000)
TEXTS = {"story": "the fox and the hare " * 40, "list": "".join(f"{n * 37 % 91}, " for n in range(300))}


def encode(text: str) -> list[int]:
    return [3 + ord(letter) % 190 for letter in text]


def make_model(path, *, output: float = 1.0, sharpness: float = 1.0) -> Decoder:
    """Return a tiny model.

    Args:
        output: scale of what attention adds, and so of what errors in keys and values cost.
        sharpness: scale of queries and of keys, and so of what an error in a key costs.
    """
    model = tiny_model("llama", max_position_embeddings=1024)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= sharpness
            layer.self_attn.k_proj.weight *= sharpness
            layer.self_attn.o_proj.weight *= output
    model.save_pretrained(path)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.fixture(autouse=True)
def texts(monkeypatch):
    monkeypatch.setattr(kept_policies, "check_texts", lambda: TEXTS)


def losses_by_share(limit: float):
    """Return a measure under which a policy loses what it drops, and the policies that were asked for."""
    asked = []

    def measure(policy: KVCacheConfig, most: float) -> Loss:
        assert most == limit
        kept = sum(tier.ratio for tier in policy.resolved_tiers)
        asked.append(kept)
        return Loss(1 - kept, ("story", 1 - kept), kept / 4, 100)

    return measure, asked


@pytest.mark.parametrize(
    ("limit", "expected", "tried"),
    [
        (0.6, 0.5, [0.7, 0.5]),  # down as long as there is room
        (0.45, 0.7, [0.7, 0.5]),  # and one holds
        (0.35, 0.7, [0.7]),  # so little room that it is not tried
        (0.05, 1.0, [0.7, 0.9, 1.0]),  # up until one holds
        (0.99, 0.3, [0.7, 0.5, 0.3]),
    ],
)
def test_the_fewest_bytes_that_hold_are_found_from_where_most_models_are(limit, expected, tried):
    policies = [KVCacheConfig("sparse", keep_ratio=ratio) for ratio in (0.3, 0.5, 0.7, 0.9, 1.0)]
    measure, asked = losses_by_share(limit)
    promise = type(PROMISES["default"])("kl", limit, tuple(p.resolved_tiers for p in policies), first=2)
    fitted = fit_policy(promise, policies, measure)
    assert fitted.tiers == (Tier(expected, 16, 16),) and fitted.holds and asked == pytest.approx(tried)


def test_every_ladder_goes_up_and_a_presets_own_policy_is_on_it():
    for name, promise in PROMISES.items():
        bits = [
            sum(tier.ratio * (tier.key_bits + tier.value_bits) for tier in tiers) for tiers in promise.ladder
        ]
        assert bits == sorted(bits), name
        assert PRESETS[name].resolved_tiers == promise.ladder[promise.first], name
        policies = list(promise.policies(name, recent_tokens=32))
        assert all(policy.can_stream and policy.recent_tokens == 32 for policy in policies), name
        assert policies[promise.first] == KVCacheConfig.from_dict(
            {"preset": name, "recent_tokens": 32}
        ) or not (PRESETS[name].tiers)


def test_a_loss_is_that_of_reading_through_the_cache(tmp_path):
    model = make_model(tmp_path)
    texts = check_texts_of(TEXTS, encode, model.config.max_context)
    assert all(len(text.context) + len(text.continuation) <= 1024 for text in texts)
    assert all(text.answer and set(text.answer) <= set(text.context) for text in texts)
    read = []
    meter = LossMeter(model, CONFIG, texts, lambda name, num_tokens: read.append(name))
    full = meter.measure(KVCacheConfig(), "kl")
    assert full.value < 1e-4 and full.kv_ratio == 1
    mild, harsh = (
        meter.measure(
            KVCacheConfig("sparse+quant", tiers=(Tier(*tier),), chunk_size=64, tail_tokens=64), "kl"
        )
        for tier in ((1, 8, 8), (0.1, 3, 2))
    )
    assert 0 < mild.value < harsh.value and harsh.kv_ratio < mild.kv_ratio < 1
    read.clear()
    stopped = meter.measure(KVCacheConfig.preset("extract"), "kl", limit=0.0)
    assert read == ["story"] and stopped.value > 0  # no more is read than shows that the limit is broken


def test_rounding_alone_is_no_loss(tmp_path):
    make_model(tmp_path)
    model = load_model(tmp_path, dtype=torch.bfloat16, basis=ROTATED)
    texts = check_texts_of(TEXTS, encode, model.config.max_context)
    meter = LossMeter(model, CONFIG, texts)
    assert meter.measure(KVCacheConfig("sparse", page_tokens=16), "kl").value < 1e-3
    assert meter.measure(KVCacheConfig("sparse"), "kl").value == 0
    assert meter.measure(KVCacheConfig.preset("default"), "kl").value > 0.01


def test_a_policy_is_fitted_once_and_kept(tmp_path, monkeypatch):
    model = make_model(tmp_path)
    monkeypatch.setattr(kept_policies, "user_cache", lambda: tmp_path / "cache")
    monkeypatch.setattr("engine.calibration.user_cache", lambda: tmp_path / "cache")
    key = PolicyKey("m", "float32", None, "cpu", "default")
    assert find_policy(key) is None
    fitted = fit_kept_policy(key, model, CONFIG, encode)
    assert find_policy(key) == fitted == FittedPolicy.from_dict(json.loads(json.dumps(fitted.to_dict())))
    record = json.loads((tmp_path / "cache" / key.place).read_text())
    assert record["kl"] == fitted.loss and record["seconds"] >= 0 and record["cpu"]
    monkeypatch.setattr(LossMeter, "measure", None)  # not measured again
    assert fit_kept_policy(key, model, CONFIG, encode) == fitted
    others = [
        PolicyKey("n", "float32", None, "cpu", "default"),
        PolicyKey("m", "bfloat16", None, "cpu", "default"),
        PolicyKey("m", "float32", None, "cpu", "logs"),
        PolicyKey("m", "float32", None, "cpu", "default", (("recent_tokens", 32),)),
    ]
    assert not any(map(find_policy, others))
    (tmp_path / "cache" / key.place).write_text('{"fitted": {"tiers": []')
    assert find_policy(key) is None


def test_keys_that_say_what_is_kept_are_measured_and_left_as_they_are(tmp_path):
    model = make_model(tmp_path)
    key = PolicyKey("literal", "float32", None, "cpu", "logs", (("keep_ratio", 0.2), ("quant_bits", 4)))
    fitted = fit_kept_policy(key, model, CONFIG, encode)
    assert fitted.tiers == (Tier(0.2, 4, 4),) and fitted.limit is None and fitted.holds and fitted.loss > 0


def test_no_preset_runs_below_its_promise(tmp_path, caplog):
    """What rounding costs grows from model to model: the bytes do too, and then there are none that do."""
    caplog.set_level(logging.INFO, "engine")
    ratios = []
    for output in (0.02, 1.0):
        model = make_model(tmp_path / str(output), output=output)
        policy = policy_of_preset("default", model, CONFIG, encode)
        meter = LossMeter(model, CONFIG, check_texts_of(TEXTS, encode, 1024))
        loss = meter.measure(policy, "kl")
        assert loss.value <= PROMISES["default"].limit
        ratios.append(loss.kv_ratio)
    assert ratios[0] < ratios[1]
    assert "default" in caplog.text and "of the bytes" in caplog.text
    with pytest.raises(EngineError, match=r"cannot keep its promise.*of at most 0\.003"):
        policy_of_preset("default", make_model(tmp_path / "sharp", sharpness=4.0), CONFIG, encode)


def test_a_folder_that_cannot_be_written_costs_time_only(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the folder's place")
    monkeypatch.setattr("engine.calibration.user_cache", lambda: tmp_path / "file")
    keep_file(PolicyKey("m", "float32", None, "cpu", "logs").place, lambda path: None)
    assert "cannot be stored" in caplog.text
