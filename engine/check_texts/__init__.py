"""Texts of six kinds, 2,000 tokens each, on which the loss of a cache policy is measured. Imports: none."""

from importlib.resources import files

NAMES = ("prose", "log", "code", "table", "russian", "chinese")


def check_texts() -> dict[str, str]:
    """Return the texts by name."""
    return {name: (files(__name__) / f"{name}.txt").read_text(encoding="utf-8") for name in NAMES}
