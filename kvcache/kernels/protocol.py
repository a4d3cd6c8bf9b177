"""What kernels over pages compute; `reference` is their specification, in plain torch."""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor

from kvcache.kernels.page_table import BlockTables, PageTable
from kvcache.kernels.page_tokens import PageTokens
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.page_format import PageFormat


class PageKernels(Protocol):
    """Functions over the pages of a pool; a module with these functions will do.

    `reference` says what each of them returns. `num_threads` changes how long it takes, and no bit of the result.
    """

    def supports(self, page_format: PageFormat) -> bool:
        """Tell whether the kernels run here and know pages of a format."""
        ...

    def quantize(
        self,
        rows: PageTokens,
        page_format: PageFormat,
        compensation: Compensation | None = None,
        *,
        num_threads: int = 1,
    ) -> Tensor:
        """Pack full pages."""
        ...

    def dequantize(
        self,
        table: PageTable,
        dtype: torch.dtype = torch.float32,
        *,
        out: tuple[Tensor, Tensor] | None = None,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Unpack the keys and values of all lanes."""
        ...

    def write_rows(self, slab: Tensor, places: Tensor, rows: Tensor, *, num_threads: int = 1) -> None:
        """Write keys or values at full precision to a slab."""
        ...

    def decode_attention(
        self,
        q: Tensor,
        table: PageTable,
        *,
        scale: float,
        want_largest: bool = False,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend one query of each sequence to pages of any format."""
        ...

    def decode_attention_pool(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        tables: BlockTables,
        *,
        scale: float,
        want_largest: bool = False,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend one query of each sequence to whole pages, keys and values in slabs of their own."""
        ...

    def prefill_attention(
        self,
        q: Tensor,
        table: PageTable | None,
        keys: Tensor,
        values: Tensor,
        *,
        scale: float,
        distance: int | None = None,
        out: Tensor | None = None,
        rounds: bool = False,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend a chunk to older pages of any format, and causally to explicit keys."""
        ...

    def prefill_attention_pool(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        pages: Tensor,
        past: Tensor,
        *,
        scale: float,
        out: Tensor | None = None,
        rounds: bool = False,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Attend a chunk causally to whole pages that hold the chunk too."""
        ...


def supports_all(kernels: PageKernels, formats: Iterable[PageFormat]) -> bool:
    """Tell whether kernels know every one of some formats."""
    return all(map(kernels.supports, formats))
