"""Which pages hold the tokens of which lane, as flat tensors that a kernel can walk."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvcache.sizes.page_format import PageFormat

# A sequence's lists of pages: format, addresses `[lanes, pages]`, valid slots of each page `[lanes, pages]`.
PageLists = Sequence[tuple[PageFormat, Tensor, Tensor]]

_PER_LANE = ("first", "num_pages", "tokens")


@dataclass(frozen=True)
class LanePages:
    """One sequence's lists of pages joined, each lane's behind each other."""

    formats: tuple[tuple[PageFormat, int], ...]  # of each list, and its pages of a lane
    addresses: Tensor  # int64 [lanes, pages]
    counts: Tensor  # int32 [lanes, pages]
    tokens: Tensor  # int64 [lanes]

    @classmethod
    def of(cls, lists: PageLists) -> Self:
        """Join lists."""
        counts = torch.cat([part for _, _, part in lists], 1)
        return cls(
            tuple((page_format, part.shape[1]) for page_format, part, _ in lists),
            torch.cat([part for _, part, _ in lists], 1),
            counts.to(torch.int32),
            counts.sum(1),
        )

    def __add__(self, later: Self) -> "LanePages":
        return LanePages(
            self.formats + later.formats,
            torch.cat([self.addresses, later.addresses], 1),
            torch.cat([self.counts, later.counts], 1),
            self.tokens + later.tokens,
        )


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
    def of(cls, slab: Tensor, sequences: Sequence[PageLists]) -> Self:
        """Join the lists of several sequences, each lane's in the order given."""
        return cls.join(slab, [LanePages.of(lists) for lists in sequences])

    @classmethod
    def join(cls, slab: Tensor, sequences: Sequence[LanePages]) -> Self:
        """Join the pages of several sequences."""
        formats = tuple(dict.fromkeys(kind for pages in sequences for kind, _ in pages.formats))
        number = {kind: [n] for n, kind in enumerate(formats)}
        ids = [sum((number[kind] * count for kind, count in pages.formats), []) for pages in sequences]
        num_lanes, widths = len(sequences[0].tokens), torch.tensor([len(each) for each in ids], device="cpu")
        starts = (widths.cumsum(0) - widths) * num_lanes
        return cls(
            slab,
            formats,
            torch.cat([pages.addresses.flatten() for pages in sequences]),
            torch.cat(
                [torch.tensor(each, dtype=torch.uint8, device="cpu").repeat(num_lanes) for each in ids]
            ),
            torch.cat([pages.counts.flatten() for pages in sequences]),
            starts[:, None] + widths[:, None] * torch.arange(num_lanes, device="cpu"),
            widths[:, None].repeat(1, num_lanes),
            torch.stack([pages.tokens for pages in sequences]),
        )

    def by_layer(self, num_layers: int) -> list["PageTable"]:
        """Return a table for each layer, whose lanes are behind each other."""
        parts = (
            getattr(self, name).unflatten(1, (num_layers, -1)).transpose(0, 1).contiguous()
            for name in _PER_LANE
        )
        return [
            replace(self, **dict(zip(_PER_LANE, layer, strict=True))) for layer in zip(*parts, strict=True)
        ]


@dataclass(frozen=True)
class BlockTables:
    """One layer's block tables of several sequences in a pool.

    Attributes:
        pages: of each sequence, int64 `[KVH, pages]` page ids.
        lengths: int64 `[B, KVH]` tokens.
        places: int64 `[B, KVH]`, where in memory each lane's page ids lie.
    """

    pages: tuple[Tensor, ...]
    lengths: Tensor
    places: Tensor
    page_tokens: int

    @classmethod
    def by_layer(
        cls,
        pages: Sequence[Tensor],  # B × int64 [L, KVH, pages]
        lengths: Tensor,  # int64 [B, L, KVH]
        page_tokens: int,
    ) -> list[Self]:
        """Return those of each layer."""
        widths = torch.tensor([table.shape[2] for table in pages], device="cpu")
        assert bool((lengths <= widths[:, None, None] * page_tokens).all()), (
            "a lane is longer than its block table"
        )
        assert all(table.is_contiguous() and table.dtype == torch.int64 for table in pages)
        starts = torch.tensor([table.data_ptr() for table in pages], device="cpu")
        _, num_layers, num_lanes = lengths.shape
        lanes = torch.arange(num_layers * num_lanes, device="cpu").view(num_layers, 1, num_lanes)
        places = starts[:, None] + lanes * (widths * pages[0].itemsize)[:, None]  # [L, B, KVH]
        per_layer = zip(*(table.unbind() for table in pages), strict=True)
        return [
            cls(tables, layer_lengths, layer_places, page_tokens)
            for tables, layer_lengths, layer_places in zip(
                per_layer, lengths.transpose(0, 1).contiguous(), places, strict=True
            )
        ]
