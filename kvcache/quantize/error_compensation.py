"""Error compensation: from second moments to the weights by which columns compensate each other's rounding errors.

Optimal brain quantization as GPTQ does it to weights (Frantar et al. 2022), applied to pages, in its equivalent form as
a nearest plane search (Chen et al. 2025): the columns of a page are rounded one after the other, each aimed at what it
should be plus a weighted sum of the errors made before it. The page format stays the same; only the codes differ.

An error e of a key costs eᵀ E[q qᵀ] e in its scores, an error of a value eᵀ Wᵀ W e behind the output projection W.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

# Fraction of the diagonal's mean, since past queries only estimate later ones (benchmarks/compression.md has others).
_DAMPING = 0.3


@dataclass(frozen=True)
class Compensation:
    """How the columns of pages compensate each other's errors.

    Args:
        key_weights: `compensation_weights` of every lane's queries; None: keys are not compensated.
        value_weights: `compensation_weights` of every lane's output projection.
        lanes: the lane of each page, an index of the weights.
    """

    key_weights: Tensor | None  # [lanes, D, D] float32
    value_weights: Tensor  # [lanes, D, D] float32
    lanes: Tensor  # int64 [P]


def compensation_weights(
    second_moments: Tensor,
) -> Tensor:  # [..., D, D] float32, symmetric -> the same, strictly lower
    """Return what column `i` adds to its target of the error of column `j < i`.

    With M = U Uᵀ, U upper triangular, errors cost |Uᵀ e|², whose element `i` is U[i, i] times the column's own error
    and the weighted sum of those before it; so the weights are U[j, i] / U[i, i]. Moments in which no direction matters
    more than another give zeros, and so do those that are not finite.
    """
    size = second_moments.shape[-1]
    scale = second_moments.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None].clamp_min(1e-30)
    damped = second_moments / scale + _DAMPING * torch.eye(size, device=second_moments.device)
    lower, info = torch.linalg.cholesky_ex(
        damped.flip(-2, -1)
    )  # flipped both ways, U Uᵀ becomes lower times upper
    lower = lower / lower.diagonal(dim1=-2, dim2=-1)[..., None, :]
    weights = lower.mT.flip(-2, -1).contiguous().tril_(-1)
    weights[info != 0] = 0
    return weights


def output_second_moments(
    weight: Tensor,  # [hidden, H D] output projection
    num_kv_heads: int,
    head_dim: int,
) -> Tensor:  # [KVH, D, D] float32
    """Return Wᵀ W of each KV head's values, summed over its query heads."""
    heads = (
        weight.float().unflatten(1, (num_kv_heads, -1, head_dim)).permute(1, 0, 2, 3)
    )  # [KVH, hidden, G, D]
    rows = heads.flatten(1, 2)
    return rows.mT @ rows
