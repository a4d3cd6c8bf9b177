"""Blocks: equal parts of one byte slab, from which a sequence carves pages of any format.

A block belongs to one sequence, or to a prefix and the sequences that begin with it. A sequence returns whole
blocks, so pages of different sizes never fragment the slab.
"""

import torch
from torch import Tensor

from kvcache.kernels.wide_copy import in_words
from kvcache.pages.block_allocator import BlockAllocator
from kvcache.pages.huge_pages import in_huge_pages
from kvcache.sizes.page_format import UNIT_BYTES, PageFormat


class BlockPool(BlockAllocator):
    """Hold `num_blocks` blocks of `block_bytes` bytes.

    Blocks are reserved at admission and allocated when written, so `used_bytes` counts only blocks with tokens.
    """

    def __init__(self, num_blocks: int, block_bytes: int, *, device: str | torch.device = "cpu"):
        assert block_bytes % UNIT_BYTES == 0
        super().__init__(num_blocks)
        self.block_bytes = block_bytes
        self.num_reserved = 0
        size = num_blocks * block_bytes
        self.slab = in_huge_pages(torch.empty(size, dtype=torch.uint8, device=device)).zero_()

    @property
    def num_available(self) -> int:
        """Blocks that are not reserved."""
        return self.num_blocks - self.num_reserved

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the slab itself, read off the tensor."""
        return self.slab.nbytes

    @property
    def used_bytes(self) -> int:
        return self.num_used * self.block_bytes

    @property
    def peak_bytes(self) -> int:
        return self.peak_blocks * self.block_bytes

    def read(self, addresses: Tensor, num_bytes: int) -> Tensor:
        """Return pages as uint8 `[*addresses.shape, num_bytes]`, copied."""
        units = addresses[..., None] + torch.arange(num_bytes // UNIT_BYTES, device="cpu")
        return in_words(self.slab.view(-1, UNIT_BYTES))[units].flatten(-2).view(torch.uint8)

    def write(self, addresses: Tensor, pages: Tensor) -> None:
        """Write whole pages, uint8 `[P, num_bytes]`, to addresses `[P]`."""
        units = addresses[:, None] + torch.arange(pages.shape[1] // UNIT_BYTES, device="cpu")
        in_words(self.slab.view(-1, UNIT_BYTES))[units.flatten()] = in_words(pages.reshape(-1, UNIT_BYTES))


class PageStore:
    """Carve pages out of blocks, for one sequence.

    Args:
        pool: where blocks come from.
        num_blocks: the blocks reserved for this sequence, which never allocates more.
    """

    def __init__(self, pool: BlockPool, num_blocks: int):
        assert num_blocks <= pool.num_available, "admission reserves before a store is made"
        self.pool = pool
        self.num_reserved = num_blocks
        pool.num_reserved += num_blocks
        self._blocks: list[Tensor] = []
        self._shared: list[Tensor] = []
        self._free: dict[PageFormat, Tensor] = {}

    @property
    def num_blocks(self) -> int:
        """Blocks that this store allocated, shared ones left out."""
        return sum(len(blocks) for blocks in self._blocks)

    @property
    def blocks(self) -> list[Tensor]:
        """All blocks that this store holds, shared ones included."""
        return self._blocks + self._shared

    def allocate(self, page_format: PageFormat, count: int) -> Tensor:
        """Return the addresses of `count` free pages, int64 `[count]`.

        Raises:
            PoolExhausted: The sequence outgrew the pool.
        """
        free = self._free.get(page_format, torch.empty(0, dtype=torch.int64, device="cpu"))
        if len(free) < count:
            per_block = pages_per_block(self.pool.block_bytes, page_format)
            blocks = self.pool.allocate(-(-(count - len(free)) // per_block)).flatten()
            self._blocks.append(blocks)
            assert self.num_blocks <= self.num_reserved, "a sequence outgrew its reservation"
            starts = blocks[:, None] * (self.pool.block_bytes // UNIT_BYTES)
            inside = torch.arange(per_block, device="cpu") * (page_format.page_bytes // UNIT_BYTES)
            free = torch.cat([free, (starts + inside).flatten()])
        self._free[page_format] = free[count:]
        return free[:count]

    def release(self, page_format: PageFormat, addresses: Tensor) -> None:
        """Free pages, to be allocated again in the same format."""
        self._free[page_format] = torch.cat([self._free[page_format], addresses.flatten()])

    def share(self, other: "PageStore") -> None:
        """Retain the blocks of another store, whose pages this sequence reads and never writes."""
        for blocks in other.blocks:
            self.pool.retain(blocks)
            self._shared.append(blocks)

    def free(self) -> None:
        """Release every block and the reservation."""
        for blocks in self.blocks:
            self.pool.release(blocks)
        self._blocks, self._shared, self._free = [], [], {}
        self.pool.num_reserved -= self.num_reserved
        self.num_reserved = 0


def pages_per_block(block_bytes: int, page_format: PageFormat) -> int:
    """Return how many pages of a format a block holds."""
    return block_bytes // page_format.page_bytes
