"""A bfloat16 model runs on CPU end to end: its queries, keys and values reach the kernels as they are."""

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.models import load_model
from engine.models.basis import basis_for
from kvcache.config import KVCacheConfig, Tier
from kvcache.kernels.cpu import ops
from tests.engine.helpers import as_text, prompts, run
from tests.engine.models.tiny_models import save_tiny_model
from tests.kvcache.kernel_builds import built, needs_compiler

CACHES = {
    "whole pages": KVCacheConfig(),
    "prefill buffer and pages": KVCacheConfig("sparse", chunk_size=64, recent_tokens=32),
    "8-bit pages": KVCacheConfig("sparse+quant", tiers=(Tier(1, 8, 8),), chunk_size=64, recent_tokens=32),
}


def last_logits(path, dtype: torch.dtype, cache: KVCacheConfig, step_tokens: int = 1024) -> torch.Tensor:
    """Return the logits `[rows, V]` that rows choose their first token by."""
    model = load_model(path, dtype=dtype, basis=basis_for(cache))
    llm = EngineCore(model, EngineConfig(60_000_000, step_tokens=step_tokens, cache=cache), as_text)
    seen, logits = [], llm.model.logits

    def recorded(hidden):
        seen.append(logits(hidden))
        return seen[-1]

    llm.model.logits = recorded
    question = prompts((9,))[0]
    sampling = SamplingParams(max_new_tokens=1)
    for i, prompt in enumerate(prompts((1, 65, 400))):
        run(llm, [Request(i, prompt, sampling, probe_token_ids=question)])
    return torch.cat(seen)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=1024)
    return path


@needs_compiler
@pytest.mark.parametrize("cache", CACHES.values(), ids=CACHES)
def test_a_bfloat16_model_gives_the_float32_models_logits(path, cache, monkeypatch):
    expected = last_logits(path, torch.float32, cache)
    dtypes = set()

    def spied(real):
        def call(q, *args, **kwargs):
            out = real(q, *args, **kwargs)
            dtypes.update((q.dtype, out[0].dtype))
            return out

        return call

    for name in ("prefill_attention", "prefill_attention_pool"):
        monkeypatch.setattr(ops, name, spied(getattr(ops, name)))
    with built("pairs"):
        actual = last_logits(path, torch.bfloat16, cache)
    # All of the model rounds to bfloat16: with attention in float32 the error is the same, 0.017 to 0.023.
    assert float((actual - expected).norm() / expected.norm()) < 0.04
    assert dtypes == {torch.bfloat16}


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=needs_compiler), False])
def test_a_float32_models_cache_may_be_bfloat16(path, compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("engine.attention.cpu.compiled_kernels", lambda *_: None)
    half = KVCacheConfig(dtype="bfloat16")
    expected, got = (last_logits(path, torch.float32, cache, 48) for cache in (KVCacheConfig(), half))
    assert 0 < (got - expected).norm() < 0.02 * expected.norm()

    model, sampling = (
        load_model(path, dtype=torch.float32),
        SamplingParams(max_new_tokens=40, ignore_eos=True),
    )
    requests = [Request(i, prompt, sampling) for i, prompt in enumerate(prompts((20, 65, 300)))]
    engines = [
        EngineCore(model, EngineConfig(60_000_000, step_tokens=step, pool_pages=100, cache=cache), as_text)
        for step, cache in ((1024, KVCacheConfig()), (1024, half), (48, half))
    ]
    answers = [[result.token_ids for result in run(llm, requests)] for llm in engines]
    whole, *halves = (llm.stats().kv_allocated_bytes for llm in engines)
    assert halves == [whole / 2] * 2
    if compiled:  # torch alone attends a chunk's own tokens before they are rounded
        assert answers[1] == answers[2]
