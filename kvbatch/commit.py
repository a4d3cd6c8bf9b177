"""What of a run counts: the one place that decides it, for resuming, reporting and carrying rows over.

A shard counts if its commit record, written last, is there and its file has that size and a footer that parses. Rows
of a shard without count if its write-ahead file holds them whole.
"""

import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from kvbatch.manifest import RunDirectory
from kvbatch.plan import read_plan
from kvbatch.shard import OUTPUT_FIELDS
from kvbatch.wal import read_rows
from kvbatch.writer import write_json


def commit_shard(run: RunDirectory, number: int) -> None:
    """Write the record by which a shard counts, and drop its write-ahead file.

    Raises:
        OutputError: The record cannot be written.
    """
    file = run.shard_file(number)
    rows = pq.read_metadata(file).num_rows
    write_json(run.commit_file(number), {"shard": number, "rows": rows, "num_bytes": file.stat().st_size})
    with suppress(OSError):  # what is left of it is never read again
        run.wal_file(number).unlink(missing_ok=True)


def is_committed(run: RunDirectory, number: int) -> bool:
    """Tell whether a shard counts."""
    try:
        record = json.loads(run.commit_file(number).read_bytes())
        file = run.shard_file(number)
        return (
            file.stat().st_size == record["num_bytes"] and pq.read_metadata(file).num_rows == record["rows"]
        )
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowException):
        return False


def committed_files(run: RunDirectory) -> list[Path]:
    """Return the files of the shards that count, in order."""
    numbers = sorted(int(path.stem.removeprefix("part-")) for path in run.commits.glob("part-*.json"))
    return [run.shard_file(number) for number in numbers if is_committed(run, number)]


def num_committed_rows(run: RunDirectory) -> int:
    """Return the rows of the shards that count."""
    return sum(pq.read_metadata(file).num_rows for file in committed_files(run))


def finished_rows(
    run: RunDirectory, names: Sequence[str] | None = None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield every finished row of a run as its row of the plan (id, hash, place) and its output columns.

    Shard by shard and in input order: memory does not grow with the run. Nothing for a run that was not planned.

    Args:
        names: the output columns that are wanted, all by default; there may be more.
    """
    if not (run.path / "plan.parquet").exists():
        return
    for number, planned in enumerate(read_plan(run.path)):
        if is_committed(run, number):
            with pq.ParquetFile(run.shard_file(number)) as file:
                yield from zip(
                    planned, file.read(names or pa.schema(OUTPUT_FIELDS).names).to_pylist(), strict=True
                )
        else:
            rows = read_rows(run.wal_file(number), OUTPUT_FIELDS)
            yield from ((planned[place], rows[place]) for place in sorted(rows))
