"""What lies in the user's cache folder, and its removal. Every kind of file that is written there has its row here."""

import json
import math
import os
import re
import shutil
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvbatch.errors import InputError, OutputError
from kvbatch.model.cache import is_being_built, model_of, remove_model, staged
from kvcache.user_cache import user_cache


@dataclass(frozen=True)
class Kind:
    """What one sub-folder holds.

    Args:
        name: of the sub-folder.
        pattern: of the names in it, as a regular expression; what has another name is not kvbatch's. None for
            models, see `kvbatch.model.cache.model_of`.
        content: what it is.
        loss: what it costs to lose it.
        has_titles: an entry is worth a line, since its name or content says what it is for.
    """

    name: str
    pattern: str | None
    content: str
    loss: str
    has_titles: bool = False


_DIGEST = r"[0-9a-f]{20}"
KINDS = (
    Kind(
        "models", None, "models converted from GGUF", "converted again, those of wheels fetched again", True
    ),
    Kind("policies", rf"{_DIGEST}\.json", "presets fitted to models", "fitted again by the next run", True),
    Kind("calibration", rf"{_DIGEST}\.pt", "keys and lanes of models", "measured again by the next run"),
    Kind("kernels", rf"{_DIGEST}-{_DIGEST}\.so", "compiled CPU kernels", "compiled again by the next run"),
    Kind(
        "precision", rf"{_DIGEST}\.json", "speeds of dtypes", "measured again; dtype auto may choose another"
    ),
    Kind("speed", rf"{_DIGEST}\.json", "speeds of models", "kvbatch plan tells no time until the next run"),
    Kind("hashes", r"[0-9a-f]{32}\.json", "hashes of model files", "those files are read again, whole"),
)

# What is written before it is renamed. The age at which nothing writes it any more: a compiler has 300 s.
_UNFINISHED = re.compile(r"tmp[a-z0-9_]{8}|\..+\.\d+\.tmp")
_ABANDONED_S = 3600.0
_MAX_POLICY_BYTES = 1 << 20
_POLICY_KEYS: dict[str, type] = {
    **dict.fromkeys(("model", "preset", "dtype", "device", "created", "cpu"), str),
    **dict.fromkeys(("kl", "nll", "kv_ratio", "seconds"), float),
}


@dataclass(frozen=True)
class Entry:
    """One thing that is kept, or was being made.

    Args:
        age_s: since it was written.
        state: `whole`; `unfinished` if a killed process left it; `busy` while it is made, and then it stays.
        policy: the known values of a fitted policy; None if the file is damaged.
    """

    kind: str
    path: Path
    num_bytes: int
    age_s: float
    state: str
    policy: dict[str, Any] | None = None


@dataclass(frozen=True)
class Stranger:
    """Something that is not kvbatch's, or is reached through a link, and why it is neither counted nor removed."""

    path: Path
    reason: str


@dataclass
class CacheFolder:
    """The user's cache folder as it was found."""

    path: Path
    is_there: bool = True
    entries: list[Entry] = field(default_factory=list)
    strangers: list[Stranger] = field(default_factory=list)


def look_into_cache(kinds: Collection[str] = (), older_than_s: float = 0.0) -> CacheFolder:
    """Return what lies in the user's cache folder; no link below it is followed.

    Args:
        kinds: those to look for; all if there are none.
        older_than_s: leave out what was written later.

    Raises:
        InputError: There is no home directory, or a folder cannot be read.
    """
    try:
        found = CacheFolder(user_cache())
    except FileNotFoundError as error:
        raise InputError(f"{error}; set KVBATCH_CACHE to the directory of the cache") from error
    now_s = time.time()
    table = {kind.name: kind for kind in KINDS}
    try:
        found.is_there = found.path.exists()
        for child in _children(found.path):
            if child.is_symlink() or child.name not in table or not child.is_dir():
                found.strangers.append(_stranger(child))
            elif not kinds or child.name in kinds:
                _look_into(child, table[child.name], now_s, found)
    except OSError as error:
        raise InputError(f"{error.filename or found.path} cannot be read: {error.strerror}") from error
    found.entries = [entry for entry in found.entries if entry.age_s >= older_than_s]
    return found


