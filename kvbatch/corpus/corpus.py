"""The corpus of a job: its files checked up front, its rows as one stream; owns the order of rows."""

from collections.abc import Iterable, Iterator
from functools import cached_property

import pyarrow as pa

from kvbatch.corpus.discovery import FileProblem, SourceFile, discover
from kvbatch.corpus.document import Document
from kvbatch.corpus.fields import FieldTypes
from kvbatch.corpus.jsonl import JsonlReader
from kvbatch.corpus.parquet import read_parquet
from kvbatch.corpus.parquet_schema import ParquetColumns, find_columns
from kvbatch.corpus.schema import (
    IdRange,
    OutputSchema,
    ParquetSchema,
    decide_schema,
    merge_parquet,
    reserved_column,
)
from kvbatch.corpus.spec import InputSpec, is_reserved
from kvbatch.corpus.where import RowFilter
from kvbatch.errors import InputError


class Corpus:
    """Read the input of a job.

    The first whole pass over `documents()` is the plan pass: it decides the types of the output's id and
    passthrough columns. Later passes give the same rows as long as the files stay as they are.

    Raises:
        InputError: `where` is not a condition on single rows.
    """

    def __init__(self, spec: InputSpec):
        self.spec = spec
        found = discover(spec.paths, spec.file_format)
        self.files: tuple[SourceFile, ...] = tuple(found.files)
        self.warnings: list[str] = found.warnings  # for the user; a pass may add to it
        self._missing = tuple(found.problems)
        self._filter = None if spec.where is None else RowFilter(spec.where)
        self._unseen: set[str] = set()  # of this pass: wanted columns that were nowhere yet
        self._num_records = 0
        self._schema: OutputSchema | None = None

    @cached_property
    def _opened(self) -> tuple[dict[str, ParquetColumns], list[FileProblem]]:
        """The columns of every Parquet file that has rows, and what is wrong with files."""
        columns: dict[str, ParquetColumns] = {}
        problems: list[FileProblem] = []
        where = () if self._filter is None else self._filter.columns
        for file in self.files:
            try:
                found = find_columns(file, self.spec, where) if file.format == "parquet" else None
                if found is not None:
                    columns[file.path] = found
            except InputError as error:
                problems.append(FileProblem(file.path, str(error).removeprefix(f"{file.path}: ")))
        return columns, problems

    @cached_property
    def _parquet(self) -> ParquetSchema:
        return merge_parquet(self._opened[0])

    def problems(self) -> list[FileProblem]:
        """Open every file and say what cannot be read, or not together with the other files."""
        return [*self._missing, *self._opened[1], *self._parquet.problems]

    def check(self) -> None:
        """Refuse the input if any file of it cannot be read.

        Raises:
            InputError: names every such file, or a column of `where` or `passthrough` that no file has.
        """
        problems = self.problems()
        if problems:
            lines = [f"{problem.path}: {problem.message}" for problem in problems]
            if len(lines) > 1:
                lines = [f"{len(lines)} problems with the input:", *(f"  {line}" for line in lines)]
            raise InputError(*lines)
        for name in self._parquet.fields:
            if is_reserved(name, self.spec.id_name):
                raise reserved_column(name)
        columns = self._opened[0].values()
        if columns and all(file.format == "parquet" for file in self.files):
            present = {column.name for each in columns for column in each.where} | set(self._parquet.fields)
            for name in self._wanted():
                if name not in present:
                    raise InputError(f"column {name!r} is in none of the {len(self.files)} input files")

    def documents(self) -> Iterator[Document]:
        """Yield the rows of every file, in input order, rejected rows in their place.

        Raises:
            InputError: what `check()` raises; a file cannot be read to its end, or changed since it was found; a
                row is rejected, if `on_bad_row` says so; after the last row, a column that the job names is in no file.
        """
        self.check()
        fields, ids = FieldTypes(), IdRange()
        limit = self.spec.limit
        self._unseen = set(self._wanted()) - set(self._parquet.fields)
        for columns in self._opened[0].values():
            self._unseen -= {column.name for column in columns.where}
        count = self._num_records = 0
        for file in self.files if limit != 0 else ():
            file.check_unchanged()
            for document in self.read(file, fields):
                if document.error_message and self.spec.on_bad_row == "fail":
                    raise InputError(f"{document.error_message} (input.on_bad_row is fail)")
                ids.note(document.row_id)
                count += 1
                yield document
                del document
                if count == limit:
                    break
            if count == limit:
                break
        else:
            if self._unseen and self._num_records:
                raise InputError(f"no record and no file has the column {sorted(self._unseen)[0]!r}")
        records = next((file.path for file in self.files if file.format == "jsonl"), "")
        schema = decide_schema(self.spec, self._parquet, fields, ids, records)
        self._schema = self._schema or schema

    def read(self, file: SourceFile, fields: FieldTypes) -> Iterator[Document]:
        """Yield the rows of one file, telling `fields` about the values of its records.

        Raises:
            InputError: the file cannot be read to its end.
        """
        if file.format == "parquet":
            columns = self._opened[0].get(file.path)
            if columns is None:
                for problem in self._opened[1]:
                    if problem.path == file.path:
                        raise InputError(f"{problem.path}: {problem.message}")
                return  # it has no rows
            fields = {} if self._parquet.problems else self._parquet.fields  # clashes are for check() to tell
            yield from read_parquet(file, self.spec, columns, self._filter, fields)
            return
        reader = JsonlReader(file, self.spec, self._filter, fields)
        yield from reader.documents()
        self._num_records += reader.num_records
        self._unseen &= reader.unseen
        self.warnings += [message for message in reader.warnings if message not in self.warnings]

    def _wanted(self) -> list[str]:
        """The columns that have to be in some file: those of `where` and of `passthrough`."""
        named = () if self.spec.passthrough == "all" else self.spec.passthrough
        return [*named, *(() if self._filter is None else self._filter.columns)]

    @property
    def schema(self) -> OutputSchema:
        """The types of the output's id and passthrough columns; known once a pass came to its end."""
        assert self._schema is not None, "read documents() to its end before the schema is asked for"
        return self._schema

    @property
    def id_type(self) -> pa.DataType:
        """The type of the id column; known once a pass came to its end."""
        return self.schema.id_type

    @property
    def passthrough_schema(self) -> pa.Schema:
        """The passthrough columns; known once a pass came to its end."""
        return self.schema.passthrough

    def to_table(self, documents: Iterable[Document]) -> pa.Table:
        """Build the id column and the passthrough columns of some rows in their final types."""
        return self.schema.table(documents)
