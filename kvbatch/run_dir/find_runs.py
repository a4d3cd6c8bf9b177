"""Which runs a job has: the latest one, the one that a path names, and which of them a job may rely on.

Imports neither torch nor transformers: whether something is new must be known at once.
"""

import hashlib
import os
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path

from kvbatch.atomic_file import fsync_directory
from kvbatch.errors import InputError, OutputError
from kvbatch.job_file.load import RESOLVED_NAME
from kvbatch.job_file.sections import Job
from kvbatch.model.source import is_same_model
from kvbatch.run_dir.describe import describe_run, input_changes, kept_memory_budget
from kvbatch.run_dir.directory import PLAN_NAME, RunDirectory
from kvbatch.run_dir.fingerprint import InputFile, config_hash, hash_files
from kvbatch.run_dir.manifest import Manifest


def new_run_id(job: Job) -> str:
    """Return a name for a run that begins now.

    Raises:
        OutputError: It could not be made the latest one.
    """
    latest = Path(job.output_dir) / "latest"
    if latest.is_dir() and not latest.is_symlink():
        raise OutputError(f"{latest} is a directory, no link to a run; move it away")
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    salt = hashlib.sha256(f"{config_hash(job)}{os.getpid()}{os.urandom(8).hex()}".encode()).hexdigest()[:6]
    return f"{stamp}-{salt}"


def next_number(home: Path) -> int:
    """Return the number of a job's next run: by it runs are ordered, whatever the clock says."""
    return 1 + max((_number(run) for run in job_runs(home)), default=0)


def plan_directory(job: Job) -> RunDirectory:
    """Return where the plan of a job lies that has no run yet."""
    return RunDirectory(Path(job.output_dir) / PLAN_NAME)


def point_latest(home: Path, run_id: str) -> None:
    """Let `latest` stand for a run.

    Raises:
        OutputError: The link cannot be made.
    """
    temp = home / f".latest.{os.getpid()}.tmp"
    try:
        if (home / "latest").is_symlink() and (home / "latest").readlink() == Path(run_id):
            return
        temp.unlink(missing_ok=True)
        temp.symlink_to(run_id)
        os.replace(temp, home / "latest")
        fsync_directory(home)
    except OSError as error:
        raise OutputError(f"cannot let {home / 'latest'} point to the run: {error.strerror}") from error


def find_unfinished_run(job: Job) -> RunDirectory | None:
    """Return the latest run if it did not come to a good end.

    Raises:
        InputError: Its manifest cannot be read.
    """
    run = latest_run(Path(job.output_dir))
    if run is None or run.is_success:
        return None
    run.read_manifest()
    return run


def find_same_run(job: Job, files: Iterable[InputFile]) -> RunDirectory | None:
    """Return the latest run if it succeeded on this very job, input, model and version.

    Files are read only where their size or time is not what it was: a touched file is the same file.

    Raises:
        InputError: Its manifest cannot be read.
    """
    run = latest_run(Path(job.output_dir))
    if run is None or not run.is_success:
        return None
    found = run.read_manifest()
    wanted = describe_run(job, files)
    same = is_same_job(found, wanted) and bool(found.input_sha256)
    same = same and is_same_model(found.model_files, found.revision, job.model.path)
    same = same and not input_changes(found, hash_files(files, found.input_files, found.input_sha256))
    return run if same and not may_now_fit(run, found, job) else None


def is_same_job(one: Manifest, other: Manifest) -> bool:
    """Tell whether two manifests are of one job and one kvbatch, whatever their input and model."""
    return (one.kvbatch, one.config_hash) == (other.kvbatch, other.config_hash)


def may_now_fit(run: RunDirectory, manifest: Manifest, job: Job) -> bool:
    """Tell whether rows did not fit into the memory of a run, and the job gives another amount now."""
    if manifest.memory_budget == kept_memory_budget(job):
        return False
    return "over_budget" in run.read_summary().get("error_codes", {})


def job_runs(home: Path) -> list[RunDirectory]:
    """Return the runs of a job, the newest first: as they were numbered, whatever the clock said."""
    made = [
        RunDirectory(path.parent)
        for path in home.glob("*/manifest.json")
        if not path.parent.is_symlink() and path.parent.name not in (PLAN_NAME, "latest")
    ]
    return sorted(made, key=lambda run: (_number(run), _head(run, "created"), run.run_id), reverse=True)


def latest_run(home: Path) -> RunDirectory | None:
    """Return the run that `latest` points to; the newest if it points to none, or a kill came before it was moved."""
    newest = next(iter(job_runs(home)), None)
    link = home / "latest"
    if not (link.is_symlink() and link.is_dir()):
        return newest
    linked = RunDirectory(home / link.readlink())  # by its own name, as relative as the path was
    # one without a number is damaged
    return newest if newest and 0 < _number(linked) < _number(newest) else linked


def open_run(path: Path) -> RunDirectory:
    """Return the run that a path names: a run directory, or a job's directory with its latest run.

    Raises:
        InputError: There is no run, or it is a plan.
    """
    if path.is_symlink() and path.is_dir():
        path = path.parent / path.readlink()
    run = RunDirectory(path) if (path / "manifest.json").exists() else latest_run(path)
    if run is None:
        if (path / RESOLVED_NAME).exists():
            RunDirectory(path).read_manifest()
        raise InputError(f"{path} holds no run; name runs/<job> or runs/<job>/<run id>")
    if run.path.resolve().name == PLAN_NAME:
        raise InputError(
            f"{path} is a plan, which kvbatch run begins with; for the job's latest run name {path.parent}"
        )
    return run


def _number(run: RunDirectory) -> int:
    return int(_head(run, "number") or 0)


def _head(run: RunDirectory, key: str) -> str:
    """Return a value from the beginning of a manifest, which may list thousands of input files."""
    try:
        with run.manifest.open("rb") as stream:
            text = stream.read(1000).decode(errors="replace")
    except OSError:
        return ""
    found = re.search(rf'^  "{key}": "?([^",\n]*)', text, re.MULTILINE)
    return found[1] if found and (key != "number" or found[1].isdecimal()) else ""
