"""The protocol by which scheduler, runner and prefixes reach a cache, whatever its policy."""

from collections.abc import Callable
from typing import Protocol

from torch import Tensor

from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.sequence.lane_usage import LaneUsage

# attend(layer, q [T, H, D], k [T, KVH, D], v [T, KVH, D]) -> [T, H, D]
Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
# look_ahead(token ids, position of the first, attend): run tokens that are not cached
LookAhead = Callable[[list[int], int, Attend], None]


class SequenceHandle(Protocol):
    """One sequence's cache, as the engine sees it."""

    num_tokens: int  # cached, kept or not
    own_bytes: int  # held by this sequence alone
    held_bytes: int  # by this sequence, shared pages included
    kept_bytes: int  # what its tokens take, shared pages included
    lane_usage: LaneUsage | None  # what its lanes keep; None where every lane keeps every token
    open_chunk_tokens: int  # the most prompt tokens it takes in one step
    whole_chunks: bool  # it must take that many
    open_tokens: int  # the most tokens it takes in one step of decode

    def free(self) -> None:
        """Give everything back."""
        ...


class CacheBackend(Protocol):
    """Keep many sequences' keys and values in one preallocated budget.

    A block is the unit sequences are admitted by: `layout.sequence_pages` counts them, `layout.page_bytes` is
    their size.
    """

    num_blocks: int
    num_available: int
    allocated_bytes: int
    used_bytes: int
    peak_bytes: int
    num_prefill_buffers: int  # in use

    def can_open(self, num_blocks: int, num_sequences: int = 1) -> bool:
        """Tell whether so many sequences that together need `num_blocks` can be opened now."""
        ...

    def open(self, num_blocks: int, num_tokens: int, prefix: SequenceHandle | None) -> SequenceHandle:
        """Return a cache for up to `num_tokens`, beginning with those of `prefix`."""
        ...

    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the tokens that look at the cache after the next `num_tokens` of a sequence, and are not cached."""
        ...

    def attend(self, plan: StepPlan) -> Attend:
        """Return the callback by which the layers of one step store and attend."""
        ...

    def attend_aside(self, cache: SequenceHandle) -> Attend:
        """Return a callback that attends tokens to one sequence and to themselves without caching them."""
        ...

    def advance(
        self, sequence: Sequence, num_tokens: int, look_ahead: LookAhead, *, prompt_ends: bool
    ) -> None:
        """Count a step's tokens of one sequence, after all layers ran, and compress what is old enough."""
        ...

    def check(self) -> None:
        """Prove that no sequence is open and nothing is held."""
        ...
