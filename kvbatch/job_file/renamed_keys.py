"""Keys of earlier job files: what each one is called now, or why it is gone."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Renamed:
    """A key under another name.

    Args:
        key: the new one, dotted.
        values: old value to new one, where they changed too.
    """

    key: str
    values: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Gone:
    """A key without a successor, and why."""

    reason: str


OLD_KEYS: dict[str, Renamed | Gone] = {
    "cache.whole_dtype": Renamed("cache.dtype", (("model", "auto"),)),
    "cache.two_axis": Gone("no measurement showed a gain from a scale for each token"),
    "input.errors": Renamed("input.encoding_errors"),
    "long_document.drop": Renamed(
        "long_document.truncation_side", (("head", "left"), ("middle", "middle"), ("tail", "right"))
    ),
}


def what_became_of(key: str, value: object) -> str | None:
    """Say what became of an old key, with what to write; None for a key that never was one.

    Args:
        key: dotted.
        value: the one it has in the job file.
    """
    found = OLD_KEYS.get(key)
    if found is None:
        return None
    if isinstance(found, Gone):
        return f"'{key}' is gone: {found.reason}; leave it out"
    new = dict(found.values).get(str(value))
    section, _, name = found.key.rpartition(".")
    line = f"{name}: {new}" if new else name
    return f"'{key}' is called '{found.key}' now; write {line} in section {section}"
