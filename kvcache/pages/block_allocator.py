"""Which blocks of a preallocated slab are free, and how many holders each has.

Blocks are plain numbers here, whatever lies in them.
"""

from collections.abc import Iterable

import torch
from torch import Tensor


class PoolExhausted(RuntimeError):
    """An allocation needs more blocks than are free; admission should have prevented it."""


class BlockAllocator:
    """Count the holders of `num_blocks` blocks, all free at first."""

    def __init__(self, num_blocks: int):
        self._holders = torch.zeros(num_blocks, dtype=torch.int32, device="cpu")
        self.num_free = num_blocks
        self.peak_blocks = 0

    @property
    def num_blocks(self) -> int:
        return len(self._holders)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, num_runs: int, run_blocks: int = 1) -> Tensor:
        """Allocate `num_runs` × `run_blocks` blocks, each run of consecutive blocks where the free list allows it.

        A kernel reads a run as one strided tensor; scattered blocks are as correct, only slower.

        Returns:
            int64 `[num_runs, run_blocks]` block numbers.

        Raises:
            PoolExhausted: Fewer blocks are free. Nothing is allocated.
        """
        wanted = num_runs * run_blocks
        if wanted > self.num_free:
            raise PoolExhausted(f"{wanted} blocks wanted, {self.num_free} of {self.num_blocks} free")
        free = (self._holders == 0).nonzero().flatten()
        blocks = _prefer_runs(free, num_runs, run_blocks)
        self._holders[blocks.flatten()] = 1
        self.num_free -= wanted
        self.peak_blocks = max(self.peak_blocks, self.num_used)
        return blocks

    def retain(self, blocks: Tensor) -> None:
        """Add a holder to blocks that already have one."""
        blocks = blocks.flatten()
        assert bool((self._holders[blocks] > 0).all()), "a free block cannot be shared"
        self._holders[blocks] += 1

    def release(self, blocks: Tensor) -> None:
        """Remove one holder of each block; a block without holders is free."""
        blocks = blocks.flatten()
        assert bool((self._holders[blocks] > 0).all()), "a block was released twice"
        self._holders[blocks] -= 1
        self.num_free += int((self._holders[blocks] == 0).sum())

    def check(self, held: Iterable[Tensor] = ()) -> None:
        """Assert that every block has exactly the holders that `held` names.

        Args:
            held: one tensor of block numbers per holder.

        Raises:
            AssertionError: A block is lost, held twice or freed while in use.
        """
        expected = torch.zeros_like(self._holders)
        for blocks in held:
            expected.index_add_(
                0, blocks.flatten(), torch.ones(blocks.numel(), dtype=torch.int32, device="cpu")
            )
        wrong = (expected != self._holders).nonzero().flatten()
        assert not len(wrong), f"blocks {wrong[:8].tolist()} have more or fewer holders than were named"
        assert self.num_free == int((self._holders == 0).sum()), "the count of free blocks is off"


def _prefer_runs(free: Tensor, num_runs: int, run_blocks: int) -> Tensor:
    """Choose blocks from the ascending list `free`, as many whole runs as it holds, the rest scattered."""
    if run_blocks == 0 or num_runs == 0:
        return free[:0].reshape(num_runs, run_blocks)
    if run_blocks == 1:
        return free[:num_runs, None].clone()  # a view would keep the whole list
    breaks = (free.diff() != 1).nonzero().flatten() + 1
    starts = torch.cat([free.new_zeros(1), breaks])
    ends = torch.cat([breaks, free.new_tensor([len(free)])])
    runs_in = (ends - starts) // run_blocks
    # the offset in `free` of every run, island after island
    first = starts.repeat_interleave(runs_in)
    rank = torch.arange(len(first), device="cpu") - (runs_in.cumsum(0) - runs_in).repeat_interleave(runs_in)
    offsets = (first + rank * run_blocks)[:num_runs]
    taken = offsets[:, None] + torch.arange(run_blocks, device="cpu")
    missing = num_runs - len(offsets)
    if missing:
        rest = torch.ones(len(free), dtype=torch.bool, device="cpu")
        rest[taken.flatten()] = False
        scattered = rest.nonzero().flatten()[: missing * run_blocks]
        taken = torch.cat([taken, scattered.reshape(missing, run_blocks)])
    return free[taken]
