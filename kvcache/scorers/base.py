"""What a scorer is: one method, its flags, and what it is shown."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """One layer of one step of a sequence in prefill.

    The prefill buffer holds `N` keys, the last `C` of them this step's own. `weights` are true attention probabilities:
    normalised over everything a query sees, compressed pages included; zero where a key is not visible; None for a
    scorer that does not look at them.
    """

    layer: int
    queries: Tensor  # [KVH, G, C, D] after rope
    keys: Tensor  # [KVH, N, D]
    values: Tensor  # [KVH, N, D]
    weights: Tensor | None  # [KVH, G, C, N] float32


class Scorer(ABC):
    """Score keys while they are in the prefill buffer; keys of higher scores are kept.

    A scorer has no state of its own: it updates the running scores of the prefill buffer's keys, which start at 0 and
    move with the keys. What it needs of the engine it says by these flags, before it is used.
    """

    kernel_maxima: bool = False
    """The score is the largest attention a key receives from queries at least `distance` tokens behind it. Kernels
    yield these maxima themselves, and `update` is their specification. Such a scorer takes a chunk in pieces; every
    other one is shown all queries of a chunk at once."""

    distance: int = 0
    """With `kernel_maxima`: 64 leaves out queries so near that nearly every key is looked at."""

    needs_weights: bool = False
    """`Observation.weights` are given. Kernels do not keep attention, so it is computed in torch for this scorer."""

    reconstructs: bool = False
    """The scorer sees other queries than the document's own: the tokens that are about to be scored are read once
    more, behind a request to repeat them, without being cached."""

    @abstractmethod
    def update(self, scores: Tensor, seen: Observation) -> None:
        """Update one layer's running scores `[KVH, N]` in place."""
