"""Scheduler and pool under random admission, progress, ending and failure; and the shape of a step."""

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, plan_chunks, step_chunk_tokens
from engine.sequence import Sequence
from kvcache.pages.page_pool import PagePool
from kvcache.sequence.full import SequenceCache
from kvcache.sizes.chunk_schedule import ChunkSchedule
from kvcache.sizes.full import CacheLayout, LayerGroup

LAYOUT = CacheLayout((LayerGroup(1, 2, 1),), 4, page_tokens=8)


def make_sequence(prompt: int, new: int, shared: int = 0) -> Sequence:
    request = Request(0, range(prompt), SamplingParams(max_new_tokens=new), prefix_tokens=shared)
    return Sequence(request, LAYOUT.sequence_pages(prompt + new, shared))


class Machine(RuleBasedStateMachine):
    """Drive scheduler and pool as the engine does, with a shared prefix of 20 tokens."""

    def __init__(self):
        super().__init__()
        self.pool = PagePool(LAYOUT, 120, dtype=torch.float32)
        self.scheduler = Scheduler(step_tokens=96, max_sequences=5)
        self.prefix = SequenceCache(self.pool, 20)
        self.prefix.advance(20)

    @rule(prompt=st.integers(21, 200), new=st.integers(1, 60), shares=st.booleans())
    def add(self, prompt, new, shares):
        self.scheduler.add(make_sequence(prompt, new, 20 if shares else 0))

    @rule()
    def admit(self):
        head = self.scheduler.waiting[0] if self.scheduler.waiting else None
        sequence = self.scheduler.admit(lambda pages: pages <= self.pool.num_free)
        if sequence is None:
            fits = head is not None and head.num_pages <= self.pool.num_free
            assert not fits or len(self.scheduler.running) == 5
            return
        assert sequence is head, "rows enter in order"
        shared = sequence.request.prefix_tokens
        total = sequence.num_prompt_tokens + sequence.request.sampling.max_new_tokens
        sequence.cache = SequenceCache(self.pool, total, self.prefix if shared else None)
        assert sequence.cache.own_pages == sequence.num_pages, "what is reserved is what is taken"
        if shared:
            sequence.reuse(shared)

    @rule()
    def advance(self):
        plan = self.scheduler.plan_step()
        assert plan.num_tokens <= 96
        assert bool(plan.num_tokens) == bool(self.scheduler.running), "running rows move"
        assert set(plan.decodes) == {s for s in self.scheduler.running if not s.in_prefill}, "no decode waits"
        for sequence, count in [(s, 1) for s in plan.decodes] + [
            (c.sequence, c.num_tokens) for c in plan.chunks
        ]:
            assert count > 0
            sequence.advance(count)
            sequence.cache.advance(count)
            if not sequence.in_prefill:
                sequence.token_ids.append(7)
                if sequence.num_generated >= sequence.request.sampling.max_new_tokens:
                    self.drop(sequence)

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def fail(self, data):
        self.drop(data.draw(st.sampled_from(self.scheduler.running)))

    def drop(self, sequence):
        self.scheduler.finish(sequence)
        sequence.cache.free()

    @invariant()
    def books_balance(self):
        self.pool.check([self.prefix.pages, *(s.cache.pages for s in self.scheduler.running)])
        for sequence in self.scheduler.running:
            assert sequence.kv_len == sequence.cache.num_tokens == sequence.num_computed_tokens
            assert sequence.num_computed_tokens <= len(sequence.token_ids)

    def teardown(self):
        for sequence in list(self.scheduler.running):
            self.drop(sequence)
        self.prefix.free()
        assert self.pool.num_free == 120


TestSchedulerAndPool = Machine.TestCase
TestSchedulerAndPool.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_chunks_are_adaptive_share_the_budget_and_fill_it():
    assert [step_chunk_tokens(n) for n in (10, 1024, 1040, 8000)] == [64, 64, 65, 500]
    rows = [make_sequence(n, 1) for n in (4000, 100, 30, 500)]
    sizes = [c.num_tokens for c in plan_chunks(rows, 400, ChunkSchedule())]
    assert sizes == [250, 64, 30, 56], "the adaptive chunk each, oldest first, while the budget lasts"
    sizes = [c.num_tokens for c in plan_chunks(rows[1:], 400, ChunkSchedule())]
    assert sizes == [100, 30, 270], "what is left lengthens the oldest chunks"
