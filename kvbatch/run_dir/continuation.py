"""Whether a run, or a plan that `kvbatch plan` made, can be continued as a job; and what of it then stays."""

from typing import TYPE_CHECKING

from kvbatch.errors import InputError, JobChanged
from kvbatch.run_dir.advice import run_command, superseded_by
from kvbatch.run_dir.commit import has_finished_rows
from kvbatch.run_dir.describe import input_changes, kept_memory_budget
from kvbatch.run_dir.directory import PLAN_FILES, RunDirectory
from kvbatch.run_dir.find_runs import plan_directory
from kvbatch.run_dir.fingerprint import Fingerprint, InputHashes, changes
from kvbatch.run_dir.previous_rows import can_be_reused
from kvbatch.run_dir.reuse import Reuse

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
