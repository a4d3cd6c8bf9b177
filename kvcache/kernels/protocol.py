"""What a set of kernels over pages must offer; `reference` (torch) and `cpu.ops` (C++) are its two implementations.

`reference` also says what each function computes: its docstrings are the specification.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvcache.kernels.page_table import BlockTables, PageTable
from kvcache.kernels.page_tokens import PageTokens
from kvcache.quantize.error_compensation import Compensation
from kvcache.sizes.full import CacheLayout
from kvcache.sizes.page_format import PageFormat

# Pages that lie in one byte slab, by address, or in a pool's two slabs of keys and values, by page id.
AnyPageFormat = PageFormat | CacheLayout


@dataclass(frozen=True)
class PrefillOptions:
    """Say how a chunk attends.

    Args:
        scale: what scores are multiplied by, above 0.
        rounds: numbers may be rounded to integers where the CPU multiplies those faster.
        num_threads: the result does not depend on it.
    """

    scale: float
    rounds: bool = False
    num_threads: int = 1


class PageKernels(Protocol):
    """Quantize pages, read them back and attend to them. The modules `reference` and `cpu.ops` implement it."""

    def supports(self, page_format: AnyPageFormat) -> bool:
        """Tell whether every function below takes pages of this format."""

    def quantize(
        self,
        rows: PageTokens,
        page_format: PageFormat,
        compensation: Compensation | None = None,
        *,
        num_threads: int = 1,
    ) -> Tensor:
        """Pack full pages, uint8 `[P, page_bytes]`."""

    def dequantize(
        self,
        table: PageTable,
        dtype: torch.dtype = torch.float32,
        *,
        out: tuple[Tensor, Tensor] | None = None,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor]:
        """Return keys and values of all lanes, `[tokens, D]` each."""

    def decode_attention(
        self,
        q: Tensor,
        table: PageTable,
        *,
        scale: float,
        want_largest: bool = False,
        num_threads: int = 1,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend one query per sequence and head to pages of any formats."""

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
        """Attend one query per sequence and head to the pages of a pool."""

    def write_rows(self, slab: Tensor, places: Tensor, rows: Tensor, *, num_threads: int = 1) -> None:
        """Write new keys or values of all lanes to their places in a slab."""

    def prefill_attention_pool(
        self,
        q: Tensor,
        keys: Tensor,
        values: Tensor,
        pages: Tensor,
        past: Tensor,
        options: PrefillOptions,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Attend a chunk causally to the pages of a pool, which hold the chunk's own tokens too."""

    def prefill_attention(
        self,
        q: Tensor,
        table: PageTable | None,
        keys: Tensor,
        values: Tensor,
        options: PrefillOptions,
        *,
        distance: int | None = None,
        out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Attend a chunk to pages of any formats and causally to explicit keys."""
