"""Models with planted trouble: the engine computes what transformers does, and what a cache loses on them shows."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine import EngineConfig, Request
from engine.cache_loss import CheckText, LossMeter
from engine.calibration import read_whole
from engine.models import Decoder, load_model
from engine.models.basis import PLAIN, ROTATED
from engine.promise import fit_policy
from engine.teacher_forcing import answer
from kvcache.config import KVCacheConfig
from kvcache.promises import PROMISES
from tests.engine.helpers import GREEDY, make_llm
from tests.engine.planted import CONTEXT, HEAD_DIM, PLANTED, far_loss, loss, planted_tokens

KEY_TROUBLE = ("key biases", "key channel", "qk norms")
EIGHT, FOUR = (KVCacheConfig("quant", quant_bits=bits) for bits in (8, 4))


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    """Return the directory of a planted model, made once."""
    made = {}

    def make(name):
        if name not in made:
            made[name] = PLANTED[name](tmp_path_factory.mktemp("planted"))
        return made[name]

    return make


def load(path) -> Decoder:
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.mark.parametrize("name", PLANTED)
def test_a_full_cache_generates_what_transformers_does_in_both_bases(planted, name):
    prompt = planted_tokens(200)
    reference = AutoModelForCausalLM.from_pretrained(planted(name), dtype=torch.float32)
    for basis in (PLAIN, ROTATED):
        model = load_model(planted(name), dtype=torch.float32, basis=basis)
        result, log_probs = answer(make_llm(model, KVCacheConfig()), Request(0, prompt, GREEDY))
        with torch.no_grad():
            logits = reference(torch.tensor([prompt + result.token_ids[:-1]])).logits[0, len(prompt) - 1 :]
        assert result.token_ids == logits.argmax(-1).tolist()
        torch.testing.assert_close(log_probs, logits.log_softmax(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", PLANTED)
def test_the_next_token_is_no_guess_and_hangs_on_distant_tokens(planted, name):
    model = load(planted(name))
    kl, entropy = far_loss(model)
    assert kl > 0.12
    assert entropy < math.log(model.config.vocab_size) / 2


@pytest.mark.parametrize("name", PLANTED)
def test_fewer_bits_lose_more(planted, name):
    model = load(planted(name))
    assert loss(model, KVCacheConfig("sparse")) < 1e-6 < loss(model, EIGHT) < 1e-4 < loss(model, FOUR) < 0.02


@pytest.mark.parametrize("name", KEY_TROUBLE)
def test_large_keys_in_the_rotated_basis_ruin_a_model(planted, name, monkeypatch):
    model = load(planted(name))
    by_lane = loss(model, FOUR)
    monkeypatch.setattr("engine.engine_core.in_basis_of", lambda policy, model, token_ids: model)
    assert loss(model, FOUR) > 20 * by_lane


@pytest.mark.parametrize("name", KEY_TROUBLE)
def test_few_key_channels_are_far_larger_than_the_others(planted, name):
    channels = keys_of(planted(name)).square().mean(2).sqrt()[:, -1]  # [L, D] of the last lane
    assert (channels.amax(-1) > 40 * channels.quantile(0.2, -1)).all()


def test_the_massive_first_token_is_a_sink(planted):
    model = AutoModelForCausalLM.from_pretrained(planted("massive first token"), attn_implementation="eager")
    with torch.no_grad():
        out = model(torch.tensor([planted_tokens(300)]), output_hidden_states=True, output_attentions=True)
    for layer, weights in enumerate(out.attentions):
        hidden = out.hidden_states[layer][0].abs()
        assert hidden[0].max() > 300 * hidden[1:].median()
        assert weights[0, :, 100:, 0].mean() > 0.5
    lengths = keys_of(planted("massive first token")).norm(dim=-1)  # [L, KVH, N]
    assert (lengths[..., 0] > 3 * lengths[..., 1:].mean(-1)).all()


def test_heads_are_as_their_names_say(planted):
    configs = {name: load(planted(name)).config for name in PLANTED}
    assert {name: c.num_kv_heads for name, c in configs.items()} == dict.fromkeys(PLANTED, 2) | {
        "one kv head": 1
    }
    sizes = {f"heads of {size}": size for size in (64, 80, 128, 256)}
    assert {name: c.head_dim for name, c in configs.items()} == dict.fromkeys(PLANTED, HEAD_DIM) | sizes


def keys_of(path) -> torch.Tensor:  # [L, KVH, N, D]
    """Return the keys of a text, in the plain basis."""
    found = {}

    def see(layer, chunk, q, keys, largest):
        found[layer] = keys.clone()

    read_whole(load(path).unrotated(), planted_tokens(CONTEXT), see)
    return torch.stack([found[layer] for layer in sorted(found)])


@pytest.mark.parametrize("name", PLANTED)
def test_default_keeps_its_promise_at_half_the_bytes_or_nothing_does(planted, name):
    tokens = planted_tokens(1960, seed=9)
    text = CheckText("random", tuple(tokens[:1900]), tuple(tokens[1900:]), (), ())
    calibration = tuple(planted_tokens(1000, seed=6))
    meter = LossMeter(
        load(planted(name)), EngineConfig(400_000_000, calibration_token_ids=calibration), [text]
    )
    promise = PROMISES["default"]
    fitted = fit_policy(
        promise,
        list(promise.policies("default")),
        lambda policy, limit: meter.measure(policy, "kl", limit),
    )
    if fitted.holds:
        assert fitted.kv_ratio <= 0.5
    else:
        assert meter.measure(EIGHT, "kl").value > promise.limit
