"""Draft tokens change how many steps a sequence takes and nothing else; they are computed where they pay."""

import random
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from engine import EngineConfig, EngineCore, Request, SamplingParams
from engine.models import load_model
from engine.models.basis import ROTATED
from engine.prompt_lookup import MAX_DRAFT_TOKENS, RETRY_STEPS, STEP_TOKENS, Gate, Lookup, NgramProposer
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.config import KVCacheConfig, Tier
from tests.engine.helpers import as_text, prompts, run
from tests.engine.models.tiny_models import tiny_model

LONG = SamplingParams(max_new_tokens=150, ignore_eos=True)  # pages fill, and open pages are compressed
SMALL = {"chunk_size": 64, "recent_tokens": 32}
CACHES = {
    "none": KVCacheConfig(),
    "default": KVCacheConfig.preset("default", **SMALL),
    "whole": KVCacheConfig("sparse", keep_ratio=0.3, **SMALL),
    "tiers": KVCacheConfig("sparse+quant", tiers=(Tier(0.2, 4, 4), Tier(0.2, 3, 2)), **SMALL),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """What follows a token depends mostly on the token, so that the model repeats itself, though not for ever."""
    path = tmp_path_factory.mktemp("llama")
    built = tiny_model("llama", max_position_embeddings=1024)
    with torch.no_grad():
        for layer in built.model.layers:
            for projection in (layer.self_attn.o_proj, layer.mlp.down_proj):
                projection.weight.mul_(0.02)
    built.save_pretrained(path)
    return load_model(path, dtype=torch.float32, basis=ROTATED)


@pytest.fixture
def always(monkeypatch):
    """Compute draft tokens whatever they cost."""
    monkeypatch.setattr(Gate, "opens", lambda *_: True)


def make_llm(model, cache: KVCacheConfig, **changes) -> EngineCore:
    return EngineCore(model, EngineConfig(60_000_000, cache=cache, **changes), as_text)


def kept_by(llm: EngineCore) -> dict[int, list]:
    """Return what every row's cache holds when it ends, filled as they do."""
    kept, finish = {}, llm._finish

    def noted(sequence):
        cache = sequence.cache
        lengths = [part.lengths.tolist() for part in getattr(cache, "lists", [cache])]
        idle = [tier.idle.tolist() for tier in getattr(cache, "tiers", ())]
        kept[sequence.request.request_id] = [cache.num_tokens, lengths, idle]
        return finish(sequence)

    llm._finish = noted
    return kept


@pytest.mark.parametrize("name", CACHES)
def test_rows_say_and_keep_the_same_in_fewer_steps(model, always, name):
    requests = [Request(i, p, LONG) for i, p in enumerate(prompts((9, 64, 300, 130)))]
    for rows in (requests[2:3], requests):
        plain, drafting = (make_llm(model, CACHES[name], prompt_lookup=on) for on in (False, True))
        kept = [kept_by(llm) for llm in (plain, drafting)]
        said = [[result.token_ids for result in run(llm, rows)] for llm in (plain, drafting)]
        assert said[1] == said[0]
        assert kept[1] == kept[0] and len(kept[0]) == len(rows)
        assert drafting.monitor.num_steps < 0.8 * plain.monitor.num_steps
        stats = drafting.stats()
        assert stats.drafted_tokens > stats.accepted_tokens > 0 == plain.stats().drafted_tokens


class Alternating:
    """Tokens of even and odd ids in turn, and an end after 60 of them."""

    def __init__(self):
        self.taken = 0

    def mask(self):
        return torch.arange(199) % 2 == self.taken % 2

    def advance(self, token_id):
        assert token_id % 2 == self.taken % 2
        self.taken += 1

    @property
    def finished(self):
        return self.taken == 60


@pytest.mark.parametrize("name", ["none", "tiers"])
def test_rows_end_where_they_would_whatever_the_draft_tokens(model, always, name):
    prompt = prompts((40,))[0]
    [greedy] = run(make_llm(model, CACHES[name], prompt_lookup=False), [Request(0, prompt, LONG)])
    said = greedy.token_ids
    seen = {token: said.index(token) for token in said}
    late = sorted(seen, key=seen.get)[-3:]  # tokens that come up late
    params = [replace(LONG, max_new_tokens=n) for n in (1, 2, 77, 78, 79)]
    params += [replace(LONG, stop_token_ids=(token,)) for token in late]
    params += [replace(LONG, stop=(as_text(said[at : at + 3]),)) for at in (100, 101, 102)]
    params += [replace(LONG, repetition_stop=True)]
    params += [replace(LONG, temperature=0.05, seed=seed) for seed in (1, 2)]
    requests = [Request(i, prompt, p) for i, p in enumerate(params)]
    requests += [Request(len(params), prompt, LONG, constraint=Alternating)]
    outcomes = []
    for on in (False, True):
        llm, logits, results = make_llm(model, CACHES[name], prompt_lookup=on), {}, []
        for request in requests:
            results += llm.generate(
                [request], observe=lambda row, x, of=logits: of.setdefault(row, []).append(x.clone())
            )
        outcomes.append(([(r.token_ids, r.text, r.finish_reason) for r in results], logits))
    assert llm.stats().accepted_tokens > 300
    assert outcomes[1][0] == outcomes[0][0]
    assert {reason for _, _, reason in outcomes[0][0]} >= {"stop", "length"}
    for row, plain in outcomes[0][1].items():
        drafted = outcomes[1][1][row]
        # a code of a page may round the other way
        torch.testing.assert_close(torch.stack(drafted), torch.stack(plain), atol=2e-3, rtol=1e-3)


def test_only_the_last_sequences_have_draft_tokens(model, always):
    llm = make_llm(model, CACHES["none"], max_sequences=2)
    execute, waiting = llm.runner.execute, []

    def watched(plan):
        if plan.drafts:
            waiting.append(len(llm.scheduler.waiting) + sum(s.in_prefill for s in llm.scheduler.running))
            assert plan.num_tokens <= STEP_TOKENS
        return execute(plan)

    llm.runner.execute = watched
    run(llm, [Request(i, p, LONG) for i, p in enumerate(prompts((9, 64, 30)))])
    assert waiting and not any(waiting)
    deterministic = make_llm(model, CACHES["none"], deterministic=True)
    run(deterministic, [Request(0, prompts((9,))[0], LONG)])
    assert deterministic.stats().drafted_tokens == 0


def test_draft_tokens_are_what_followed_the_longest_match_the_last_time():
    draw = random.Random(5)
    tokens = [draw.randrange(4) for _ in range(3)]
    lookup = Lookup(tokens)
    for _ in range(300):
        expected = ()
        for size in (2, 3):  # the longer one is looked at last
            ends = [e for e in range(size, len(tokens)) if tokens[e - size : e] == tokens[-size:]]
            if ends:
                followed = tokens[ends[-1] :]
                expected = tuple((followed * MAX_DRAFT_TOKENS)[:MAX_DRAFT_TOKENS])
        assert lookup.propose(MAX_DRAFT_TOKENS) == expected
        tokens += [draw.randrange(4) for _ in range(draw.randrange(1, 4))]


def test_draft_tokens_are_watched_until_it_is_known_whether_they_are_chosen():
    tokens = [1, 2]
    lookup = Lookup(tokens)
    assert lookup.settle() is None and not lookup.is_watching
    for drafted, said, share in (((5, 6, 7, 8), (5, 6, 9), 0.5), ((5, 6), (5, 6), 1.0), ((5,), (4,), 0.0)):
        lookup.watch(drafted)
        for token in said:
            assert lookup.settle() is None
            tokens.append(token)
        assert lookup.settle() == share and not lookup.is_watching


def test_draft_tokens_are_computed_as_long_as_they_pay():
    """Two sequences; a step takes one second, with draft tokens two. Times are given: no clock is read."""
    gate = Gate()
    assert not gate.opens(2, 14), "first it is measured what a step takes"
    gate = gate.after(1.0, drafted=False)
    assert gate.opens(2, 0.1) and not gate.opens(2, 0), "the cost of draft tokens is not known yet"
    gate = gate.after(2.0, drafted=True)
    assert gate.opens(2, 2.1) and not gate.opens(2, 1.9)
    for _ in range(30):  # steps with draft tokens take longer
        gate = gate.after(3.0, drafted=True)
    assert gate.opens(2, 4.1) and not gate.opens(2, 3.8)
    for _ in range(RETRY_STEPS):
        assert not gate.opens(2, 3.8)
        gate = gate.after(1.0, drafted=False)
    assert gate.opens(2, 0.1), "they are tried again"
    gate = gate.after(1.5, drafted=True)
    assert gate.opens(2, 1.1) and not gate.opens(2, 0.9), "and what they cost now counts"


def plan_of(tokens: list[int]) -> StepPlan:
    sequence = Sequence(
        Request(0, tokens[:4], LONG), 0, token_ids=tokens, num_computed_tokens=len(tokens) - 1
    )
    sequence.cache = SimpleNamespace(open_tokens=100)
    return StepPlan((sequence,), ())


@pytest.mark.parametrize("repeats", [True, False])
def test_a_text_that_does_not_repeat_itself_has_no_draft_tokens(repeats):
    """A step with draft tokens takes twice as long. Pairs of tokens come again in either text."""
    draw, proposer, num_drafts = random.Random(1), NgramProposer(STEP_TOKENS), 0
    plan = plan_of([0, 1, 2, 3])
    tokens = plan.decodes[0].token_ids
    for step in range(140):
        drafted = proposer.propose(plan)
        num_drafts += len(drafted.drafts)
        proposer.note(drafted, 0, 2.0 if drafted.drafts else 1.0)
        tokens.append(step % 10 if repeats else draw.randrange(8))
    assert num_drafts > 100 if repeats else num_drafts < 10
