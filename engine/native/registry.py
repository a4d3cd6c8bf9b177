"""Which kernels run: the compiled ones where they are and fit, else their torch twins."""

from types import ModuleType

import torch

from engine.models.config import ModelConfig
from engine.native import torch_twin


def layer_kernels(config: ModelConfig, device: torch.device) -> ModuleType:
    """Return `ops` or `torch_twin`, which has the same functions. The compiled ones take eight numbers at a time."""
    odd = config.head_dim % 16 or config.hidden_size % 8 or config.intermediate_size % 8
    if odd or device.type != "cpu":
        return torch_twin
    from engine.native import ops

    return torch_twin if ops.library() is None else ops
