"""Bins hold every row once, within capacity, fullest first; a shared prefix is counted once a bin."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.packing import PackItem, pack


@given(
    sizes=st.lists(st.tuples(st.integers(1, 50), st.sampled_from(["a", "b", None])), max_size=60),
    capacity=st.integers(60, 200),
    max_rows=st.integers(1, 10),
)
def test_every_row_is_packed_once_and_fits(sizes, capacity, max_rows):
    prefix_pages = {"a": 7, "b": 3, None: 0}
    items = [PackItem(i, pages, key, prefix_pages[key]) for i, (pages, key) in enumerate(sizes)]
    bins = pack(items, capacity, max_rows)
    assert sorted(i for b in bins for i in b.indices) == list(range(len(sizes)))
    for b in bins:
        keys = {sizes[i][1] for i in b.indices}
        assert len(keys) == 1 and len(b.indices) <= max_rows
        assert b.num_pages == sum(sizes[i][0] for i in b.indices) + prefix_pages[keys.pop()] <= capacity
    assert [b.num_pages for b in bins] == sorted((b.num_pages for b in bins), reverse=True)


def test_small_rows_fill_the_gaps_of_large_ones():
    bins = pack([PackItem(i, n) for i, n in enumerate((70, 20, 60, 30, 10, 40))], 100, 64)
    assert [b.indices for b in bins] == [(0, 3), (2, 5), (1, 4)]
    assert [b.num_pages for b in bins] == [100, 100, 30]


def test_a_row_larger_than_a_bin_is_the_planners_mistake():
    with pytest.raises(ValueError, match="row 3 needs 95 pages, a bin has 90"):
        pack([PackItem(3, 95, "a", 10)], 100, 64)
