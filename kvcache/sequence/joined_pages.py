"""A sequence's lists of pages as kernels take them, joined again only after one of them changed."""

from collections.abc import Sequence

from torch import Tensor

from kvcache.kernels.page_table import LanePages
from kvcache.pages.page_list import PageList


class JoinedPages:
    """Join lists of pages and keep the result while the lists stay as they are."""

    def __init__(self) -> None:
        self._made_of: list[Tensor] = []
        self._pages: LanePages | None = None

    def of(self, lists: Sequence[PageList]) -> LanePages:
        """Return the pages of these lists, joined.

        Lists replace their tensors and never change them in place, so the same tensors mean the same pages.
        """
        tensors = [x for part in lists for x in (part.addresses, part.lengths)]
        if self._pages is None or any(x is not y for x, y in zip(tensors, self._made_of, strict=True)):
            self._made_of = tensors
            self._pages = LanePages.of([(part.format, part.addresses, part.counts) for part in lists])
        return self._pages
