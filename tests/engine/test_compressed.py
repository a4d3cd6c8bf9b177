"""The compressed cache in the engine: the full cache's tokens when it keeps everything, the same kept set in any
batch, memory that is really given back, and no byte read that was not written.
"""

from dataclasses import replace

import pytest
import torch

from engine import EngineConfig, EngineCore, Request
from engine.errors import BudgetError
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.compress import compressor as compression
from kvcache.config import KVCacheConfig, Tier
from tests.engine.helpers import GREEDY, LOSSY, as_text, make_llm, prompts, rows_are_alike, run, tokens
from tests.engine.models.tiny_models import save_tiny_model, tiny_model

LONG = replace(GREEDY, max_new_tokens=150)  # the open pages fill and are compressed twice
LENGTHS = (1, 63, 64, 65, 300, 700)
# A tie between two codes may be broken otherwise in another batch, and with compensation the whole token with it.
PLAIN = replace(LOSSY, compensate=False)
KVZIP = KVCacheConfig(
    "sparse", keep_ratio=0.3, scorer="kvzip", chunk_size=64, recent_tokens=32, tail_tokens=0
)
REPEAT = (7, 8, 9)  # stands for the words that ask for a repetition


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=1024)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.mark.parametrize(
    ("cache", "shared", "changes"),
    [
        (KVCacheConfig("sparse"), 0, {}),
        (KVCacheConfig("sparse", streaming=False), 0, {"max_sequences": 3}),
        (KVCacheConfig("sparse", chunk_size=32, recent_tokens=32, delay=2, warmup_tokens=4), 130, {}),
        (KVCacheConfig("sparse", delay=0, chunk_size=64, budget="uniform"), 64, {"step_tokens": 50}),
        (KVCacheConfig("sparse", tiers=(Tier(0.5, 16, 16),) * 2, scorer="kvzip", chunk_size=64), 130, {}),
        (KVCacheConfig("sparse", chunk_size=64, overlap=True), 130, {}),
    ],
)
def test_what_keeps_everything_whole_gives_the_full_caches_tokens(model, cache, shared, changes):
    prefix = prompts((shared,))[0]
    question = prompts((9,))[0]
    requests = [
        Request(i, prefix + p, LONG, prefix_tokens=shared, probe_token_ids=question)
        for i, p in enumerate(prompts(LENGTHS))
    ]
    full = make_llm(model, KVCacheConfig())
    assert tokens(make_llm(model, cache, **changes), requests) == tokens(full, requests)


@rows_are_alike
@pytest.mark.parametrize(
    ("cache", "changes"),
    [
        (PLAIN, {}),
        (replace(PLAIN, tail_tokens=0), {}),
        # which queries attend in the last layer is a matter of position, not of steps or prefixes
        (replace(PLAIN, tail_tokens=0, chunk_size=256), {}),
        (replace(PLAIN, overlap=True), {}),
        (replace(PLAIN, budget="global"), {}),
        (replace(PLAIN, scorer="kvzip", overlap=True), {}),
        (replace(PLAIN, scorer="kvzip", streaming=False), {}),
    ],
    ids=[
        "attention_max",
        "no-tail",
        "long-chunks",
        "overlapped",
        "global",
        "kvzip",
        "kvzip-at-the-end",
    ],
)
def test_a_row_keeps_the_same_alone_in_a_batch_and_behind_a_shared_prefix(model, cache, changes):
    changes = {**changes, "repeat_token_ids": REPEAT}
    prefix = prompts((130,))[0]
    sampling = replace(GREEDY, max_new_tokens=100)  # a page is closed in decode
    requests = [Request(i, prefix + p, sampling) for i, p in enumerate(prompts(LENGTHS))]
    together = tokens(make_llm(model, cache, **changes), requests)
    alone = [tokens(make_llm(model, cache, step_tokens=48, **changes), [request])[0] for request in requests]
    shared = [replace(request, prefix_tokens=130) for request in requests]
    behind = tokens(make_llm(model, cache, max_sequences=4, **changes), shared)
    assert together == alone
    assert behind == [tokens(make_llm(model, cache, **changes), [request])[0] for request in shared]
    if not cache.tail_tokens:  # a prefix is scored before it is known how much of a row its tail will be
        assert behind == together


def pages_after_prefill(llm: EngineCore, requests: list[Request]) -> dict[int, torch.Tensor]:
    """Return the bytes of each request's quantized pages when its prompt ends."""
    found, original = {}, llm.runner.execute

    def execute(plan):
        out = original(plan)
        for sequence in llm.scheduler.running:
            cache = sequence.cache
            if cache and not cache.prefill_buffer and sequence.request.request_id not in found:
                pages = [
                    cache.store.pool.read(tier.addresses[tier.addresses >= 0], tier.format.page_bytes)
                    for tier in cache.tiers
                ]
                found[sequence.request.request_id] = torch.cat([part.flatten() for part in pages])
        return out

    llm.runner.execute = execute
    run(llm, requests)
    return found


