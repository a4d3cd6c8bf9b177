"""Whether compression runs beside the model."""

from kvcache.config import KVCacheConfig


def overlaps_compression(config: KVCacheConfig, device: str) -> bool:
    """Return what the configuration says, or else whether the device has a stream to spare for it.

    On a CPU it must be asked for: what a row generates depends on it, so it must not depend on the cores a machine
    happens to have left, and it saves no more than 4 % of prefill there.
    """
    if not (config.compresses and config.streaming):
        return False
    return device.startswith("cuda") if config.overlap is None else config.overlap
