"""SHA-256 of files that are too large to be read at every start.

A hash is kept in the user's cache for as long as size, times and inode of its file stay what they were. The time of an
inode's last change (ctime) cannot be set back as that of its content can, so an edit that restores the latter shows.
"""

import contextlib
import hashlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from kvbatch.atomic_file import write_json
from kvbatch.errors import ModelUnavailable, OutputError
from kvbatch.text import digest

_TICK_NS = (
    2_000_000_000  # the coarsest clock of a file system: within it, an edit may leave the times as they were
)
_TOLD_BYTES = 1 << 30  # reading so much takes seconds

_log = logging.getLogger(__name__)


class FileHashes:
    """Know files by their content.

    Args:
        cache: the user's cache; if there is none or it cannot be written, every file is read again.
        now_ns: the clock.
    """

    def __init__(self, cache: Path | None, now_ns: Callable[[], int] = time.time_ns):
        self._folder = cache / "hashes" if cache else None
        self._now_ns = now_ns

    def of(self, files: Sequence[Path]) -> list[str]:
        """Return the SHA-256 of each file, in hex digits.

        Raises:
            ModelUnavailable: A file changed while it was read.
            OSError: It cannot be read.
        """
        facts = [file_facts(file) for file in files]
        known = [self._known(file, fact) for file, fact in zip(files, facts, strict=True)]
        hashes = {index: sha256 for index, sha256 in enumerate(known) if sha256 is not None}
        unread = [index for index in range(len(files)) if index not in hashes]
        num_bytes = sum(facts[index]["num_bytes"] for index in unread)
        if num_bytes > _TOLD_BYTES:
            gib, folder = num_bytes / (1 << 30), files[unread[0]].parent
            _log.info("reading %.1f GiB of %s, once, to know the model by its content", gib, folder)
        started_ns = self._now_ns()
        for index in unread:
            hashes[index] = sha256_of(files[index])
        for index, file in enumerate(files):
            if file_facts(file) != facts[index]:
                raise ModelUnavailable(f"{file} changed while it was read; start again when it is complete")
        for index in unread:
            self._keep(files[index], facts[index], hashes[index], started_ns)
        return [hashes[index] for index in range(len(files))]

    def has(self, files: Sequence[Path]) -> bool:
        """Tell whether the hash of every file is known without reading it; raises OSError."""
        return all(self._known(file, file_facts(file)) for file in files)

    def _known(self, file: Path, facts: dict[str, int]) -> str | None:
        if self._folder is None:
            return None
        try:
            entry = json.loads(_entry(self._folder, file).read_text(encoding="utf-8"))
            kept = {"file": entry["file"], "sha256": entry["sha256"]}
            is_whole = entry["check"] == digest(kept)
        except (OSError, ValueError, KeyError, TypeError):
            return None
        return kept["sha256"] if is_whole and kept["file"] == facts else None

    def _keep(self, file: Path, facts: dict[str, int], sha256: str, started_ns: int) -> None:
        age_ns = min(started_ns - facts["ctime_ns"], abs(started_ns - facts["mtime_ns"]))
        if self._folder and age_ns > _TICK_NS:
            kept = {"file": facts, "sha256": sha256}
            with contextlib.suppress(OutputError):
                write_json(_entry(self._folder, file), kept | {"check": digest(kept)})


def _entry(folder: Path, file: Path) -> Path:
    return folder / f"{hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:32]}.json"


def file_facts(file: Path) -> dict[str, int]:
    """Return what changes when a file does."""
    found = file.stat()
    return {
        "num_bytes": found.st_size,
        "mtime_ns": found.st_mtime_ns,
        "ctime_ns": found.st_ctime_ns,
        "inode": found.st_ino,
    }


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hex digits; raises OSError."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
