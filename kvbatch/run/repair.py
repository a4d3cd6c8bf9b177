"""What a run that is continued needs and has lost: made again where that is possible, named where it is not."""

from dataclasses import asdict
from typing import TYPE_CHECKING

from kvbatch.errors import Damaged
from kvbatch.run_dir.checked_file import file_problem
from kvbatch.run_dir.manifest import PLAN_FILES, RunDirectory, keep_job

if TYPE_CHECKING:
    from kvbatch.opened_job import JobRunner


def restore_files(runner: "JobRunner", run: RunDirectory) -> None:
    """Write the run's job again, and forget measurements that cannot be made again, where they are damaged.

    Raises:
        OutputError: The run directory cannot be written.
    """
    manifest = run.read_manifest()
    files = dict(manifest.get("files", {}))
    for name, facts in manifest.get("files", {}).items():
        problem = name not in PLAN_FILES and file_problem(run.path / name, facts, deep=True)
        if problem and name == run.job_file.name:
            runner.progress.note(f"{run.path / name} {problem}; it is written again")
            files[name] = keep_job(run, runner.job)
        elif problem:
            runner.progress.note(f"warning: {run.path / name} {problem}; the report goes without it")
            (run.path / name).unlink(missing_ok=True)
            del files[name]
    if files != manifest.get("files", {}):
        run.write_manifest(manifest | {"files": files})


def restore_plan(runner: "JobRunner", run: RunDirectory) -> None:
    """Make the plan of a run again if it is damaged: of the same rows, job and memory comes the same plan.

    Raises:
        Damaged: Another plan came of them, so that nothing says which rows the run has to make.
        OutputError: The run directory cannot be written.
    """
    manifest = run.read_manifest()
    found = {name: facts for name, facts in manifest.get("files", {}).items() if name in PLAN_FILES}
    problems = [file_problem(run.path / name, facts, deep=True) for name, facts in found.items()]
    if not found:  # of an older release
        problems = [None if run.plan.exists() else "is missing"]
    if not any(problems):
        return
    runner.progress.note(f"{run.plan} or its bins are missing or damaged; the plan is made again")
    plan, files = runner.write_plan(run)
    if asdict(plan) != manifest["plan"]:
        raise Damaged(
            run.plan,
            "was damaged, and what the run finished does not fit the plan that is made of its input now",
            "start afresh: kvbatch run --new-run",
        )
    run.write_manifest(manifest | {"files": manifest.get("files", {}) | files})


def check_whole(run: RunDirectory) -> None:
    """Prove at its end that a run has its rows: nobody took a shard away while it went on.

    Raises:
        Damaged: A shard does not count.
    """
    from kvbatch.run_dir.commit import check_shard

    for number in range(run.read_manifest()["plan"]["num_shards"]):
        check_shard(run, number)
