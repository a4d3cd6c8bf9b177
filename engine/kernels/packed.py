"""Weights for products of float32 or bfloat16 rows in the order in which the kernel reads them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvcache.pages.huge_pages import in_huge_pages


@dataclass(frozen=True)
class PackedWeight:
    """A matrix of weights, `[width, depth]`, in panels of outputs: their numbers for one input lie side by side.

    In bfloat16 they lie so for two inputs at once. Weights that bfloat16 holds exactly may be kept in it under float32
    rows too: half the memory to hold and to read, and products that are the same to the bit.
    """

    panels: Tensor  # float32 [panels, depth, panel, 1] or bfloat16 [panels, depth / 2, panel, 2], the last one padded
    width: int  # outputs

    @classmethod
    def empty(cls, width: int, depth: int, panel: int, dtype: torch.dtype) -> Self:
        """Return one without numbers; the depth of bfloat16 is even."""
        group = 2 if dtype == torch.bfloat16 else 1
        assert depth % group == 0
        panels = in_huge_pages(
            torch.empty(-(-width // panel), depth // group, panel, group, dtype=dtype, device="cpu")
        )
        panels[width // panel :].zero_()
        return cls(panels, width)

    @property
    def panel(self) -> int:
        """Outputs in a panel."""
        return self.panels.shape[2]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[width, depth]`."""
        return self.width, self.panels.shape[1] * self.panels.shape[3]

    def dense(self) -> Tensor:
        """Return a copy of the matrix, float32 `[width, depth]`."""
        return self.panels.transpose(1, 2).reshape(-1, self.shape[1])[: self.width].contiguous().float()

    def put(self, first: int, matrix: Tensor) -> None:
        """Take the numbers of a matrix as the outputs from `first` on."""
        outputs = self.panels.transpose(1, 2)  # [panels, panel, depth / group, group], a view
        while len(matrix):
            panel, place = divmod(first, self.panel)
            whole = 0 if place else len(matrix) // self.panel
            count = whole * self.panel or min(self.panel - place, len(matrix))
            to = outputs[panel : panel + whole] if whole else outputs[panel, place : place + count]
            to.copy_(matrix[:count].view(to.shape))
            first, matrix = first + count, matrix[count:]

    def rows(self, index: Tensor) -> Tensor:  # int64 [T] -> [T, depth]
        """Return rows of the matrix."""
        return self.panels[index // self.panel, :, index % self.panel].flatten(1)


def pack_weight(weight: Tensor, panel: int, dtype: torch.dtype = torch.float32) -> PackedWeight:
    """Copy a matrix `[width, depth]` into panels."""
    packed = PackedWeight.empty(weight.shape[0], weight.shape[1], panel, dtype)
    packed.put(0, weight)
    return packed
