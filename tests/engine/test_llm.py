"""The engine generates what transformers generates, whatever the chunks, the order and the batch."""

import time
from dataclasses import replace
from itertools import count

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.models import load_model
from tests.engine.helpers import GREEDY, as_text, prompts, run
from tests.engine.models.tiny_models import save_tiny_model


def reference(model, prompt: list[int], count: int = 12) -> list[int]:
    model.generation_config.eos_token_id = None
    ids = torch.tensor([prompt])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, pad_token_id=0
    )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return save_tiny_model(path, "llama", max_position_embeddings=512), load_model(path, dtype=torch.float32)


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_greedy_equals_transformers(tmp_path, name):
    model = save_tiny_model(tmp_path, name, max_position_embeddings=512)
    llm = EngineCore(load_model(tmp_path, dtype=torch.float32), EngineConfig(20_000_000), as_text)
    results = run(llm, [Request(i, p, GREEDY) for i, p in enumerate(prompts())])
    assert [r.token_ids for r in results] == [reference(model, p) for p in prompts()]
    assert {r.finish_reason for r in results} == {"length"}


@pytest.mark.parametrize(
    ("step_tokens", "max_sequences", "shared"),
    [(16, 3, 0), (16, 64, 64), (50, 1, 40), (50, 64, 130), (512, 3, 64), (512, 64, 0)],
)
def test_chunks_order_batch_and_shared_prefix_change_nothing(llama, step_tokens, max_sequences, shared):
    prefix = prompts([shared])[0]
    rows = [prefix + p for p in prompts()]
    expected = [reference(llama[0], p) for p in rows]
    config = EngineConfig(20_000_000, step_tokens=step_tokens, max_sequences=max_sequences)
    llm = EngineCore(llama[1], config, as_text)
    requests = [Request(i, p, GREEDY, prefix_tokens=shared) for i, p in enumerate(rows)]
    for order in (requests, requests[::-1]):
        results = run(llm, order)
        assert [r.token_ids for r in results] == [expected[r.request_id] for r in order]
        assert {r.cached_prompt_tokens for r in results} == {shared}
    stats = llm.stats()
    assert stats.kv_allocated_bytes == llm.cache.pool.keys.nbytes + llm.cache.pool.values.nbytes
    assert stats.prompt_tokens == 2 * sum(map(len, rows))


def test_a_small_pool_only_makes_rows_wait_and_its_peak_is_the_reservation(llama):
    layout = EngineCore(llama[1], EngineConfig(20_000_000), as_text).budget.layout
    need = layout.sequence_pages(300 + 12)
    llm = EngineCore(llama[1], EngineConfig(20_000_000, pool_pages=need), as_text)
    results = run(llm, [Request(i, p, GREEDY) for i, p in enumerate(prompts())])
    assert [r.token_ids for r in results] == [reference(llama[0], p) for p in prompts()]
    assert llm.stats().kv_peak_bytes == need * layout.page_bytes == results[-1].kv_peak_bytes
    assert results[-1].kv_full_bytes == (300 + 11) * layout.token_bytes  # the last token is never computed


def test_a_request_that_cannot_run_is_answered_and_the_rest_run(llama):
    config = EngineConfig(20_000_000, pool_pages=24)
    llm = EngineCore(llama[1], config, as_text)
    rows = [*prompts((20, 508, 400, 0, 30)), [5, 199]]
    results = run(llm, [Request(i, p, GREEDY) for i, p in enumerate(rows)])
    assert [r.finish_reason for r in results] == ["length", *["error"] * 3, "length", "error"]
    assert (
        "508 prompt tokens and up to 12 new ones exceed the model's context of 512"
        in results[1].error_message
    )
    assert "need" in results[2].error_message and "bytes of KV" in results[2].error_message
    assert "token 199 of the prompt is outside the model's vocabulary of 199" in results[5].error_message
    assert results[4].token_ids == reference(llama[0], rows[4])


def test_requests_are_pulled_only_as_far_as_there_is_room(llama):
    pulled = []

    def source():
        for i, p in enumerate(prompts((30,) * 8)):
            pulled.append(i)
            yield Request(i, p, GREEDY)

    llm = EngineCore(llama[1], EngineConfig(20_000_000, max_sequences=2), as_text)
    results = llm.generate(source())
    next(results)
    assert len(pulled) <= 4
    results.close()
    assert llm.cache.num_available == llm.cache.num_blocks, "an abandoned run gives its pages back"
    assert not llm.scheduler.running


