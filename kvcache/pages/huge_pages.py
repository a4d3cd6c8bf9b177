"""Memory in pages of 2 MB, where the system hands them out on request (Linux's `madvise` setting)."""

import ctypes
import mmap

from torch import Tensor


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Ask for a new tensor's memory in huge pages, best before anything is written to it, and return the tensor.

    Reading weights and caches, which are far larger than the processor's address table covers, then waits less
    (benchmarks/kernels.md). Where the system has no huge pages, nothing changes.
    """
    if tensor.device.type == "cpu" and hasattr(mmap, "MADV_HUGEPAGE"):
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        size = tensor.data_ptr() + tensor.nbytes - start
        if size > 0:
            ctypes.CDLL(None).madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), mmap.MADV_HUGEPAGE)
    return tensor
