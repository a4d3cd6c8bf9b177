"""Find ids that occur more than once, in 8 bytes of memory per id."""

import hashlib
from collections.abc import Sequence

import numpy as np


class UniqueIds:
    """Keep hashes of 64 bits: among a million ids, one is taken for another with a chance of 3e-8.

    They lie in sorted arrays of falling length, two of which are merged when the newer one is as long.
    """

    def __init__(self) -> None:
        self._runs: list[np.ndarray] = []

    def repeated(self, ids: Sequence[str]) -> list[bool]:
        """Tell of each id whether it came before, here or in an earlier call."""
        keys = np.array([_hash(each) for each in ids], np.uint64)
        distinct, first = np.unique(keys, return_index=True)
        is_repeated = np.ones(len(keys), bool)
        is_repeated[first] = False
        for run in self._runs:
            at = np.minimum(np.searchsorted(run, keys), len(run) - 1)
            is_repeated |= run[at] == keys
        if len(distinct):
            self._runs.append(distinct)
        while len(self._runs) > 1 and len(self._runs[-1]) >= len(self._runs[-2]):
            merged = np.concatenate([self._runs.pop(), self._runs.pop()])
            merged.sort()
            self._runs.append(merged)
        return is_repeated.tolist()


def _hash(row_id: str) -> int:
    return int.from_bytes(hashlib.blake2b(row_id.encode(), digest_size=8).digest(), "big")
