"""What an earlier session of a run finished, and the clearing away of what it left half done."""

from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kvbatch.errors import Damaged, OutputError
from kvbatch.run_dir.commit import check_shard, planned_shards, shard_table
from kvbatch.run_dir.manifest import RunDirectory
from kvbatch.run_dir.output_schema import OUTPUT_FIELDS
from kvbatch.run_dir.wal import read_rows


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
