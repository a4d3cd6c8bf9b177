"""A run that was stopped, resumed: whether a job may continue it, and which of its rows are finished."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from kvbatch.errors import Damaged, InputError, JobChanged, OutputError
from kvbatch.run_dir.advice import run_command, superseded_by
from kvbatch.run_dir.commit import check_shard, has_finished_rows, planned_shards, shard_table
from kvbatch.run_dir.describe import input_changes, kept_memory_budget
from kvbatch.run_dir.directory import PLAN_FILES, RunDirectory
from kvbatch.run_dir.find_runs import plan_directory
from kvbatch.run_dir.fingerprint import Fingerprint, InputHashes, changes
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.previous_rows import can_be_reused
from kvbatch.run_dir.reuse import Reuse
from kvbatch.run_dir.wal import read_rows

if TYPE_CHECKING:
    from kvbatch.job_file.sections import Job


def can_continue(
    run: RunDirectory, job: "Job", fingerprint: Fingerprint, inputs: InputHashes, *, insists: bool
) -> bool:
    """Tell whether a run can be continued as a job.

    Args:
        insists: the user named this run; else one that ended, or has no finished row, is left for a new one.

    Raises:
        JobChanged: It has finished rows, and what decides the output is not what it was.
        InputError: An input file or the run cannot be read.
    """
    found = run.read_manifest()
    changed_keys = changes(found.semantic, fingerprint.semantic)
    lines = changed_keys + input_changes(found, inputs.hashes((found.input_files, found.input_sha256)))
    # a new run reuses what this one finished
    builds_upon = not insists and job.input.incremental
    if not lines:
        return not builds_upon or can_be_reused(run)
    if builds_upon and not changed_keys:
        return False
    if not insists and (run.end or not has_finished_rows(run)):
        return False
    remedy = "kvbatch run --new-run starts afresh"
    if job.input.incremental and not changed_keys:
        remedy = f"{run_command(found)} reuses in a new run what this one finished"
    later = superseded_by(run, found)
    raise JobChanged(
        f"{run.path} {f'was superseded by run {later} and ' if later else ''}cannot be continued, since what "
        "decides its output changed:",
        *(f"  {line}" for line in lines),
        f"({remedy})",
    )


def find_plan(job: "Job", fingerprint: Fingerprint, inputs: InputHashes, reuse: Reuse) -> RunDirectory | None:
    """Return what `kvbatch plan` left for this very job, its input and the rows it reuses, if it left that."""
    planned = plan_directory(job)
    try:
        found = planned.read_manifest()
        for name in PLAN_FILES:
            planned.check_file(planned.path / name)
    except InputError:  # there is none, or none that can be used
        return None
    fits = found.plan is not None and found.operational == fingerprint.operational
    fits = fits and Reuse.of(planned) == reuse
    return planned if fits and can_continue(planned, job, fingerprint, inputs, insists=False) else None


def kept_shard_rows(run: RunDirectory) -> int | None:
    """Return the shard size of a run that is planned: its plan stands."""
    found = run.read_manifest()
    return found.operational["output.shard_rows"] if found.plan else None


def kept_budget_bytes(run: RunDirectory, job: "Job") -> int | None:
    """Return the bytes that a run resolved the job's memory budget to, if the job still gives the same."""
    found = run.read_manifest()
    return found.memory_budget_bytes if found.memory_budget == kept_memory_budget(job) else None


@dataclass
class Recovered:
    """Say what need not run again.

    Args:
        committed: numbers of the shards that count.
        rows: of other shards, the output columns of finished rows by their place.
        num_finished: rows that ran, in either.
        num_left: rows that have to run.
        is_whole: whether every shard counts.
        summary: what a session said at its end, if one came to it.
    """

    committed: set[int] = field(default_factory=set)
    rows: dict[int, dict[int, dict[str, Any]]] = field(default_factory=dict)
    num_finished: int = 0
    num_left: int = 0
    is_whole: bool = True
    summary: dict[str, Any] = field(default_factory=dict)


def recover(run: RunDirectory) -> Recovered:
    """Find the finished rows of a planned run, and remove whatever else a kill may have left of its shards.

    A run that has come to its end, but lost rows since, is none that has from then on.

    Raises:
        Damaged: The plan cannot be read.
        OutputError: The run directory cannot be written.
    """
    found = Recovered(summary=run.read_summary())
    try:
        for leftover in run.path.rglob(".*.tmp"):
            leftover.unlink(missing_ok=True)
        for number, planned in enumerate(planned_shards(run, ["status"])):
            runs = {place for place, row in enumerate(planned) if row.status == "ok"}
            rows: dict[int, dict[str, Any]] = {}
            try:
                if check_shard(run, number, deep=True)["rows"] != len(planned):
                    raise Damaged(run.commit_file(number), "does not fit the plan", run.repair)
                run.wal_file(number).unlink(missing_ok=True)
                found.committed.add(number)
                found.num_finished += len(runs)
                continue
            except Damaged as damaged:
                if damaged.path == run.deadletter_file(number):  # the rows themselves are whole
                    rows = dict(
                        enumerate(shard_table(run, number, pa.schema(OUTPUT_FIELDS).names).to_pylist())
                    )
            for file in (run.path / "_SUCCESS", run.summary, run.commit_file(number), run.shard_file(number)):
                file.unlink(missing_ok=True)
            run.deadletter_file(number).unlink(missing_ok=True)
            rows = rows or read_rows(run.wal_file(number), OUTPUT_FIELDS, cut=True)
            found.rows[number] = {place: row for place, row in rows.items() if place in runs}
            found.num_finished += len(found.rows[number])
            found.num_left += len(runs) - len(found.rows[number])
            found.is_whole = False
    except OSError as error:
        raise OutputError(f"cannot clear up {run.path}: {error.strerror or error}") from error
    return found