def _look_into(folder: Path, kind: Kind, now_s: float, found: CacheFolder) -> None:
    models = set()
    for child in _children(folder):
        final = None if kind.pattern else model_of(child)
        is_unfinished = kind.pattern and _UNFINISHED.fullmatch(child.name)
        if child.is_symlink():
            found.strangers.append(_stranger(child))
        elif child.name.endswith(".lock"):  # empty, and stays: a waiting process may have it open
            continue
        elif final and child.is_dir():
            models.add(final)
        elif is_unfinished or (kind.pattern and re.fullmatch(kind.pattern, child.name) and child.is_file()):
            with suppress(FileNotFoundError):  # it was removed or renamed meanwhile
                num_bytes, written_s = _size_and_time(child)
                age_s = max(0.0, now_s - written_s)
                state = "whole" if not is_unfinished else "busy" if age_s < _ABANDONED_S else "unfinished"
                policy = _policy(child) if kind.name == "policies" and state == "whole" else None
                found.entries.append(Entry(kind.name, child, num_bytes, age_s, state, policy))
        else:
            found.strangers.append(_stranger(child))
    for final in sorted(models):
        with suppress(FileNotFoundError):
            found.entries.append(_model_entry(final, now_s))


def _model_entry(final: Path, now_s: float) -> Entry:
    """Return a model with all that killed processes left of it."""
    is_whole = final.exists() and not final.is_symlink()
    sizes = [_size_and_time(directory) for directory in [*([final] if is_whole else []), *staged(final)]]
    state = "busy" if is_being_built(final) else "whole" if is_whole else "unfinished"
    age_s = max(0.0, now_s - max((written_s for _, written_s in sizes), default=now_s))
    return Entry("models", final, sum(num_bytes for num_bytes, _ in sizes), age_s, state)


def _size_and_time(path: Path) -> tuple[int, float]:
    """Return the bytes of a file, or of all files of a directory, and when it was written (POSIX time)."""
    facts = path.lstat()
    if not path.is_dir():
        return facts.st_size, facts.st_mtime
    num_bytes = 0
    for place, _, names in os.walk(path):
        for name in names:
            with suppress(FileNotFoundError):
                num_bytes += os.lstat(os.path.join(place, name)).st_size
    return num_bytes, facts.st_mtime


def _children(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except FileNotFoundError:
        return []


def _stranger(path: Path) -> Stranger:
    return Stranger(path, "a link, not followed" if path.is_symlink() else "not written by kvbatch")


def _policy(path: Path) -> dict[str, Any] | None:
    """Return the known values of a fitted policy; None if the file lacks what is shown of one."""
    try:
        with path.open(encoding="utf-8") as file:
            values = json.loads(file.read(_MAX_POLICY_BYTES), parse_int=float)
        policy = {
            name: values[name] for name, type_ in _POLICY_KEYS.items() if type(values.get(name)) is type_
        }
    except (OSError, ValueError, AttributeError, RecursionError):
        return None
    numbers = [value for value in policy.values() if isinstance(value, float)]
    is_told = {"model", "preset", "kv_ratio"} <= policy.keys() and not policy.keys().isdisjoint(("kl", "nll"))
    return policy if is_told and all(map(math.isfinite, numbers)) else None


def remove_entries(entries: Collection[Entry]) -> Iterator[Entry]:
    """Remove entries one by one; yield each that is gone. What a process builds now stays.

    Raises:
        OutputError: One cannot be removed.
    """
    for entry in entries:
        try:
            is_gone = entry.state != "busy" and _is_removed(entry)
        except OSError as error:
            raise OutputError(
                f"{error.filename or entry.path} cannot be removed: {error.strerror}"
            ) from error
        if is_gone:
            yield entry


def _is_removed(entry: Entry) -> bool:
    if entry.kind == "models":
        return remove_model(entry.path)
    with suppress(FileNotFoundError):  # another process removed it
        if entry.path.is_dir():
            shutil.rmtree(entry.path)
        else:
            entry.path.unlink()
    return True
