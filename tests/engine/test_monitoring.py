"""What the monitor says is what pool and page lists hold, and a long run's samples stay few and keep the peak."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import EngineConfig, EngineCore, Request
from engine.models import load_model
from engine.models.basis import ROTATED
from engine.monitoring import MAX_SAMPLES, Monitor
from engine.scheduler import StepPlan
from kvcache.config import KVCacheConfig, Tier
from kvcache.kernels.page_table import PageTable
from kvcache.pages.block_pool import pages_per_block
from kvcache.sequence.compressed import CompressedCache
from tests.engine.models.tiny_models import save_tiny_model
from tests.engine.test_llm import GREEDY, as_text, prompts, run

LONG = replace(GREEDY, max_new_tokens=70)  # the open pages fill and are compressed
LOSSY = KVCacheConfig(
    "sparse+quant", tiers=(Tier(0.3, 4, 4), Tier(0.3, 3, 2)), chunk_size=64, recent_tokens=32
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=1024)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


def requests(shared: int = 0) -> list[Request]:
    prefix = prompts((shared,))[0]
    rows = prompts((1, 64, 65, 500))
    return [Request(i, prefix + p, LONG, prefix_tokens=shared) for i, p in enumerate(rows)]


@pytest.mark.parametrize("cache", [KVCacheConfig(), LOSSY], ids=["none", "lossy"])
def test_samples_are_what_the_pool_held_after_each_step(model, cache):
    config = EngineConfig(60_000_000, cache=cache, max_sequences=3, step_tokens=100, prompt_lookup=False)
    llm = EngineCore(model, config, as_text)
    original, expected = llm.runner.execute, []

    def execute(plan):
        prefilling = sum(s.in_prefill for s in llm.scheduler.running)
        counts = (plan.num_tokens, prefilling, len(llm.scheduler.running) - prefilling)
        out = original(plan)
        if cache.compresses:
            blocks, caches = llm.cache.blocks, [s.cache for s in llm.scheduler.running]
            used = sum(c.own_bytes for c in caches)
            reserved = sum(c.store.num_reserved for c in caches) * blocks.block_bytes
            prefill_buffers = sum(c.prefill_buffer is not None for c in caches)
        else:
            used = reserved = sum(s.cache.own_bytes for s in llm.scheduler.running)
            prefill_buffers = 0
        expected.append((*counts, prefill_buffers, used, reserved))
        return out

    llm.runner.execute = execute
    run(llm, requests())
    samples, stats = llm.monitor.samples, llm.stats()
    assert (llm.monitor.lanes is not None) == cache.compresses
    fields = (
        "num_tokens",
        "num_prefills",
        "num_decodes",
        "num_prefill_buffers",
        "kv_used_bytes",
        "kv_reserved_bytes",
    )
    assert [tuple(getattr(sample, name) for name in fields) for sample in samples] == expected
    assert [sample.step for sample in samples] == list(range(1, stats.num_steps + 1))
    assert max(sample.kv_used_bytes for sample in samples) == stats.kv_peak_bytes
    seconds = sum(sample.step_s for sample in samples)
    assert stats.kv_mean_bytes == pytest.approx(sum(s.kv_used_bytes * s.step_s for s in samples) / seconds)
    assert seconds <= samples[-1].elapsed_s
    assert stats.kv_pool_bytes == llm.cache.num_blocks * llm.budget.layout.page_bytes
    assert (
        sum(s.num_tokens for s in samples) == stats.prompt_tokens + stats.completion_tokens - stats.num_rows
    )


@pytest.mark.parametrize("shared", [0, 130])
def test_lanes_keep_what_their_page_lists_hold(model, shared, monkeypatch):
    """Recomputed from the tables that kernels read, just before each row is freed."""
    llm = EngineCore(model, EngineConfig(60_000_000, cache=LOSSY, max_sequences=3), as_text)
    kept = torch.zeros(llm.budget.layout.num_lanes, dtype=torch.int64)
    by_format, num_bytes, seen = Counter(), Counter(), []
    free = CompressedCache.free

    def counted_free(cache):
        if cache.prefill_buffer is None:  # not the prefix
            kept.add_(PageTable.of(cache.store.pool.slab, [cache.page_lists]).tokens[0])
            seen.append(cache.num_tokens)
            pages = Counter()
            for page_format, addresses, counts in cache.page_lists:
                by_format[page_format] += int(counts.sum())
                pages[page_format] += int((counts > 0).sum())
                assert torch.equal(counts > 0, addresses >= 0)
            num_bytes["pages"] += sum(f.page_bytes * count for f, count in pages.items())
            num_bytes["rows"] += cache.kept_bytes
            if (
                not shared
            ):  # a row's bytes are blocks: besides its pages, the free ones and what no page fits into
                block_bytes, blocks = cache.store.pool.block_bytes, 0
                for page_format, addresses in cache.store._free.items():
                    count, rest = divmod(
                        pages[page_format] + len(addresses), pages_per_block(block_bytes, page_format)
                    )
                    assert not rest
                    blocks += count
                assert blocks * block_bytes == cache.kept_bytes
        free(cache)

    monkeypatch.setattr(CompressedCache, "free", counted_free)
    results = run(llm, requests(shared))
    usage = llm.monitor.lanes
    assert usage.tokens_seen == sum(seen) == sum(r.prompt_tokens + r.completion_tokens - 1 for r in results)
    assert torch.equal(usage.tokens_kept.flatten(), kept)
    assert len({*kept.tolist()}) > 1, "lanes keep different numbers of tokens"
    assert dict(zip(usage.formats, usage.tokens.sum((1, 2)).tolist(), strict=True)) == by_format
    assert int(usage.num_bytes.sum()) == num_bytes["pages"] <= num_bytes["rows"]
    assert num_bytes["rows"] == sum(r.kv_kept_bytes for r in results)
    bits = sum(f.bits_per_element * count for f, count in by_format.items()) / int(kept.sum())
    assert float((usage.bits_per_element * usage.tokens_kept).sum() / kept.sum()) == pytest.approx(bits)


@pytest.mark.parametrize("num_steps", [1, MAX_SAMPLES, MAX_SAMPLES + 1, 5 * MAX_SAMPLES])
def test_a_long_run_keeps_the_fullest_step_of_each_span(num_steps):
    chance = random.Random(7)
    cache = SimpleNamespace(
        num_prefill_buffers=0, num_blocks=100, num_available=40, used_bytes=0, peak_bytes=0
    )
    monitor = Monitor(cache, 10)
    held = []
    for _ in range(num_steps):
        cache.used_bytes = chance.randrange(10**9)
        cache.peak_bytes = max(cache.peak_bytes, cache.used_bytes)
        held.append(cache.used_bytes)
        monitor.note_step(StepPlan((), ()), 0, 0.5)
    samples = monitor.samples
    span = 1
    while num_steps > span * MAX_SAMPLES:
        span *= 2
    spans = [held[start : start + span] for start in range(0, num_steps, span)]
    assert [sample.kv_used_bytes for sample in samples] == [max(steps) for steps in spans]
    assert all(held[sample.step - 1] == sample.kv_used_bytes for sample in samples)
    assert len(samples) <= MAX_SAMPLES and monitor.num_steps == num_steps
    assert monitor.mean_used_bytes == pytest.approx(sum(held) / num_steps)
    assert samples[0].kv_reserved_bytes == 600


def test_a_peak_between_two_steps_is_not_lost():
    cache = SimpleNamespace(num_prefill_buffers=0, num_blocks=9, num_available=9, used_bytes=5, peak_bytes=5)
    monitor = Monitor(cache, 1)
    for cache.used_bytes, cache.peak_bytes in ((5, 5), (3, 8), (4, 8)):
        monitor.note_step(StepPlan((), ()), 0, 1.0)
    assert [sample.kv_used_bytes for sample in monitor.samples] == [5, 8, 4]
