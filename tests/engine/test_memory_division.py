"""Budgets as people write them, and how one is divided."""

import pytest
import torch

from engine.config import EngineConfig
from engine.errors import BudgetError
from engine.memory import available_bytes, parse_budget, resolve_budget
from engine.memory_division import divide_budget
from engine.models.config import ModelConfig
from kvcache.pages.page_pool import PagePool
from tests.engine.models.tiny_models import save_tiny_model


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("60%", 0.6),
        (0.6, 0.6),
        ("0.25", 0.25),
        ("4GiB", 4 << 30),
        ("1.5 GB", 1_500_000_000),
        ("512mb", 512_000_000),
        (1024, 1024),
    ],
)
def test_budgets_are_read_as_written(written, meant):
    assert parse_budget(written) == pytest.approx(meant)


@pytest.mark.parametrize("written", ["", "lots", "0", "120%", 1.5, -1, 0, True, "4 GiB of it"])
def test_what_is_no_budget_is_refused(written):
    with pytest.raises(BudgetError, match="memory_budget"):
        parse_budget(written)


def test_a_fraction_is_of_what_is_free_and_a_size_must_fit():
    free = available_bytes()
    assert 0.3 * free < resolve_budget("50%") < 0.7 * free
    assert resolve_budget("1MiB") == 1 << 20
    with pytest.raises(BudgetError, match="only"):
        resolve_budget("900TiB")


def test_workspace_and_pool_stay_within_the_budget(tmp_path):
    save_tiny_model(tmp_path, "llama")
    model = ModelConfig.from_pretrained(tmp_path)
    sizes = []
    for budget_bytes in (200_000, 1_000_000, 50_000_000):
        budget = divide_budget(model, EngineConfig(budget_bytes), 4)
        pool = PagePool(budget.layout, budget.capacity_pages, dtype=torch.float32)
        assert 0.8 * budget_bytes < pool.allocated_bytes + budget.workspace_bytes <= budget_bytes
        sizes.append(budget.step_tokens)
    assert 16 <= sizes[0] < sizes[1] <= sizes[2] == 1024, "a small budget means shorter steps"
    with pytest.raises(BudgetError, match="leaves no room for a sequence.*; increase memory_budget_bytes$"):
        divide_budget(model, EngineConfig(50_000), 4)
