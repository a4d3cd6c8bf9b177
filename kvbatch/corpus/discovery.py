"""Find the input files that a job's paths name, in a fixed order.

Hidden files and files that are not data are skipped. Each skipped file is listed with its reason.
"""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from urllib.parse import unquote

from kvbatch.corpus.convert import how_to_convert
from kvbatch.corpus.skipped import HIDDEN, SkippedFile, by_reason, described
from kvbatch.corpus.sniff import CONVERTIBLE, identify, is_named_as_data, why_no_data
from kvbatch.errors import InputError

END_BYTES = 4096
HIVE_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class SourceFile:
    """One input file.

    `label` is its name within the input, part of the ids made up for its rows. `partitions` are the columns that
    its directories name (`lang=en/`), always strings. `end` is a hash of its last bytes.
    """

    path: str
    label: str
    format: str
    compression: tuple[str, ...]
    num_bytes: int
    mtime_ns: int
    partitions: tuple[tuple[str, str | None], ...] = ()
    end: bytes = b""

    def check_unchanged(self) -> None:
        """Refuse the file if its size or modification time differs from when it was found.

        A JSONL file may have grown. Only the bytes that it had when it was found are read.

        Raises:
            InputError: it was written to otherwise, or is gone.
        """
        try:
            stat = os.stat(self.path)
            is_longer = self.format == "jsonl" and stat.st_size > self.num_bytes
            has_grown = is_longer and _hash_of_end(self.path, self.num_bytes) == self.end
        except OSError as error:
            raise InputError(f"{self.path}: {error.strerror or error}") from error
        if not has_grown and (stat.st_size, stat.st_mtime_ns) != (self.num_bytes, self.mtime_ns):
            raise InputError(f"{self.path}: the input changed while the job ran; run the job again")


@dataclass(frozen=True)
class FileProblem:
    """A file, or a path that names none, that cannot be read at all."""

    path: str
    message: str


@dataclass
class Discovery:
    """What the paths of a job lead to.

    `missing` are paths that lead to nothing, `unreadable` are files, `skipped` is what is no input.
    """

    files: list[SourceFile] = field(default_factory=list)
    missing: list[FileProblem] = field(default_factory=list)
    unreadable: list[FileProblem] = field(default_factory=list)
    skipped: list[SkippedFile] = field(default_factory=list)


def discover(paths: Iterable[str], wanted: str, text_name: str) -> Discovery:
    """Find the input files: paths in the order given, sorted by name within a directory or pattern.

    A file that several paths reach is taken once, at its first place. In directories and patterns, names that
    start with `_` or `.` are hidden, and of a file whose suffix promises no data the bytes decide whether it is some.

    Args:
        wanted: the job's input.format.
        text_name: the job's text column.
    """
    found = Discovery()
    seen: set[str] = set()
    for path in map(os.path.expanduser, paths):
        for candidate, label in _expand(path, found, wanted, text_name):
            real = os.path.realpath(candidate)
            if real in seen:
                continue
            seen.add(real)
            if not _is_utf8(candidate):
                problem = FileProblem(_shown(candidate), "the file's name is not UTF-8; rename it")
                found.unreadable.append(problem)
                continue
            try:
                format_, compression = identify(candidate, wanted)
                stat = os.stat(candidate)
                end = _hash_of_end(candidate, stat.st_size)
            except (InputError, OSError) as error:
                message = str(error).removeprefix(f"{candidate}: ")
                is_there = os.path.lexists(candidate)
                (found.unreadable if is_there else found.missing).append(FileProblem(candidate, message))
                continue
            found.files.append(
                SourceFile(
                    path=candidate,
                    label=label,
                    format=format_,
                    compression=compression,
                    num_bytes=stat.st_size,
                    mtime_ns=stat.st_mtime_ns,
                    partitions=_partitions(label),
                    end=end,
                )
            )
    found.files = _distinct_labels(found.files)
    once = {
        file.path: file for file in found.skipped
    }  # several paths may lead to it, one of them by its name
    found.skipped = [file for path, file in once.items() if os.path.realpath(path) not in seen]
    return found


def _hash_of_end(path: str, num_bytes: int) -> bytes:
    """Return a hash of the last bytes before `num_bytes`. It distinguishes a file that grew from a rewritten one."""
    with open(path, "rb") as file:
        file.seek(max(0, num_bytes - END_BYTES))
        return hashlib.sha256(file.read(min(num_bytes, END_BYTES))).digest()


