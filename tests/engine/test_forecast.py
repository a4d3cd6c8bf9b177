"""What a forecast says is held at once is what a run holds: a policy's pages come as it goes, not all at admission."""

import random
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.forecast import PlannedRow, forecast
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.config import KVCacheConfig
from kvcache.sizes.expected import expected_pages
from tests.engine.helpers import as_text
from tests.engine.models.tiny_models import save_tiny_model

NEW_TOKENS = 70  # an open page fills and is compressed
LENGTHS = (1500, 1250, 1100, 700, 400)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    shape = {"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
    save_tiny_model(path, "llama", max_position_embeddings=4096, **shape)
    return load_model(path, dtype=torch.bfloat16, basis=ROTATED)


@pytest.mark.parametrize(
    ("preset", "shared"), [("none", 100), ("dialogue", 0), ("default", 640), ("aggressive", 640)]
)
def test_the_peak_is_known_before(model, preset, shared):
    cache = KVCacheConfig.preset(preset)
    config = EngineConfig(400_000_000, cache=cache, step_tokens=512, max_sequences=4)
    llm = EngineCore(model, config, as_text)
    layout, chance = llm.budget.layout, random.Random(5)
    prefix = [chance.randrange(3, 100) for _ in range(shared)]
    prompts = [prefix + [chance.randrange(3, 100) for _ in range(n)] for n in LENGTHS]
    pages = [layout.sequence_pages(len(p) + NEW_TOKENS, shared, NEW_TOKENS) for p in prompts]
    # so little that not all rows are admitted at once
    llm = EngineCore(
        model, replace(config, pool_pages=sum(pages[:3]) + layout.sequence_pages(shared)), as_text
    )
    sampling = SamplingParams(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    results = list(llm.generate(Request(i, p, sampling, shared) for i, p in enumerate(prompts)))
    assert all(result.finish_reason == "length" for result in results)

    def after(*args, **kwargs):
        return partial(expected_pages, layout, *args, **kwargs) if cache.compresses else None

    rows = [
        PlannedRow(len(p), NEW_TOKENS, count, shared, after(len(p), shared_tokens=shared))
        for p, count in zip(prompts, pages, strict=True)
    ]
    beside = PlannedRow(shared, 0, layout.sequence_pages(shared), 0, after(None)) if shared else None
    found = forecast(rows, llm.budget, prefix=beside)
    measured = llm.stats().kv_peak_bytes / layout.page_bytes
    reserved = max(sample.kv_reserved_bytes for sample in llm.monitor.samples) / layout.page_bytes
    if cache.compresses:
        assert found.peak_pages == pytest.approx(measured, rel=0.05) and measured < 0.95 * reserved
    else:
        assert found.peak_pages == measured == reserved