def test_what_stops_the_engine_is_told_and_every_page_comes_back(llama, monkeypatch):
    """At any of its forward passes: of the prefix, of a prefill, of a decode."""
    prefix = prompts((70,))[0]
    requests = [Request(i, prefix + p, GREEDY, prefix_tokens=70) for i, p in enumerate(prompts((30, 40)))]
    forward = llama[1].forward
    for last in range(4):
        llm = EngineCore(llama[1], EngineConfig(20_000_000, step_tokens=64), as_text)
        left = iter(range(last))

        def stopped(*args, left=left):
            if next(left, None) is None:
                raise KeyboardInterrupt
            return forward(*args)

        monkeypatch.setattr(llama[1], "forward", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(llm.generate(requests))
        assert llm.cache.num_available == llm.cache.num_blocks


def test_rows_end_for_their_own_reason(llama):
    row = prompts((50,))[0]
    greedy = reference(llama[0], row, 40)
    llm = EngineCore(llama[1], EngineConfig(20_000_000), as_text)
    text = as_text(greedy)
    third = greedy.index(greedy[2])  # its first occurrence
    params = [
        replace(GREEDY, stop_token_ids=(greedy[2],)),
        replace(GREEDY, max_new_tokens=40, stop=(text[4:7], "nowhere")),
        replace(GREEDY, max_new_tokens=3),
        replace(GREEDY, ignore_eos=False),
    ]
    llm._end_token_ids = frozenset({greedy[2]})
    results = run(llm, [Request(i, row, p) for i, p in enumerate(params)])
    assert [r.finish_reason for r in results] == ["stop", "stop", "length", "stop"]
    assert results[0].token_ids == greedy[: third + 1] == results[3].token_ids
    assert results[1].text == text[: text.index(text[4:7])]
    assert results[2].token_ids == greedy[:3]


def test_a_row_whose_logits_break_fails_alone(llama):
    llm = EngineCore(llama[1], EngineConfig(20_000_000), as_text)
    rows = prompts((10, 20))
    expected = reference(llama[0], rows[1])
    original = llama[1].logits
    try:
        # the first row's logits of its third token turn to NaN
        calls = []

        def broken(hidden):
            out = original(hidden)
            calls.append(1)
            if len(calls) == 3:
                out[0] = torch.nan
            return out

        llama[1].logits = broken
        results = run(llm, [Request(i, p, GREEDY) for i, p in enumerate(rows)])
    finally:
        del llama[1].logits
    assert [r.finish_reason for r in results] == ["error", "length"]
    assert "not finite" in results[0].error_message and len(results[0].token_ids) == 2
    assert results[1].token_ids == expected


def test_sampling_depends_on_the_rows_seed_alone(llama):
    rows = prompts((40, 50, 60))
    params = [
        SamplingParams(max_new_tokens=10, temperature=1.0, top_p=0.9, seed=i, ignore_eos=True)
        for i in range(3)
    ]
    requests = [Request(i, p, s) for i, (p, s) in enumerate(zip(rows, params, strict=True))]
    llm = EngineCore(llama[1], EngineConfig(20_000_000), as_text)
    together = run(llm, requests)
    alone = [run(llm, [request])[0] for request in requests]
    assert [r.token_ids for r in together] == [r.token_ids for r in alone]
    reseeded = run(llm, [replace(requests[0], sampling=replace(params[0], seed=9))])[0]
    assert reseeded.token_ids != together[0].token_ids


def test_none_among_the_requests_drains_the_engine_and_keeps_the_prefix(llama):
    prefix = prompts((40,))[0]
    rows = [
        Request(i, prefix + p, GREEDY, prefix_tokens=40) for i, p in enumerate(prompts((30, 300, 50, 20)))
    ]
    llm = EngineCore(llama[1], EngineConfig(20_000_000), as_text)
    order = [result.request_id for result in llm.generate([*rows[:2], None, *rows[2:], None])]
    assert sorted(order[:2]) == [0, 1] and sorted(order[2:]) == [2, 3]
    free = run(llm, rows)
    assert sorted(r.request_id for r in free) == [0, 1, 2, 3]


def test_time_of_the_steps_is_divided_among_sequences_and_the_rest_is_waiting(llama, monkeypatch):
    ticks = count()
    llm = EngineCore(llama[1], EngineConfig(20_000_000, step_tokens=64, max_sequences=2), as_text)
    requests = [Request(i, p, GREEDY, prefix_tokens=130) for i, p in enumerate(same_start(130, 4))]
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))  # a step takes exactly one second
    results = list(llm.generate(requests))
    num_prefix_steps = 3  # 130 tokens, 64 a step
    spent = sum(r.prefill_s + r.decode_s for r in results)
    assert spent == pytest.approx(llm.stats().num_steps + num_prefix_steps)
    by_id = {r.request_id: r for r in results}
    assert by_id[0].prefill_s > num_prefix_steps > by_id[1].prefill_s, (
        "who needed the prefix first has its time"
    )
    assert by_id[2].wait_s > by_id[0].decode_s, "two run at once: the third waits for one of them"
    assert sum(r.prefill_s + r.decode_s + r.wait_s for r in results) > spent


def same_start(num_shared: int, num_prompts: int) -> list[list[int]]:
    shared = prompts([num_shared])[0]
    return [[*shared, 7 + i, 9, 11] for i in range(num_prompts)]
