"""How many pages of the pool a request takes. Planner, estimates and engine all ask here. No torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvcache.sizes.full import CacheLayout

if TYPE_CHECKING:
    from kvcache.sizes.compressed import CompressedLayout


def request_pages(
    layout: CacheLayout | CompressedLayout,
    prompt_tokens: int,
    new_tokens: int,
    *,
    prefix_tokens: int = 0,
    longest_prompt: int | None = None,
) -> int:
    """Return the most pages that a request holds, those of its prefix left out.

    Args:
        prompt_tokens: tokens of the whole prompt, its prefix included.
        new_tokens: the most tokens of the answer.
        prefix_tokens: leading prompt tokens that are cached for several requests.
        longest_prompt: of a request that may exceed the model's context (`Request.streams`), the longest prompt that
            the context holds beside the answer; a longer prompt takes the pages of that one.
    """
    if longest_prompt is not None and prompt_tokens > longest_prompt:
        assert not isinstance(layout, CacheLayout), "a full cache holds no prompt beyond the context"
        num_tokens = longest_prompt + new_tokens
        return layout.sequence_pages(num_tokens, new_tokens=new_tokens, streamed_tokens=prompt_tokens)
    return layout.sequence_pages(prompt_tokens + new_tokens, prefix_tokens, new_tokens)


def prefix_pages(layout: CacheLayout | CompressedLayout, prefix_tokens: int) -> int:
    """Return the pages that a prefix holds, once for all requests that share it; 0 for no prefix."""
    return request_pages(layout, prefix_tokens, 0) if prefix_tokens else 0


def held_pages(
    layout: CacheLayout | CompressedLayout,
    prompt_tokens: int | None,
    *,
    prefix_tokens: int = 0,
    longest_prompt: int | None = None,
) -> Callable[[int], int] | None:
    """Return what gives the pages a request is expected to hold, by the number of its tokens computed so far.

    Args:
        prompt_tokens, prefix_tokens, longest_prompt: as in `request_pages`; without `prompt_tokens` it is a prefix.

    Returns:
        None where nothing is compressed: all pages are held from the beginning.
    """
    if isinstance(layout, CacheLayout):
        return None
    from kvcache.sizes.expected import expected_pages

    if prompt_tokens is not None and longest_prompt is not None and prompt_tokens > longest_prompt:
        return partial(expected_pages, layout, longest_prompt, streamed_tokens=prompt_tokens)
    return partial(expected_pages, layout, prompt_tokens, shared_tokens=prefix_tokens)
