"""Rows and weights of int8 with float32 scales, as the kernels and their twins take them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Int8Rows:
    """Activations: a row's numbers are its codes times its scale."""

    codes: Tensor  # int8 [T, K], of -127 to 127
    scales: Tensor  # float32 [T]


@dataclass(frozen=True)
class Int8Weight:
    """One matrix of weights, an output's numbers are its codes times its scale.

    Codes lie as the kernels that packed them want them, scales and starts (-128 times the sum of an output's codes)
    may be padded.
    """

    codes: Tensor  # int8
    scales: Tensor  # float32 [at least width]
    starts: Tensor  # int32 [at least width]
    width: int  # outputs
    depth: int  # inputs

    @property
    def nbytes(self) -> int:
        """Bytes it takes in memory."""
        return self.codes.nbytes + self.scales.nbytes + self.starts.nbytes


def quantise_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round a matrix `[width, depth]` to int8, each output's largest number to 127.

    Returns:
        codes int8 `[width, depth]` and scales float32 `[width]`.
    """
    weight = weight.float()
    scales = weight.abs().amax(1) / 127
    codes = weight / scales.where(scales > 0, 1.0)[:, None]
    return codes.round_().clamp_(-127, 127).to(torch.int8), scales
