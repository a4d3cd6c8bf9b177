"""Budgets give out exactly their places, scorers score as they say, and every scorer can be had by name."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.compress.allocation import EVICTED, assign_tiers
from kvcache.compress.lane_shares import LaneShares
from kvcache.scorers.probe import raise_by_probes
from kvcache.scorers.protocol import Observation
from kvcache.scorers.registry import SCORERS, get_scorer


@given(
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    tokens=st.integers(1, 70),
    ratios=st.sampled_from([(1.0,), (0.3,), (0.2, 0.5), (0.1, 0.2, 0.7)]),
    budget=st.sampled_from(["global", "per_head", "uniform"]),
    ties=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_a_budget_gives_out_its_places_best_scores_first(layers, heads, tokens, ratios, budget, ties, seed):
    torch.manual_seed(seed)
    scores = torch.rand(layers, heads, tokens)
    if ties:
        scores = (scores * 3).floor()
    tiers = assign_tiers(scores, ratios, budget, floor_ratio=0.0)
    cells = {"global": layers * heads * tokens, "per_head": heads * tokens, "uniform": tokens}[budget]
    total = 0.0
    for number, ratio in enumerate(ratios):
        total += ratio
        kept = (tiers >= 0) & (tiers <= number)
        groups = kept.view({"global": 1, "per_head": layers, "uniform": layers * heads}[budget], -1)
        assert groups.sum(1).tolist() == [round(min(1.0, total) * cells)] * len(groups)
        for group, values in zip(groups, scores.view(groups.shape), strict=True):
            if group.any() and not group.all():
                assert values[group].min() >= values[~group].max()


def test_a_global_budget_lets_lanes_differ_down_to_the_floor():
    scores = torch.zeros(2, 1, 100)
    scores[0] = torch.arange(100) + 1000.0
    scores[1] = torch.arange(100)
    kept = assign_tiers(scores, (0.5,), "global", floor_ratio=0.2)[:, 0] != EVICTED
    assert kept.sum(1).tolist() == [90, 10]
    assert kept[1, 90:].all(), "the floor keeps the lane's best"


def test_a_layered_budget_follows_its_weights():
    kept = assign_tiers(torch.rand(2, 2, 100), (0.4,), "layered", layer_weights=(3.0, 1.0)) != EVICTED
    assert kept.sum(2).tolist() == [[60, 60], [20, 20]]
    with pytest.raises(ValueError, match="2 layers, 3 weights"):
        assign_tiers(torch.rand(2, 2, 9), (0.4,), "layered", layer_weights=(1, 1, 1))


def observe(weights: torch.Tensor, keys: torch.Tensor | None = None) -> Observation:
    heads, group, queries, tokens = weights.shape
    keys = torch.randn(heads, tokens, 16) if keys is None else keys
    return Observation(
        0, torch.randn(heads, group, queries, 16), keys, torch.randn(heads, tokens, 16), weights
    )


@pytest.mark.parametrize("name", SCORERS)
def test_scorers_give_finite_scores_over_two_steps(name):
    torch.manual_seed(0)
    scorer = get_scorer(name)
    scores = torch.zeros(2, 128)
    for tokens in (64, 128):
        mask = torch.ones(64, tokens).tril(tokens - 64)
        weights = (torch.rand(2, 3, 64, tokens) * mask).softmax(-1) * mask
        seen = observe(weights)
        scorer.update(
            scores[:, :tokens],
            seen if scorer.needs_weights or scorer.scored_by_kernels else replace(seen, weights=None),
        )
    assert torch.isfinite(scores).all()
    assert scores.std() > 0


def test_what_each_attention_scorer_looks_at():
    weights = torch.zeros(1, 2, 100, 200)
    weights[0, 1, 50, 10] = 0.9  # one query, once, from afar
    weights[0, :, :, 20] = 0.1  # all queries, a little
    weights[0, :, -1, 30] = 0.5  # the last query alone
    weights[0, 0, 60, 155] = 0.95  # near: 5 tokens behind
    best = {name: int(score(name, weights)[0].argmax()) for name in ("attention_max", "h2o", "tova")}
    assert best == {"attention_max": 10, "h2o": 20, "tova": 30}
    assert score("attention_max", weights)[0, 155] == 0


def score(name: str, weights: torch.Tensor) -> torch.Tensor:
    scores = torch.zeros(weights.shape[0], weights.shape[3])
    get_scorer(name).update(scores, observe(weights))
    return scores


def test_keydiff_keeps_the_odd_key():
    keys = torch.ones(1, 50, 16) + 0.01 * torch.randn(1, 50, 16)
    keys[0, 17] = -1
    scores = torch.zeros(1, 50)
    get_scorer("keydiff").update(scores, observe(torch.rand(1, 1, 4, 50), keys))
    assert int(scores.argmax()) == 17


def test_probes_raise_what_they_look_at_and_its_neighbours():
    scores = torch.full((1, 100), 0.2)
    peaks = torch.zeros(1, 100)
    peaks[0, 50] = 0.3
    raise_by_probes(scores, peaks)
    assert scores[0, 42:59].tolist() == pytest.approx([1.2] * 17)
    assert scores[0, [41, 59]].tolist() == pytest.approx([0.2, 0.2])


def test_unknown_scorer_is_named():
    with pytest.raises(ValueError, match="best.*attention_max"):
        get_scorer("best")


@given(st.integers(0, 1000), st.floats(0.01, 1), st.integers(1, 300), st.floats(0, 1))
def test_lane_shares_give_out_what_there_is(seed, ratio, num_tokens, floor_ratio):
    random = torch.Generator().manual_seed(seed)
    strength = torch.rand(3, 2, 1, generator=random)
    shares = LaneShares.from_scores(torch.rand(3, 2, 200, generator=random) * strength)
    counts = shares.counts(ratio, num_tokens, floor_ratio)
    assert int(counts.sum()) == pytest.approx(ratio * num_tokens * 6, abs=1)
    assert counts.min() >= 0 and counts.max() <= num_tokens
    assert counts.min() >= int(floor_ratio * ratio * num_tokens)
    order = strength.flatten().argsort()
    assert (
        counts.flatten()[order].diff() >= -num_tokens * 0.2 - 1
    ).all()  # the stronger a lane, the more it keeps


def test_a_calibrated_budget_keeps_the_best_of_every_lane():
    shares = LaneShares(
        torch.stack([torch.tensor([[i / 64 * 1.5], [i / 64 * 0.5]]) for i in range(65)]).clamp(max=1)
    )
    scores = torch.rand(2, 1, 100)
    tiers = assign_tiers(scores, (0.2, 0.2), "calibrated", floor_ratio=0.0, lane_shares=shares)
    for lane, (best, kept) in enumerate([(30, 60), (10, 20)]):
        order = scores[lane, 0].argsort(descending=True)
        assert (tiers[lane, 0][order[:best]] == 0).all() and (tiers[lane, 0][order[best:kept]] == 1).all()
        assert (tiers[lane, 0][order[kept:]] == EVICTED).all()


@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 0.0)])
def test_a_layered_budget_that_keeps_everything_drops_nothing(weights):
    tiers = assign_tiers(torch.rand(2, 2, 50), (0.5, 0.5), "layered", layer_weights=weights)
    assert (tiers != EVICTED).all()
    kept = assign_tiers(torch.rand(2, 2, 100), (0.45,), "layered", layer_weights=(3.0, 1.0)) != EVICTED
    assert kept.float().mean() == pytest.approx(
        0.45, abs=0.01
    )  # what the first layer cannot use goes to the second
