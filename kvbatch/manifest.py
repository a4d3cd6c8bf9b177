"""The run directory: its names, its manifest, and which earlier run a job may rely on.

Imports neither torch nor transformers: whether something is new must be known at once.
"""

import hashlib
import json
import os
import platform
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from kvbatch import __version__
from kvbatch.config import to_yaml
from kvbatch.errors import InputError, OutputError
from kvbatch.fingerprint import InputFile, changes, config_hash, hash_files
from kvbatch.job import Job
from kvbatch.writer import atomic_file, fsync_directory, write_json, write_text

MANIFEST_FORMAT = 1
PLAN_NAME = "plan"  # what a plan without a run is called among the runs of its job
MODEL_SUFFIXES = (".safetensors", ".json", ".gguf", ".jinja", ".model", ".txt")
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

    def read_manifest(self) -> dict[str, Any]:
        """Return the manifest.

        Raises:
            InputError: It is missing or damaged.
        """
        try:
            return json.loads(self.manifest.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise InputError(f"{self.path} is no run directory: {error}") from error

    def read_summary(self) -> dict[str, Any]:
        """Return the summary that was written at the end; empty if there is none that can be read."""
        try:
            return json.loads(self.summary.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def succeed(self) -> None:
        """Say that the run is complete."""
        write_text(self.path / "_SUCCESS", "")


def new_run_id(job: Job) -> str:
    """Return a name for a run that begins now; by their names runs are in the order of their beginnings."""
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S")
    salt = hashlib.sha256(f"{config_hash(job)}{os.getpid()}{os.urandom(8).hex()}".encode()).hexdigest()[:6]
    return f"{stamp}-{salt}"


def describe_directory(run: RunDirectory, job: Job, manifest: dict[str, Any]) -> None:
    """Write into the directory of a new run or plan what it is of; raises as `write_json`."""
    write_text(run.path / "job.resolved.yaml", to_yaml(job))
    write_json(run.manifest, manifest | {"run_id": run.run_id})


def plan_directory(job: Job) -> RunDirectory:
    """Return where the plan of a job lies that has no run yet."""
    return RunDirectory(Path(job.output_dir) / PLAN_NAME)


def adopt_plan(planned: RunDirectory, run: RunDirectory) -> None:
    """Make a plan that was made before its run the plan of that run.

    Raises:
        OutputError: The run directory cannot be written.
    """
    try:
        for name in ("plan.parquet", "stats/bins.parquet"):
            with atomic_file(run.path / name) as stream, (planned.path / name).open("rb") as source:
                shutil.copyfileobj(source, stream)
    except FileNotFoundError as error:
        raise OutputError(f"{planned.path} is incomplete; remove it and start again") from error
    found = planned.read_manifest()
    adopted = {key: found[key] for key in ("plan", "num_rows", "text_sha256", "predicted_kv_peak_bytes")}
    write_json(run.manifest, run.read_manifest() | adopted)


def point_latest(home: Path, run_id: str) -> None:
    """Let `latest` stand for a run.

    Raises:
        OutputError: The link cannot be made.
    """
    temp = home / f".latest.{os.getpid()}.tmp"
    try:
        temp.unlink(missing_ok=True)
        temp.symlink_to(run_id)
        os.replace(temp, home / "latest")
        fsync_directory(home)
    except OSError as error:
        raise OutputError(f"cannot let {home / 'latest'} point to the run: {error.strerror}") from error


def describe_run(job: Job, files: Iterable[InputFile]) -> dict[str, Any]:
    """Return what a manifest says before anything was read: fingerprints and versions."""
    return {
        "format": MANIFEST_FORMAT,
        "kvbatch": __version__,
        "job": job.name,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "config_hash": config_hash(job),
        "input_files": describe_files(files),
        "model_files": describe_model_files(job.model.path),
        "memory_budget": job.engine.memory_budget,
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES},
        "platform": platform.platform(),
    }


def describe_files(files: Iterable[InputFile]) -> list[dict[str, Any]]:
    """Return path, size and modification time of input files."""
    return [{"path": str(f.path), "num_bytes": f.num_bytes, "mtime_ns": f.mtime_ns} for f in files]


def describe_model_files(spec: str) -> list[dict[str, Any]]:
    """Return the same for a local model's files; a model that is no local path is fixed by its revision."""
    path = Path(spec).expanduser()
    files = [path] if path.is_file() else sorted(path.iterdir()) if path.is_dir() else []
    stats = [(file, file.stat()) for file in files if file.suffix in MODEL_SUFFIXES]
    return [{"path": f.name, "num_bytes": s.st_size, "mtime_ns": s.st_mtime_ns} for f, s in stats]


def find_unfinished_run(job: Job) -> RunDirectory | None:
    """Return the latest run if it did not come to a good end and can be read."""
    run = _followed(Path(job.output_dir) / "latest")
    if run.is_success:
        return None
    try:
        return run if run.read_manifest()["format"] == MANIFEST_FORMAT else None
    except (InputError, KeyError):
        return None


def find_same_run(job: Job, files: Iterable[InputFile]) -> RunDirectory | None:
    """Return the latest run if it succeeded on this very job, input, model and version.

    Files are read only where their size or time is not what it was: a touched file is the same file.
    """
    run = _followed(Path(job.output_dir) / "latest")
    if not run.is_success:
        return None
    try:
        found = run.read_manifest()
    except InputError:
        return None
    wanted = describe_run(job, files)
    same = all(found.get(key) == wanted[key] for key in _IDENTITY) and "input_sha256" in found
    same = same and not input_changes(found, hash_files(files, found["input_files"], found["input_sha256"]))
    return run if same and not may_now_fit(run, found, job) else None


_IDENTITY = ("format", "kvbatch", "config_hash", "model_files")


def input_changes(manifest: dict[str, Any], hashes: dict[str, str]) -> list[str]:
    """Say how input files, by the hash of each, differ from those of a run."""
    known = manifest["input_sha256"]
    lines = changes({"input files": list(known)}, {"input files": list(hashes)})
    return lines + [f"input file {line}" for line in changes(known, hashes)]


def may_now_fit(run: RunDirectory, manifest: dict[str, Any], job: Job) -> bool:
    """Tell whether rows did not fit into the memory of a run, and the job gives another amount now."""
    if manifest.get("memory_budget") == job.engine.memory_budget:
        return False
    return "over_budget" in run.read_summary().get("error_codes", {})


def open_run(path: Path) -> RunDirectory:
    """Return the run that a path names: a run directory, or a job's directory with its `latest`.

    Raises:
        InputError: There is no run, or it is a plan.
    """
    for candidate in (path, path / "latest"):
        if (candidate / "manifest.json").exists():
            run = _followed(candidate)
            if run.path.resolve().name == PLAN_NAME:
                raise InputError(
                    f"{path} is a plan, which kvbatch run begins with; for the job's latest run name {path.parent}"
                )
            return run
    raise InputError(f"{path} holds no run; name runs/<job> or runs/<job>/<run id>")


def _followed(path: Path) -> RunDirectory:
    """Return the run that `latest` stands for by its own name, as relative as the path was."""
    return RunDirectory(path.parent / path.readlink() if path.is_symlink() else path)


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
