"""The question's own tokens as probes: what they look at is kept, whatever else attends to it.

A job knows its question, so it can ask each chunk before the chunk is judged. The probe finds the place, not the
answer beside it; pooling over neighbours keeps both.
"""

import torch.nn.functional as F
from torch import Tensor

WEIGHT = 4.0
WINDOW = 17


def raise_by_probes(
    scores: Tensor,  # [KVH, N] raised in place
    peaks: Tensor,  # [KVH, N] the largest attention any probe gives
) -> None:
    """Join another scorer's scores with what the probes attend to, by maximum."""
    pooled = F.max_pool1d(peaks[:, None], WINDOW, stride=1, padding=WINDOW // 2)[:, 0]
    scores.copy_(scores.maximum(pooled.mul_(WEIGHT)))
