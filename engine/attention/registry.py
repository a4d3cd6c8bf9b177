"""Which backend runs where. Modules are imported when asked for."""

from engine.attention.base import AttentionBackend


def get_backend(name: str) -> AttentionBackend:
    """Return the backend of that name: `reference` (any device) or `cpu`.

    Raises:
        ValueError: No backend has that name.
    """
    if name == "reference":
        from engine.attention.reference import ReferenceAttention

        return ReferenceAttention()
    if name == "cpu":
        from engine.attention.cpu import CPUAttention

        return CPUAttention()
    raise ValueError(f"attention backend {name!r} is not known; use reference or cpu")
