"""What the lanes of a compressed cache keep, in tokens and in pages."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kvcache.pages.page_list import PageList
from kvcache.sizes.compressed import CompressedLayout
from kvcache.sizes.page_format import PageFormat


@dataclass(frozen=True)
class LaneUsage:
    """Count what every lane keeps, of one sequence or, added up, of many.

    The first of the K kinds are the tokens kept whole: sinks, recent window and those pending until they fill a page.
    The other kinds are the tiers, best first.

    Attributes:
        formats: page format of each kind.
        tokens_seen: ever cached in a lane, kept or not; the same in all lanes.
        tokens: kept, int64 `[K, L, KVH]`.
        pages: that hold them, those shared with other sequences included, int64 `[K, L, KVH]`.
    """

    formats: tuple[PageFormat, ...]
    tokens_seen: int
    tokens: Tensor
    pages: Tensor

    @classmethod
    def of(cls, layout: CompressedLayout, tokens_seen: int, kinds: Sequence[Sequence[PageList]]) -> Self:
        """Count a sequence's lists of pages, those of each kind together."""
        shape = (len(kinds), layout.num_layers, layout.num_kv_heads)
        tokens = [torch.stack([part.lengths for part in lists]).sum(0) for lists in kinds]
        pages = [torch.stack([part.num_pages for part in lists]).sum(0) for lists in kinds]
        return cls(
            (layout.whole, *layout.tiers),
            tokens_seen,
            torch.stack(tokens).view(shape),
            torch.stack(pages).view(shape),
        )

    def __add__(self, other: "LaneUsage") -> "LaneUsage":
        assert self.formats == other.formats, "lanes of different policies do not add up"
        return replace(
            self,
            tokens_seen=self.tokens_seen + other.tokens_seen,
            tokens=self.tokens + other.tokens,
            pages=self.pages + other.pages,
        )

    @property
    def tokens_kept(self) -> Tensor:
        """Tokens kept, of all kinds together, int64 `[L, KVH]`."""
        return self.tokens.sum(0)

    @property
    def num_bytes(self) -> Tensor:
        """Bytes of the pages, partly filled ones counted whole, int64 `[L, KVH]`.

        Their sum is less than the sequence's `kept_bytes`, which also counts free space in its blocks.
        """
        return sum(
            pages * page_format.page_bytes
            for page_format, pages in zip(self.formats, self.pages, strict=True)
        )

    @property
    def bits_per_element(self) -> Tensor:
        """Mean bits of a kept key or value element, scales included, float64 `[L, KVH]`; 0 where nothing is kept."""
        bits = sum(
            tokens.double() * page_format.bits_per_element
            for page_format, tokens in zip(self.formats, self.tokens, strict=True)
        )
        return bits / self.tokens_kept.clamp(min=1)
