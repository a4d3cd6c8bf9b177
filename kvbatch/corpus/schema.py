"""Decide the types of the output's id and passthrough columns, and report types that clash between files.

The types of Parquet columns are read from the schemas, before any row. The types of JSONL fields are known only after
a whole pass over the records.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
from pyarrow import types as kind

from kvbatch.corpus.discovery import FileProblem
from kvbatch.corpus.document import Document
from kvbatch.corpus.fields import FieldType, FieldTypes
from kvbatch.corpus.json_values import INT64_RANGE
from kvbatch.corpus.parquet import ArrowRow
from kvbatch.corpus.parquet_schema import ParquetColumns, storage_type
from kvbatch.corpus.spec import InputSpec, is_reserved
from kvbatch.corpus.types import TypeClash, widen, widened
from kvbatch.errors import InputError

UINT64_RANGE = range(1 << 64)


@dataclass(frozen=True)
class ParquetSchema:
    """What the Parquet files of a job agree on: passthrough fields by name, and the type of integer ids."""

    fields: Mapping[str, pa.Field]
    origins: Mapping[str, str]  # the file that a field was first seen in
    id_type: pa.DataType | None
    problems: tuple[FileProblem, ...]


def merge_parquet(files: Mapping[str, ParquetColumns]) -> ParquetSchema:
    """Match columns by name and widen their types; a clash becomes a problem of the later file."""
    fields: dict[str, pa.Field] = {}
    origins: dict[str, str] = {}
    problems: list[FileProblem] = []
    ids: tuple[str, pa.DataType] | None = None
    for path, columns in files.items():
        for column in columns.passthrough:
            new = column.field.with_name(column.name).with_nullable(True)
            old = fields.get(column.name)
            try:
                fields[column.name] = new if old is None else old.with_type(widen(old.type, new.type))
                origins.setdefault(column.name, path)
            except TypeClash:
                first = f"{fields[column.name].type} in {origins[column.name]}"
                problems.append(FileProblem(path, f"column {column.name!r} is {new.type} here and {first}"))
        if columns.id is None or kind.is_null(columns.id.field.type):
            continue
        new_id = storage_type(columns.id.field.type)
        if ids is None:
            ids = path, new_id
        elif kind.is_integer(new_id) != kind.is_integer(ids[1]):
            name, old_id = columns.id.name, ids[1]
            problems.append(
                FileProblem(path, f"id column {name!r} is {new_id} here and {old_id} in {ids[0]}")
            )
        elif kind.is_integer(new_id):
            try:
                ids = ids[0], widen(ids[1], new_id)
            except TypeClash:  # signed and unsigned: the values of a pass decide
                ids = ids[0], pa.int64()
    return ParquetSchema(fields, origins, ids[1] if ids else None, tuple(problems))


@dataclass
class IdRange:
    """What the ids of a pass were: text, or integers from `low` to `high`."""

    has_text: bool = False
    low: int = 0
    high: int = 0
    count: int = field(default=0)

    def note(self, row_id: str | int) -> None:
        """Take one id into account."""
        if isinstance(row_id, str):
            self.has_text = True
        else:
            self.low = min(self.low, row_id)
            self.high = max(self.high, row_id)
        self.count += 1

    def arrow_type(self, declared: pa.DataType | None) -> pa.DataType:
        """Return the declared integer type if it holds every id, else int64, uint64 or string."""
        if self.has_text or not self.count:
            return pa.string()
        if declared is not None and kind.is_integer(declared) and _holds(declared, self.low, self.high):
            return declared
        if self.low in INT64_RANGE and self.high in INT64_RANGE:
            return pa.int64()
        return pa.uint64() if self.low in UINT64_RANGE and self.high in UINT64_RANGE else pa.string()


def _holds(type_: pa.DataType, low: int, high: int) -> bool:
    try:
        pa.array([low, high], type_)
    except (pa.ArrowInvalid, OverflowError):
        return False
    return True


@dataclass(frozen=True)
class OutputSchema:
    """The final types of the id column and of every passthrough column."""

    id_name: str
    id_type: pa.DataType
    passthrough: pa.Schema
    json_fields: frozenset[str]  # their JSONL values are written as JSON text

    def table(self, documents: Iterable[Document]) -> pa.Table:
        """Build the id column and the passthrough columns of some rows, in their order."""
        documents = list(documents)
        ids = [document.row_id for document in documents]
        if kind.is_string(self.id_type):
            ids = [str(row_id) for row_id in ids]
        arrays: list = [pa.array(ids, self.id_type)]
        arrays += [self._column(wanted, documents) for wanted in self.passthrough]
        return pa.table(arrays, pa.schema([pa.field(self.id_name, self.id_type), *self.passthrough]))

    def _column(self, wanted: pa.Field, documents: list[Document]) -> pa.ChunkedArray:
        """Join a column from runs: Arrow rows that follow each other in one batch, and records."""
        chunks: list[pa.Array] = []
        start = 0
        while start < len(documents):
            end = start + 1
            while end < len(documents) and _continues(documents, start, end):
                end += 1
            chunks.append(self._run(wanted, documents[start:end]))
            start = end
        return pa.chunked_array(chunks, wanted.type)

    def _run(self, wanted: pa.Field, run: list[Document]) -> pa.Array:
        first = run[0].values
        if not isinstance(first, ArrowRow):
            records = [getattr(document.values, "record", {}) for document in run]
            field_type = FieldType(wanted.type, wanted.name in self.json_fields)
            return field_type.array([record.get(wanted.name) for record in records])
        position = first.batch.schema.get_field_index(wanted.name)
        if position < 0:
            return pa.nulls(len(run), wanted.type)
        array = first.batch.column(position).slice(first.position, len(run))
        return widened(array, wanted.type)


def _continues(documents: list[Document], start: int, end: int) -> bool:
    first, last, new = (documents[position].values for position in (start, end - 1, end))
    if not isinstance(new, ArrowRow) or not isinstance(last, ArrowRow):
        return not isinstance(new, ArrowRow) and not isinstance(first, ArrowRow)
    return new.batch is last.batch and new.position == last.position + 1


def reserved_column(name: str) -> InputError:
    """Return the error for a column of the input that would hide one of the output."""
    return InputError(
        f"passthrough column {name!r} has the name of an output column: list the columns instead"
    )


def decide_schema(
    spec: InputSpec, parquet: ParquetSchema, records: FieldTypes, ids: IdRange, record_file: str
) -> OutputSchema:
    """Combine the types in the Parquet files' schemas with those that a pass over the records found.

    Raises:
        InputError: a field is of one type in Parquet and of another in JSONL, or hides an output column.
    """
    found = records.types()
    names = (
        list(spec.passthrough)
        if spec.passthrough != "all"
        else list(dict.fromkeys([*parquet.fields, *found]))
    )
    fields: list[pa.Field] = []
    for name in names:
        if is_reserved(name, spec.id_name):
            raise reserved_column(name)
        declared, seen = parquet.fields.get(name), found.get(name, FieldType(pa.null()))
        if declared is None:
            fields.append(pa.field(name, pa.string() if kind.is_null(seen.arrow) else seen.arrow))
            continue
        try:
            if seen.as_json:
                raise TypeClash
            fields.append(declared.with_type(widen(declared.type, seen.arrow)))
        except TypeClash:
            here = "values of several kinds" if seen.as_json else str(seen.arrow)
            first = f"{declared.type} in {parquet.origins[name]}"
            raise InputError(f"{record_file}: field {name!r} holds {here}, and it is {first}") from None
    json_fields = frozenset(name for name, seen in found.items() if seen.as_json)
    return OutputSchema(spec.id_name, ids.arrow_type(parquet.id_type), pa.schema(fields), json_fields)
