"""The run directory: what its files are called, and the reading and writing of its manifest."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kvbatch.atomic_file import write_text
from kvbatch.errors import Damaged, InputError
from kvbatch.job_file.load import RESOLVED_NAME
from kvbatch.run_dir.checked_file import file_problem
from kvbatch.run_dir.manifest import Manifest
from kvbatch.run_dir.record import read_record, write_record

PLAN_NAME = "plan"  # what a plan without a run is called among the runs of its job


PLAN_FILES = ("plan.parquet", "stats/bins.parquet")


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
        """The plan of every row, as `kvbatch.plan.planner` writes it."""
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

    def read_manifest(self) -> Manifest:
        """Return the manifest.

        Raises:
            InputError: It is missing, damaged or of another format.
        """
        remedy = (
            f"nothing of {self.path} can be relied on without it: remove that directory, "
            "or start afresh: kvbatch run --new-run"
        )
        try:
            return Manifest.from_record(read_record(self.manifest, remedy))
        except (KeyError, TypeError) as error:
            raise Damaged(self.manifest, "is damaged: it is no manifest", remedy) from error

    def write_manifest(self, manifest: Manifest) -> None:
        """Write the manifest; raises as `atomic_file`."""
        write_record(self.manifest, manifest.to_record())

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
        found = self.read_manifest().files | self.read_summary().get("files", {})
        if name in found and (problem := file_problem(path, found[name], deep=True)):
            raise Damaged(path, problem, self.repair)

    def succeed(self) -> None:
        """Say that the run is complete."""
        write_text(self.path / "_SUCCESS", "")
