"""Input files that are not read, each with its reason, and the messages that report them."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

SHOWN_NAMES = 5
HIDDEN = "hidden, its name begins with _ or ."


@dataclass(frozen=True)
class SkippedFile:
    """A file or directory that is not read, and why."""

    path: str
    reason: str


def by_reason(files: Iterable[SkippedFile]) -> list[dict[str, Any]]:
    """Count files by reason, the most frequent first, and name the first ones of each."""
    groups: dict[str, list[str]] = {}
    for file in files:
        groups.setdefault(file.reason, []).append(file.path)
    return [
        {"reason": reason, "files": len(paths), "first": paths[:SHOWN_NAMES]}
        for reason, paths in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]


def described(group: dict[str, Any]) -> str:
    """Return a message that names the skipped files of one group of `by_reason`, and the reason."""
    return f"{named(group)}: skipped, {group['reason']}"


def named(group: dict[str, Any]) -> str:
    """Name the first files of one group of `by_reason`."""
    more = group["files"] - len(group["first"])
    return ", ".join(group["first"]) + (f" and {more:,} more" if more else "")


def notes(files: Iterable[SkippedFile]) -> list[str]:
    """Return the messages on skipped files. Hidden files get none."""
    return [described(group) for group in by_reason(file for file in files if file.reason != HIDDEN)]
