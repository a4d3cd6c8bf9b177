"""The rows of a run's shards, for whoever looks at a run after it: reports, comparisons, exports."""

from collections.abc import Iterator, Sequence
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


def read_rows(run: RunDirectory, names: Sequence[str]) -> "pl.DataFrame":
    """Return some columns of all rows, in input order, and before them the id as text, `row_id`.

    Args:
        names: output columns, without their `kvb_`; one that a shard of an older release lacks is null.

    Raises:
        InputError: A shard is missing or damaged.
    """
    import polars as pl
    import pyarrow as pa

    from kvbatch.run_dir.commit import checked_shards
    from kvbatch.run_dir.output_schema import OUTPUT_FIELDS

    types = {field.name: field.type for field in OUTPUT_FIELDS}
    wanted = {name: name if name in types else f"kvb_{name}" for name in names}
    schema = pa.schema([("row_id", pa.string()), *((name, types[wanted[name]]) for name in names)])
    tables = [schema.empty_table()]
    for file in checked_shards(run):
        # by pyarrow, because polars does not know every type that an id or a passthrough column may have
        with opened_table(file, run.repair) as parquet:
            present = parquet.schema_arrow.names
            table = parquet.read([present[0], *(each for each in wanted.values() if each in present)])
        columns = [table.column(0).cast(pa.string())]
        for column in wanted.values():
            columns.append(table.column(column) if column in present else pa.nulls(len(table), types[column]))
        tables.append(pa.table(columns, schema))
    return pl.from_arrow(pa.concat_tables(tables))
