"""`kvbatch.run(job)`: run a job from a script or a notebook."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kvbatch.errors import JobFileError
from kvbatch.job_file.load import load_job, load_mapping
from kvbatch.job_file.sections import Job
from kvbatch.report.summary import Summary, load_summary
from kvbatch.run.entry import Caller, run_job
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.read_output import iter_tables
from kvbatch.signals import stop_on_signals

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


@dataclass(frozen=True)
class FinishedRun:
    """A run that came to its end.

    Args:
        path: the run directory.
        is_new: False where an earlier run had done the same job already.
    """

    path: Path
    is_new: bool

    @cached_property
    def summary(self) -> Summary:
        """Rows, tokens, memory and speed, as `kvbatch report --json` prints them."""
        return load_summary(self.path)

    def tables(self, batch_rows: int = 512) -> Iterator["pa.Table"]:
        """Yield the output rows in input order, `batch_rows` at a time, as `pyarrow.Table`."""
        return iter_tables(RunDirectory(self.path), batch_rows)

    def output(self) -> "pl.DataFrame":
        """Return all output rows, in input order."""
        import polars as pl

        frames = [cast("pl.DataFrame", pl.from_arrow(table)) for table in self.tables()]
        return pl.concat(frames) if frames else pl.DataFrame()


def run(
    job: str | Path | Mapping[str, Any] | Job, *, overrides: Sequence[str] = (), new_run: bool = False
) -> FinishedRun:
    """Run a job in this process, or continue its latest run if that was stopped. Progress goes to stderr.

    Args:
        job: path of a job file, its content as a mapping, or a job.
        overrides: `key=value` each, as `-s` takes them; for a job file only.
        new_run: begin anew in any case.

    Raises:
        KvbatchError: As `run_job`; a signal or Ctrl-C ends in `Interrupted`, and finished rows are kept.
    """
    loaded = _loaded(job, overrides)
    with stop_on_signals() as stopper:
        outcome = run_job(loaded, new_run=new_run, caller=Caller(stopper=stopper))
    return FinishedRun(outcome.run.path, outcome.is_new)


def _loaded(job: str | Path | Mapping[str, Any] | Job, overrides: Sequence[str]) -> Job:
    if isinstance(job, str | Path):
        return load_job(job, overrides)
    if overrides:
        raise JobFileError("overrides are for job files; change the mapping or the job itself")
    if isinstance(job, Job):
        return job
    return load_mapping(job)
