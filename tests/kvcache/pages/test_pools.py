"""Pages are never lost, never held twice, and lie in runs where the free list allows it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcache.pages.block_allocator import BlockAllocator, PoolExhausted
from kvcache.pages.page_pool import PagePool
from kvcache.sequence.full import SequenceCache, slot_mapping
from kvcache.sizes.full import CacheLayout, LayerGroup

LAYOUT = CacheLayout((LayerGroup(2, 2, 4),), 4, page_tokens=8)


def make_pool(num_pages: int) -> PagePool:
    return PagePool(LAYOUT, num_pages, dtype=torch.float32)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_order_of_allocating_and_releasing_keeps_the_books(data):
    pool = make_pool(40)
    held = []
    for _ in range(data.draw(st.integers(1, 25))):
        if held and data.draw(st.booleans()):
            pool.release(held.pop(data.draw(st.integers(0, len(held) - 1))))
        else:
            runs, size = data.draw(st.integers(0, 4)), data.draw(st.integers(0, 6))
            if runs * size > pool.num_free:
                with pytest.raises(PoolExhausted):
                    pool.allocate(runs, size)
                continue
            pages = pool.allocate(runs, size)
            assert pages.shape == (runs, size)
            held.append(pages)
        pool.check(held)


def test_runs_are_consecutive_while_the_free_list_allows_it():
    pool = make_pool(12)
    first = pool.allocate(1, 3)
    second = pool.allocate(1, 3)
    pool.release(first)  # free: 0-2, 6-11
    runs = pool.allocate(2, 4)
    assert second.tolist() == [[3, 4, 5]]
    assert runs[0].tolist() == [6, 7, 8, 9]
    assert sorted(runs[1].tolist()) == [0, 1, 2, 10]


def test_blocks_in_hand_keep_no_free_list_alive():
    pool = BlockAllocator(1000)
    for shape in ((3, 1), (3, 2)):
        blocks = pool.allocate(*shape)
        assert blocks.untyped_storage().nbytes() == blocks.nbytes


def test_books_that_do_not_balance_are_found():
    pool = make_pool(4)
    pages = pool.allocate(1, 2)
    with pytest.raises(AssertionError, match="more or fewer holders"):
        pool.check([])
    pool.release(pages)
    with pytest.raises(AssertionError, match="released twice"):
        pool.release(pages)


def test_reported_bytes_are_the_allocated_bytes():
    pool = make_pool(10)
    assert pool.allocated_bytes == 10 * LAYOUT.page_bytes == 10 * 2 * 8 * 4 * 4
    cache = SequenceCache(pool, 9)  # two pages in each of four lanes
    assert cache.own_bytes == pool.used_bytes == pool.peak_bytes == 8 * LAYOUT.page_bytes
    cache.free()
    assert (pool.used_bytes, pool.num_free, pool.peak_bytes) == (0, 10, 8 * LAYOUT.page_bytes)


@pytest.mark.parametrize("fragmented", [False, True])
@pytest.mark.parametrize("prefix_tokens", [0, 5, 8, 21])
def test_what_is_stored_is_read_back(fragmented, prefix_tokens):
    pool = make_pool(200)
    if fragmented:  # leave holes of one page everywhere
        blocks = [pool.allocate(1, 1) for _ in range(160)]
        for block in blocks[::2]:
            pool.release(block)
    everything = torch.randn(2, 2, 30, 2, 4)  # layer, key or value, token, head, dim
    prefix = None
    if prefix_tokens:
        prefix = SequenceCache(pool, prefix_tokens)
        write(prefix, everything[:, :, :prefix_tokens])
    used = pool.num_used
    cache = SequenceCache(pool, 40, prefix)
    assert pool.num_used - used == LAYOUT.sequence_pages(40, prefix_tokens) == cache.own_pages
    write(cache, everything[:, :, prefix_tokens:23])
    write(cache, everything[:, :, 23:])
    for layer in range(2):
        for num_tokens in (1, 8, 29, 30):
            parts = list(cache.parts(layer, num_tokens))
            for kind in (0, 1):
                read = torch.cat([part[kind] for part in parts], dim=1)
                assert torch.equal(read, everything[layer, kind, :num_tokens].transpose(0, 1))
    cache.free()
    if prefix:
        prefix.free()
    assert pool.num_free == 200 - (80 if fragmented else 0)


def write(cache: SequenceCache, new: torch.Tensor) -> None:
    """Store `[layer, key or value, token, head, dim]` as the runner does."""
    slots = slot_mapping([cache], [new.shape[2]])
    for layer in range(2):
        cache.pool.store(slots[layer], new[layer, 0], new[layer, 1])
    cache.advance(new.shape[2])
