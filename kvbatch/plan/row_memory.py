"""What a row needs of the page pool: page arithmetic over its requests, before any of them runs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvbatch.prompts.row_shape import RowShape

if TYPE_CHECKING:
    from engine.memory_division import Budget


@dataclass(frozen=True)
class RowNeed:
    """Say what a row holds.

    Args:
        num_pages: that its requests hold at once, as many as run at once; without a prefix shared with other rows.
        num_sequences: these requests; all there may be where not all of them run at once, so that nobody joins them.
        full_bytes: what the same requests would hold in the full cache.
        prefix_pages: of the prefix shared with other rows.
        least_pages: without which one of the requests could not run, the prefix included.
        largest_tokens: the prompt of that request.
    """

    num_pages: int
    num_sequences: int
    full_bytes: int
    prefix_pages: int
    least_pages: int
    largest_tokens: int


def row_need(shape: RowShape, budget: "Budget") -> RowNeed:
    """Return what a row needs; a request over partial answers is counted at the most tokens that it may have."""
    layout = budget.layout
    requests, reduce_pages = shape.requests(layout), shape.reduce_pages(layout)
    prefix_pages = 0 if shape.tail_tokens else requests[0][2]
    least = [(own + shared, tokens) for tokens, own, shared in requests]
    least.append((reduce_pages + prefix_pages, shape.reduce_tokens))
    in_order = _in_order(shape, requests)
    num_pages, num_at_once = _first_wave(in_order, budget.capacity_pages - prefix_pages, budget.max_sequences)
    full = layout.uncompressed
    full_shape = replace(shape, streams=False)
    full_pages = sum(_in_order(full_shape, full_shape.requests(full))[:num_at_once])
    return RowNeed(
        max(num_pages, reduce_pages),
        num_at_once if num_at_once == len(in_order) else budget.max_sequences,
        max(full_pages, shape.reduce_pages(full)) * full.page_bytes,
        prefix_pages,
        *max(least),
    )


def _in_order(shape: RowShape, requests: Sequence[tuple[int, int, int]]) -> list[int]:
    """Return the pages that each request takes from the pool when it is admitted: the first of a part reads it."""
    num_tails = len(shape.tail_tokens)
    return [
        own + (shared if num_tails and number % num_tails == 0 else 0)
        for number, (_, own, shared) in enumerate(requests)
    ]


def _first_wave(in_order: list[int], capacity_pages: int, max_sequences: int) -> tuple[int, int]:
    """Return pages and number of the requests that are admitted together."""
    held = 0
    for number, pages in enumerate(in_order):
        if number == max_sequences or held + pages > capacity_pages and number:
            return held, number
        held += pages
    return held, len(in_order)
