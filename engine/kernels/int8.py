"""Rows and weights of int8 with float32 scales, as the kernels and their references take them."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Int8Rows:
    """Activations: a row's numbers are its codes times its scale."""

    codes: Tensor  # int8 [T, K], of -127 to 127
    scales: Tensor  # float32 [T]


@dataclass(frozen=True)
class Int8Weight:
    """A matrix of weights: an output's numbers are its codes times its scale.

    Codes lie as kernels read them, a group of inputs of each of a panel's outputs behind each other; the last panel
    may be padded.
    """

    codes: Tensor  # int8 [panels, depth / group, panel, group]
    scales: Tensor  # float32 [panels × panel]
    starts: Tensor  # int32 [panels × panel], -128 times the sum of an output's codes
    width: int  # outputs

    @property
    def depth(self) -> int:
        """Number of inputs."""
        return self.codes.shape[1] * self.codes.shape[3]

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the matrix, `[width, depth]`."""
        return self.width, self.depth

    def unpacked(self) -> Tensor:
        """Return the codes as a matrix, int8 `[width, depth]`."""
        return self.codes.transpose(1, 2).reshape(-1, self.depth)[: self.width]

    def dense(self) -> Tensor:
        """Return the matrix in float32."""
        return self.unpacked() * self.scales[: self.width, None]


def quantize_weight(weight: Tensor, panel: int, group: int) -> Int8Weight:
    """Round a matrix `[width, depth]` to int8, each output's largest number to 127.

    Args:
        panel: outputs that the kernel computes side by side.
        group: inputs that it multiplies at once.
    """
    width, depth = weight.shape
    assert depth % group == 0
    weight = F.pad(weight.float(), (0, 0, 0, -width % panel))
    scales = weight.abs().amax(1) / 127
    codes = (weight / scales.where(scales > 0, 1.0)[:, None]).round_().clamp_(-127, 127).to(torch.int8)
    packed = codes.view(-1, panel, depth // group, group).transpose(1, 2).contiguous()
    return Int8Weight(packed, scales, codes.sum(1, dtype=torch.int32) * -128, width)
