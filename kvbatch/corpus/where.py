"""Decide which rows a job's `where` selects; the only place that loads polars."""

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pyarrow as pa

from kvbatch.corpus.json_values import INT64_RANGE, NumberText, find_field, json_text
from kvbatch.corpus.parquet_schema import Column
from kvbatch.corpus.strings import plain_value
from kvbatch.errors import InputError

if TYPE_CHECKING:
    import polars as pl


class ConditionError(InputError):
    """The condition of a job cannot be used, whatever the state of its files."""


class RowFilter:
    """Hold a polars SQL condition over the columns that it names; count the rows that it left out.

    Raises:
        ConditionError: it is not SQL, names no column, or needs more than one row at a time (an aggregate).
    """

    def __init__(self, condition: str):
        import polars

        self._polars = polars
        # a panic: of what polars does not know, such as the type decimal256
        self._failures = polars.exceptions.PolarsError, polars.exceptions.PanicException
        self.condition = condition
        self.num_left_out = 0
        try:
            self._expression = polars.sql_expr(condition)
            self.columns = tuple(dict.fromkeys(self._expression.meta.root_names()))
            is_by_row = _is_by_row(self._expression)
        except polars.exceptions.ColumnNotFoundError as error:
            # Their left side is looked up at once, in no data at all (polars 2.1).
            raise self._error(
                "IN, * and / are not supported here: compare columns themselves, as in `a = 1 OR a = 2`"
            ) from error
        except polars.exceptions.PolarsError as error:
            raise self._error(str(error)) from error
        if not self.columns or "*" in self.columns:
            raise self._error("it names no column")
        if not is_by_row:
            raise self._error("it looks at more than one row; only conditions on single rows are possible")

    def keep_batch(self, batch: pa.RecordBatch, columns: Sequence[Column], path: str) -> Sequence[bool | str]:
        """Tell for every row of a batch whether it is selected, or why that cannot be told of it.

        Columns that the file lacks are null.

        Args:
            columns: those of the condition that the file has.

        Raises:
            ConditionError: the condition does not fit the types of the columns.
        """
        found = {column.name: column.array(batch) for column in columns}
        arrays = [_as_shown(found.get(name, pa.nulls(len(batch)))) for name in self.columns]
        try:
            answers = self._evaluate(self._polars.DataFrame(pa.table(arrays, list(self.columns))))
        except self._failures as error:
            raise self._error(f"{path}: {_first_line(error)}") from error
        self.num_left_out += answers.count(False)
        return answers

    def keep_records(self, records: Sequence[dict]) -> list[bool | str]:
        """Tell for every JSON record whether it is selected, or why that cannot be told of it.

        Fields that a record lacks are null.

        Records whose fields have the same kinds are evaluated together, so that a number in one record is never
        compared as a string because of another record.
        """
        groups: dict[tuple, list[int]] = {}
        rows = [[_comparable(find_field(record, name)[1]) for name in self.columns] for record in records]
        for position, row in enumerate(rows):
            groups.setdefault(tuple(_kind(value) for value in row), []).append(position)
        kept: list[bool | str] = [False] * len(records)
        for kinds, positions in groups.items():
            columns = zip(*(rows[position] for position in positions), strict=True)
            frame = self._polars.DataFrame(
                [
                    self._polars.Series(name, values, self._polars.Int128 if kind == "long" else None)
                    for name, values, kind in zip(self.columns, columns, kinds, strict=True)
                ]
            )
            try:
                answers = self._evaluate(frame)
            except self._failures as error:
                answers = [_first_line(error)] * len(positions)
            for position, answer in zip(positions, answers, strict=True):
                kept[position] = answer
        self.num_left_out += kept.count(False)
        return kept

    def _evaluate(self, frame: "pl.DataFrame") -> Sequence[bool | str]:
        """Evaluate rows; LIKE wants text, and a column without any value may be meant as one."""
        nulls = [name for name, dtype in frame.schema.items() if dtype == self._polars.Null]
        try:
            return self._keep_rows(frame)
        except self._failures:
            for texts in (nulls, *([name] for name in nulls)):
                with contextlib.suppress(*self._failures):
                    return self._keep_rows(frame.cast(dict.fromkeys(texts, self._polars.String)))
            raise

    def _keep_rows(self, frame: "pl.DataFrame") -> Sequence[bool | str]:
        """Evaluate rows together, or one by one where a value among them is at fault (`CAST('x' AS INT)`)."""
        try:
            return self._keep(frame)
        except self._failures:
            self._keep(frame.clear())  # fails as well where the types are at fault
        answers: list[bool | str] = []
        for position in range(len(frame)):
            try:
                answers += self._keep(frame[position : position + 1])
            except self._failures as error:
                answers.append(_without_value(error))
        return answers

    def _keep(self, frame: "pl.DataFrame") -> list[bool]:
        result = frame.select(self._expression.alias("keep"))["keep"]
        if result.dtype not in (self._polars.Boolean, self._polars.Null):
            raise self._error(f"it gives {result.dtype}, not a boolean")
        return [keep is True for keep in result]

    def _error(self, reason: str) -> ConditionError:
        return ConditionError(f"input.where = {self.condition!r}: {reason}")


def _is_by_row(expression: "pl.Expr") -> bool:
    """Tell whether no part of an expression needs other rows (polars looks at the outermost part only)."""
    meta = expression.meta
    return meta.is_row_separable() and all(map(_is_by_row, meta.pop()))


def _first_line(error: BaseException) -> str:
    """Return what polars says of a condition and the types of its columns; it has seen no row then."""
    return str(error).split("\n")[0]


def _without_value(error: BaseException) -> str:
    """Say why a row cannot be evaluated; polars quotes the row's values, which may be document text."""
    conversion = re.match(r"conversion from `[^`]*` to `[^`]*` failed", str(error))
    return conversion[0] if conversion else "the condition does not fit a value of the row"


def _as_shown(array: pa.Array) -> pa.Array:
    """Return a column in a type that polars knows: UUIDs and bytes of fixed size as the text that ids of them are."""
    if pa.types.is_fixed_size_binary(getattr(array.type, "storage_type", array.type)):
        return pa.array([plain_value(value) for value in array], pa.string())
    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _comparable(value: object) -> object:
    if isinstance(value, NumberText):
        return float(value)
    if isinstance(value, dict | list):
        return json_text(value)
    if isinstance(value, int) and abs(value) >= 1 << 126:  # beyond polars' widest integer
        return str(value)
    return value


def _kind(value: object) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value not in INT64_RANGE:
        return "long"
    return type(value).__name__
