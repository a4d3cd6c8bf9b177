"""What of a run counts: the one place that decides it, for resuming, reporting and carrying rows over.

A shard counts if its commit record, written last, is whole and its files are those that the record describes. Rows of a
shard without count if its write-ahead file holds them whole.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvbatch.errors import Damaged
from kvbatch.run_dir.checked_file import file_problem, opened_table
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.run_dir.lock import lock_holder
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.plan_file import PlanRow, read_plan, shard_starts
from kvbatch.run_dir.record import read_record, write_record
from kvbatch.run_dir.wal import read_rows

_PLANNED = ["index", "row_id", "content", "status"]


def commit_shard(run: RunDirectory, number: int, facts: Mapping[str, Any]) -> None:
    """Write the record by which a shard counts, and drop its write-ahead file.

    Args:
        facts: of its files and rows, as `OpenShard.write` returns them.

    Raises:
        OutputError: The record cannot be written.
    """
    write_record(run.commit_file(number), {"shard": number} | dict(facts))
    with suppress(OSError):  # what is left of it is never read again
        run.wal_file(number).unlink(missing_ok=True)


def check_shard(run: RunDirectory, number: int, *, deep: bool = False) -> dict[str, Any]:
    """Prove that a shard counts and return its record.

    Args:
        deep: see `file_problem`.

    Raises:
        Damaged: It does not.
        InputError: The record is of run directories of another format.
    """
    path, remedy = run.commit_file(number), run.repair
    record = read_record(path, remedy)
    if record.get("shard") != number or not {"rows", "num_bytes"} <= record.keys():
        raise Damaged(path, f"is damaged: it is no record of shard {number}", remedy)
    file = run.shard_file(number)
    if problem := file_problem(file, record, deep=deep):
        raise Damaged(file, problem, remedy)
    letters = run.deadletter_file(number)
    if record.get("deadletter") and (problem := file_problem(letters, record["deadletter"], deep=deep)):
        raise Damaged(letters, problem, remedy)
    return record


def is_committed(run: RunDirectory, number: int, *, deep: bool = False) -> bool:
    """Tell whether a shard counts; raises `InputError` if it is of another format."""
    try:
        check_shard(run, number, deep=deep)
    except Damaged:
        return False
    return True


def expected_shards(run: RunDirectory) -> list[int]:
    """Return the numbers of the shards that have to count.

    All of a run that came to its end. Of another one those that have a commit record, or had: a shard whose rows are
    written ahead no more was committed.

    Raises:
        InputError: The manifest cannot be read.
    """
    numbers = range(run.read_manifest().num_shards)
    if run.end:
        return list(numbers)
    return [number for number in numbers if _was_committed(run, number)]


def _was_committed(run: RunDirectory, number: int) -> bool:
    record = run.commit_file(number)
    if record.exists():
        return True
    has_lost_it = run.shard_file(number).exists() and not run.wal_file(number).exists()
    return has_lost_it and lock_holder(run.path.parent) is None  # else it may be about to be written


def committed_files(run: RunDirectory) -> list[Path]:
    """Return the files of the shards that count, in order; raises as `expected_shards`."""
    return [run.shard_file(number) for number in expected_shards(run) if is_committed(run, number)]


def checked_shards(run: RunDirectory) -> Iterator[Path]:
    """Yield the file of every shard that has to count, in order.

    Raises:
        Damaged: One of them does not count; what shows without reading them all is raised before the first.
    """
    numbers = expected_shards(run)
    for number in numbers:
        check_shard(run, number)
    for number in numbers:
        check_shard(run, number, deep=True)
        yield run.shard_file(number)


def has_finished_rows(run: RunDirectory) -> bool:
    """Tell whether any row of a run need not be done again; raises as `expected_shards`."""
    numbers = range(run.read_manifest().num_shards)
    return any(is_committed(run, number) or _written_ahead(run, number) for number in numbers)


def count_rows(run: RunDirectory) -> tuple[Counter[str], Counter[str]]:
    """Count the finished rows by status, and of those that this run did the rows and their tokens.

    Raises:
        InputError: The manifest cannot be read.
    """
    statuses: Counter[str] = Counter(ok=0, error=0, rejected=0)
    own: Counter[str] = Counter(rows=0, prompt=0, completion=0)
    for number in range(run.read_manifest().num_shards):
        try:
            record = check_shard(run, number)
        except Damaged:
            record = tally(run.run_id, _written_ahead(run, number).values())
        statuses.update(record["statuses"])
        own.update(record["own"])
    return statuses, own


def tally(run_id: str, rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return what a commit record counts of output rows."""
    statuses: Counter[str] = Counter()
    own = {"rows": 0, "prompt": 0, "completion": 0}
    for row in rows:
        statuses[row["kvb_status"]] += 1
        if row["kvb_attempts"] and row["kvb_run_id"] == run_id:
            own["rows"] += 1
            own["prompt"] += row["kvb_prompt_tokens"]
            own["completion"] += row["kvb_completion_tokens"]
    return {"statuses": dict(statuses), "own": own}


