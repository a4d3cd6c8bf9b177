"""When a chunk is due: pure integers, the same for scheduler, cache, budget and forecast."""

from dataclasses import replace

import pytest

from kvcache.config import KVCacheConfig
from kvcache.sizes.chunk_schedule import ChunkSchedule

POLICY = KVCacheConfig("sparse", keep_ratio=0.5, chunk_size=64, delay=2, recent_tokens=32)


def test_a_step_ends_where_its_chunk_or_the_prompt_does():
    streaming = ChunkSchedule.of(POLICY)
    assert [streaming.step_limit(n, 150) for n in (0, 10, 63, 64, 130, 149)] == [64, 54, 1, 64, 20, 1]
    at_the_end = ChunkSchedule.of(replace(POLICY, streaming=False))
    assert at_the_end.step_limit(10, 1000) == ChunkSchedule().step_limit(10, 1000) == 990
    together = ChunkSchedule.of(replace(POLICY, streaming=False, scorer="snapkv"))
    assert together.whole_chunks and together.step_limit(64, 1000) == 64
    assert not ChunkSchedule.of(replace(POLICY, keep_ratio=1.0, scorer="snapkv")).whole_chunks, "no scores"


@pytest.mark.parametrize("step", [1, 7, 64])
def test_what_is_due_is_what_leaves_a_buffer_that_never_overflows(step):
    chunks = ChunkSchedule.of(POLICY)
    computed = buffered = most = 0
    while computed < 1000:
        size = min(step, chunks.step_limit(computed, 1000))
        computed, buffered = computed + size, buffered + size
        most = max(most, buffered)
        due = chunks.due_tokens(buffered)
        assert not due or chunks.completes_chunk(computed), "a chunk is due only where another one ends"
        buffered -= due
        assert computed - buffered == chunks.compressed_tokens(computed)
    assert most == chunks.buffer_tokens(overlaps=False) == chunks.buffer_tokens(overlaps=True) - 64 == 192
    assert chunks.due_tokens_at_end(buffered) == buffered - 32 and chunks.due_tokens_at_end(20) == 0


def test_a_prompt_kept_to_its_end_has_nothing_due_before():
    for chunks in (ChunkSchedule(), ChunkSchedule.of(replace(POLICY, streaming=False))):
        assert chunks.due_tokens(10_000) == chunks.compressed_tokens(10_000) == 0
        assert not chunks.completes_chunk(640)
