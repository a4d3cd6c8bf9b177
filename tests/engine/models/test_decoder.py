"""The decoder's logits are those of transformers, for every architecture and rope scaling."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.errors import ModelError, UnsupportedModelError
from engine.kernels import reference as reference_kernels
from engine.kernels import registry
from engine.models import ModelConfig, load_model
from engine.models.basis import PLAIN, ROTATED, BasisTable, basis_for, keys_from_mask
from engine.models.decoder import kernels_of
from kvcache.config import KVCacheConfig
from kvcache.quantize.pages import rotation
from tests.engine.helpers import rows_are_alike
from tests.engine.models.tiny_models import holds_once, save_tiny_model, tiny_model

LLAMA3 = {
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
LONGROPE = {
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [2.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}


def dense_attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attend causally over the tokens of this call alone."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1).transpose(0, 1) for x in (k, v))
    return F.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True).transpose(0, 1)


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """Return a config change that sets the rope scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1000.0} | parameters}


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True, "head_dim": 32}),
        ("llama", rope("linear", factor=2.0)),
        ("llama", rope("llama3", **LLAMA3)),
        ("llama", rope("yarn", **YARN)),
        ("llama", rope("dynamic", factor=2.0)),
        ("llama", rope("longrope", **LONGROPE)),
        ("mistral", {"num_key_value_heads": 4}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {"attention_bias": True}),
        ("qwen3", {"num_key_value_heads": 1}),
    ],
    ids=str,
)
def test_logits_equal_those_of_transformers(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    reference = save_tiny_model(tmp_path, name, **changes)
    decoder = load_model(tmp_path, dtype=torch.float32)
    for num_tokens in (32, 7):  # the second call runs in the larger workspace of the first
        token_ids = torch.randint(0, 199, (num_tokens,), generator=torch.Generator().manual_seed(num_tokens))
        hidden = decoder.forward(token_ids, torch.arange(num_tokens), dense_attend)
        with torch.no_grad():
            expected = reference(token_ids[None]).logits[0]
        torch.testing.assert_close(decoder.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    assert holds_once(decoder, reference)


def test_positions_may_be_any_of_the_context(tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "llama", **rope("yarn", **YARN))
    positions = torch.tensor([3, 9, 40, 63])
    token_ids = torch.tensor([5, 6, 7, 8])
    hidden = load_model(tmp_path, dtype=torch.float32).forward(token_ids, positions, dense_attend)
    with torch.no_grad():
        mask = torch.ones(1, 1, 4, 4, dtype=torch.bool).tril()
        expected = reference.model(token_ids[None], position_ids=positions[None], attention_mask=mask)
    torch.testing.assert_close(hidden, expected.last_hidden_state[0], rtol=1e-4, atol=1e-4)


def test_bf16_is_close_to_float32(tmp_path: Path) -> None:
    reference = save_tiny_model(tmp_path, "qwen3")
    decoder = load_model(tmp_path, dtype=torch.bfloat16)
    hidden = decoder.forward(torch.arange(20), torch.arange(20), dense_attend)
    assert hidden.dtype == torch.bfloat16
    with torch.no_grad():
        expected = reference(torch.arange(20)[None]).logits[0]
    error = (decoder.logits(hidden) - expected).norm() / expected.norm()
    assert error < 0.02


@rows_are_alike
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("basis", [PLAIN, ROTATED])
def test_a_token_is_batch_invariant(
    tmp_path: Path, dtype: torch.dtype, basis: BasisTable, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as where torch has no units of its own for bfloat16
    monkeypatch.setattr(registry, "_torch_is_far_faster", lambda: False)
    save_tiny_model(tmp_path, "llama", vocab_size=203, attention_bias=True, mlp_bias=True, head_dim=32)
    decoder = load_model(tmp_path, dtype=dtype, basis=basis)
    ids = torch.arange(64)

    def logits(some: slice) -> Tensor:
        return decoder.logits(decoder.forward(ids[some], ids[some], lambda layer, q, k, v: q))

    together = logits(slice(None))
    for some in (slice(5, 6), slice(0, 2), slice(3, 11), slice(1, 33)):
        assert torch.equal(logits(some), together[some])


@pytest.mark.parametrize("is_tied", [True, False])
def test_bf16_weights_of_a_float32_model_are_kept_as_they_are(tmp_path: Path, is_tied: bool) -> None:
    model = tiny_model("llama", vocab_size=192, tie_word_embeddings=is_tied, mlp_bias=True)
    with torch.no_grad():
        expected = model(torch.arange(171, 191)[None]).logits[0]
    outs, sizes = [], []
    for part in ("nothing", "keys", "all"):  # the tiny model's weights are exact in bfloat16
        if part == "keys":
            model.model.layers[0].self_attn.k_proj.to(torch.bfloat16)
        elif part == "all":
            model.to(torch.bfloat16)
        model.save_pretrained(tmp_path / part)
        for basis in (PLAIN, ROTATED):
            decoder = load_model(tmp_path / part, dtype=torch.float32, basis=basis)
            sizes.append(decoder.weight_bytes)
            hidden = decoder.forward(torch.arange(171, 191), torch.arange(20), dense_attend)
            outs.append((hidden, decoder.logits(hidden)))
    for out, again in zip(outs[:2] * 2, outs[2:], strict=True):
        assert all(map(torch.equal, out, again))
    torch.testing.assert_close(outs[0][1], expected, rtol=1e-4, atol=1e-4)
    is_packed = kernels_of(decoder.config, decoder.device).float_panel()
    assert sizes[:2] == sizes[2:4] == [sizes[0]] * 2  # a stack of both is float32
    assert sizes[4] < 0.7 * sizes[0] if is_packed else sizes[4] == sizes[0]
    assert sizes[4] < sizes[5] < sizes[0] if is_packed else sizes[5] == sizes[0]  # rotated ones are float32


@pytest.mark.parametrize(
    ("name", "changes"),
    [("llama", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}), ("qwen3", {"head_dim": 48})],
    ids=str,
)
def test_rotated_heads_compute_the_same(tmp_path: Path, name: str, changes: dict[str, Any]) -> None:
    save_tiny_model(tmp_path, name, **changes)
    decoder = load_model(tmp_path, dtype=torch.float32)
    token_ids, seen = torch.arange(20), []

    def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        seen.append([x.clone() for x in (q, k, v)])
        return dense_attend(layer, q, k, v)

    turned = load_model(tmp_path, dtype=torch.float32, basis=ROTATED)
    config = decoder.config
    # a last head of each layer stays plain
    mixed = [[True] * (config.num_kv_heads - 1) + [False]] * config.num_layers
    models = (decoder, turned, turned.unrotated(), turned.with_keys(keys_from_mask(mixed)))
    close = partial(torch.testing.assert_close, rtol=1e-4, atol=1e-4)
    logits = [model.logits(model.forward(token_ids, token_ids, attend)) for model in models]
    for other in logits[1:]:
        close(other, logits[0])
    plain, rotated, unrotated, partly = (seen[i * config.num_layers] for i in range(4))
    for one, other in zip(plain, rotated, strict=True):
        close(other, one @ rotation(one.shape[2]))
    for all_plain, all_rotated, both in zip(plain[:2], rotated[:2], partly[:2], strict=True):
        last = both.shape[1] // config.num_kv_heads  # heads that share the last KV head
        close(both[:, -last:], all_plain[:, -last:])
        close(both[:, :-last], all_rotated[:, :-last])
    for one, other in zip(plain[:2], unrotated[:2], strict=True):
        close(other, one)
    assert decoder.unrotated() is decoder


def test_a_basis_table_holds_for_a_model() -> None:
    assert PLAIN.rotated_keys(2, 2) == [[False] * 2] * 2 and ROTATED.rotated_keys(1, 3) == [[True] * 3]
    mixed = [[True, False], [False, False]]
    assert BasisTable("rotated", keys_from_mask(mixed)).rotated_keys(2, 2) == mixed
    assert [basis.suits(KVCacheConfig.preset("default")) for basis in (PLAIN, ROTATED)] == [False, True]
    assert [basis.suits(KVCacheConfig()) for basis in (PLAIN, ROTATED)] == [True, True]
    assert basis_for(KVCacheConfig()) == PLAIN and basis_for(KVCacheConfig(), "int8") == ROTATED
    with pytest.raises(ValueError, match="rows of one length"):
        BasisTable("rotated", (("plain",), ("plain", "rotated")))
    with pytest.raises(ValueError, match="not turned"):
        BasisTable("turned")
    with pytest.raises(ValueError, match="2 layers of 2 KV heads does not fit a model of 3 layers"):
        BasisTable("rotated", keys_from_mask(mixed)).rotated_keys(3, 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "changes"), [("llama", {"attention_bias": True, "mlp_bias": True}), ("qwen3", {})], ids=str
)
def test_int8_weights_are_close_and_small(
    tmp_path: Path, name: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    reference = save_tiny_model(tmp_path, name, **changes)
    decoder = load_model(tmp_path, dtype=dtype, weight_quant="int8")
    token_ids = torch.arange(20)
    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    hidden = decoder.forward(token_ids, token_ids, dense_attend)
    assert (decoder.logits(hidden) - expected).norm() < 0.1 * expected.norm()
    assert decoder.weight_bytes < load_model(tmp_path, dtype=dtype).weight_bytes
    decoder._kernels = reference_kernels  # the same weights without a compiler
    again = decoder.forward(token_ids, token_ids, dense_attend)
    assert (again - hidden).float().norm() < 0.03 * hidden.float().norm()


def test_context_ends_where_the_frequencies_would_change(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "llama", **rope("longrope", **LONGROPE))
    assert ModelConfig.from_pretrained(tmp_path).max_context == 32
    with pytest.raises(ModelError, match="max_context is 33"):
        ModelConfig.from_pretrained(tmp_path, max_context=33)


def test_sliding_window_is_refused_beyond_the_window(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "mistral", sliding_window=24)
    with pytest.raises(UnsupportedModelError, match=r"window 24.*set model.max_context to 24"):
        ModelConfig.from_pretrained(tmp_path)
    assert ModelConfig.from_pretrained(tmp_path, max_context=24).max_context == 24


def test_qwen_without_sliding_layers_is_not_refused(tmp_path: Path) -> None:
    save_tiny_model(tmp_path, "qwen2", sliding_window=8, use_sliding_window=False)
    assert ModelConfig.from_pretrained(tmp_path).max_context == 64
