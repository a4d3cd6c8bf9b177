"""One sequence's uncompressed cache: its block table and the length of each lane.

Each lane has a length of its own, though without compression all lengths are equal.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from kvcache.pages.page_pool import PagePool


class SequenceCache:
    """Hold the pages of one sequence until `free`.

    Args:
        pool: where the pages come from.
        num_tokens: slots every lane must be able to hold.
        prefix: a finished cache whose tokens this sequence begins with. Its full pages are shared,
            its last, partly filled page is copied.

    Raises:
        PoolExhausted: The pool has too few free pages.
    """

    def __init__(self, pool: PagePool, num_tokens: int, prefix: "SequenceCache | None" = None):
        layout = pool.layout
        self.pool = pool
        self.lengths = torch.zeros(layout.num_layers, layout.num_kv_heads, dtype=torch.int64, device="cpu")
        prefix_tokens = prefix.num_tokens if prefix else 0
        self.num_shared_pages = prefix_tokens // layout.page_tokens
        own = pool.allocate(
            layout.num_layers, layout.num_kv_heads * layout.lane_pages(num_tokens, prefix_tokens)
        ).view(layout.num_layers, layout.num_kv_heads, -1)
        if prefix:
            shared = prefix.pages[:, :, : self.num_shared_pages]
            pool.retain(shared)
            if prefix_tokens % layout.page_tokens:
                pool.copy(prefix.pages[:, :, self.num_shared_pages], own[:, :, 0])
            own = torch.cat([shared, own], dim=2)
            self.lengths += prefix.lengths
        self.pages: Tensor = own  # [layers, KV heads, pages of a lane] int64 page ids
        self._runs = [_runs(layer_pages) for layer_pages in own]

    @property
    def num_tokens(self) -> int:
        """Slots filled in the longest lane."""
        return int(self.lengths.max())

    @property
    def capacity_tokens(self) -> int:
        return self.pages.shape[2] * self.pool.layout.page_tokens

    @property
    def kept_bytes(self) -> int:
        """Bytes of the tokens held, shared ones included."""
        return int(self.lengths.sum()) * self.pool.layout.page_bytes // self.pool.layout.page_tokens

    @property
    def lane_usage(self) -> None:
        """None: every lane keeps every token whole."""
        return None

    @property
    def open_tokens(self) -> int:
        """The most tokens of one decode step: the slots left."""
        return self.capacity_tokens - self.num_tokens

    @property
    def own_pages(self) -> int:
        """Pages that only this sequence holds."""
        return self.pages[:, :, self.num_shared_pages :].numel()

    @property
    def own_bytes(self) -> int:
        return self.own_pages * self.pool.layout.page_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes of all pages, shared ones included."""
        return self.pages.numel() * self.pool.layout.page_bytes

    def advance(self, num_tokens: int) -> None:
        """Count `num_tokens` more slots of every lane as filled."""
        self.lengths += num_tokens
        assert self.num_tokens <= self.capacity_tokens, "a sequence outgrew its reservation"

    def parts(self, layer: int, num_tokens: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield keys and values of a layer's first `num_tokens` tokens, in order, as `[KV heads, n, D]`.

        A run of consecutive pages is a view of the slab; scattered pages are gathered into a copy.
        """
        size = self.pool.layout.page_tokens
        for run in self._runs[layer]:
            count = min(num_tokens - run.start * size, run.num_pages * size)
            if count <= 0:
                return
            if run.head_stride is None:
                pages = self.pages[layer, :, run.start : run.start + run.num_pages].to(self.pool.keys.device)
                keys, values = (
                    slab[pages].flatten(1, 2)[:, :count] for slab in (self.pool.keys, self.pool.values)
                )
            else:
                keys, values = (
                    slab.as_strided(
                        (len(self.pages[layer]), count, slab.shape[2]),
                        (run.head_stride * slab.stride(0), slab.stride(1), 1),
                        run.first_page * slab.stride(0),
                    )
                    for slab in (self.pool.keys, self.pool.values)
                )
            yield keys, values

    def free(self) -> None:
        """Release every page; shared pages stay with their other holders."""
        self.pool.release(self.pages)
        self.pages = self.pages[:, :, :0]
        self.lengths.zero_()


@dataclass(frozen=True)
class _Run:
    """Pages `[start, start + num_pages)` of a layer's lanes, `head_stride` pages apart from head to head.

    `head_stride` is None where the lanes are not evenly spaced, so that no single view covers them.
    """

    start: int
    num_pages: int
    first_page: int
    head_stride: int | None


# Beyond this many views the calls cost more than copying the pages together.
_MAX_RUNS = 8


def _runs(pages: Tensor) -> list[_Run]:
    """Cut a layer's block table `[KV heads, pages]` into runs that are consecutive in every lane."""
    num_heads, num_pages = pages.shape
    breaks = (pages.diff(dim=1) != 1).any(0).nonzero().flatten().add(1).tolist()
    bounds = [0, *breaks, num_pages]
    if len(bounds) - 1 > _MAX_RUNS:
        return [_Run(0, num_pages, 0, None)]
    runs = []
    for start, end in pairwise(bounds):
        strides = set(pages[:, start].diff().tolist()) or {0}
        stride = strides.pop()
        runs.append(_Run(start, end - start, int(pages[0, start]), None if strides or stride < 0 else stride))
    return runs


def slot_mapping(caches: Sequence[SequenceCache], counts: Sequence[int]) -> Tensor:
    """Return the slots into which the next `counts[i]` tokens of `caches[i]` are written.

    Returns:
        int64 `[layers, KV heads, sum(counts)]`: page id × page_tokens + offset, on the pool's device.
    """
    parts = []
    for cache, count in zip(caches, counts, strict=True):
        size = cache.pool.layout.page_tokens
        slots = cache.lengths[:, :, None] + torch.arange(count, device="cpu")
        parts.append(cache.pages.gather(2, slots // size).mul_(size).add_(slots % size))
    return torch.cat(parts, dim=2).to(caches[0].pool.keys.device)
