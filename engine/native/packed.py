"""Weights for float32 products in the order in which the kernel reads them."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kvcache.huge_pages import in_huge_pages


@dataclass(frozen=True)
class PackedWeight:
    """A matrix of weights, `[width, depth]`, in panels of outputs: their numbers for one input lie side by side.

    Weights that bfloat16 holds exactly may be kept in it: half the memory to hold and to read, and products that are
    the same to the bit. There the halves of a panel's outputs take turns: two numbers come apart by a shift and a mask.
    """

    panels: Tensor  # float32 [width / panel, depth, 2, panel / 2] or bfloat16 [width / panel, depth, panel / 2, 2]

    @classmethod
    def empty(cls, width: int, depth: int, panel: int, dtype: torch.dtype) -> Self:
        """Return one without numbers; the width is a multiple of `panel`."""
        order = (panel // 2, 2) if dtype == torch.bfloat16 else (2, panel // 2)
        return cls(in_huge_pages(torch.empty(width // panel, depth, *order, dtype=dtype)))

    @property
    def panel(self) -> int:
        """Outputs in a panel."""
        return self.panels.shape[2] * self.panels.shape[3]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[width, depth]`."""
        return len(self.panels) * self.panel, self.panels.shape[1]

    @property
    def _outputs(self) -> Tensor:  # [panels, 2, panel / 2, depth], a view
        is_bf16 = self.panels.dtype == torch.bfloat16
        return self.panels.permute(0, 3, 2, 1) if is_bf16 else self.panels.permute(0, 2, 3, 1)

    def dense(self) -> Tensor:
        """Return the matrix, float32 `[width, depth]`."""
        return self._outputs.float().reshape(self.shape)

    def copy_(self, weight: Tensor) -> None:
        """Take the numbers of a matrix of the same shape."""
        self._outputs.copy_(weight.view(self._outputs.shape))

    def split(self, widths: list[int]) -> tuple["PackedWeight", ...]:
        """Return parts of so many outputs each, whole numbers of panels, that share memory with this one."""
        return tuple(map(PackedWeight, self.panels.split([width // self.panel for width in widths])))

    def rows(self, index: Tensor) -> Tensor:  # int64 [T] -> float32 [T, depth]
        """Return rows of the matrix."""
        half = self.panel // 2
        return self._outputs[index // self.panel, index // half % 2, index % half].float()


def pack_weight(weight: Tensor, panel: int, dtype: torch.dtype = torch.float32) -> PackedWeight:
    """Copy a matrix `[width, depth]` into panels; the width is a multiple of `panel`."""
    packed = PackedWeight.empty(*weight.shape, panel, dtype)
    packed.copy_(weight)
    return packed
