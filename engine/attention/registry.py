"""Attention backends of the full cache by name. A backend's module is imported when it is asked for."""

from importlib import import_module

import torch

from engine.attention.base import AttentionBackend

# name -> module and class
BACKENDS = {
    "reference": ("engine.attention.reference", "ReferenceAttention"),
    "cpu": ("engine.attention.cpu", "CPUAttention"),
}
# device type -> name of the backend that runs there unless another is asked for
_DEFAULTS = {"cpu": "cpu"}


def get_backend(name: str | None, device: torch.device) -> AttentionBackend:
    """Return the backend of that name, or the device's own.

    Raises:
        ValueError: No backend has that name.
    """
    name = name or _DEFAULTS.get(device.type, "reference")
    if name not in BACKENDS:
        raise ValueError(f"attention backend {name!r} is not known; use one of {', '.join(BACKENDS)}")
    module, class_name = BACKENDS[name]
    return getattr(import_module(module), class_name)()
