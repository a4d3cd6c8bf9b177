"""Filters keep what transformers' warpers keep; a row's draw is its own; broken logits are found."""

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from engine.constraint import constrain
from engine.request import SamplingParams
from engine.sampling import make_random, probabilities, sample


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [(1.0, 0, 1.0, 0.0), (0.7, 5, 1.0, 0.0), (1.3, 0, 0.8, 0.0), (1.0, 0, 1.0, 0.1), (0.9, 20, 0.9, 0.05)],
)
def test_filters_are_those_of_transformers(temperature, top_k, top_p, min_p):
    logits = 2 * torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
    warpers = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    warpers += [TopKLogitsWarper(top_k)] if top_k else []
    warpers += [TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [MinPLogitsWarper(min_p)] if min_p else []
    expected = warpers(None, logits.clone()).softmax(-1)
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    got = torch.stack([probabilities(row, params) for row in logits])
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)


def test_a_tiny_temperature_is_greedy():
    logits = torch.tensor([1.0, 300.0, 299.0])
    assert probabilities(logits, SamplingParams(temperature=1e-37)).tolist() == [0, 1, 0]


def test_draws_follow_the_distribution_and_the_rows_seed_alone():
    logits = torch.tensor([0.1, 0.6, 0.3]).log()
    params = SamplingParams(temperature=1.0, seed=5)

    def draws(neighbours: int) -> list[int]:
        random = make_random(params)
        rows = torch.cat([logits[None], torch.randn(neighbours, 3)])
        others = [SamplingParams(temperature=1.0, seed=i) for i in range(neighbours)]
        states = [make_random(p) for p in others]
        return [sample(rows, [params, *others], [random, *states])[0] for _ in range(2000)]

    alone = draws(0)
    assert alone == draws(3)
    shares = torch.bincount(torch.tensor(alone), minlength=3) / 2000
    torch.testing.assert_close(shares, logits.exp(), rtol=0, atol=0.04)


def test_greedy_takes_the_first_of_equals_and_broken_logits_choose_nothing():
    rows = torch.tensor([[1.0, 3.0, 3.0], [torch.nan, 0.0, 1.0], [torch.inf, 0.0, 0.0]])
    assert sample(rows, [SamplingParams()] * 3, [None] * 3) == [1, None, None]


def test_settings_out_of_range_are_refused():
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"min_p": 1}, {"max_new_tokens": 0}, {"stop": ("",)}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0]):
            SamplingParams(**wrong)


def test_a_constraint_binds_its_own_row_alone():
    class Only:
        def __init__(self, *tokens):
            self.allowed = torch.zeros(6, dtype=torch.bool).index_fill(0, torch.tensor(tokens), True)

        def mask(self):
            return self.allowed

    logits = torch.tensor([[0.0, 1, 2, 3, 4, 5]]).repeat(3, 1)
    params, before = [SamplingParams()] * 3, logits.clone()
    bound = constrain(logits, [None, Only(1, 3), Only(0)])
    assert sample(bound, params, [None] * 3) == [5, 3, 0]
    assert torch.equal(bound[0], before[0]) and torch.equal(logits, before)
    assert constrain(logits, [None] * 3) is logits
