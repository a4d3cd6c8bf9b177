"""Compression beside the model: what it gives depends on no timing, and what goes wrong in it is told."""

import threading
import time
from concurrent.futures import Future
from dataclasses import replace

import pytest
import torch

from engine import EngineConfig, Request
from engine.memory_division import divide_budget
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.compress.background import BackgroundCompressor
from kvcache.compress.compressor import Compressor
from kvcache.sequence.compressed import CompressedCache
from tests.engine.helpers import GREEDY, LOSSY, make_llm, prompts, tokens
from tests.engine.models.tiny_models import save_tiny_model

pytestmark = pytest.mark.usefixtures("poisoned")

OVERLAPPED = replace(LOSSY, overlap=True)

compress = Compressor.compress


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=1024)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.fixture
def requests():
    question = prompts((9,))[0]
    rows = prompts((200, 900, 500))
    return [Request(i, p, GREEDY, probe_token_ids=question) for i, p in enumerate(rows)]


def slow(*arguments, **options):
    time.sleep(0.2)  # many steps of a tiny model, also on a busy machine
    return compress(*arguments, **options)


def at_once(self, compress, *arguments):
    future = Future()
    future.set_result(compress(*arguments))
    return future


def test_the_outcome_does_not_depend_on_when_it_is_ready(model, requests, monkeypatch):
    def generated():
        return tokens(make_llm(model, OVERLAPPED), requests)

    expected = generated()
    assert generated() == expected
    with monkeypatch.context() as patch:
        patch.setattr(Compressor, "compress", slow)
        assert generated() == expected
    monkeypatch.setattr(BackgroundCompressor, "submit", at_once)
    assert generated() == expected


def test_a_chunk_is_evicted_by_the_scores_it_had_when_it_was_handed_over(model, requests, monkeypatch):
    at_hand_over, used, later = [], [], []

    def see(self, scores, *rest, **options):
        time.sleep(0.03)
        if threading.current_thread() is not threading.main_thread():
            used.append(scores.clone())
        return compress(self, scores, *rest, **options)

    submit, leave = BackgroundCompressor.submit, CompressedCache._await_chunk

    def handed_over(self, compress, scores, *rest):
        at_hand_over.append(scores.clone())
        return submit(self, compress, scores, *rest)

    def left(self):
        if self._leaving:
            later.append(self._oldest(64)[0].clone())
        leave(self)

    monkeypatch.setattr(Compressor, "compress", see)
    monkeypatch.setattr(BackgroundCompressor, "submit", handed_over)
    monkeypatch.setattr(CompressedCache, "_await_chunk", left)
    tokens(make_llm(model, OVERLAPPED), requests[1:2])
    assert len(used) == len(later) == 900 // 64 - 1
    assert all(map(torch.equal, used, at_hand_over))
    assert not any(map(torch.equal, later, at_hand_over)), (
        "the next chunk changes the scores in the prefill buffer"
    )


@pytest.mark.parametrize("last", [3, 4])
def test_a_row_that_ends_while_its_chunk_is_compressed_leaves_nothing(model, requests, monkeypatch, last):
    llm = make_llm(model, OVERLAPPED)
    expected = tokens(llm, requests)
    running, forward, left = [], llm.model.forward, iter(range(last))
    with monkeypatch.context() as patch:
        patch.setattr(Compressor, "compress", slow)

        def stopped(*args):
            if next(left, None) is None:
                running.extend(s.cache._leaving for s in llm.scheduler.running if s.cache._leaving)
                assert not all(future.done() for future in running)
                raise KeyboardInterrupt
            return forward(*args)

        patch.setattr(llm.model, "forward", stopped)
        with pytest.raises(KeyboardInterrupt):
            list(llm.generate(requests))
    assert all(future.done() for future in running)
    assert llm.cache.used_bytes == 0
    assert tokens(llm, requests) == expected


def test_what_goes_wrong_in_the_background_is_raised(model, requests, monkeypatch):
    def broken(*arguments, **options):
        raise RuntimeError("no such tier")

    monkeypatch.setattr(Compressor, "compress", broken)
    llm = make_llm(model, OVERLAPPED)
    with pytest.raises(RuntimeError, match="no such tier"):
        list(llm.generate(requests))
    assert llm.cache.used_bytes == 0


def test_the_background_takes_one_core_and_no_other_threads_number_changes():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compressor = BackgroundCompressor(torch.device("cpu"))
        seen = [torch.get_num_threads(), compressor._thread.submit(torch.get_num_threads).result()]
        thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(before)
    assert seen == [2, 1, 2]


def test_it_is_on_where_asked_for_and_takes_a_chunk_more_of_prefill_buffer(model):
    def config(wanted: bool | None, **policy) -> EngineConfig:
        cache = replace(LOSSY, overlap=wanted, **policy)
        return EngineConfig(60_000_000, cache=cache, step_tokens=64)

    def budget(wanted: bool | None, **policy):
        return divide_budget(model.config, config(wanted, **policy), 4)

    off, on = budget(False), budget(True)
    assert on.prefill_buffer_tokens == off.prefill_buffer_tokens + 64
    assert on.capacity_pages < off.capacity_pages
    assert not budget(None).overlaps_compression
    assert not budget(True, streaming=False).overlaps_compression
