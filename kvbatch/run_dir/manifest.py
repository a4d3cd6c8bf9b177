"""The run directory: its names, its manifest, and which earlier run a job may rely on.

Imports neither torch nor transformers: whether something is new must be known at once.
"""

import hashlib
import os
import platform
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from kvbatch import __version__
from kvbatch.atomic_file import described_file, fsync_directory, write_text
from kvbatch.errors import Damaged, InputError, OutputError
from kvbatch.job_file.environment import without_credentials
from kvbatch.job_file.load import RESOLVED_NAME, to_yaml
from kvbatch.job_file.sections import Job
from kvbatch.model.source import describe_model_files, is_same_model
from kvbatch.run_dir.checked_file import file_problem
from kvbatch.run_dir.fingerprint import InputFile, changes, config_hash, hash_files
from kvbatch.run_dir.record import FORMAT, read_record, write_record

PLAN_NAME = "plan"  # what a plan without a run is called among the runs of its job
PLAN_FILES = ("plan.parquet", "stats/bins.parquet")
PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "polars", "numpy", "triton")


@dataclass(frozen=True)
class RunDirectory:
    """Name the files of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """Time of the start and six digits of chance; also the directory's name."""
        return self.path.name

    @property
    def manifest(self) -> Path:
        """What was run, on what, by which versions."""
        return self.path / "manifest.json"

    @property
    def job_file(self) -> Path:
        """The job with all defaults, as it was run."""
        return self.path / RESOLVED_NAME

    @property
    def plan(self) -> Path:
        """What every row will cost; `kvbatch.plan.planner` owns its content."""
        return self.path / "plan.parquet"

    @property
    def summary(self) -> Path:
        """What came of it; written at the end."""
        return self.path / "summary.json"

    @property
    def shards(self) -> Path:
        """The directory of the output."""
        return self.path / "shards"

    @property
    def commits(self) -> Path:
        """The directory of the records by which shards count; beside them, so that they are nothing but Parquet."""
        return self.path / "commits"

    def shard_file(self, number: int) -> Path:
        """One file of the output."""
        return self.shards / f"part-{number:05d}.parquet"

    @property
    def deadletter(self) -> Path:
        """The directory of the rows without an answer."""
        return self.path / "deadletter"

    def deadletter_file(self, number: int) -> Path:
        """The rows of a shard without an answer."""
        return self.deadletter / f"part-{number:05d}.parquet"

    def commit_file(self, number: int) -> Path:
        """What says that a shard counts."""
        return self.commits / f"part-{number:05d}.json"

    def wal_file(self, number: int) -> Path:
        """The finished rows of a shard that is not written yet."""
        return self.path / "wal" / f"part-{number:05d}.arrow"

    @property
    def steps(self) -> Path:
        """What the pool held, step by step; written at the end of a run of the engine."""
        return self.path / "stats" / "steps.parquet"

    @property
    def kv_lanes(self) -> Path:
        """What every layer and head kept; written with the steps if the cache is compressed."""
        return self.path / "stats" / "kv_lanes.parquet"

    @property
    def quality(self) -> Path:
        """What the quality guard found on its sampled rows."""
        return self.path / "stats" / "quality.parquet"

    @property
    def page(self) -> Path:
        """The report as a page; written at the end and by `kvbatch report`."""
        return self.path / "report.html"

    @property
    def log(self) -> Path:
        """Events, one JSON object a line."""
        return self.path / "logs" / "run.jsonl"

    @property
    def heartbeat(self) -> Path:
        """Rewritten every ten seconds of a running job."""
        return self.path / "heartbeat.json"

    @property
    def is_success(self) -> bool:
        """Whether the run came to a good end."""
        return (self.path / "_SUCCESS").exists()

    @property
    def end(self) -> Literal["complete", "over_limits"] | None:
        """How the run came to its end; None as long as it did not, even if every row is finished."""
        if self.is_success:
            return "complete"
        return "over_limits" if self.read_summary().get("status") == "over_limits" else None

    @property
    def repair(self) -> str:
        """How a user repairs the run."""
        return f"repair the run: kvbatch resume {self.path} (or make all of it again: kvbatch run --new-run)"

    def read_manifest(self) -> dict[str, Any]:
        """Return the manifest.

        Raises:
            InputError: It is missing, damaged or of a newer release.
        """
        remedy = (
            f"nothing of {self.path} can be relied on without it: remove that directory, "
            "or start afresh: kvbatch run --new-run"
        )
        found = read_record(self.manifest, remedy)
        if not found.keys() >= _NEEDED:
            raise Damaged(self.manifest, "is damaged: it is no manifest", remedy)
        return found

    def write_manifest(self, values: Mapping[str, Any]) -> None:
        """Write the manifest, first what orders it among others; raises as `atomic_file`."""
        head = {key: values[key] for key in ("run_id", "number", "created") if key in values}
        write_record(self.manifest, head | dict(values))

    def read_summary(self) -> dict[str, Any]:
        """Return the summary that was written at the end; empty if there is none that can be read."""
        try:
            return read_record(self.summary, self.repair)
        except InputError:
            return {}

    def check_file(self, path: Path) -> None:
        """Prove that a file is the one that the manifest or the summary describes, if it was described then.

        Raises:
            InputError: It is not, or the manifest cannot be read.
        """
        name = str(path.relative_to(self.path))
        found = self.read_manifest().get("files", {}) | self.read_summary().get("files", {})
        if name in found and (problem := file_problem(path, found[name], deep=True)):
            raise Damaged(path, problem, self.repair)

    def succeed(self) -> None:
        """Say that the run is complete."""
        write_text(self.path / "_SUCCESS", "")


