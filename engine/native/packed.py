"""Weights of float32 in the order in which the kernel reads them."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class PackedWeight:
    """A matrix of weights, `[width, depth]`, in panels of outputs: their numbers for one input lie side by side."""

    panels: Tensor  # float32 [width / panel, depth, panel]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[width, depth]`."""
        num_panels, depth, panel = self.panels.shape
        return num_panels * panel, depth

    def dense(self) -> Tensor:
        """Return the matrix, float32 `[width, depth]`."""
        return self.panels.transpose(1, 2).reshape(self.shape)

    def copy_(self, weight: Tensor) -> None:
        """Take the numbers of a matrix of the same shape."""
        self.panels.copy_(weight.view(-1, self.panels.shape[2], weight.shape[1]).transpose(1, 2))

    def split(self, widths: list[int]) -> tuple["PackedWeight", ...]:
        """Return parts of so many outputs each, whole numbers of panels, that share memory with this one."""
        return tuple(
            map(PackedWeight, self.panels.split([width // self.panels.shape[2] for width in widths]))
        )

    def rows(self, index: Tensor) -> Tensor:  # int64 [T] -> [T, depth]
        """Return rows of the matrix."""
        panel = self.panels.shape[2]
        return self.panels[index // panel, :, index % panel]


def pack_weight(weight: Tensor, panel: int) -> PackedWeight:
    """Copy a matrix `[width, depth]` into panels; the width is a multiple of `panel`."""
    return PackedWeight(weight.view(-1, panel, weight.shape[1]).transpose(1, 2).contiguous())