@rows_are_alike
def test_compensated_pages_follow_from_the_prompt_alone(model):
    prefix = prompts((130,))[0]
    lossy = replace(LOSSY, tail_tokens=0)
    two = replace(GREEDY, max_new_tokens=2)
    requests = [Request(i, prefix + p, two) for i, p in enumerate(prompts((300, 700)))]
    together = pages_after_prefill(make_llm(model, lossy), requests)
    alone = {
        request.request_id: pages_after_prefill(make_llm(model, lossy, step_tokens=48), [request])[
            request.request_id
        ]
        for request in requests
    }
    shared = [replace(request, prefix_tokens=130) for request in requests]
    shared = pages_after_prefill(make_llm(model, lossy, max_sequences=4), shared)
    plain = pages_after_prefill(make_llm(model, replace(lossy, compensate=False)), requests)
    assert sum(len(pages) for pages in together.values()) > 30_000
    for number, pages in together.items():
        for other in (alone[number], shared[number]):
            assert pages.shape == other.shape
            assert float((pages != other).float().mean()) < 0.005  # ties
        assert pages.shape == plain[number].shape and float((pages != plain[number]).float().mean()) > 0.05


def test_memory_is_given_back_and_reported_as_it_is(model):
    row = prompts((900,))[0]
    held = {}
    for name, cache in {"full": KVCacheConfig("sparse"), "lossy": LOSSY}.items():
        llm = make_llm(model, cache)
        used = []
        results = llm.generate([Request(0, row, replace(GREEDY, max_new_tokens=2))])
        original = llm.runner.execute

        def execute(plan, original=original, llm=llm, used=used):
            out = original(plan)
            cache = llm.scheduler.running[0].cache
            assert llm.cache.blocks.used_bytes == cache.own_bytes == cache.kept_bytes
            used.append(cache.own_bytes)
            return out

        llm.runner.execute = execute
        (result,) = results
        assert result.kv_kept_bytes == used[-1]
        held[name] = used[-1]
        assert llm.cache.used_bytes == 0 and llm.cache.allocated_bytes > 0
    assert held["lossy"] < 0.35 * held["full"]


