"""What a scorer reads, what it updates and what it may ask for."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Observation:
    """One layer of one step of a sequence in prefill.

    The prefill buffer holds `N` keys, the last `C` of them this step's own.

    Attributes:
        weights: attention probabilities, normalized over everything a query sees, pages included; zero where a key is
            not visible. None for a scorer without `needs_weights`.
    """

    layer: int
    queries: Tensor  # [KVH, G, C, D] after rope
    keys: Tensor  # [KVH, N, D]
    values: Tensor  # [KVH, N, D]
    weights: Tensor | None  # [KVH, G, C, N] float32

    @property
    def attention(self) -> Tensor:
        """The weights, for a scorer that has `needs_weights`."""
        assert self.weights is not None, "the scorer did not ask for attention weights"
        return self.weights


class Scorer(ABC):
    """Score keys while they lie in the prefill buffer; higher scores are kept.

    A scorer holds no state: it updates the running scores of the prefill buffer's keys, which start at 0 and move with
    the keys. A new scorer is a subclass in a file of its own and a line in `registry.SCORERS`; it overrides the flags
    that differ from what is said here.

    Attributes:
        needs_weights: `update` reads attention weights. Kernels do not keep them, so chunks are attended in torch.
        needs_whole_chunks: all queries of a chunk must come in one `update`, in the last layer too.
        scored_by_kernels: the score is the largest attention received from queries at least `distance` tokens behind
            the key. Kernels yield it, `update` is its specification and is not called; the maximum may be taken over
            parts of a chunk.
        distance: see `scored_by_kernels`.
        reconstructs: `update` sees not the document's own queries but those of the tokens about to be scored, read once
            more behind a request to repeat them, without being cached.
    """

    needs_weights: bool = False
    needs_whole_chunks: bool = True
    scored_by_kernels: bool = False
    distance: int = 0
    reconstructs: bool = False

    @abstractmethod
    def update(self, scores: Tensor, seen: Observation) -> None:
        """Update one layer's running scores `[KVH, N]` in place."""
