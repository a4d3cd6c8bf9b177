"""What a new run says of itself: its job and manifest, and the plan that it adopts.

Imports neither torch nor transformers: whether something is new must be known at once.
"""

import platform
import shutil
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from kvbatch import __version__
from kvbatch.atomic_file import described_file
from kvbatch.errors import Damaged, OutputError
from kvbatch.job_file.environment import without_credentials
from kvbatch.job_file.load import to_yaml
from kvbatch.job_file.sections import Job
from kvbatch.model.source import describe_model_files
from kvbatch.run_dir.checked_file import file_problem
from kvbatch.run_dir.directory import PLAN_FILES, RunDirectory
from kvbatch.run_dir.fingerprint import InputFile, changes, config_hash
from kvbatch.run_dir.manifest import Manifest

PACKAGES = ("torch", "transformers", "tokenizers", "pyarrow", "polars", "numpy", "triton")


def describe_directory(run: RunDirectory, job: Job, manifest: Manifest) -> None:
    """Write into the directory of a new run or plan what it is of; raises as `atomic_file`."""
    files = {run.job_file.name: keep_job(run, job)}
    run.write_manifest(replace(manifest, run_id=run.run_id, files=files))


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
    facts = run.read_manifest().files.get(run.job_file.name)
    if facts and (problem := file_problem(run.job_file, facts, deep=True)):
        raise Damaged(run.job_file, problem, "kvbatch run with the job file writes it again")


def adopt_plan(planned: RunDirectory, run: RunDirectory) -> None:
    """Make a plan that was made before its run the plan of that run.

    Raises:
        OutputError: The run directory cannot be written.
    """
    found = planned.read_manifest()
    files = dict(run.read_manifest().files)
    try:
        for name in PLAN_FILES:
            facts = found.files[name]
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
    adopted = replace(
        run.read_manifest(),
        plan=found.plan,
        num_rows=found.num_rows,
        left_out=found.left_out,
        text_sha256=found.text_sha256,
        predicted_kv_peak_bytes=found.predicted_kv_peak_bytes,
        files=files,
    )
    run.write_manifest(adopted)


def describe_run(job: Job, files: Iterable[InputFile]) -> Manifest:
    """Return what a manifest says before anything was read: fingerprints and versions."""
    return Manifest(
        kvbatch=__version__,
        job=job.name,
        created=datetime.now(UTC).isoformat(timespec="microseconds"),
        working_directory=_working_directory(),
        output_dir=without_credentials(job.output_dir),
        config_hash=config_hash(job),
        input_files=tuple(describe_files(files)),
        model_files=describe_model_files(job.model.path),
        memory_budget=kept_memory_budget(job),
        versions={"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
        platform=platform.platform(),
    )


def describe_files(files: Iterable[InputFile]) -> list[dict[str, Any]]:
    """Return path, size and modification time of input files."""
    return [{"path": str(f.path), "num_bytes": f.num_bytes, "mtime_ns": f.mtime_ns} for f in files]


def input_changes(manifest: Manifest, hashes: dict[str, str]) -> list[str]:
    """Say how input files, by the hash of each, differ from those of a run."""
    known = manifest.input_sha256
    lines = changes({"input files": list(known)}, {"input files": list(hashes)})
    return lines + [f"input file {line}" for line in changes(known, hashes)]


def kept_memory_budget(job: Job) -> object:
    """Return what a manifest keeps of the memory that a job gives."""
    return job.environment.kept("engine.memory_budget", job.engine.memory_budget)


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
