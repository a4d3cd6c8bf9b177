"""Which kernels run: the compiled ones where they are, else their torch references."""

from types import ModuleType


def compiled_kernels(head_dim: int) -> ModuleType | None:
    """Return the compiled kernels, `kvcache.kernels.cpu.ops`, or None where there are none for this head size."""
    from kvcache.kernels.cpu.build import library

    if head_dim % 16 or library() is None:
        return None
    from kvcache.kernels.cpu import ops

    return ops


def cpu_kernels(head_dim: int) -> ModuleType:
    """Return the compiled kernels where they are, else `reference`, which has the same functions."""
    from kvcache.kernels import reference

    return compiled_kernels(head_dim) or reference
