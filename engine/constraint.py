"""Which tokens a sequence may generate next. Grammars and their libraries are the caller's."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Constraint(Protocol):
    """The state of one sequence in a grammar."""

    def mask(self) -> Tensor:
        """Return which tokens may come next: bool `[V]`, on the CPU, V being the model's vocabulary."""
        ...

    def advance(self, token_id: int) -> None:
        """Advance by the token that was chosen."""
        ...

    @property
    def finished(self) -> bool:
        """Whether the output is complete, so that no token may follow."""
        ...


def constrain(
    logits: Tensor,  # [N, V] float32
    constraints: Sequence[Constraint | None],
) -> Tensor:
    """Return the logits with minus infinity for tokens that a sequence may not generate."""
    constrained = {row: constraint for row, constraint in enumerate(constraints) if constraint}
    if not constrained:
        return logits
    allowed = torch.stack([constraint.mask() for constraint in constrained.values()]).to(logits.device)
    rows, logits = list(constrained), logits.clone()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return logits
