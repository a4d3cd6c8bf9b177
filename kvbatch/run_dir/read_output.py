"""The output rows of a run, for everything that looks at a run after it: reports, comparisons, exports.

The one way to the shards: a shard is read only after `commit` has found it committed.
"""

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvbatch.run_dir.checked_file import opened_table
from kvbatch.run_dir.directory import RunDirectory

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa


def iter_tables(run: RunDirectory, batch_rows: int = 512) -> Iterator["pa.Table"]:
    """Yield all columns of a run's rows in input order, some rows at a time; the first column is the id.

    Raises:
        InputError: A shard is missing or damaged.
    """
    import pyarrow as pa

    from kvbatch.run_dir.commit import checked_shards

    for file in checked_shards(run):
        with opened_table(file, run.repair) as parquet:
            for batch in parquet.iter_batches(batch_rows):
                yield pa.Table.from_batches([batch])


def output_columns(run: RunDirectory) -> list[str]:
    """Return the names of the output columns in their order, the id first; none if no shard is committed.

    Raises:
        InputError: A shard is missing or damaged.
    """
    from kvbatch.run_dir.commit import committed_files

    for file in committed_files(run):
        with opened_table(file, run.repair) as parquet:
            return list(parquet.schema_arrow.names)
    return []


def read_rows(run: RunDirectory, names: Sequence[str]) -> "pl.DataFrame":
    """Return some columns of all rows, in input order, and before them the id as text, `row_id`.

    Args:
        names: output columns, without their `kvb_`; one that a shard of an older release lacks is null.

    Raises:
        InputError: A shard is missing or damaged.
    """
    import polars as pl

    from kvbatch.run_dir.commit import checked_shards

    frames = [_columns(file, names, run.repair) for file in checked_shards(run)]
    return pl.concat(frames) if frames else _empty(names)


def iter_shards(
    run: RunDirectory, names: Sequence[str], left_out: Collection[object] = ()
) -> Iterator["pl.DataFrame"]:
    """Yield what `read_rows` returns, one committed shard at a time; a damaged shard is passed over.

    Args:
        left_out: files of shards that are known to be damaged.

    Raises:
        InputError: The manifest cannot be read, or a shard changed since it was checked.
    """
    from kvbatch.run_dir.commit import committed_files

    for file in committed_files(run):
        if file not in left_out:
            yield _columns(file, names, run.repair)


def _columns(file: Path, names: Sequence[str], remedy: str) -> "pl.DataFrame":
    import polars as pl
    import pyarrow as pa

    fields = _fields(names)
    # by pyarrow, because polars does not know every type that an id or a passthrough column may have
    with opened_table(file, remedy) as parquet:
        present = parquet.schema_arrow.names
        table = parquet.read([present[0], *(field.name for field in fields if field.name in present)])
    columns = [table.column(0).cast(pa.string())]
    for field in fields:
        is_missing = field.name not in present
        columns.append(pa.nulls(len(table), field.type) if is_missing else table.column(field.name))
    frame = pl.from_arrow(pa.table(columns, _schema(names)))
    assert isinstance(frame, pl.DataFrame)
    return frame


def _empty(names: Sequence[str]) -> "pl.DataFrame":
    import polars as pl

    frame = pl.from_arrow(_schema(names).empty_table())
    assert isinstance(frame, pl.DataFrame)
    return frame


def _schema(names: Sequence[str]) -> "pa.Schema":
    import pyarrow as pa

    types = [field.type for field in _fields(names)]
    return pa.schema([("row_id", pa.string()), *zip(names, types, strict=True)])


def _fields(names: Sequence[str]) -> "list[pa.Field]":
    """Return the output columns that are meant; a passthrough column may have the same name without `kvb_`."""
    from kvbatch.run_dir.output_schema import OUTPUT_FIELDS

    known = {field.name: field for field in OUTPUT_FIELDS}
    return [known[name if name in known else f"kvb_{name}"] for name in names]
