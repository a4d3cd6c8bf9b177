"""What a row needs of the page pool: page arithmetic over its requests, before any of them runs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvbatch.prompt import Prompt

if TYPE_CHECKING:
    from engine.budget import Budget


@dataclass(frozen=True)
class RowNeed:
    """Say what a row holds.

    Args:
        num_pages: that its requests hold at once, as many as run at once; without a prefix shared with other rows.
        num_sequences: these requests; all there may be where not all of them run at once, so that nobody joins them.
        prefix: tokens shared with other rows.
        prefix_pages: held for them.
        least_pages: without which one of the requests could not run, shared prefix included.
        largest_tokens: the prompt of that request.
    """

    num_pages: int
    num_sequences: int
    prefix: tuple[int, ...]
    prefix_pages: int
    least_pages: int
    largest_tokens: int


def row_need(prompt: Prompt, budget: "Budget", max_prompt_tokens: int, new_tokens: int) -> RowNeed:
    """Return what a row that runs needs.

    A request over partial answers is counted at the most tokens that it may have.

    Args:
        max_prompt_tokens: what the model's context leaves to a prompt; a streamed one takes as much.
        new_tokens: the most tokens of an answer.
    """
    layout = budget.layout

    def pages(tokens: int, shared: int) -> int:
        if prompt.outcome == "streamed":
            most = max_prompt_tokens + new_tokens
            return layout.sequence_pages(most, new_tokens=new_tokens, streamed_tokens=tokens)
        return layout.sequence_pages(tokens + new_tokens, shared, new_tokens)

    shared_prefix: tuple[int, ...] = ()
    in_order: list[int] = []  # pages that each request takes from the pool when it is admitted
    least = [(0, 0)]  # pages, tokens
    for part in prompt.parts or (prompt,):
        prefix_pages = 0
        for number, request in enumerate(part.requests):
            if request.prefix_tokens:
                prefix_pages = layout.sequence_pages(request.prefix_tokens)
            own = pages(len(request.token_ids), request.prefix_tokens)
            least.append((own + prefix_pages, len(request.token_ids)))
            # what several questions share is this row's
            in_order.append(own + (prefix_pages if part.tails and number == 0 else 0))
        if not part.tails:
            shared_prefix = tuple(part.token_ids[: part.prefix_tokens])
    prefix_pages = layout.sequence_pages(len(shared_prefix)) if shared_prefix else 0
    reduce_pages = pages(prompt.reduce_tokens, 0) if prompt.parts else 0
    least.append((reduce_pages + prefix_pages, prompt.reduce_tokens))
    num_pages, num_at_once = _first_wave(in_order, budget.capacity_pages - prefix_pages, budget.max_sequences)
    return RowNeed(
        max(num_pages, reduce_pages),
        num_at_once if num_at_once == len(in_order) else budget.max_sequences,
        shared_prefix,
        prefix_pages,
        *max(least),
    )


def _first_wave(in_order: list[int], capacity_pages: int, max_sequences: int) -> tuple[int, int]:
    """Return pages and number of the requests that are admitted together."""
    held = 0
    for number, pages in enumerate(in_order):
        if number == max_sequences or held + pages > capacity_pages and number:
            return held, number
        held += pages
    return held, len(in_order)
