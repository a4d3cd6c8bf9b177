"""What a row may say, token by token. Grammars and their libraries are the caller's; the engine asks three things."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor


class Constraint(Protocol):
    """One row's way through a grammar."""

    def mask(self) -> Tensor:
        """Return which tokens may come next: bool `[V]`, on the CPU, V being the model's vocabulary."""
        ...

    def advance(self, token_id: int) -> None:
        """Take the token that came."""
        ...

    @property
    def finished(self) -> bool:
        """Whether nothing may follow."""
        ...


def constrain(
    logits: Tensor,  # [N, V] float32
    constraints: Sequence[Constraint | None],
) -> Tensor:
    """Return the logits with what a row must not say at minus infinity."""
    rows = [i for i, constraint in enumerate(constraints) if constraint]
    if not rows:
        return logits
    allowed = torch.stack([constraints[i].mask() for i in rows]).to(logits.device)
    logits = logits.clone()
    logits[rows] = logits[rows].masked_fill(~allowed, -torch.inf)
    return logits
