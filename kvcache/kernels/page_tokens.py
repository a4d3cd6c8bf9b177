"""The tokens that fill pages, named by where they lie, so that kernels read each of them once, in place."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kvcache.kernels.wide_copy import in_words


@dataclass(frozen=True)
class PageTokens:
    """Name the tokens of pages: tokens of a chunk, and tokens of earlier chunks that were held back in their lanes.

    Attributes:
        keys, values: the chunk's, `[lanes, C, D]`; lanes may be apart.
        held_keys, held_values: `[H, D]`.
        index: int64 `[P, T]`, the tokens of each page. Number n is token n % C of the chunk's lane n // C, and ~n,
            which is below zero, token n of those held.
    """

    keys: Tensor
    values: Tensor
    held_keys: Tensor
    held_values: Tensor
    index: Tensor

    @classmethod
    def of_pages(cls, keys: Tensor, values: Tensor) -> "PageTokens":
        """Name all tokens `[P, T, D]` of pages that lie there whole."""
        index = torch.arange(keys.shape[0] * keys.shape[1], device="cpu").view(keys.shape[:2])
        return cls(keys, values, keys[:0, 0], values[:0, 0], index)

    def gather(self, index: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Copy the tokens of `index`, by default its own: keys and values `[*index.shape, D]` in the chunk's dtype."""
        index = self.index if index is None else index
        flat = index.flatten()
        is_new = flat >= 0
        new = flat[is_new]
        lanes, tokens = new // self.keys.shape[1], new % self.keys.shape[1]
        place = torch.where(is_new, is_new.cumsum(0) - 1, len(new) + ~flat)
        out = []
        for chunk, held in ((self.keys, self.held_keys), (self.values, self.held_values)):
            rows = torch.cat([in_words(chunk)[lanes, tokens].view(chunk.dtype), held.to(chunk.dtype)])
            out.append(rows.index_select(0, place).view(*index.shape, chunk.shape[2]))
        return out[0], out[1]
