"""In which basis a model computes the queries, keys and values of its heads."""

from dataclasses import dataclass
from typing import Literal

from kvcache.config import KVCacheConfig

Basis = Literal["plain", "rotated"]


@dataclass(frozen=True)
class BasisTable:
    """Name the basis of each layer and KV head.

    In the rotated basis a Hadamard matrix spreads outliers over the head's dimensions, so that few bits do
    (`kvcache.quantize.pages.rotation`). Attention is the same in any basis, but for rounding.

    Args:
        entries: one row a layer, one entry a KV head. A single entry holds for all of them.

    Raises:
        ValueError: There is more than one entry; the kernels know one basis a model so far.
    """

    entries: tuple[tuple[Basis, ...], ...] = (("plain",),)

    def __post_init__(self) -> None:
        if [len(row) for row in self.entries] != [1]:
            raise ValueError("one basis holds for all layers and heads of a model: give a single entry")

    def of(self, layer: int, head: int) -> Basis:
        """Return the basis of one lane."""
        return self.entries[layer % len(self.entries)][head % len(self.entries[0])]

    @property
    def rotates(self) -> bool:
        """Whether any lane is rotated."""
        return any("rotated" in row for row in self.entries)

    def suits(self, policy: KVCacheConfig) -> bool:
        """Tell whether a cache of this policy may keep the heads of a model of this basis.

        A cache that quantizes needs the rotated basis; every other one takes any.
        """
        return self.rotates or not policy.quantizes


PLAIN = BasisTable()
ROTATED = BasisTable((("rotated",),))


def basis_for(policy: KVCacheConfig, weight_quant: str | None = None) -> BasisTable:
    """Return the basis that a model is loaded in for a cache policy.

    Args:
        weight_quant: int8 weights are rotated too, before they are rounded: it spreads their outliers.
    """
    return ROTATED if policy.quantizes or weight_quant else PLAIN
