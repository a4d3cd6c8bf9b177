"""The corpus of a job: its files are validated first, then its rows are read as one stream in a fixed order."""

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
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
from kvbatch.corpus.skipped import SkippedFile, notes
from kvbatch.corpus.spec import InputSpec, is_reserved
from kvbatch.corpus.where import ConditionError, RowFilter
from kvbatch.errors import InputError, LimitExceeded


class Corpus:
    """Read the input of a job.

    The first whole pass over `documents()` is the plan pass: it decides the types of the output's id and
    passthrough columns. Later passes give the same rows as long as the files stay as they are.

    Raises:
        InputError: `where` is not a condition on single rows.
    """

    def __init__(self, spec: InputSpec):
        self.spec = spec
        self._found = discover(spec.paths, spec.file_format, spec.text_name)
        self.warnings: list[str] = notes(self._found.skipped)  # for the user; a pass may add to it
        self._filter = None if spec.where is None else RowFilter(spec.where)
        self._unseen: set[str] = set()  # of this pass: wanted columns that were nowhere yet
        self._num_records = 0
        self._schema: OutputSchema | None = None

    @cached_property
    def files(self) -> tuple[SourceFile, ...]:
        """The files that are read, in order."""
        bad = {problem.path for problem in self._bad_files}
        return tuple(file for file in self._found.files if file.path not in bad)

    @property
    def skipped(self) -> list[SkippedFile]:
        """Input files that are not read: files that are not data, and unreadable files if `on_bad_file` is `skip`."""
        return [*self._found.skipped, *(SkippedFile(bad.path, bad.message) for bad in self._bad_files)]

    @property
    def num_left_out(self) -> int:
        """Rows of this pass that `where` did not select."""
        return 0 if self._filter is None else self._filter.num_left_out

    @cached_property
    def _opened(self) -> tuple[dict[str, ParquetColumns], list[FileProblem]]:
        """The columns of every Parquet file that has rows, and what is wrong with files."""
        columns: dict[str, ParquetColumns] = {}
        problems: list[FileProblem] = []
        where = () if self._filter is None else self._filter.columns
        for file in self._found.files:
            try:
                found = find_columns(file, self.spec, where) if file.format == "parquet" else None
                if found is not None:
                    columns[file.path] = found
            except InputError as error:
                problems.append(FileProblem(file.path, str(error).removeprefix(f"{file.path}: ")))
        return columns, problems

    @cached_property
    def _bad_files(self) -> tuple[FileProblem, ...]:
        """Files that are left out because they cannot be read; decided once, by reading all, as passes must agree."""
        if self.spec.on_bad_file == "fail":
            return ()
        columns, problems = self._opened
        problems = [*self._found.unreadable, *problems]
        known = {problem.path for problem in problems}
        for file in self._found.files:
            if file.path in known:
                continue
            try:
                if file.format == "jsonl":
                    rows = JsonlReader(file, self.spec, self._filter, FieldTypes()).documents()
                elif file.path in columns:
                    rows = read_parquet(file, self.spec, columns[file.path], self._filter, {})
                else:
                    continue
                for row in rows:
                    del row  # the next one may be as large
            except ConditionError:
                raise  # of the job, not of the file
            except InputError as error:
                problems.append(FileProblem(file.path, str(error).removeprefix(f"{file.path}: ")))
        self.warnings += notes(SkippedFile(bad.path, bad.message) for bad in problems)
        return tuple(problems)

    @cached_property
    def _columns(self) -> dict[str, ParquetColumns]:
        """The columns of the Parquet files that are read and have rows."""
        bad = {problem.path for problem in self._bad_files}
        return {path: columns for path, columns in self._opened[0].items() if path not in bad}

    @cached_property
    def _parquet(self) -> ParquetSchema:
        return merge_parquet(self._columns)

    def problems(self) -> list[FileProblem]:
        """Open every file; return those that cannot be read, or whose column types clash with other files."""
        found = list(self._found.missing)
        if self.spec.on_bad_file == "fail":
            found += [*self._found.unreadable, *self._opened[1]]
        elif not self.files:
            found += self._bad_files  # nothing is left
        return [*found, *self._parquet.problems]

    def mistakes(self) -> list[str]:
        """Say what a pass would be refused for: files that cannot be read, else columns that cannot be had."""
        if problems := self.problems():
            return [f"{problem.path}: {problem.message}" for problem in problems]
        reserved = (name for name in self._parquet.fields if is_reserved(name, self.spec.id_name))
        lines = [str(reserved_column(name)) for name in reserved]
        if self._columns and all(file.format == "parquet" for file in self.files):
            where = f"in none of the {len(self.files)} input files"
            lines += [f"column {name!r} is {where}{self._hint(name)}" for name in self._absent()]
        return lines

    def check(self) -> None:
        """Refuse the input if a file of it cannot be read, or columns that the job names are in no file.

        Raises:
            InputError: names all of them.
        """
        if lines := self.mistakes():
            if len(lines) > 1:
                lines = [f"{len(lines)} problems with the input:", *(f"  {line}" for line in lines)]
            raise InputError(*lines)

    def documents(self) -> Generator[Document]:
        """Yield the rows of every file, in input order, rejected rows in their place.

        Raises:
            InputError: what `check()` raises; a file cannot be read to its end, or changed since it was found; a
                row is rejected and `on_bad_row` is `fail`; after the last row, no file has a column that the job names.
            LimitExceeded: after the last row, `where` left out every row.
        """
        self.check()
        fields, ids = FieldTypes(), IdRange()
        limit = self.spec.limit
        self._unseen = set(self._absent())
        if self._filter is not None:
            self._filter.num_left_out = 0
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
                absent = (f"{name!r}{self._hint(name)}" for name in self._wanted() if name in self._unseen)
                raise InputError(f"no record and no file has the column {', or '.join(absent)}")
            if not count and self.num_left_out:
                total = f"{self.num_left_out:,} of {self.num_left_out:,} rows"
                raise LimitExceeded(
                    f"input.where = {self.spec.where!r} left out {total}; none is left to run"
                )
            if not count:
                self._warn("the input has no rows")
        records = next((file.path for file in self.files if file.format == "jsonl"), "")
        schema = decide_schema(self.spec, self._parquet, fields, ids, records)
        self._schema = self._schema or schema

    def check_selects(self) -> None:
        """Refuse an input of which `where` selects no row; reads no further than to the first one that it does.

        Raises:
            InputError, LimitExceeded: what `documents()` raises until then.
        """
        if self._filter is not None:
            with closing(self.documents()) as documents:
                next(documents, None)

    def read(self, file: SourceFile, fields: FieldTypes) -> Iterator[Document]:
        """Yield the rows of one file, and record the values of its records in `fields`.

        Raises:
            InputError: the file cannot be read to its end.
        """
        if file.format == "parquet":
            columns = self._columns.get(file.path)
            if columns is None:
                for problem in self._opened[1]:
                    if problem.path == file.path:
                        raise InputError(f"{problem.path}: {problem.message}")
                return  # it has no rows
            merged = {} if self._parquet.problems else self._parquet.fields  # check() reports clashes
            yield from read_parquet(file, self.spec, columns, self._filter, merged)
            return
        reader = JsonlReader(file, self.spec, self._filter, fields)
        yield from reader.documents()
        self._num_records += reader.num_records
        self._unseen &= reader.unseen
        for message in reader.warnings:
            self._warn(message)

    def _warn(self, message: str) -> None:
        if message not in self.warnings:
            self.warnings.append(message)

    def _absent(self) -> list[str]:
        """The wanted columns that no Parquet file has."""
        present = {column.name for each in self._columns.values() for column in each.where}
        present |= set(self._parquet.fields)
        return [name for name in dict.fromkeys(self._wanted()) if name not in present]

    def _hint(self, name: str) -> str:
        """Say of an absent column what may have been meant by it."""
        if self._filter is None or name not in self._filter.columns:
            return ""
        return f" (in input.where text stands in single quotes: '{name}')"

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
