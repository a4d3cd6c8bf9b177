"""What a scorer sees and what it keeps."""

from dataclasses import dataclass
from typing import Protocol

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


class Scorer(Protocol):
    """Judge keys while they lie in the prefill buffer; higher is kept.

    A scorer holds no state of its own: it updates the running scores of the prefill buffer's keys, which start at 0 and
    move with the keys. `needs_question` says whether it works only with the question's tokens as probes,
    `needs_weights` whether it looks at attention, which kernels do not keep: a chunk's is then made in torch. With
    `reconstructs` it sees other queries than the document's own: the tokens about to be judged, read once more behind a
    request to repeat them, without being cached. Where `distance` is a number, the score is the largest attention ever
    received from queries at least that far behind: kernels yield it by themselves, and `update` is its specification.
    """

    needs_question: bool
    needs_weights: bool
    reconstructs: bool
    distance: int | None

    def update(self, scores: Tensor, seen: Observation) -> None:
        """Update one layer's running scores `[KVH, N]` in place."""
        ...
