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


def _two(first: float, second: float, *bits: int) -> tuple[Tier, ...]:
    """Return a share at 4 bits, and another at the bits of keys and of values."""
    return (Tier(first, 4, 4), Tier(second, *bits))


# Every token. Two tiers, though of one format: scores then tell what to thin of a document beyond the context.
_WHOLE = tuple((Tier(0.5, *bits), Tier(0.5, *bits)) for bits in ((4, 4), (8, 4), (8, 8)))
_MILD = (_two(0.12, 0.75, 3, 2), _two(0.3, 0.7, 3, 2), _two(0.4, 0.6, 3, 3), *_WHOLE)

# On the check texts, which are short and dense. Documents of 4,000 tokens lose 0.5 to 0.9 times as much
# (benchmarks/compression.md).
PROMISES: dict[str, Promise] = {
    "default": Promise("kl", 0.003, _MILD, first=1),
    "dialogue": Promise(
        "kl", 0.003, ((Tier(0.4, 8, 8),), (Tier(0.5, 8, 8),), (Tier(0.7, 8, 8),), *_WHOLE[1:]), first=1
    ),
    "aggressive": Promise(
        "kl",
        0.012,
        (_two(0.12, 0.32, 3, 2), _two(0.15, 0.42, 3, 2), _two(0.2, 0.55, 3, 2), *_MILD[1:]),
        first=1,
    ),
    "logs": Promise(
        "kl",
        0.02,
        (
            *(
                _two(first, second, 3, 2)
                for first, second in ((0.05, 0.22), (0.08, 0.3), (0.12, 0.45), (0.2, 0.55))
            ),
            *_MILD[1:],
        ),
        first=1,
    ),
    "extract": Promise(
        "question",
        0.03,
        (*((Tier(ratio, 4, 4),) for ratio in (0.07, 0.1, 0.15, 0.22, 0.3, 0.5)), *_WHOLE),
        first=1,
    ),
}
