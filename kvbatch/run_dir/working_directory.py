"""Where a run began: its relative paths, of input, model, output and files of the job, start there."""

import os
from pathlib import Path

from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.manifest import Manifest

KEY = "working_directory"  # of the manifest


def enter_working_directory(run: RunDirectory) -> tuple[RunDirectory, str | None]:
    """Change to the directory in which a run began, so that it finds what it found then.

    If that is gone, the run may have been moved together with what lies around it: `runs/<job>/<run id>` tells where
    it began now.

    Returns:
        The run by a path that holds here, and a note if its directory is gone.

    Raises:
        InputError: The manifest cannot be read.
    """
    manifest = run.read_manifest()
    began = manifest.working_directory
    if began is None or _is_here(began):
        return run, None
    found = RunDirectory(run.path.resolve())
    moved = _moved_to(found, manifest)
    target = began if Path(began).is_dir() else moved
    if target is None:
        return run, f"{began}, where {run.path} began, is gone: relative paths start at {Path.cwd()} instead"
    note = (
        None
        if target == began
        else f"{began}, where {run.path} began, is gone: relative paths start at {target}"
    )
    if not _is_here(target):
        os.chdir(target)
        return found, note
    return run, note


def _is_here(path: str) -> bool:
    try:
        return os.path.samefile(path, ".")
    except OSError:
        return False


def _moved_to(run: RunDirectory, manifest: Manifest) -> str | None:
    """Return the directory from which a run's relative output directory leads to where the run lies now."""
    parts = Path(os.path.normpath(manifest.output_dir or "/")).parts
    lies = run.path.parent.parts
    if not parts or parts[0] in ("/", "..") or lies[-len(parts) :] != parts:
        return None
    return str(Path(*lies[: -len(parts)]))
