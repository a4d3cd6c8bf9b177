"""What compression is for: more rows in the same memory."""

from dataclasses import replace

import pytest
import torch

from engine import EngineConfig, EngineCore, Request
from engine.models import load_model
from engine.models.basis import ROTATED
from kvcache.config import KVCacheConfig
from tests.engine.helpers import GREEDY, as_text, prompts
from tests.engine.models.tiny_models import save_tiny_model

PROMPT_TOKENS, NEW_TOKENS = 3800, 200
BUDGET_BYTES = 44_000_000


class AllAnswering(Exception):
    """No row is read any more: as many as fit are answered at once."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    shape = {
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "hidden_size": 96,
        "num_attention_heads": 3,
        "num_key_value_heads": 3,
        "head_dim": 64,
    }
    save_tiny_model(path, "llama", **shape)
    return load_model(path, dtype=torch.bfloat16, basis=ROTATED)


def rows_in_decode(model, preset: str, num_rows: int) -> int:
    """Return how many rows of 4,000 tokens are answered at once; the memory is asked of the tensors."""
    cache = KVCacheConfig.preset(preset)
    llm = EngineCore(
        model, EngineConfig(BUDGET_BYTES, step_tokens=640, max_sequences=300, cache=cache), as_text
    )
    assert llm.cache.allocated_bytes <= BUDGET_BYTES
    plan_step, execute, found = llm.scheduler.plan_step, llm.runner.execute, 0

    def reading_first():
        plan = plan_step()
        return replace(plan, decodes=()) if plan.chunks else plan

    def watched(plan):
        nonlocal found
        out = execute(plan)
        if not plan.chunks:
            found = len(plan.decodes)
            assert llm.stats().kv_used_bytes <= llm.cache.allocated_bytes
            raise AllAnswering
        return out

    llm.scheduler.plan_step, llm.runner.execute = reading_first, watched
    sampling = replace(GREEDY, max_new_tokens=NEW_TOKENS)
    rows = prompts((PROMPT_TOKENS,) * num_rows)
    with pytest.raises(AllAnswering):
        list(llm.generate(Request(i, row, sampling) for i, row in enumerate(rows)))
    assert llm.cache.used_bytes == 0
    return found


def test_a_budget_holds_many_times_the_rows(model):
    whole = rows_in_decode(model, "none", 10)
    assert whole < 10
    assert 5 * whole > rows_in_decode(model, "default", 5 * whole) >= 3.5 * whole
    assert 9 * whole > rows_in_decode(model, "aggressive", 9 * whole) >= 5.5 * whole
