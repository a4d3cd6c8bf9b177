"""What the lanes of a compressed cache keep: tokens and pages, as the page lists have them."""

from dataclasses import dataclass, replace

from torch import Tensor

from kvcache.sizes.page_format import PageFormat


@dataclass(frozen=True)
class LaneUsage:
    """Count what every lane keeps, of one sequence or, added up, of many.

    The first list is that of the tokens kept whole: sinks, recent window and those that wait for their page to be
    full. The others are the tiers, best first.

    Attributes:
        formats: of each list.
        tokens_seen: ever cached in a lane, kept or not; the same in all.
        tokens: int64 `[lists, L, KVH]` kept.
        pages: int64 `[lists, L, KVH]` that hold them, those shared with other sequences included.
    """

    formats: tuple[PageFormat, ...]
    tokens_seen: int
    tokens: Tensor
    pages: Tensor

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
        """Tokens kept in any list, int64 `[L, KVH]`."""
        return self.tokens.sum(0)

    @property
    def num_bytes(self) -> Tensor:
        """Bytes of the pages, partly filled ones as a whole, int64 `[L, KVH]`.

        Together less than a sequence's `kept_bytes`, which also counts the room in its blocks that no page takes.
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
