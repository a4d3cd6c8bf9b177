"""What a run that is continued needs and has lost: made again where that is possible, named where it is not."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from kvbatch.errors import Damaged
from kvbatch.job_file.sections import Job
from kvbatch.opened_job import OpenedJob
from kvbatch.planning import write_plan
from kvbatch.progress.display import Progress
from kvbatch.run_dir.checked_file import file_problem
from kvbatch.run_dir.commit import check_shard
from kvbatch.run_dir.describe import keep_job
from kvbatch.run_dir.directory import PLAN_FILES, RunDirectory

if TYPE_CHECKING:
    from kvbatch.plan.memory_plan import MemoryPlan


def restore_files(run: RunDirectory, job: Job, note: Callable[[str], None]) -> None:
    """Write the run's job again, and drop damaged measurements, which cannot be made again.

    Raises:
        OutputError: The run directory cannot be written.
    """
    manifest = run.read_manifest()
    files = dict(manifest.files)
    for name, facts in manifest.files.items():
        problem = name not in PLAN_FILES and file_problem(run.path / name, facts, deep=True)
        if problem and name == run.job_file.name:
            note(f"{run.path / name} {problem}; it is written again")
            files[name] = keep_job(run, job)
        elif problem:
            note(f"warning: {run.path / name} {problem}; the report goes without it")
            (run.path / name).unlink(missing_ok=True)
            del files[name]
    if files != manifest.files:
        run.write_manifest(replace(manifest, files=files))


def restore_plan(opened: OpenedJob, memory: "MemoryPlan", run: RunDirectory, progress: Progress) -> None:
    """Make the plan of a run again if it is damaged: of the same rows, job and memory comes the same plan.

    Raises:
        Damaged: Another plan came of them, so that nothing says which rows the run has to make.
        OutputError: The run directory cannot be written.
    """
    manifest = run.read_manifest()
    found = {name: facts for name, facts in manifest.files.items() if name in PLAN_FILES}
    problems = [file_problem(run.path / name, facts, deep=True) for name, facts in found.items()]
    if not any(problems):
        return
    progress.note(f"{run.plan} or its bins are missing or damaged; the plan is made again")
    plan, files = write_plan(opened, memory, run, progress)
    if plan != manifest.plan:
        raise Damaged(
            run.plan,
            "was damaged, and what the run finished does not fit the plan that is made of its input now",
            "start afresh: kvbatch run --new-run",
        )
    run.write_manifest(replace(manifest, files=manifest.files | files))


def check_whole(run: RunDirectory) -> None:
    """Prove at its end that a run has its rows: nobody took a shard away while it went on.

    Raises:
        Damaged: A shard does not count.
    """
    for number in range(run.read_manifest().num_shards):
        check_shard(run, number)
