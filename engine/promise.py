"""Which policy of the fewest bytes keeps a preset's promise on a model. No torch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Self

from kvcache.config import KVCacheConfig, Tier
from kvcache.promises import Promise

if TYPE_CHECKING:
    from engine.cache_loss import Loss


# A step down the ladder loses 1.4 times as much and more, so it is not tried where there is less room.
_ROOM = 1 / 1.4


@dataclass(frozen=True)
class FittedPolicy:
    """A policy, and what it was measured to lose.

    Args:
        tiers: what is kept of the tokens, and at how many bits.
        measure: `kl` or `question`, see `kvcache.promises.Promise`.
        limit: the most that the preset promises; None where the policy was given and promises nothing.
        loss: the mean over the check texts.
        worst: the check text that lost most, and what it lost.
        kv_ratio: bytes of keys and values on the check texts, of the full cache's.
        num_tokens: of the longest check text.
    """

    tiers: tuple[Tier, ...]
    measure: str
    limit: float | None
    loss: float
    worst: tuple[str, float]
    kv_ratio: float
    num_tokens: int

    @property
    def holds(self) -> bool:
        """Whether the promise is kept; a policy without a promise breaks none."""
        return self.limit is None or self.loss <= self.limit

    def __str__(self) -> str:
        name = "KL" if self.measure == "kl" else "NLL of the answer"
        text = f"{name} {self.loss:+.4f}" if self.measure == "question" else f"{name} {self.loss:.4f}"
        if self.limit is not None:
            text += f" of at most {self.limit:g}"
        return f"{self.kv_ratio:.1%} of the bytes, {text}, measured at {self.num_tokens:,} tokens"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Return what `to_dict` gave, after JSON.

        Raises:
            TypeError, KeyError, ValueError: It is something else.
        """
        tiers = tuple(Tier(**tier) for tier in values["tiers"])
        name, value = values["worst"]
        limit = values["limit"]
        return cls(
            tiers,
            str(values["measure"]),
            None if limit is None else float(limit),
            float(values["loss"]),
            (str(name), float(value)),
            float(values["kv_ratio"]),
            int(values["num_tokens"]),
        )


def fit_policy(
    promise: Promise, policies: Sequence[KVCacheConfig], measure: "Callable[[KVCacheConfig, float], Loss]"
) -> FittedPolicy:
    """Return the policy of the fewest bytes that keeps a promise; if none does, the last one, with its loss.

    Args:
        policies: of the promise's ladder.
        measure: what a policy loses; it may stop early above the second argument.
    """

    def fitted(step: int) -> FittedPolicy:
        policy = policies[step]
        loss = measure(policy, promise.limit)
        return FittedPolicy(
            policy.resolved_tiers,
            promise.measure,
            promise.limit,
            loss.value,
            loss.worst,
            loss.kv_ratio,
            loss.num_tokens,
        )

    step = promise.first
    best = fitted(step)
    while step > 0 and best.loss <= _ROOM * promise.limit:
        cheaper = fitted(step - 1)
        if not cheaper.holds:
            break
        best, step = cheaper, step - 1
    while not best.holds and step < len(policies) - 1:
        step += 1
        best = fitted(step)
    return best
