"""The page pool: one preallocated slab of keys and one of values, allocated by the page.

It has no notion of sequences, layers or heads.
"""

import torch
from torch import Tensor

from kvcache.kernels.registry import kernels_for
from kvcache.pages.block_allocator import BlockAllocator
from kvcache.pages.huge_pages import in_huge_pages
from kvcache.sizes.full import CacheLayout


class PagePool(BlockAllocator):
    """Hold `num_pages` pages of keys and values, rounded to the pool's dtype when they are stored.

    Args:
        layout: sizes of a page.
        num_pages: pages to allocate, all at once.
        dtype: element type; its size must be `layout.element_bytes`.
        device: where the slab lies.
    """

    def __init__(
        self, layout: CacheLayout, num_pages: int, *, dtype: torch.dtype, device: str | torch.device = "cpu"
    ):
        assert dtype.itemsize == layout.element_bytes, "layout and dtype disagree"
        super().__init__(num_pages)
        shape = (num_pages, layout.page_tokens, layout.head_dim)
        self.layout = layout
        # zeroed, so that the system provides the memory now and not in the middle of a job
        self.keys, self.values = (  # [P, page_tokens, D]
            in_huge_pages(torch.empty(shape, dtype=dtype, device=device)).zero_() for _ in range(2)
        )
        self._kernels = kernels_for(self.keys.device, layout)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of both slabs, read off the tensors."""
        return self.keys.nbytes + self.values.nbytes

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.layout.page_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * self.layout.page_bytes

    def store(
        self,
        slots: Tensor,  # [KVH, T] page id × page_tokens + offset
        keys: Tensor,  # [T, KVH, D]
        values: Tensor,  # [T, KVH, D]
    ) -> None:
        """Write one layer's new keys and values into their slots."""
        places = slots * self.keys.shape[2]
        for slab, rows in ((self.keys, keys), (self.values, values)):
            self._kernels.write_rows(slab, places, rows, num_threads=torch.get_num_threads())

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copy whole pages, keys and values."""
        source, target = source.flatten().to(self.keys.device), target.flatten().to(self.keys.device)
        self.keys[target] = self.keys[source]
        self.values[target] = self.values[source]