_NEEDED = {"format", "job", "created", "config_hash", "input_files"}


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


def describe_directory(run: RunDirectory, job: Job, manifest: dict[str, Any]) -> None:
    """Write into the directory of a new run or plan what it is of; raises as `atomic_file`."""
    files = {run.job_file.name: keep_job(run, job)}
    run.write_manifest(manifest | {"run_id": run.run_id, "files": files})


def keep_job(run: RunDirectory, job: Job) -> dict[str, Any]:
    """Write down the job with all defaults, and the key to what it took from the environment.

    Return what describes the job's file.

    Raises:
        OutputError: It cannot be written.
    """
    try:
        job.environment.write_key(run.path)
    except OSError as error:
        raise OutputError(f"cannot write into {run.path}: {error.strerror}; change output.dir") from error
    with described_file(run.job_file) as (stream, facts):
        stream.write(to_yaml(job).encode())
    return facts


def check_job_file(run: RunDirectory) -> None:
    """Prove that a run's job is as it was kept.

    Raises:
        InputError: It is not, or the manifest cannot be read.
    """
    facts = run.read_manifest().get("files", {}).get(run.job_file.name)
    if facts and (problem := file_problem(run.job_file, facts, deep=True)):
        raise Damaged(run.job_file, problem, "kvbatch run with the job file writes it again")


def plan_directory(job: Job) -> RunDirectory:
    """Return where the plan of a job lies that has no run yet."""
    return RunDirectory(Path(job.output_dir) / PLAN_NAME)


def adopt_plan(planned: RunDirectory, run: RunDirectory) -> None:
    """Make a plan that was made before its run the plan of that run.

    Raises:
        OutputError: The run directory cannot be written.
    """
    found = planned.read_manifest()
    files = dict(run.read_manifest()["files"])
    try:
        for name in PLAN_FILES:
            facts = found["files"][name]
            with (
                described_file(run.path / name) as (stream, copied),
                (planned.path / name).open("rb") as source,
            ):
                shutil.copyfileobj(source, stream)
            if copied["sha256"] != facts["sha256"]:
                raise Damaged(planned.path / name, "is damaged", f"remove {planned.path} and start again")
            files[name] = facts | copied
    except FileNotFoundError as error:
        raise OutputError(f"{planned.path} is incomplete; remove it and start again") from error
    names = ("plan", "num_rows", "left_out", "text_sha256", "predicted_kv_peak_bytes")
    adopted = {name: found[name] for name in names if name in found}
    run.write_manifest(run.read_manifest() | adopted | {"files": files})


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


def describe_run(job: Job, files: Iterable[InputFile]) -> dict[str, Any]:
    """Return what a manifest says before anything was read: fingerprints and versions."""
    return {
        "format": FORMAT,
        "kvbatch": __version__,
        "job": job.name,
        "created": datetime.now(UTC).isoformat(timespec="microseconds"),
        "working_directory": _working_directory(),
        "output_dir": without_credentials(job.output_dir),
        "config_hash": config_hash(job),
        "input_files": describe_files(files),
        "model_files": describe_model_files(job.model.path),
        "memory_budget": kept_memory_budget(job),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
    }


def describe_files(files: Iterable[InputFile]) -> list[dict[str, Any]]:
    """Return path, size and modification time of input files."""
    return [{"path": str(f.path), "num_bytes": f.num_bytes, "mtime_ns": f.mtime_ns} for f in files]


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
    same = all(found.get(key) == wanted[key] for key in _IDENTITY) and "input_sha256" in found
    same = same and is_same_model(found, job.model.path)
    same = same and not input_changes(found, hash_files(files, found["input_files"], found["input_sha256"]))
    return run if same and not may_now_fit(run, found, job) else None


_IDENTITY = ("format", "kvbatch", "config_hash")


def input_changes(manifest: dict[str, Any], hashes: dict[str, str]) -> list[str]:
    """Say how input files, by the hash of each, differ from those of a run."""
    known = manifest["input_sha256"]
    lines = changes({"input files": list(known)}, {"input files": list(hashes)})
    return lines + [f"input file {line}" for line in changes(known, hashes)]


def may_now_fit(run: RunDirectory, manifest: dict[str, Any], job: Job) -> bool:
    """Tell whether rows did not fit into the memory of a run, and the job gives another amount now."""
    if manifest.get("memory_budget") == kept_memory_budget(job):
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
    # one without a number is damaged, or of an older release
    return newest if newest and 0 < _number(linked) < _number(newest) else linked


def kept_memory_budget(job: Job) -> Any:
    """Return what a manifest keeps of the memory that a job gives."""
    return job.environment.kept("engine.memory_budget", job.engine.memory_budget)


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


def _working_directory() -> str | None:
    try:
        return str(Path.cwd())
    except OSError:  # it was removed
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def prompt_time(manifest: Mapping[str, Any]) -> datetime | None:
    """Return the time that a run's prompts were rendered at, by its manifest; None if it keeps none."""
    try:
        return datetime.fromisoformat(manifest["prompt_time"])
    except (KeyError, TypeError, ValueError):
        return None
