"""What each preset promises to lose at most, and the policies that may keep the promise, from few bytes to many.

A model decides which of them it needs: a share of tokens and a number of bits that one model does not feel ruin another
one. `engine.promise` finds the cheapest that holds.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from kvcache.config import KVCacheConfig, Tier

# Keys that say how much is kept. Whoever sets one of them takes a policy as it is.
KEPT_KEYS = ("compress_method", "keep_ratio", "quant_bits", "tiers")


@dataclass(frozen=True)
class Promise:
    """Bound the loss of a preset.

    Args:
        measure: `kl`, the mean divergence of the next token's distribution from that of the full cache, in nats; or
            `question`, by how much the negative log-likelihood of the answer to the prompt's own question grows, in
            nats a token.
        limit: the most of it.
        ladder: tiers from the fewest bytes to the most.
        first: the step to try first, that most models need.
    """

    measure: Literal["kl", "question"]
    limit: float
    ladder: tuple[tuple[Tier, ...], ...]
    first: int

    def policies(self, preset: str, **changes: Any) -> Iterator[KVCacheConfig]:
        """Yield the policy of every step.

        Args:
            changes: keys of `KVCacheConfig` that differ from the preset; none of `KEPT_KEYS`.
        """
        for tiers in self.ladder:
            yield replace(KVCacheConfig.from_dict({"preset": preset} | changes), tiers=tiers)


def _kept(*ratios: float) -> list[tuple[Tier, ...]]:
    return [(Tier(ratio, 4, 4),) for ratio in ratios]


_ALL = [(Tier(1.0, 4, 4),), (Tier(1.0, 8, 4),), (Tier(1.0, 8, 8),)]
_MIXED = [
    (Tier(ratio, 4, 4), Tier(round(1 - ratio, 2), 3, low)) for ratio, low in ((0.1, 2), (0.3, 2), (0.4, 3))
]

PROMISES: dict[str, Promise] = {
    "default": Promise("kl", 0.0025, (*_MIXED, *_ALL), first=1),
    "dialogue": Promise(
        "kl", 0.0025, ((Tier(0.4, 8, 8),), (Tier(0.5, 8, 8),), (Tier(0.7, 8, 8),), *_ALL[1:]), first=1
    ),
    "aggressive": Promise("kl", 0.006, (*_kept(0.34, 0.44, 0.55, 0.7), *_MIXED[1:], *_ALL), first=1),
    "logs": Promise("kl", 0.012, (*_kept(0.22, 0.3, 0.38, 0.48, 0.6, 0.75), *_MIXED[2:], *_ALL), first=1),
    "extract": Promise("question", 0.06, tuple(_kept(0.07, 0.1, 0.15, 0.22, 0.3, 0.5) + _ALL), first=1),
}
