"""A list of pages for every lane of a sequence, all of one format.

A lane's tokens lie in its pages in the order of appending; lanes have lengths of their own. Single tokens are appended
to pages at full precision only (`append_tokens`); quantized pages are appended full (`append_pages`) and never change.
"""

from typing import Self

import torch
from torch import Tensor

from kvcache.kernels.registry import kernels_for
from kvcache.pages.block_pool import PageStore
from kvcache.sizes.page_format import UNIT_BYTES, PageFormat


class PageList:
    """Hold `num_lanes` lists of pages.

    Attributes:
        addresses: int64 `[lanes, pages]`, -1 beyond a lane's own pages.
        lengths: int64 `[lanes]` tokens.
    """

    def __init__(self, store: PageStore, page_format: PageFormat, num_lanes: int, whole_dtype: torch.dtype):
        self._store = store
        self._dtype = whole_dtype
        self.format = page_format
        self.addresses = torch.full((num_lanes, 0), -1, dtype=torch.int64, device="cpu")
        self.lengths = torch.zeros(num_lanes, dtype=torch.int64, device="cpu")

    @property
    def counts(self) -> Tensor:
        """Tokens in each page, int64 `[lanes, pages]`."""
        return self.counts_with(0)

    def counts_with(self, num_open: int) -> Tensor:
        """Return the tokens in each page as if each lane had `num_open` more, int64 `[lanes, pages]`."""
        size = self.format.page_tokens
        starts = torch.arange(self.addresses.shape[1], device="cpu") * size
        return (self.lengths[:, None] + num_open - starts).clamp_(0, size)

    @property
    def num_pages(self) -> Tensor:
        """Pages of each lane, int64 `[lanes]`."""
        return (self.addresses >= 0).sum(1)

    def append_tokens(
        self,
        lanes: Tensor,  # [N] ascending
        keys: Tensor,  # [N, D]
        values: Tensor,  # [N, D]
    ) -> None:
        """Write tokens at full precision behind those of their lanes."""
        added = torch.bincount(lanes, minlength=len(self.lengths))
        rank = torch.arange(len(lanes), device="cpu") - (added.cumsum(0) - added)[lanes]
        slots = self.lengths[lanes] + rank
        self._grow(self.lengths + added)
        self.lengths = self.lengths + added
        where = self._places(self.addresses[lanes, slots // self.format.page_tokens], slots)
        for places, rows in zip(where, (keys, values), strict=True):
            self.write_rows(places[None], rows[:, None])

    def open_slots(self, num_tokens: int) -> tuple[Tensor, Tensor]:
        """Make room for more tokens in every lane, without counting them in `lengths`.

        Returns:
            The places of their keys and of their values, int64 `[lanes, num_tokens]` each, for `write_rows`.
        """
        self._grow(self.lengths + num_tokens)
        slots = self.lengths[:, None] + torch.arange(num_tokens, device="cpu")
        return self._places(self.addresses.gather(1, slots // self.format.page_tokens), slots)

    def write_rows(self, places: Tensor, rows: Tensor) -> None:
        """Write keys or values `[T, lanes, D]` to the places `[lanes, T]` that `open_slots` named."""
        slab = self._store.pool.slab.view(self._dtype)
        kernels = kernels_for(slab.device, self.format)
        kernels.write_rows(slab, places, rows, num_threads=torch.get_num_threads())

    def append_pages(self, lanes: Tensor, pages: Tensor) -> None:
        """Write full pages, uint8 `[P, page_bytes]`, behind those of their lanes `[P]`, ascending."""
        size = self.format.page_tokens
        added = torch.bincount(lanes, minlength=len(self.lengths))
        rank = torch.arange(len(lanes), device="cpu") - (added.cumsum(0) - added)[lanes]
        places = self.lengths[lanes] // size + rank
        self.lengths = self.lengths + added * size
        self._grow(self.lengths)
        self._store.pool.write(self.addresses[lanes, places], pages)

    def take_front(self, num_tokens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Remove the first `num_tokens[lane]` tokens of each lane, whole pages each.

        Returns:
            lanes `[N]` ascending, keys and values `[N, D]` in the whole dtype.
        """
        size = self.format.page_tokens
        num_pages = num_tokens // size
        assert bool((num_pages * size == num_tokens).all()), "only whole pages leave a list"
        lanes = torch.arange(len(num_pages), device="cpu").repeat_interleave(num_pages)
        places = torch.arange(len(lanes), device="cpu") - (num_pages.cumsum(0) - num_pages)[lanes]
        taken = self.addresses[lanes, places]
        keys, values = self.read_whole(taken)
        shift = torch.arange(self.addresses.shape[1], device="cpu") + num_pages[:, None]
        padded = torch.cat([self.addresses, torch.full_like(self.addresses, -1)], 1)
        self.addresses = (
            padded.gather(1, shift.clamp_(max=padded.shape[1] - 1)) if len(lanes) else self.addresses
        )
        self.lengths = self.lengths - num_tokens
        self._store.release(self.format, taken)
        return lanes.repeat_interleave(size), keys.flatten(0, 1), values.flatten(0, 1)

    def read_tokens(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return every token of a list kept whole: lanes `[N]` ascending, keys and values `[N, D]`."""
        lanes, places = (self.addresses >= 0).nonzero(as_tuple=True)
        keys, values = self.read_whole(self.addresses[lanes, places])
        valid = torch.arange(self.format.page_tokens, device="cpu") < self.counts[lanes, places][:, None]
        return lanes.repeat_interleave(valid.sum(1)), keys[valid], values[valid]

    def clear(self) -> None:
        """Remove every token."""
        held = self.addresses[self.addresses >= 0]
        if len(held):
            self._store.release(self.format, held)
        self.addresses, self.lengths = self.addresses[:, :0], torch.zeros_like(self.lengths)

    def read_whole(self, addresses: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of whole pages, each `[*addresses.shape, page_tokens, D]`."""
        size = self.format.page_tokens
        pages = self._store.pool.read(addresses, self.format.page_bytes).view(self._dtype)
        pages = pages[..., : 2 * size * self.format.head_dim].unflatten(-1, (2, size, self.format.head_dim))
        return pages.select(-3, 0), pages.select(-3, 1)

    def clone_into(self, store: PageStore, *, share: bool) -> Self:
        """Return the same list for another sequence: the same pages if `share`, else copies of them."""
        other = type(self)(store, self.format, len(self.lengths), self._dtype)
        if share:
            other.addresses, other.lengths = self.addresses, self.lengths
            return other
        other._grow(self.lengths)
        held = self.addresses >= 0
        other.lengths = self.lengths
        if bool(held.any()):
            pages = self._store.pool.read(self.addresses[held], self.format.page_bytes)
            store.pool.write(other.addresses[other.addresses >= 0], pages)
        return other

    def _places(self, addresses: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Return where the key and the value of a slot begin, in elements from the slab's first."""
        size, dim = self.format.page_tokens, self.format.head_dim
        keys = addresses * (UNIT_BYTES // self._dtype.itemsize) + slots % size * dim
        return keys, keys + size * dim

    def _grow(self, lengths: Tensor) -> None:
        """Add pages until each lane holds `lengths[lane]` tokens."""
        held = self.num_pages
        if int(lengths.max()) <= int(held.min()) * self.format.page_tokens:
            return  # as in most decode steps
        needed = -(-lengths // self.format.page_tokens)
        width = int(needed.max())
        if width > self.addresses.shape[1]:
            pad = torch.full(
                (len(lengths), width - self.addresses.shape[1]), -1, dtype=torch.int64, device="cpu"
            )
            self.addresses = torch.cat([self.addresses, pad], 1)
        places = torch.arange(self.addresses.shape[1], device="cpu")
        missing = (places >= held[:, None]) & (places < needed[:, None])
        count = int(missing.sum())
        if count:
            self.addresses = self.addresses.clone()
            self.addresses[missing] = self._store.allocate(self.format, count)
