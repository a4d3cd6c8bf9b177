"""Whether compression runs beside the model."""

from engine.config import EngineConfig


def overlaps_compression(config: EngineConfig, device: str) -> bool:
    """Return what the configuration says, or else whether the device has a stream to spare for it.

    On a CPU it must be asked for: what a row generates depends on it, so it must not depend on the cores a machine
    happens to have left, and it saves no more than 4 % of prefill there.
    """
    if not (config.cache.compresses and config.cache.streaming):
        return False
    if config.overlap_compression is None:
        return device.startswith("cuda")
    return config.overlap_compression
