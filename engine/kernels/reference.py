"""The kernels in torch: the specification of the C++ ones, and what runs where there is no compiler or on a GPU.

Everything is computed in float32 and rounded once, whatever the tensors' type.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.int8 import Int8Rows, Int8Weight
from engine.kernels.packed import PackedWeight

_EXACT_DEPTH = 1024  # sums of so many products of int8 are integers that float32 holds exactly


def rms_norm(
    x: Tensor,  # [T, W]
    weight: Tensor,  # [W]
    eps: float,
    out: Tensor | Int8Rows,  # [T, W]
) -> None:
    """Scale each row to a mean square of 1, times the weights."""
    _put(F.rms_norm(x.float(), weight.shape, weight.float(), eps), out)


def silu_mul(
    gate_up: Tensor,  # [T, 2 W]
    out: Tensor | Int8Rows,  # [T, W]
) -> None:
    """Return silu(gate) times up, which lie beside each other."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    _put(F.silu(gate) * up, out)


def quantize_rows(
    x: Tensor,  # [T, W]
    out: Int8Rows,
) -> None:
    """Round each row to int8, its largest number to 127. A row that is not finite gets a scale that is not."""
    _put(x, out)


@dataclass(frozen=True)
class HeadNorms:
    """RMS norms of query and key heads; None: those heads are not normalized."""

    q: Tensor | None  # [D]
    k: Tensor | None  # [D]
    eps: float


@dataclass(frozen=True)
class KeyTurn:
    """A matrix for the queries and keys of some KV heads.

    Args:
        matrix: `kvcache.quantize.pages.rotation`, float32 `[D, D]`.
        turned: uint8 `[KVH]`, 1 for the heads that it is for.
    """

    matrix: Tensor
    turned: Tensor


def rotate(
    qkv: Tensor,  # [T, heads, D], query heads, key heads, others
    num_q: int,
    num_k: int,
    cos: Tensor,  # float32 [T, D / 2]
    sin: Tensor,  # float32 [T, D / 2]
    *,
    norms: HeadNorms | None = None,
    turn: KeyTurn | None = None,
) -> None:
    """Normalize query and key heads, rotate them by position, and then by `turn` where it is for them; in place."""
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    parts = qkv[:, :num_q], qkv[:, num_q : num_q + num_k]
    weights = (norms.q, norms.k) if norms else (None, None)
    for part, weight in zip(parts, weights, strict=True):
        x = part.float()
        if norms and weight is not None:
            x = F.rms_norm(x, weight.shape, weight.float(), norms.eps)
        first, second = x.chunk(2, dim=-1)
        x = torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
        if turn is not None:
            turned = turn.turned.bool().repeat_interleave(part.shape[1] // num_k)
            x = torch.where(turned[:, None], x @ turn.matrix, x)
        part.copy_(x)


def float_panel() -> int:
    """Return how many outputs of weights that are no integers are computed side by side; 0: dense ones are as good."""
    return 0


def float_product(
    x: Tensor,  # [T, depth]
    weight: PackedWeight,
    out: Tensor,  # [T, width]
    *,
    bias: Tensor | None = None,  # float32 [width]
    adds: bool = False,
) -> None:
    """Multiply, with or without bias; or add to what is in `out`."""
    x = x.float() if x.dtype == torch.bfloat16 else x
    product = F.linear(x, weight.dense().to(x.dtype), bias)
    out.copy_(out + product if adds else product)


def int8_panel() -> int:
    """Return how many outputs of a weight are computed side by side; here it does not matter."""
    return 8


def int8_group() -> int:
    """Return how many inputs are multiplied at once; here it does not matter."""
    return 4


def int8_product(
    x: Int8Rows,  # [T, depth]
    weight: Int8Weight,
    out: Tensor,  # [T, width]
    *,
    bias: Tensor | None = None,  # float32 [width]
    adds: bool = False,
) -> None:
    """Multiply, exactly in int32, then by both scales; or add to what is in `out`."""
    codes = weight.unpacked()
    sums = torch.zeros(out.shape, dtype=torch.int32, device=out.device)
    for start in range(0, weight.depth, _EXACT_DEPTH):
        part = slice(start, start + _EXACT_DEPTH)
        sums += (x.codes[:, part].float() @ codes[:, part].float().T).to(torch.int32)
    product = sums.float() * weight.scales[: weight.width] * x.scales[:, None]
    if bias is not None:
        product += bias
    out.copy_(out.float() + product if adds else product)


def _put(x: Tensor, out: Tensor | Int8Rows) -> None:
    if isinstance(out, Tensor):
        out.copy_(x)
        return
    x = x.float()
    largest = x.abs().amax(1)
    inverse = torch.where(largest > 1e-30, largest.new_tensor(127.0) / largest, 0.0)
    # a row that is not finite has codes of no meaning
    codes = (x * inverse[:, None]).nan_to_num_(0, 0, 0).round_()
    out.codes.copy_(codes)
    out.scales.copy_(largest / 127)
