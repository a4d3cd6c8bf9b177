"""Whether compression runs beside the model."""

import os

from engine.config import EngineConfig


def overlaps_compression(config: EngineConfig, device: str) -> bool:
    """Return what the configuration says, or else whether the device has something to spare for it."""
    if not (config.cache.compresses and config.cache.streaming):
        return False
    if config.overlap_compression is not None:
        return config.overlap_compression
    if device.startswith("cuda"):
        return True
    import torch

    # The model's threads wait for each other: with a core short they lose more than compression takes.
    return torch.get_num_threads() < _usable_cores()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