def _partitions(label: str) -> tuple[tuple[str, str | None], ...]:
    """Read the columns that the directories of a label name, as hive writes them."""
    pairs = (part.partition("=") for part in label.split("/")[:-1])
    found = {unquote(name): unquote(value) for name, sign, value in pairs if name and sign}
    return tuple((name, None if value == HIVE_NULL else value) for name, value in found.items())


def _distinct_labels(files: list[SourceFile]) -> list[SourceFile]:
    """Fall back to the whole path where two files of different places have one label."""
    count = Counter(file.label for file in files)
    return [replace(file, label=file.path) if count[file.label] > 1 else file for file in files]


def _expand(path: str, found: Discovery, wanted: str, text_name: str) -> Iterator[tuple[str, str]]:
    """Yield the candidates that one path of the job stands for, each with its label."""
    num_missing, num_skipped = len(found.missing), len(found.skipped)
    if os.path.isdir(path):
        candidates = _walk(path, found)
        root, suffix = path, ""
    elif os.path.lexists(path) or not glob.has_magic(path):
        yield path, os.path.basename(path)
        return
    else:
        candidates = _match(path, found)
        root = _fixed_part(path)
        suffix = os.path.splitext(path)[1]  # `*.log` selects by suffix; `*.*` does not
        suffix = "" if glob.has_magic(suffix) else suffix
    # of a file that links make appear at several depths, the shortest path
    nearest: dict[str, list[str]] = {}
    for parts in sorted((each.split(os.sep) for each in candidates), key=lambda parts: (len(parts), parts)):
        nearest.setdefault(os.path.realpath(os.sep.join(parts)), parts)
    is_unlisted = len(found.missing) > num_missing
    num_data = 0
    for candidate in map(os.sep.join, sorted(nearest.values())):
        is_promised = is_named_as_data(candidate) or (suffix and candidate.endswith(suffix))
        reason = None if is_promised else why_no_data(candidate, wanted, text_name)
        if reason is None:
            num_data += 1
            yield candidate, os.path.relpath(candidate, root).replace(os.sep, "/")
        else:
            found.skipped.append(SkippedFile(_shown(candidate), reason))
    if not num_data and not is_unlisted:
        groups = by_reason(found.skipped[num_skipped:])
        message = "; ".join(["no input file found here", *map(described, groups)])
        for group in groups:
            if group["reason"] in CONVERTIBLE:
                message += f"; convert them: {how_to_convert(group['reason'], group['first'][0])}"
                break
        found.missing.append(FileProblem(path, message))


def _walk(root: str, found: Discovery) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        where = error.filename or root
        found.missing.append(FileProblem(where, f"cannot list the directory: {error.strerror}"))

    visited: set[str] = set()
    for directory, subdirectories, names in os.walk(root, onerror=refuse, followlinks=True):
        real = os.path.realpath(directory)
        if real in visited:  # a link to a directory above it
            subdirectories.clear()
            continue
        visited.add(real)
        for name in [*names, *subdirectories]:
            if _is_hidden(name):
                _hide(os.path.join(directory, name), found)
        subdirectories[:] = [name for name in subdirectories if not _is_hidden(name)]
        yield from (os.path.join(directory, name) for name in names if not _is_hidden(name))


def _match(pattern: str, found: Discovery) -> Iterator[str]:
    root = _fixed_part(pattern)
    for match in glob.iglob(pattern, recursive=True):
        if any(map(_is_hidden, os.path.relpath(match, root).split(os.sep))):
            _hide(match, found)
        elif not os.path.isdir(match):
            yield match
        elif "**" not in pattern:  # with **, the files below match by themselves
            yield from _walk(match, found)


def _hide(path: str, found: Discovery) -> None:
    found.skipped.append(SkippedFile(_shown(path), HIDDEN))


def _shown(path: str) -> str:
    """Return a path as it can be written, whatever the bytes of its name."""
    return os.fsencode(path).decode(errors="backslashreplace")


def _is_hidden(name: str) -> bool:
    return name.startswith(("_", ".")) and name != "."


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:  # other bytes become lone surrogates in Python's names
        return False
    return True


def _fixed_part(pattern: str) -> str:
    """Return the directory above the first part of a pattern that has a wildcard."""
    parts = pattern.split(os.sep)
    first = next(position for position, part in enumerate(parts) if glob.has_magic(part))
    return os.sep.join(parts[:first]) or (os.sep if pattern.startswith(os.sep) else ".")
