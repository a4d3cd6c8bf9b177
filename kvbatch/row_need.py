"""What a row needs of the page pool: page arithmetic over its requests, before any of them runs."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from engine.forecast import PlannedRow
from kvcache.expected_pages import expected_pages

if TYPE_CHECKING:
    from engine.budget import Budget
    from kvcache.compressed_layout import CompressedLayout
    from kvcache.layout import CacheLayout


@dataclass(frozen=True)
class RowShape:
    """Say how long a row's requests are.

    Args:
        part_tokens: of each part's prompt; of several questions, without them.
        tail_tokens: of several questions, each with what follows it; a part's requests share all before them.
        new_tokens: the most of an answer.
        prefix_tokens: shared with other rows, where there is no part to share.
        prefix_kind: tells prefixes of one length apart.
        reduce_tokens: the most of a prompt over partial answers, 0 if there are none.
        streams: the prompt takes as much memory as one of `longest_tokens`.
        longest_tokens: of a prompt that the model's context holds.
    """

    part_tokens: Sequence[int]
    tail_tokens: Sequence[int]
    new_tokens: int
    prefix_tokens: int
    prefix_kind: str
    reduce_tokens: int
    streams: bool
    longest_tokens: int

    def requests(self, layout: "CacheLayout | CompressedLayout") -> list[tuple[int, int, int]]:
        """Return prompt tokens of each request in order, its own pages, and those of what it shares."""
        found = []
        for part in self.part_tokens:
            shared = part if self.tail_tokens else self.prefix_tokens
            shared_pages = layout.sequence_pages(shared) if shared else 0
            for tail in self.tail_tokens or (0,):
                found.append((part + tail, self._pages(layout, part + tail, shared), shared_pages))
        return found

    def planned(self, layout: "CacheLayout | CompressedLayout", answer_tokens: int) -> Iterator[PlannedRow]:
        """Yield each request in order, as a forecast takes it; of several questions, the first reads the document.

        Args:
            answer_tokens: how long an answer will be, a partial one too.
        """
        num_tails = len(self.tail_tokens)
        for number, (tokens, own, shared_pages) in enumerate(self.requests(layout)):
            part = self.part_tokens[number // max(1, num_tails)]
            shared = part if num_tails else self.prefix_tokens
            if num_tails and number % num_tails == 0:
                own, shared = own + shared_pages, 0
            yield PlannedRow(tokens, answer_tokens, own, shared, self._pages_after(layout, tokens, shared))
        if self.reduce_tokens:  # one level; how many more there will be is not known
            tokens = max(1, self.reduce_tokens - len(self.part_tokens) * (self.new_tokens - answer_tokens))
            for _ in self.tail_tokens or (0,):
                yield PlannedRow(
                    tokens, answer_tokens, self.reduce_pages(layout), 0, self._pages_after(layout, tokens, 0)
                )

    def _pages_after(
        self, layout: "CacheLayout | CompressedLayout", tokens: int, shared: int
    ) -> Callable[[int], int] | None:
        """Return what `PlannedRow` takes: pages of a compressed cache come as they are needed."""
        if layout is layout.uncompressed:
            return None
        if self.streams:
            return partial(expected_pages, layout, self.longest_tokens, streamed_tokens=tokens)
        return partial(expected_pages, layout, tokens, shared_tokens=shared)

    def reduce_pages(self, layout: "CacheLayout | CompressedLayout") -> int:
        """Return the most pages of a request over partial answers."""
        return self._pages(layout, self.reduce_tokens, 0) if self.reduce_tokens else 0

    def _pages(self, layout: "CacheLayout | CompressedLayout", tokens: int, shared: int) -> int:
        new = self.new_tokens
        if self.streams:
            longest = self.longest_tokens + new
            return layout.sequence_pages(longest, new_tokens=new, streamed_tokens=tokens)
        return layout.sequence_pages(tokens + new, shared, new)


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
