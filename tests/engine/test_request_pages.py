"""A request's pages are counted by one function, which engine and plan share."""

import pytest

from engine.request_pages import held_pages, prefix_pages, request_pages
from kvcache.config import KVCacheConfig
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.full import CacheLayout, LayerGroup

FULL = CacheLayout((LayerGroup(2, 2, 16),), 4, page_tokens=16)
COMPRESSED = CompressedLayout((LayerGroup(4, 2, 16),), 4, 2, KVCacheConfig.preset("aggressive"))


def test_a_full_caches_pages_follow_from_the_tokens():
    assert request_pages(FULL, 100, 30) == 4 * 9
    assert request_pages(FULL, 100, 30, prefix_tokens=40) == 4 * 7, "the partly filled page is copied"
    assert (prefix_pages(FULL, 40), prefix_pages(FULL, 0)) == (4 * 3, 0)
    assert held_pages(FULL, 100) is None


@pytest.mark.parametrize("prompt", [3000, 20_000])
def test_a_prompt_beyond_the_context_takes_no_more_than_the_longest_in_it(prompt):
    longest = 4000
    pages = request_pages(COMPRESSED, prompt, 50, longest_prompt=longest)
    held = held_pages(COMPRESSED, prompt, longest_prompt=longest)
    assert held(prompt) <= pages
    if prompt <= longest:
        assert pages == request_pages(COMPRESSED, prompt, 50)
    else:
        assert request_pages(COMPRESSED, longest, 50) <= pages < 0.5 * request_pages(COMPRESSED, prompt, 50)
        assert held(prompt) == pytest.approx(held_pages(COMPRESSED, longest)(longest), rel=0.1)
