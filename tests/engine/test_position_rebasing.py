"""Prompts beyond the context: positions within it, keys where these say, and no more memory than a full context."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine import Request
from engine.models import load_model
from engine.models.basis import ROTATED
from engine.position_rebasing import StreamPositions
from engine.teacher_forcing import reading
from kvcache.config import KVCacheConfig, Tier
from tests.engine.helpers import GREEDY, make_llm, prompts, rows_are_alike, tokens
from tests.engine.models.tiny_models import save_tiny_model

CONTEXT = 512
WHOLE = KVCacheConfig(
    "sparse", keep_ratio=0.5, chunk_size=32, recent_tokens=32, warmup_tokens=40, tail_tokens=16
)
LOSSY = KVCacheConfig(
    "sparse+quant",
    tiers=(Tier(0.3, 4, 4), Tier(0.7, 3, 2)),
    chunk_size=32,
    recent_tokens=32,
    compensate=False,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=CONTEXT)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.mark.parametrize("num_tokens", [300, 301, 1000, 5000, 123_457])
def test_positions_keep_order_and_stay_within(num_tokens):
    positions = StreamPositions(num_tokens, 16, 300)
    found = [positions.of(index) for index in range(num_tokens + 1)]
    assert found[:17] == list(range(17)) and found[-1] == 300
    assert all(0 <= b - a <= 1 for a, b in zip(found, found[1:], strict=False))


def test_moved_keys_are_those_of_another_position(model):
    tokens = torch.tensor([5, 6])
    before, after = (layer_0_keys(model, tokens, positions) for positions in ([100, 400], [350, 1]))
    torch.testing.assert_close(model.move_keys(0, before, torch.tensor([250, -399])), after)


def layer_0_keys(model, token_ids: Sequence[int], positions: list[int]) -> torch.Tensor:
    """Return the first layer's keys `[KVH, n, D]`, which depend on token and position alone."""
    found = []

    def attend(layer, q, k, v):
        if layer == 0:
            found.append(k.clone())
        return torch.zeros_like(q)

    for start in range(0, len(token_ids), 256):
        span = slice(start, start + 256)
        model.forward(torch.as_tensor(token_ids[span]), torch.tensor(positions[span]), attend)
    return torch.cat(found).transpose(0, 1)


def test_every_key_lies_where_its_position_says(model):
    [prompt] = prompts((3000,))
    llm = make_llm(model, WHOLE, step_tokens=64)
    request = Request(0, prompt, GREEDY, streams=True)
    left = CONTEXT - 64 - GREEDY.max_new_tokens
    positions = StreamPositions(3000, 40, left)
    with reading(llm, request):
        [sequence] = llm.scheduler.running
        cache = sequence.cache
        first = 3000 // 32 * 32 - 32  # of the last prefill buffer
        expected = [positions.of(i) if i < first else positions.of(first) + i - first for i in range(3000)]
        assert sequence.position == expected[-1] + 1 <= CONTEXT
        keys = layer_0_keys(model, prompt, expected)
        for part in cache.lists:
            lanes, found, _ = part.read_tokens()
            for head in range(len(keys)):
                mine = found[lanes == head]
                if len(mine):
                    distance, nearest = torch.cdist(
                        mine, keys[head], compute_mode="donot_use_mm_for_euclid_dist"
                    ).min(1)
                    assert float(distance.max()) < 1e-3
                    assert len(nearest.unique()) > 0.9 * len(nearest)


@rows_are_alike
@pytest.mark.parametrize("cache", [LOSSY, replace(LOSSY, overlap=True), replace(WHOLE, scorer="kvzip")])
def test_memory_and_positions_do_not_grow_with_the_prompt(model, cache):
    sampling = replace(GREEDY, max_new_tokens=40)
    requests = [Request(i, p, sampling, streams=True) for i, p in enumerate(prompts((400, 472, 600, 2001)))]
    llm = make_llm(model, cache, repeat_token_ids=(7, 8, 9))
    largest, forward = [0], llm.model.forward

    def watched(ids, positions, *args):
        largest[0] = max(largest[0], int(positions.max()))
        return forward(ids, positions, *args)

    llm.model.forward = watched
    try:
        together = tokens(llm, requests)
    finally:
        del llm.model.forward
    assert all(len(generated) == 40 for generated in together) and largest[0] < CONTEXT
    longest = llm.budget.layout.sequence_pages(CONTEXT, new_tokens=40)
    assert llm._pages(requests[-1]) < 1.5 * longest
    alone = make_llm(model, cache, step_tokens=48, repeat_token_ids=(7, 8, 9))
    assert [tokens(alone, [request])[0] for request in requests[2:]] == together[2:]
    # what fits is read as ever
    plain = [replace(request, streams=False) for request in requests[:2]]
    assert tokens(make_llm(model, cache, repeat_token_ids=(7, 8, 9)), plain) == together[:2]


@pytest.mark.parametrize(
    ("cache", "reason"),
    [
        (KVCacheConfig(), "scores by chunk"),
        (replace(WHOLE, chunk_size=256), "too short to stream"),
    ],
)
def test_what_cannot_stream_says_why(model, cache, reason):
    request = Request(0, prompts((900,))[0], GREEDY, streams=True)
    [result] = make_llm(model, cache).generate([request])
    assert result.finish_reason == "error" and reason in result.error_message
