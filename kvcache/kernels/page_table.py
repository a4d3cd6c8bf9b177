"""Which pages hold the tokens of which lane, as flat tensors that a kernel can walk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvcache.page_format import PageFormat

# A sequence's lists of pages: format, addresses `[lanes, pages]`, valid slots of each page `[lanes, pages]`.
PageLists = Sequence[tuple[PageFormat, Tensor, Tensor]]

_PER_LANE = ("first", "num_pages", "tokens")


@dataclass(frozen=True)
class PageTable:
    """Hold the pages of lanes of several sequences.

    A lane's pages are entries `[first, first + num_pages)` of the three flat tensors; an entry of no slots is
    skipped whatever its address.

    Attributes:
        slab: uint8, all pages.
        formats: what `format_ids` count.
        addresses: int64 `[P]` in units of 512 bytes.
        format_ids: uint8 `[P]`.
        counts: int32 `[P]` valid slots, the page's first ones.
        first: int64 `[B, lanes]`.
        num_pages: int64 `[B, lanes]`.
        tokens: int64 `[B, lanes]`, what the lane's counts add up to.
    """

    slab: Tensor
    formats: tuple[PageFormat, ...]
    addresses: Tensor
    format_ids: Tensor
    counts: Tensor
    first: Tensor
    num_pages: Tensor
    tokens: Tensor

    @classmethod
    def of(cls, slab: Tensor, sequences: Sequence[PageLists]) -> "PageTable":
        """Join the lists of several sequences, each lane's in the order given."""
        formats = tuple(dict.fromkeys(page_format for lists in sequences for page_format, _, _ in lists))
        addresses, format_ids, counts, first, num_pages, tokens = [], [], [], [], [], []
        start = 0
        for lists in sequences:
            held = torch.cat([part for _, part, _ in lists], 1)  # [lanes, pages]
            ids = [torch.full((part.shape[1],), formats.index(kind)) for kind, part, _ in lists]
            addresses.append(held.flatten())
            format_ids.append(torch.cat(ids).to(torch.uint8).expand_as(held).flatten())
            filled = torch.cat([part for _, _, part in lists], 1)
            counts.append(filled.to(torch.int32).flatten())
            tokens.append(filled.sum(1))
            num_lanes, width = held.shape
            first.append(start + torch.arange(num_lanes) * width)
            num_pages.append(torch.full((num_lanes,), width))
            start += held.numel()
        return cls(
            slab,
            formats,
            torch.cat(addresses),
            torch.cat(format_ids),
            torch.cat(counts),
            torch.stack(first),
            torch.stack(num_pages),
            torch.stack(tokens),
        )

    def lanes(self, start: int, end: int) -> "PageTable":
        """Return the table of lanes `[start, end)` of every sequence."""
        per_lane = {name: getattr(self, name)[:, start:end].contiguous() for name in _PER_LANE}
        return replace(self, **per_lane)
