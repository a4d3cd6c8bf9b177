"""Plan an opened job into the files of a directory."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kvbatch.opened_job import OpenedJob
from kvbatch.plan.feasibility import check_prompt_columns
from kvbatch.progress.display import Progress
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.reuse import Reuse

if TYPE_CHECKING:
    from kvbatch.plan.memory_plan import MemoryPlan
    from kvbatch.run_dir.plan_file import PlanSummary


def write_plan(
    opened: OpenedJob,
    memory: "MemoryPlan",
    run: RunDirectory,
    progress: Progress,
    known_tokens: Mapping[str, int] | None = None,
) -> tuple["PlanSummary", dict[str, Any]]:
    """Plan the corpus into the files of a directory; return what the plan comes to, and what describes its files.

    Args:
        known_tokens: see `Planner`.

    Raises:
        JobFileError: The prompt uses a column that the input does not have.
        InputError: An input file cannot be read.
        OutputError: The directory cannot be written.
    """
    from kvbatch.run_dir.previous_rows import PreviousRows

    reuse = Reuse.of(run)
    previous = PreviousRows(reuse) if reuse.runs else None
    planner = opened.planner(memory, previous=previous, known_tokens=known_tokens)
    plan = planner.write(opened.corpus.documents(), run.path, progress.advance)
    for warning in opened.corpus.warnings:
        progress.note(f"warning: {warning}")
    if plan.num_rows:
        check_prompt_columns(opened.job, opened.corpus.passthrough_schema.names)
    return plan, planner.files


def make_plan(
    opened: OpenedJob,
    memory: "MemoryPlan",
    run: RunDirectory,
    progress: Progress,
    known_tokens: Mapping[str, int] | None = None,
) -> "PlanSummary":
    """Plan the corpus into a directory and keep the plan in its manifest; arguments and errors as `write_plan`."""
    plan, files = write_plan(opened, memory, run, progress, known_tokens)
    manifest = run.read_manifest()
    planned = replace(
        manifest,
        plan=plan,
        num_rows=plan.num_rows,
        left_out=opened.corpus.num_left_out,
        text_sha256=plan.text_hashes,
        predicted_kv_peak_bytes=plan.predicted_kv_peak_bytes,
        files=manifest.files | files,
    )
    run.write_manifest(planned)
    return plan
