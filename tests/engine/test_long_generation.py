"""Generations much longer than the open pages: where tokens are dropped, memory stays what it was."""

from dataclasses import replace

import pytest
import torch

from engine import EngineCore, Request
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.config import KVCacheConfig, Tier
from kvcache.kernels.page_table import LanePages
from kvcache.sequence.compressed import ATTENDED_FACTOR
from tests.engine.helpers import GREEDY, make_llm, prompts, rows_are_alike, run, tokens
from tests.engine.models.tiny_models import save_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned")

QUANTIZED = KVCacheConfig("sparse+quant", keep_ratio=0.3, quant_bits=4, chunk_size=64, recent_tokens=32)
WHOLE = KVCacheConfig("sparse", keep_ratio=0.3, chunk_size=64, recent_tokens=32)
TIERED = replace(QUANTIZED, tiers=(Tier(0.2, 4, 4), Tier(0.2, 3, 2)))


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=4096)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


def after_each_step(llm: EngineCore, look) -> None:
    """Call `look(plan)` after every step, before any row ends."""
    execute = llm.runner.execute

    def watched(plan):
        out = execute(plan)
        look(plan)
        return out

    llm.runner.execute = watched


def pages(cache) -> list[int]:
    """Return the pages of all lanes of each tier."""
    return [int((tier.addresses >= 0).sum()) for tier in cache.tiers]


@pytest.mark.parametrize(("policy", "count"), [(QUANTIZED, 2000), (WHOLE, 600)])
def test_a_long_generation_holds_a_constant_number_of_blocks(model, policy, count):
    llm = make_llm(model, policy)
    request = Request(0, prompts((700,))[0], replace(GREEDY, max_new_tokens=count))
    held = []

    def look(plan):
        if plan.decodes:
            held.append((llm.cache.blocks.num_used, pages(plan.decodes[0].cache)))

    after_each_step(llm, look)
    (result,) = run(llm, [request])
    assert result.finish_reason == "length" and result.completion_tokens == count
    first, later = held[0], held[300:]
    assert all(blocks == later[0][0] for blocks, _ in later)
    lanes = llm.budget.layout.num_lanes
    most = 4 * lanes if policy is WHOLE else lanes  # 64 tokens for each lane that had none
    assert all(now <= before + most for now, before in zip(later[-1][1], first[1], strict=True))
    assert all(now == later[0][1] for _, now in later)


@rows_are_alike
@pytest.mark.parametrize("policy", [TIERED, WHOLE])
def test_a_row_makes_the_same_room_alone_and_in_a_batch(model, policy):
    requests = [
        Request(i, p, replace(GREEDY, max_new_tokens=200)) for i, p in enumerate(prompts((60, 300, 700)))
    ]
    kept = {}

    def lengths_of(llm, name):
        def look(plan):
            for sequence in plan.decodes:
                key = name, sequence.request.request_id
                kept[key] = [part.lengths.tolist() for part in sequence.cache.lists]
                joined, fresh = (
                    sequence.cache._older.of(sequence.cache.lists[:-1]),
                    LanePages.of(sequence.cache.page_lists[:-1]),
                )
                assert joined.formats == fresh.formats and torch.equal(joined.addresses, fresh.addresses)
                assert torch.equal(joined.counts, fresh.counts) and torch.equal(joined.tokens, fresh.tokens)

        return look

    together = make_llm(model, policy)
    after_each_step(together, lengths_of(together, "together"))
    expected = tokens(together, requests)
    for request, token_ids in zip(requests, expected, strict=True):
        alone = make_llm(model, policy, step_tokens=48)
        after_each_step(alone, lengths_of(alone, "alone"))
        assert tokens(alone, [request]) == [token_ids]
        assert kept["alone", request.request_id] == kept["together", request.request_id]


def test_what_keeps_every_token_keeps_it_in_decode_too(model):
    policy = replace(QUANTIZED, tiers=(Tier(0.3, 4, 4), Tier(0.7, 3, 2)))
    llm = make_llm(model, policy)
    held = []

    def look(plan):
        for sequence in plan.decodes:
            counts = sum(part.lengths for part in sequence.cache.lists)
            held.append(counts.sum() == sequence.cache.num_tokens * len(counts))

    after_each_step(llm, look)
    run(llm, [Request(0, prompts((300,))[0], replace(GREEDY, max_new_tokens=400))])
    assert len(held) == 399 and all(held)


def test_a_page_is_attended_when_one_of_its_tokens_is(model, monkeypatch):
    llm = make_llm(model, TIERED)
    kernels, layers, checked = llm.cache.attention._kernels, [], []
    attention = kernels.decode_attention

    def recorded(q, table, **options):
        out = attention(q, table, **options)
        layers.append((table, iter(out[2].tolist())))
        return out

    def check(plan):
        caches = [sequence.cache for sequence in plan.decodes]
        # entry by entry, as the kernel walks them
        for layer, (lanes, slots) in enumerate(layers):
            num_heads = lanes.first.shape[1]
            for sequence, cache in enumerate(caches):
                for head in range(num_heads):
                    lane = layer * num_heads + head
                    first = int(lanes.first[sequence, head])
                    entries = lanes.counts[first : first + int(lanes.num_pages[sequence, head])].tolist()
                    received = [max([next(slots) for _ in range(n)], default=0) for n in entries]
                    attended = [ATTENDED_FACTOR / sum(entries) <= most for most in received]
                    start = cache.sinks.addresses.shape[1]
                    for tier in cache.tiers:
                        idle = tier.idle[lane].tolist()
                        held = [n > 0 for n in tier.counts[lane].tolist()]
                        seen = attended[start : start + len(idle)]
                        checked.extend((i == 0) == s for i, s, h in zip(idle, seen, held, strict=True) if h)
                        start += len(idle)
        layers.clear()

    monkeypatch.setattr(kernels, "decode_attention", recorded)
    after_each_step(llm, check)
    run(llm, [Request(i, p, GREEDY) for i, p in enumerate(prompts((80, 700)))])
    assert len(checked) > 100 and all(checked)
