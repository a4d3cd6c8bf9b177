"""Which kernels run: the compiled ones where they are and fit, else their torch references."""

import functools
import time
from collections.abc import Callable
from types import ModuleType

import torch

from engine.kernels import reference
from engine.kernels.packed import pack_weight

_FAR_FASTER = 2  # far from 1 and from what AMX reaches, so that a busy machine chooses as an idle one does


def layer_kernels(device: torch.device, head_dim: int, *widths: int) -> ModuleType:
    """Return `ops` or `reference`, which has the same functions. The compiled ones take eight numbers at a time.

    Args:
        head_dim: of the model's heads.
        widths: of its other rows: hidden and intermediate size.
    """
    odd = head_dim % 16 or any(width % 8 for width in widths)
    if odd or device.type != "cpu":
        return reference
    from engine.kernels import ops

    return reference if ops.library() is None else ops


def float_panel(kernels: ModuleType, dtype: torch.dtype) -> int:
    """Return how the kernels want weights packed for rows of a type; 0: torch is to multiply them as they are.

    A row of the kernels' products is the same to the bit whatever is beside it, so they serve even where torch is
    somewhat faster.
    """
    panel = kernels.float_panel()
    return 0 if panel and dtype == torch.bfloat16 and _torch_is_far_faster() else panel


@functools.cache
def _torch_is_far_faster() -> bool:
    """Tell, by some hundredths of a second of both, whether torch multiplies bfloat16 by other units, such as AMX."""
    from engine.kernels import ops

    x, weight = (torch.ones(rows, 576, dtype=torch.bfloat16, device="cpu") for rows in (128, 1536))
    packed, out = pack_weight(weight, ops.float_panel(), weight.dtype), x.new_empty(128, 1536)
    ours, theirs = _best_times(
        lambda: ops.float_product(x, packed, out), lambda: torch.mm(x, weight.t(), out=out)
    )
    return ours > _FAR_FASTER * theirs


def _best_times(*calls: Callable[[], object]) -> list[float]:
    """Return each call's best time of five turns, in seconds."""
    best = [float("inf")] * len(calls)
    for _ in range(5):
        for n, call in enumerate(calls):
            started_s = time.perf_counter()
            call()
            best[n] = min(best[n], time.perf_counter() - started_s)
    return best
