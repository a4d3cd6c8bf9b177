"""Which kernels run: the compiled ones of a device where they support the pages, else the torch reference."""

import torch

from kvcache.kernels import reference
from kvcache.kernels.protocol import PageKernels, supports_all
from kvcache.sizes.page_format import PageFormat


def kernels_for(device: torch.device | str, *formats: PageFormat) -> PageKernels:
    """Return the kernels for pages of these formats.

    A format that compiled kernels do not support runs in the reference, so a new format starts there alone.

    Args:
        device: where the pages lie.
        formats: of all pages that one call reads.
    """
    compiled = compiled_kernels(device)
    return compiled if compiled and supports_all(compiled, formats) else reference


def compiled_kernels(device: torch.device | str) -> PageKernels | None:
    """Return the compiled kernels of a device, or None where it has none."""
    if torch.device(device).type != "cpu":
        return None
    from kvcache.kernels.cpu import ops

    return ops if ops.library() else None
