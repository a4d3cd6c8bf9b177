"""The question's own tokens as probes: the keys they attend to are kept, whatever other scorers say.

A job knows its question, so the question can attend to each chunk before the chunk is scored. A probe finds the place
that the question names, the answer lies beside it; pooling over neighbours keeps both.
"""

import torch.nn.functional as F
from torch import Tensor

WEIGHT = 4.0
WINDOW = 17


def raise_by_probes(
    scores: Tensor,  # [KVH, N] raised in place
    peaks: Tensor,  # [KVH, N] the largest attention of any probe
) -> None:
    """Raise another scorer's scores to the probes' pooled attention where that is higher."""
    pooled = F.max_pool1d(peaks[:, None], WINDOW, stride=1, padding=WINDOW // 2)[:, 0]
    scores.copy_(scores.maximum(pooled.mul_(WEIGHT)))
