"""Bins: rows that fit into the page pool together. Decisions alone, no torch.

First-fit decreasing over page counts, within groups that share a prompt prefix, as the classical bin-packing
heuristic has it (at most 11/9 of the optimum, Johnson 1973). Here nearly all rows are small against a bin, and
bins come out almost full.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PackItem:
    """A row to pack.

    Args:
        index: the caller's name for the row.
        num_pages: pages only this row holds.
        prefix_key: rows of one key share a prefix; None shares nothing.
        prefix_pages: pages of that prefix, held once per bin.
        num_sequences: requests that the row runs at once.
    """

    index: int
    num_pages: int
    prefix_key: Hashable = None
    prefix_pages: int = 0
    num_sequences: int = 1


@dataclass(frozen=True)
class Bin:
    """Rows that run together, longest first, and the pages they hold, shared prefix included."""

    indices: tuple[int, ...]
    num_pages: int


def pack(items: Sequence[PackItem], capacity_pages: int, max_sequences: int) -> list[Bin]:
    """Pack rows into bins of at most `capacity_pages` and `max_sequences`, fullest bin first.

    The fullest bin comes first because the engine admits it whole at the start: the peak is then known beforehand.

    Raises:
        ValueError: A row does not fit an empty bin; the planner must refuse it before.
    """
    groups: dict[Hashable, list[PackItem]] = {}
    for item in items:
        groups.setdefault(item.prefix_key, []).append(item)
    bins: list[Bin] = []
    for group in groups.values():
        bins += _first_fit(
            sorted(group, key=lambda item: (-item.num_pages, item.index)), capacity_pages, max_sequences
        )
    return sorted(bins, key=lambda b: (-b.num_pages, b.indices))


def _first_fit(items: list[PackItem], capacity_pages: int, max_sequences: int) -> list[Bin]:
    rows: list[list[int]] = []
    free: list[int] = []
    left: list[int] = []  # sequences that a bin may still take
    first_open = 0  # bins before it take no more sequences or cannot take the smallest row
    smallest = items[-1].num_pages
    for item in items:
        room = capacity_pages - item.prefix_pages
        if item.num_pages > room:
            raise ValueError(f"row {item.index} needs {item.num_pages} pages, a bin has {room}")
        for i in range(first_open, len(rows)):
            if free[i] >= item.num_pages and left[i] >= item.num_sequences:
                break
        else:
            i = len(rows)
            rows.append([])
            free.append(room)
            left.append(max_sequences)
        rows[i].append(item.index)
        free[i] -= item.num_pages
        left[i] -= item.num_sequences
        while first_open < len(rows) and (free[first_open] < smallest or left[first_open] < 1):
            first_open += 1
    return [Bin(tuple(r), capacity_pages - f) for r, f in zip(rows, free, strict=True)]
