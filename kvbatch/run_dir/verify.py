"""Whether a run directory still holds what was written: what is missing or changed, and how it is repaired.

The log, the heartbeat and the page are not checked: nothing is computed from the first two, and the page is made
from files that are.
"""

import re
from pathlib import Path
from typing import Any

from kvbatch.errors import Damaged
from kvbatch.run_dir.checked_file import file_problem
from kvbatch.run_dir.commit import check_shard, expected_shards
from kvbatch.run_dir.describe import check_job_file
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.find_runs import open_run
from kvbatch.run_dir.record import read_record
from kvbatch.text import counted


def find_problems(run: RunDirectory, *, deep: bool = False) -> list[Damaged]:
    """Return what is wrong with the files of a run.

    Args:
        deep: read every file; else only those whose time is another than it was, so that size, presence and every
            record are checked.

    Raises:
        InputError: The manifest cannot be read.
    """
    manifest = run.read_manifest()
    problems: list[Damaged] = []
    files = dict(manifest.files)
    try:
        if run.summary.exists() or run.is_success:
            files |= read_record(run.summary, run.repair).get("files", {})
    except Damaged as error:
        problems.append(error)
    try:
        check_job_file(run)
    except Damaged as error:
        problems.append(error)
    files.pop(run.job_file.name, None)
    for name, facts in files.items():
        if problem := file_problem(run.path / name, facts, deep=deep):
            problems.append(Damaged(run.path / name, problem, run.repair))
    num_rows, shards = 0, expected_shards(run)
    for number in shards:
        try:
            num_rows += check_shard(run, number, deep=deep)["rows"]
        except Damaged as error:
            problems.append(error)
    planned = manifest.num_rows
    if not problems and manifest.plan and len(shards) == manifest.num_shards and num_rows != planned:
        what = f"hold {num_rows:,} rows, {planned:,} were planned"
        problems.append(Damaged(run.shards, what, run.repair))
    return problems


def verify(path: Path) -> dict[str, Any]:
    """Check every file of the run that a path names, by its content.

    Raises:
        InputError: There is no run.
    """
    run = open_run(path)
    num_files = num_rows = 0
    problems: list[Damaged] = []
    try:
        manifest, shards = run.read_manifest(), expected_shards(run)
        problems = find_problems(run, deep=True) + _strangers(run)
        described = len(manifest.files) + len(run.read_summary().get("files", {}))
        num_files = 1 + run.summary.exists() + described + 2 * len(shards)
        damaged = {problem.path for problem in problems}
        for number in shards:
            if not damaged & {run.commit_file(number), run.shard_file(number), run.deadletter_file(number)}:
                record = check_shard(run, number)
                num_rows += record["rows"]
                num_files += bool(record.get("deadletter"))
    except Damaged as error:
        problems = [error]
    return {
        "run": str(run.path),
        "run_id": run.run_id,
        "status": "damaged" if problems else "whole",
        "files": num_files,
        "rows": num_rows,
        "problems": [
            {"file": str(each.path), "problem": each.problem, "remedy": each.remedy} for each in problems
        ],
    }


def render_verified(found: dict[str, Any]) -> str:
    """Return what was found as the lines a terminal shows: one a problem, and a summary."""
    lines = [f"{each['file']} {each['problem']}; {each['remedy']}" for each in found["problems"]]
    what = f"{counted(found['files'], 'file')} checked, {counted(found['rows'], 'row')} whole"
    verdict = counted(len(lines), "problem") if lines else "all as written"
    return "\n".join([*lines, f"{found['run']}: {what}, {verdict}"])


def _strangers(run: RunDirectory) -> list[Damaged]:
    """Return the files beside the shards that are none, since whoever reads `part-*.parquet` reads them too."""
    numbers = set(range(run.read_manifest().num_shards))
    found = []
    for file in sorted(run.shards.glob("part-*.parquet")):
        match = re.fullmatch(r"part-(\d{5,})\.parquet", file.name)
        if not match or int(match[1]) not in numbers:
            found.append(Damaged(file, "does not belong to the run", "move it away"))
    return found
