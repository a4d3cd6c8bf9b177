"""Decide which rows a job's `where` selects; the only place that loads polars."""

from collections.abc import Sequence

import pyarrow as pa

from kvbatch.corpus.json_values import INT64_RANGE, NumberText, json_text
from kvbatch.errors import InputError


class RowFilter:
    """Hold a polars SQL condition over the columns that it names.

    Raises:
        InputError: it is not SQL, names no column, or needs more than one row at a time (an aggregate).
    """

    def __init__(self, condition: str):
        import polars

        self._polars = polars
        self.condition = condition
        try:
            self._expression = polars.sql_expr(condition)
            self.columns = tuple(dict.fromkeys(self._expression.meta.root_names()))
            is_by_row = _is_by_row(self._expression)
        except polars.exceptions.ColumnNotFoundError as error:
            # The left side of IN is looked up at once, in no data at all (polars 2.1).
            raise self._error("IN is not supported here: write `a = 1 OR a = 2`") from error
        except polars.exceptions.PolarsError as error:
            raise self._error(str(error)) from error
        if not self.columns or "*" in self.columns:
            raise self._error("it names no column")
        if not is_by_row:
            raise self._error("it looks at more than one row; only conditions on single rows are possible")

    def keep_batch(self, batch: pa.RecordBatch, path: str) -> list[bool]:
        """Tell for every row of a batch whether it is selected; columns that the file lacks are null.

        Raises:
            InputError: the condition does not fit the types of the columns.
        """
        arrays = []
        for name in self.columns:
            position = batch.schema.get_field_index(name)
            array = batch.column(position) if position >= 0 else pa.nulls(len(batch))
            arrays.append(array.storage if isinstance(array, pa.ExtensionArray) else array)
        failures = self._polars.exceptions.PolarsError, self._polars.exceptions.PanicException
        try:
            return self._keep(self._polars.from_arrow(pa.table(arrays, list(self.columns))))
        except failures as error:  # a panic: a type that polars does not know, such as decimal256
            raise self._error(f"{path}: {error}") from error

    def keep_records(self, records: Sequence[dict]) -> list[bool | str]:
        """Tell for every JSON record whether it is selected, or why that cannot be told of it.

        Fields that a record lacks are null.

        Records whose fields have the same kinds are judged together, so that a number in one record is never
        compared as a string because of another record.
        """
        groups: dict[tuple, list[int]] = {}
        rows = [[_comparable(record.get(name)) for name in self.columns] for record in records]
        for position, row in enumerate(rows):
            groups.setdefault(tuple(_kind(value) for value in row), []).append(position)
        kept: list[bool | str] = [False] * len(records)
        for kinds, positions in groups.items():
            columns = zip(*(rows[position] for position in positions), strict=True)
            frame = self._polars.DataFrame(
                [
                    self._polars.Series(name, values, self._polars.Int128 if type_ == "long" else None)
                    for name, values, type_ in zip(self.columns, columns, kinds, strict=True)
                ]
            )
            try:
                answers = self._keep(frame)
            except self._polars.exceptions.PolarsError as error:
                answers = [str(error)] * len(positions)
            for position, answer in zip(positions, answers, strict=True):
                kept[position] = answer
        return kept

    def _keep(self, frame) -> list[bool]:
        result = frame.select(self._expression.alias("keep"))["keep"]
        if result.dtype not in (self._polars.Boolean, self._polars.Null):
            raise self._error(f"it gives {result.dtype}, not a boolean")
        return [keep is True for keep in result]

    def _error(self, reason: str) -> InputError:
        return InputError(f"input.where = {self.condition!r}: {reason}")


def _is_by_row(expression) -> bool:
    """Tell whether no part of an expression needs other rows (polars looks at the outermost part only)."""
    meta = expression.meta
    return meta.is_row_separable() and all(map(_is_by_row, meta.pop()))


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
