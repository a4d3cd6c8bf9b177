"""The interface by which scheduler, runner and prefixes reach a cache, whatever its policy."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

import torch

from engine.config import EngineConfig
from engine.models.decoder import Attend, Decoder
from engine.scheduler import StepPlan
from engine.sequence import Sequence
from kvcache.pages.block_pool import BlockPool
from kvcache.pages.page_pool import PagePool
from kvcache.sequence.lane_usage import LaneUsage

# run_uncached(token ids, position of the first, attend): run the model over tokens that no cache keeps
RunUncached = Callable[[list[int], int, Attend], None]


class SequenceHandle(Protocol):
    """One sequence's cache, as the engine sees it."""

    @property
    def own_bytes(self) -> int:
        """Bytes held by this sequence alone."""
        ...

    @property
    def held_bytes(self) -> int:
        """Bytes held by this sequence, shared pages included."""
        ...

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tokens it keeps, shared pages included."""
        ...

    @property
    def lane_usage(self) -> LaneUsage | None:
        """What each lane keeps; None where every lane keeps every token."""
        ...

    @property
    def open_tokens(self) -> int:
        """The most tokens that one decode step may compute."""
        ...

    def free(self) -> None:
        """Return all pages to the pool."""
        ...


Cache = TypeVar("Cache", bound=SequenceHandle)


class CacheBackend(ABC, Generic[Cache]):
    """Keep the keys and values of many sequences in memory that is allocated once.

    A block is the unit by which sequences are admitted: `request_pages` counts them, `layout.page_bytes` is their
    size.

    Args:
        blocks: the pool of blocks.
    """

    def __init__(self, blocks: BlockPool | PagePool) -> None:
        self.blocks = blocks

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool."""
        return self.blocks.num_blocks

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that sequences hold now."""
        return self.blocks.used_bytes

    @property
    def peak_bytes(self) -> int:
        """The most bytes that sequences held at once."""
        return self.blocks.peak_bytes

    @property
    def allocated_bytes(self) -> int:
        """Bytes of everything allocated."""
        return self.blocks.allocated_bytes

    @property
    def num_prefill_buffers(self) -> int:
        """Prefill buffers in use."""
        return 0

    @property
    @abstractmethod
    def num_available(self) -> int:
        """Blocks that are reserved for no sequence."""

    def can_open(self, num_blocks: int, num_sequences: int = 1) -> bool:
        """Tell whether `num_sequences` that together need `num_blocks` can be opened now."""
        return num_blocks <= self.num_available

    @abstractmethod
    def open(self, num_blocks: int, num_tokens: int, prefix: Cache | None) -> Cache:
        """Return a cache for up to `num_tokens`, which begins with the tokens of `prefix`."""

    @abstractmethod
    def probe_tokens(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """Return the tokens that attend behind the next `num_tokens` of a prompt and are not cached."""

    @abstractmethod
    def attend(self, plan: StepPlan) -> Attend:
        """Return the function by which the layers of one step store keys and values and attend."""

    @abstractmethod
    def attend_uncached(self, cache: Cache) -> Attend:
        """Return a function that lets tokens attend to one sequence and causally to themselves, and stores nothing."""

    @abstractmethod
    def advance(
        self, sequence: Sequence, num_tokens: int, run_uncached: RunUncached, *, prompt_ends: bool
    ) -> None:
        """Count a step's tokens of one sequence after all layers have run, and compress the tokens that are due."""

    def check(self) -> None:
        """Prove that no sequence is open and no block is held."""
        self.blocks.check()


def whole_dtype(config: EngineConfig, model: Decoder) -> torch.dtype:
    """Return the type of tokens that are kept whole."""
    return torch.bfloat16 if config.cache.dtype == "bfloat16" else model.dtype
