"""In which basis a model computes the queries, keys and values of its heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from kvcache.config import KVCacheConfig

Basis = Literal["plain", "rotated"]


@dataclass(frozen=True)
class BasisTable:
    """Name the basis of the values, and that of each lane's keys.

    In the rotated basis a Hadamard matrix spreads outliers over the head's dimensions, so that few bits do
    (`kvcache.quantize.pages.rotation`). It does harm where few key channels are large and queries are small there.
    Attention is the same in any basis, but for rounding.

    Args:
        values: of all values; the weights of a loaded model have it.
        keys: of keys and the queries that meet them, one row a layer, one entry a KV head. A single row holds for all
            layers, a single entry for all heads.

    Raises:
        ValueError: The rows differ in length, or a basis is not known.
    """

    values: Basis = "plain"
    keys: tuple[tuple[Basis, ...], ...] = (("plain",),)

    def __post_init__(self) -> None:
        if not self.keys or len({len(row) for row in self.keys}) != 1 or not self.keys[0]:
            raise ValueError("each layer has one basis a KV head: rows of one length")
        unknown = {self.values, *(basis for row in self.keys for basis in row)} - {"plain", "rotated"}
        if unknown:
            raise ValueError(f"a basis is plain or rotated, not {', '.join(sorted(unknown))}")

    def rotated_keys(self, num_layers: int, num_kv_heads: int) -> list[list[bool]]:
        """Return for each layer and KV head whether its keys are rotated.

        Raises:
            ValueError: The table is of another model.
        """
        if len(self.keys) not in (1, num_layers) or len(self.keys[0]) not in (1, num_kv_heads):
            raise ValueError(
                f"a table of {len(self.keys)} layers of {len(self.keys[0])} KV heads does not fit a model of "
                f"{num_layers} layers of {num_kv_heads}"
            )
        rows = self.keys * (num_layers // len(self.keys))
        return [[basis == "rotated" for basis in row * (num_kv_heads // len(row))] for row in rows]

    def suits(self, policy: KVCacheConfig) -> bool:
        """Tell whether a cache of this policy may keep the heads of a model of this basis.

        A cache that quantizes needs rotated values; every other one takes any.
        """
        return self.values == "rotated" or not policy.quantizes


PLAIN = BasisTable()
ROTATED = BasisTable("rotated", (("rotated",),))


def basis_for(policy: KVCacheConfig, weight_quant: str | None = None) -> BasisTable:
    """Return the basis that a model is loaded in for a cache policy, before its keys have been measured.

    Args:
        weight_quant: int8 weights are rotated too, before they are rounded: it spreads their outliers.
    """
    return ROTATED if policy.quantizes or weight_quant else PLAIN


def keys_from_mask(rotated: Sequence[Sequence[bool]]) -> tuple[tuple[Basis, ...], ...]:
    """Return `BasisTable.keys` from what `BasisTable.rotated_keys` gives."""
    return tuple(tuple("rotated" if each else "plain" for each in row) for row in rotated)
