"""How long a row's requests are: prompt, shared prefix and answer of each, in tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.forecast import PlannedRow
from engine.request_pages import held_pages, prefix_pages, request_pages

if TYPE_CHECKING:
    from kvcache.sizes.compressed import CompressedLayout
    from kvcache.sizes.full import CacheLayout


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
            shared_pages = prefix_pages(layout, shared)
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
            held = held_pages(layout, tokens, prefix_tokens=shared, longest_prompt=self._longest_prompt)
            yield PlannedRow(tokens, answer_tokens, own, shared, held)
        if self.reduce_tokens:  # one level; how many more there will be is not known
            tokens = max(1, self.reduce_tokens - len(self.part_tokens) * (self.new_tokens - answer_tokens))
            for _ in self.tail_tokens or (0,):
                held = held_pages(layout, tokens)
                yield PlannedRow(tokens, answer_tokens, self.reduce_pages(layout), 0, held)

    def reduce_pages(self, layout: "CacheLayout | CompressedLayout") -> int:
        """Return the most pages of a request over partial answers."""
        return self._pages(layout, self.reduce_tokens, 0) if self.reduce_tokens else 0

    @property
    def _longest_prompt(self) -> int | None:
        return self.longest_tokens if self.streams else None

    def _pages(self, layout: "CacheLayout | CompressedLayout", tokens: int, shared: int) -> int:
        return request_pages(
            layout, tokens, self.new_tokens, prefix_tokens=shared, longest_prompt=self._longest_prompt
        )
