"""Which kernels run: the compiled ones where they are and support the pages, else their torch references."""

import torch

from kvcache.kernels import reference
from kvcache.kernels.protocol import AnyPageFormat, PageKernels


def kernels_for(device: torch.device, *page_formats: AnyPageFormat) -> PageKernels:
    """Return the fastest kernels on a device that support all of these page formats; `reference` supports any."""
    return compiled_kernels(device, *page_formats) or reference


def compiled_kernels(device: torch.device, *page_formats: AnyPageFormat) -> PageKernels | None:
    """Return the compiled kernels, or None where there are none for this device and these page formats."""
    if device.type != "cpu":
        return None
    from kvcache.kernels.cpu import ops

    supported = all(map(ops.supports, page_formats))
    return ops if supported and ops.library() is not None else None
