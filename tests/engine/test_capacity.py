"""What compression is for: more rows in the same memory."""

from dataclasses import replace

import pytest
import torch

from engine import LLM, EngineConfig, Request
from engine.models import load_model
from kvcache.config import KVCacheConfig
from tests.engine.models.tiny_models import save_tiny_model
from tests.engine.test_llm import GREEDY, as_text, prompts

PROMPT_TOKENS, NEW_TOKENS = 3700, 300


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    save_tiny_model(path, "llama", max_position_embeddings=4096, head_dim=64)
    return load_model(path, dtype=torch.bfloat16)


def most_rows_in_decode(model, preset: str, num_rows: int) -> int:
    """Return how many rows of 4,000 tokens were answered at once; the memory is asked of the tensors."""
    budget_bytes = 40_000_000
    llm = LLM(
        model,
        EngineConfig(budget_bytes, step_tokens=512, max_sequences=300, cache=KVCacheConfig.preset(preset)),
        as_text,
    )
    execute, most = llm.runner.execute, 0

    def watched(plan):
        nonlocal most
        most = max(most, len(plan.decodes))
        return execute(plan)

    llm.runner.execute = watched
    rows = prompts((PROMPT_TOKENS,) * num_rows)
    sampling = replace(GREEDY, max_new_tokens=NEW_TOKENS)
    results = list(llm.generate(Request(i, row, sampling) for i, row in enumerate(rows)))
    assert [result.completion_tokens for result in results] == [NEW_TOKENS] * num_rows
    assert (
        llm.cache.allocated_bytes <= budget_bytes and llm.stats().kv_peak_bytes <= llm.cache.allocated_bytes
    )
    return most


def test_a_budget_holds_many_times_the_rows(model):
    whole = most_rows_in_decode(model, "none", 12)
    assert most_rows_in_decode(model, "default", 5 * whole) >= 3.5 * whole
    assert most_rows_in_decode(model, "aggressive", 8 * whole) >= 6 * whole
