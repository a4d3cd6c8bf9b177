"""Which kernels run: the compiled ones where they are, else their torch twins."""

from types import ModuleType


def cpu_kernels(head_dim: int) -> ModuleType:
    """Return a module with `dequantise`, `decode_attention` and `decode_attention_pool`."""
    from kvcache.kernels.cpu.build import library

    if head_dim % 16 or library() is None:
        from kvcache.kernels import torch_twin

        return torch_twin
    from kvcache.kernels.cpu import ops

    return ops