def test_many_more_rows_are_in_decode_at_once_in_the_same_bytes(model):
    rows = [Request(i, p, replace(GREEDY, max_new_tokens=100)) for i, p in enumerate(prompts((900,) * 20))]
    most = {}
    for name, cache in {"none": KVCacheConfig(), "aggressive": KVCacheConfig.preset("aggressive")}.items():
        config = EngineConfig(60_000_000, cache=cache, max_sequences=64)
        page_bytes = EngineCore(model, config, as_text).budget.layout.page_bytes
        llm = EngineCore(model, replace(config, pool_pages=3_000_000 // page_bytes), as_text)
        counts = []
        original = llm.runner.execute

        def execute(plan, original=original, counts=counts):
            counts.append(len(plan.decodes))
            return original(plan)

        llm.runner.execute = execute
        assert len(list(llm.generate(rows))) == 20
        most[name] = max(counts)
    assert most["aggressive"] >= 3 * most["none"], most


@pytest.mark.parametrize("cache", [KVCacheConfig(), KVCacheConfig("sparse", chunk_size=64)])
def test_continuation_logits_are_those_of_the_run_and_leave_nothing(model, cache):
    row = prompts((400,))[0]
    llm = make_llm(model, cache)
    (expected,) = run(llm, [Request(0, row, replace(GREEDY, max_new_tokens=20))])
    seen = []
    original = llm.runner.execute

    def execute(plan):
        ready, logits = original(plan)
        if ready and not seen:
            seen.append(llm.runner.continuation_logits(ready[0], expected.token_ids[:-1]).argmax(-1).tolist())
        return ready, logits

    llm.runner.execute = execute
    (again,) = run(llm, [Request(0, row, replace(GREEDY, max_new_tokens=20))])
    assert seen == [expected.token_ids[1:]]
    assert again.token_ids == expected.token_ids


@pytest.mark.parametrize(
    ("changes", "length", "scored"),
    [
        ({}, 150, (16, 64)),  # its first chunk, scored when the second has been read
        ({"streaming": False}, 300, (16, 268)),
        ({"streaming": False}, 1000, (16, 968)),  # 24 positions are left: the last ones are used twice
    ],
)
def test_kvzip_scores_by_what_a_repetition_attends_to(model, monkeypatch, changes, length, scored):
    row = prompts((length,))[0]
    seen = []

    def assign(scores, *args, assign=compression.assign_tiers):
        seen.append(scores.clone())
        return assign(scores, *args)

    monkeypatch.setattr(compression, "assign_tiers", assign)
    llm = make_llm(model, replace(KVZIP, **changes), repeat_token_ids=REPEAT)
    run(llm, [Request(0, row, replace(GREEDY, max_new_tokens=1))])

    read = row if changes else row[:128]
    plain = tiny_model("llama", max_position_embeddings=1024)
    plain.set_attn_implementation("eager")
    expected = torch.zeros(2, 2, len(read))
    end = length - 32 if changes else 64
    for start in range(0, end, 64):
        repeated = [*REPEAT, *row[start : min(start + 64, end)]]
        first = min(len(read), 1024 - len(repeated))
        positions = [*range(len(read)), *range(first, first + len(repeated))]
        with torch.no_grad():
            out = plain(
                torch.tensor([[*read, *repeated]]),
                position_ids=torch.tensor([positions]),
                attention_mask=torch.ones(1, 1, len(positions), len(positions)).tril().log(),
                output_attentions=True,
            )
        for layer, weights in enumerate(out.attentions):
            peaks = weights[0, :, len(read) :, : len(read)].amax(1)  # [H, N]
            expected[layer] = expected[layer].maximum(peaks.unflatten(0, (2, 2)).amax(1))
    torch.testing.assert_close(seen[0], expected[:, :, slice(*scored)], rtol=1e-3, atol=1e-5)


def test_a_repetition_is_a_pass_of_its_own_that_the_budget_has_room_for(model, monkeypatch):
    small = {"max_sequences": 8, "repeat_token_ids": REPEAT}
    llm = make_llm(model, KVZIP, step_tokens=48, **small)
    sizes = []

    def forward(token_ids, *args, original=model.forward):
        sizes.append(len(token_ids))
        return original(token_ids, *args)

    monkeypatch.setattr(model, "forward", forward)
    run(llm, [Request(i, p, GREEDY) for i, p in enumerate(prompts((300, 90)))])
    assert max(sizes) == 64 + len(REPEAT)
    plain = make_llm(model, replace(KVZIP, scorer="attention_max"), step_tokens=max(sizes), **small)
    assert llm.budget.workspace_bytes == plain.budget.workspace_bytes


@rows_are_alike
@pytest.mark.parametrize("scorer", ["snapkv", "mix", "expected_attention", "h2o"])
def test_a_scorer_that_sees_attention_sees_whole_chunks_in_any_batch(model, scorer):
    cache = replace(PLAIN, scorer=scorer)
    requests = [Request(i, p, GREEDY) for i, p in enumerate(prompts((700, 333, 80)))]
    together = make_llm(model, cache, step_tokens=70)
    alone = [tokens(make_llm(model, cache), [request])[0] for request in requests]
    assert tokens(together, requests) == alone


def test_a_scorer_that_needs_whole_chunks_is_refused_a_smaller_step(model):
    with pytest.raises(
        BudgetError, match="has 48; increase memory_budget_bytes and step_tokens or decrease cache.chunk_size"
    ):
        make_llm(model, replace(LOSSY, scorer="snapkv"), step_tokens=48)


def test_rows_with_prefixes_of_their_own_fit_a_tight_pool(model):
    cache = replace(LOSSY, tiers=(Tier(0.2, 4, 4),), warmup_tokens=200)
    layout = make_llm(model, cache).budget.layout
    pages = 2 * layout.sequence_pages(700 + 60, 300, 60) + layout.sequence_pages(300)
    llm = make_llm(model, cache, pool_pages=pages)
    requests = []
    for number, prompt in enumerate(prompts((700, 701, 702, 703))):
        requests.append(Request(number, prompt, replace(GREEDY, max_new_tokens=60), prefix_tokens=300))
    execute = llm.runner.execute

    def watched(plan):
        out = execute(plan)
        assert llm.cache.blocks.num_used <= llm.cache.blocks.num_reserved
        return out

    llm.runner.execute = watched
    assert [len(generated) for generated in tokens(llm, requests)] == [60] * 4


@pytest.mark.parametrize(
    ("shape", "cache", "reason"),
    [
        ({"head_dim": 24}, LOSSY, "multiple of 16, not 24"),
        (
            {},
            replace(LOSSY, budget="layered", layer_budget=(1.0, 2.0, 1.0)),
            "3 weights, but the model 2 layers",
        ),
    ],
)
def test_a_policy_that_does_not_suit_the_model_is_refused(tmp_path, shape, cache, reason):
    save_tiny_model(tmp_path, "llama", **shape)
    with pytest.raises(ValueError, match=reason):
        make_llm(load_model(tmp_path, dtype=torch.float32, basis=ROTATED), cache)