def planned_shards(run: RunDirectory, columns: list[str] | None = None) -> Iterator[list[PlanRow]]:
    """Yield the rows of a run's plan, one list per shard.

    Raises:
        Damaged: It is not the plan that was made.
    """
    run.check_file(run.plan)
    try:
        yield from read_plan(run.path, columns)
    except (OSError, pa.ArrowException) as error:
        raise Damaged(run.plan, f"cannot be read ({error})", run.repair) from error


def num_committed_rows(run: RunDirectory) -> int:
    """Return the rows of the shards that count."""
    num_rows = 0
    for number in expected_shards(run):
        with suppress(Damaged):
            num_rows += check_shard(run, number)["rows"]
    return num_rows


def planned_starts(run: RunDirectory) -> list[int]:
    """Return the index of the first row of every shard of a run's plan; raises as `planned_shards`."""
    run.check_file(run.plan)
    try:
        return shard_starts(run.path)
    except (OSError, pa.ArrowException) as error:
        raise Damaged(run.plan, f"cannot be read ({error})", run.repair) from error


def finished_rows(
    run: RunDirectory,
    names: Sequence[str] | None = None,
    on_damage: Callable[[Damaged], None] = lambda error: None,
) -> Iterator[tuple[PlanRow, dict[str, Any]]]:
    """Yield every finished row of a run as its row of the plan (index, id, content, status) and its output columns.

    Shard by shard and in input order: memory does not grow with the run. Nothing for a run that was not planned, nor
    of a shard that is damaged.

    Args:
        names: the output columns that are wanted, all by default; there may be more.
        on_damage: called with each shard that should be whole and is not.

    Raises:
        InputError: Manifest or plan cannot be read.
    """
    if run.read_manifest().plan is None:
        return
    expected = set(expected_shards(run))
    for number, planned in enumerate(planned_shards(run, _PLANNED)):
        try:
            check_shard(run, number, deep=True)
            made = shard_table(run, number, names or pa.schema(OUTPUT_FIELDS).names).to_pylist()
            yield from zip(planned, made, strict=True)
        except Damaged as error:
            if number in expected:
                on_damage(error)
            rows = _written_ahead(run, number)
            yield from ((planned[place], rows[place]) for place in sorted(rows))


def shard_table(run: RunDirectory, number: int, names: Sequence[str]) -> pa.Table:
    """Return columns of a shard that counts; raises `Damaged` where its pages do not fit their checksums."""
    with opened_table(run.shard_file(number), run.repair) as file:
        return file.read(list(names))


def _written_ahead(run: RunDirectory, number: int) -> dict[int, dict[str, Any]]:
    try:
        return read_rows(run.wal_file(number), OUTPUT_FIELDS)
    except OSError as error:
        raise Damaged(run.wal_file(number), f"cannot be read ({error.strerror})", run.repair) from error
