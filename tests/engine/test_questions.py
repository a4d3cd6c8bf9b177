"""Several requests behind one document: it is read once, shared, and in the end given back."""

from dataclasses import replace

import pytest
import torch

from engine import Request
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.config import KVCacheConfig, Tier
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.full import LayerGroup
from tests.engine.helpers import GREEDY, LOSSY, make_llm, prompts, rows_are_alike, tokens
from tests.engine.models.tiny_models import save_tiny_model

LONG = replace(GREEDY, max_new_tokens=100)  # pages are closed in decode
FEW = KVCacheConfig(
    "sparse+quant", keep_ratio=0.2, quant_bits=4, chunk_size=64, recent_tokens=32, tail_tokens=64
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=4096)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


def asked(lengths, num_questions=3, sampling=LONG) -> list[Request]:
    questions = prompts(range(9, 9 + num_questions))
    return [
        Request(len(questions) * d + q, document + question, sampling, len(document))
        for d, document in enumerate(prompts(lengths))
        for q, question in enumerate(questions)
    ]


@rows_are_alike
@pytest.mark.parametrize(
    "cache",
    [
        KVCacheConfig(),
        replace(LOSSY, compensate=False),
        replace(FEW, compensate=False),
        replace(FEW, compensate=False, budget="uniform", delay=2, chunk_size=32),
        replace(FEW, compensate=False, overlap=True),
        replace(FEW, compensate=False, tiers=(Tier(0.1, 16, 16), Tier(0.5, 4, 2)), keep_ratio=1.0),
        KVCacheConfig("sparse", keep_ratio=0.3, streaming=False, recent_tokens=32),
    ],
    ids=["none", "tiers", "few", "uniform", "overlapped", "whole-tier", "at-the-end"],
)
def test_each_question_is_answered_as_if_it_were_the_only_one(model, cache):
    requests = asked((700, 300))
    together = make_llm(model, cache)  # it proves that no sequence outgrows its reservation
    alone = [tokens(make_llm(model, cache), [request])[0] for request in requests[::2]]
    assert tokens(together, requests)[::2] == alone
    read = sum(len(request.prompt_token_ids) - request.prefix_tokens for request in requests)
    assert together.monitor.samples and sum(s.num_tokens for s in together.monitor.samples) == read + 6 * 99


@pytest.mark.parametrize("preset", ["logs", "default", "aggressive"])
def test_a_question_reserves_little_beside_its_document(preset):
    layout = CompressedLayout((LayerGroup(30, 3, 64),), 4, 2, KVCacheConfig.preset(preset))
    document, question = layout.sequence_pages(30_000), layout.sequence_pages(30_030, 30_000, 20)
    assert layout.sequence_pages(30_030, 0, 20) > 0.95 * document
    assert question < 0.25 * document


@rows_are_alike
def test_documents_wait_for_an_prefill_buffer(model):
    cache = replace(FEW, compensate=False)
    requests = asked((500, 501, 502), sampling=GREEDY)
    llm = make_llm(model, cache, step_tokens=64)
    assert llm.cache.pool.prefill_buffers.num_blocks == 2
    assert tokens(llm, requests) == tokens(make_llm(model, cache), requests)
