"""A tier's list of pages, in which decode evicts the page of a lane that was attended longest ago (LRU)."""

from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from kvcache.pages.block_pool import PageStore
from kvcache.pages.page_list import PageList
from kvcache.sizes.page_format import PageFormat


class TierList(PageList):
    """Hold a tier's pages and how long ago each was attended.

    Attributes:
        idle: int64 `[lanes, pages]`, decode steps since a page was attended, or since its first token.
    """

    def __init__(
        self, store: PageStore, page_format: PageFormat, num_lanes: int, whole_dtype: torch.dtype
    ) -> None:
        super().__init__(store, page_format, num_lanes, whole_dtype)
        self.idle = torch.zeros_like(self.addresses)
        self._num_shared = torch.zeros_like(
            self.lengths
        )  # of each lane's first pages, those a prefix holds too

    def note_attention(self, attended: Tensor) -> None:
        """Count a decode step that attended some of the pages, bool `[lanes, pages]`."""
        self.idle = (self.idle + 1).masked_fill_(attended | (self.addresses < 0), 0)

    def make_room(self, num_tokens: Tensor) -> None:
        """Release as many pages of each lane as `num_tokens[lane]` more tokens need, those idle for longest.

        Of pages equally idle the oldest is evicted. Shared pages and a page not yet full are never evicted: a lane that
        has no other pages grows.
        """
        size = self.format.page_tokens
        needed = -(-(self.lengths + num_tokens) // size) - (self.addresses >= 0).sum(1)
        places = torch.arange(self.addresses.shape[1], device="cpu")
        may_leave = (places >= self._num_shared[:, None]) & (places < self.lengths[:, None] // size)
        order = self.idle.masked_fill(~may_leave, -1).argsort(dim=1, descending=True, stable=True)
        leaves = torch.zeros_like(may_leave).scatter_(1, order, places < needed[:, None]) & may_leave
        if not bool(leaves.any()):
            return
        self._store.release(self.format, self.addresses[leaves])
        self.lengths = self.lengths - leaves.sum(1) * size
        order = leaves.byte().argsort(dim=1, stable=True)  # the remaining pages move up
        self.addresses = self.addresses.masked_fill(leaves, -1).gather(1, order)
        self.idle = self.idle.masked_fill(leaves, 0).gather(1, order)

    def clone_into(self, store: PageStore, *, share: bool) -> Self:
        """See `PageList.clone_into`; shared pages are never evicted."""
        other = super().clone_into(store, share=share)
        other.idle = torch.zeros_like(other.addresses)
        if share:
            other._num_shared = (other.addresses >= 0).sum(1)
        return other

    def _grow(self, lengths: Tensor) -> None:
        super()._grow(lengths)
        self.idle = F.pad(self.idle, (0, self.addresses.shape[1] - self.idle.shape[1]))
