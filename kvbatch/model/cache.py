"""Converted models in the user's cache: each is made once, whole, and known to be what was made.

A conversion happens in a temporary directory and is renamed into place under a lock, so two processes or a kill never
leave half a model. The hashes of its files lie with it; what does not fit them any more is converted again.
"""

import fcntl
import glob
import logging
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbatch.errors import ModelUnavailable
from kvbatch.model.file_hashes import FileHashes, sha256_of

# Raise it when the conversion changes: models converted by an older one are then converted again.
CONVERTER_VERSION = 1
SUMS_NAME = "SHA256SUMS"  # as sha256sum writes and checks it

# NAME-<hash>-v1, and .NAME-<hash>-v1-<suffix> while it is made or removed
_DIRECTORY = re.compile(r"(?:(?P<whole>.+-[0-9a-f]{12}-v\d+)|\.(?P<staged>.+-[0-9a-f]{12}-v\d+)-.+)")

_log = logging.getLogger(__name__)


class ModelAbsent(ModelUnavailable):
    """The model would have to be fetched or converted first."""


def cached_model(cache: Path, key: str, build: Callable[[Path], None], look_only: bool) -> Path:
    """Return the cached directory of a key, building it once however many processes ask.

    Args:
        build: writes the model into an empty directory; checks it, too.
        look_only: build nothing.

    Raises:
        ModelUnavailable: The cache cannot be written, or what `build` raises.
        ModelAbsent: With `look_only`, it is not there.
    """
    final = cache / "models" / f"{key}-v{CONVERTER_VERSION}"
    hashes = FileHashes(cache)
    if _is_whole(final, hashes):
        return final
    if look_only:
        raise ModelAbsent(f"it is fetched or converted by the first run, into {final}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final):
            if _is_whole(final, hashes):  # another process built it while this one waited
                return final
            if final.exists():
                _log.info("%s is not what was converted; it is converted again", final)
            for leftover in staged(final):  # of a killed build: its lock is gone
                shutil.rmtree(leftover)
            partial = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
            try:
                build(partial)
                _write_sums(partial)
                partial.chmod(0o755)
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelUnavailable(
            f"the model cache {cache} cannot be written ({error}); set KVBATCH_CACHE to a place with room"
        ) from error
    return final


def model_of(directory: Path) -> Path | None:
    """Return where the model that a directory holds, or a part of, has its place; None if the name is no model's."""
    match = _DIRECTORY.fullmatch(directory.name)
    return directory.with_name(match["whole"] or match["staged"]) if match else None


def staged(final: Path) -> list[Path]:
    """Return the directories in which a model is made or removed, or was when the process was killed."""
    found = final.parent.glob(f".{glob.escape(final.name)}-*")
    return [directory for directory in found if not directory.is_symlink()]


def is_being_built(final: Path) -> bool:
    """Tell whether a process holds the lock of a model; raises OSError."""
    try:
        with _lock_path(final).open(encoding="utf-8") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def remove_model(final: Path) -> bool:
    """Remove a model and what killed processes left of it; return False, and remove nothing, while it is being built.

    It leaves its place at once, so that no process takes half a model for a whole one. The lock file stays, since a
    waiting process may have it open.

    Raises:
        OSError: It cannot be removed.
    """
    try:
        with _locked(final, waits=False):
            for leftover in staged(final):
                shutil.rmtree(leftover)
            if final.exists() and not final.is_symlink():  # no new file is needed: the disk may be full
                shutil.rmtree(final.rename(final.with_name(f".{final.name}-removed")))
    except BlockingIOError:
        return False
    return True


def _write_sums(directory: Path) -> None:
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
    (directory / SUMS_NAME).write_text("".join(lines), encoding="utf-8")


def _is_whole(directory: Path, hashes: FileHashes) -> bool:
    if not (directory / SUMS_NAME).exists():
        return (directory / "config.json").exists()  # made before there were sums
    try:
        lines = (directory / SUMS_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
        wanted = {directory / name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
        is_complete = {*wanted, directory / SUMS_NAME} == {*directory.iterdir()}
        return is_complete and hashes.of([*wanted]) == [*wanted.values()]
    except FileNotFoundError:  # removed meanwhile
        return False


def _lock_path(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


@contextmanager
def _locked(final: Path, *, waits: bool = True) -> Iterator[None]:
    """Hold the lock of a model; raises BlockingIOError if another process does and this one does not wait."""
    with _lock_path(final).open("w", encoding="utf-8") as handle:
        fcntl.flock(
            handle, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB)
        )  # the kernel frees it with the process
        yield
