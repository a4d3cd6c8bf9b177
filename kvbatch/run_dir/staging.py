"""A run or a plan in the making: hidden beside the job's runs until it stands, so that what is refused leaves nothing.

Everything here happens under the job's lock.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbatch.atomic_file import fsync_directory
from kvbatch.errors import OutputError
from kvbatch.run_dir.directory import RunDirectory

_HIDDEN = ".new"  # among a job's runs
_REPLACED = "replaced"


def clear_drafts(home: Path) -> None:
    """Remove what a start left that was killed before its run or plan stood.

    Raises:
        OutputError: It cannot be removed.
    """
    try:
        if (home / _HIDDEN).exists():
            shutil.rmtree(home / _HIDDEN)
        for link in home.glob(".latest.*.tmp"):
            link.unlink()
    except OSError as error:
        raise OutputError(f"cannot clear up {home / _HIDDEN}: {error.strerror or error}") from error


@contextmanager
def drafted(home: Path, name: str, parts: Iterable[str] = ("stats",)) -> Iterator[RunDirectory]:
    """Give a block a directory that `publish` puts into its place; nothing of it is left otherwise.

    Args:
        home: of the job's runs.
        name: of the directory.
        parts: directories made in it.

    Raises:
        OutputError: It cannot be made.
    """
    clear_drafts(home)
    draft = RunDirectory(home / _HIDDEN / name)
    try:
        for part in parts:
            (draft.path / part).mkdir(parents=True)
    except OSError as error:
        shutil.rmtree(home / _HIDDEN, ignore_errors=True)
        raise OutputError(f"cannot make {draft.path}: {error.strerror}; change output.dir") from error
    try:
        yield draft
    finally:
        shutil.rmtree(home / _HIDDEN, ignore_errors=True)


def publish(draft: RunDirectory) -> RunDirectory:
    """Put a draft into its place, and return it there; one that stood there before is replaced.

    Raises:
        OutputError: The directory cannot be written.
    """
    home = draft.path.parents[1]
    place = home / draft.path.name
    try:
        if place.exists():  # no directory can be renamed over another
            os.replace(place, home / _HIDDEN / _REPLACED)
        os.replace(draft.path, place)
        fsync_directory(home)
    except OSError as error:
        raise OutputError(f"cannot make {place}: {error.strerror}; change output.dir") from error
    return RunDirectory(place)


def find_draft(path: Path) -> RunDirectory | None:
    """Return the run in the making that a path names: by its own name, or by the job's directory."""
    named = path.parent / _HIDDEN / path.name
    for manifest in (named / "manifest.json", *(path / _HIDDEN).glob("2*/manifest.json")):
        if manifest.exists():
            return RunDirectory(manifest.parent)
    return None


def is_draft(run: RunDirectory) -> bool:
    """Tell whether a run is in the making."""
    return run.path.parent.name == _HIDDEN
