"""Read one Parquet file in batches, and convert its columns into the ids, texts and values of rows.

Memory holds a batch of rows and, for each column read, a buffer of 1 MiB and one page. A row group is never held
whole: at 20,000 bytes of text a row, a row group of 3,000 rows and one of 12,000 rows both took 64 MB. The batch size
is computed from the row groups' byte counts. These underestimate dictionary-encoded text. Such a column is therefore
read as a dictionary, which holds a repeated text once.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types as kind

from kvbatch.corpus.discovery import SourceFile
from kvbatch.corpus.document import RAW_BYTES, Document, RowValues, is_blank, made_up_id
from kvbatch.corpus.fields import JsonRow
from kvbatch.corpus.ids import id_from_bytes
from kvbatch.corpus.parquet_schema import (
    Column,
    ParquetColumns,
    is_binary,
    is_string,
    open_parquet,
    parquet_error,
    storage_type,
)
from kvbatch.corpus.spec import InputSpec
from kvbatch.corpus.strings import scalar_text
from kvbatch.corpus.types import widened
from kvbatch.corpus.where import RowFilter
from kvbatch.errors import InputError

MAX_BATCH_ROWS = 128
BATCH_BYTES = 8 << 20


@dataclass(frozen=True)
class ArrowRow:
    """The passthrough values of one Parquet row, still in Arrow."""

    batch: pa.RecordBatch
    position: int

    def strings(self) -> Mapping[str, str]:
        """Return every value as text: dates in ISO form, nested values as JSON, null empty."""
        return {
            name: scalar_text(column[self.position])
            for name, column in zip(self.batch.schema.names, self.batch.columns, strict=True)
        }


def read_parquet(
    source: SourceFile,
    spec: InputSpec,
    columns: ParquetColumns,
    row_filter: RowFilter | None,
    fields: Mapping[str, pa.Field],
) -> Iterator[Document]:
    """Yield a document for every record that `where` selects.

    Args:
        fields: the passthrough columns in the types that hold those of all files.

    Raises:
        InputError: a page is damaged, the file cannot be read to its end, or a value is out of the range of its
            column's final type.
    """
    with open_parquet(source) as file:
        as_dictionary = _repeated_text(file, columns)
    with open_parquet(source, as_dictionary) as file:
        num_rows = 0
        for batch in _batches(source, file, columns):
            kept = None if row_filter is None else row_filter.keep_batch(batch, columns.where, source.path)
            texts = _Texts(columns.text.array(batch))
            ids = [None] * len(batch) if columns.id is None else _ids(columns.id.array(batch))
            values = pa.RecordBatch.from_arrays(
                [column.array(batch) for column in columns.passthrough],
                schema=pa.schema([_renamed(column) for column in columns.passthrough]),
            )
            _check_range(source, values, fields, num_rows)
            broken = _not_utf8(values)
            row_bytes = values.nbytes // max(1, len(batch))
            for position in range(len(batch)):
                answer = kept is None or kept[position]
                if answer:
                    text = texts[position]
                    row = num_rows + position + 1
                    row_values: RowValues = ArrowRow(values, position)
                    problem = (
                        ("where_type", f"`where` cannot be decided: {answer}") if answer is not True else None
                    )
                    if position in broken:
                        problem = "bad_utf8", f"column {broken[position]!r} is not UTF-8"
                        row_values = JsonRow({})
                    yield _document(source, spec, row, ids[position], text, row_values, problem, row_bytes)
                    del text
            num_rows += len(batch)


class _Texts:
    """The texts of a batch as bytes; of a dictionary they are taken one by one, for it may repeat a large one."""

    def __init__(self, array: pa.Array):
        array = array.storage if isinstance(array, pa.ExtensionArray) else array
        self._indices = array.indices if kind.is_dictionary(array.type) else None
        self._values = _as_bytes(array if self._indices is None else array.dictionary)

    def __getitem__(self, position: int) -> bytes | None:
        index = position if self._indices is None else self._indices[position].as_py()
        return None if index is None else self._values[index].as_py()


def _repeated_text(file: pq.ParquetFile, columns: ParquetColumns) -> list[str]:
    """Name the text column if the file holds it as a dictionary, unless it is needed in its own type as well."""
    path = columns.text.path
    others = {column.path for column in (*columns.passthrough, *columns.where)}
    if path[0] in columns.partitions or any(each[0] == path[0] for each in others):
        return []
    name = ".".join(path)
    leaves = [leaf for leaf in range(len(file.schema)) if file.schema.column(leaf).path == name]
    groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
    return (
        [name] if any(group.column(leaf).has_dictionary_page for group in groups for leaf in leaves) else []
    )


def _renamed(column: Column) -> pa.Field:
    return column.field.with_name(column.name).with_nullable(True)


def _batches(source: SourceFile, file: pq.ParquetFile, columns: ParquetColumns) -> Iterator[pa.RecordBatch]:
    try:
        for batch in file.iter_batches(
            batch_size=_batch_rows(file, columns), columns=columns.selection, use_threads=False
        ):
            for name, value in columns.partitions.items():
                batch = batch.append_column(name, pa.repeat(pa.scalar(value, pa.string()), len(batch)))
            yield batch
    except (OSError, pa.ArrowException) as error:
        raise parquet_error(source.path, error) from error


def _check_range(
    source: SourceFile, values: pa.RecordBatch, fields: Mapping[str, pa.Field], num_rows: int
) -> None:
    """Refuse what would not fit into a column once it is widened, while no answer has been made yet."""
    for name, array in zip(values.schema.names, values.columns, strict=True):
        try:
            if name in fields:
                widened(array, fields[name].type)
        except pa.ArrowInvalid as error:
            where = f"in rows {num_rows + 1:,} to {num_rows + len(values):,}"
            reason = f"a value is out of bounds of {fields[name].type}"  # the error would quote it
            raise InputError(f"{source.path}: column {name!r} {where}: {reason}") from error


def _not_utf8(values: pa.RecordBatch) -> dict[int, str]:
    """Find rows that hold bytes in a string column that are not UTF-8, which Parquet does not exclude.

    Returns:
        The name of such a column, by position.
    """
    found: dict[int, str] = {}
    for name, array in zip(values.schema.names, values.columns, strict=True):
        if not _is_valid(array):
            array = array.dictionary_decode() if kind.is_dictionary(array.type) else array
            positions = (p for p in range(len(array)) if not _is_valid(array.take(pa.array([p]))))
            found |= {position: name for position in positions if position not in found}
    return found


def _is_valid(array: pa.Array) -> bool:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def _batch_rows(file: pq.ParquetFile, columns: ParquetColumns) -> int:
    """Choose the rows of a batch so that the largest row group's average rows stay within BATCH_BYTES."""
    names = columns.selection
    leaves = [
        position
        for position in range(len(file.schema))
        if any((file.schema.column(position).path + ".").startswith(name + ".") for name in names)
    ]
    row_bytes = 1
    for number in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(number)
        group_bytes = sum(group.column(leaf).total_uncompressed_size for leaf in leaves)
        row_bytes = max(row_bytes, group_bytes // max(1, group.num_rows))
    return min(MAX_BATCH_ROWS, max(1, BATCH_BYTES // row_bytes))


def _as_bytes(array: pa.Array) -> pa.Array:
    """View a text column as bytes, so that one row that is not UTF-8 stays one row."""
    if isinstance(array, pa.ExtensionArray):
        array = array.storage
    if kind.is_dictionary(array.type):
        array = pc.cast(array, array.type.value_type)
    return pc.cast(array, pa.large_binary())


def _ids(array: pa.Array) -> list[str | int | None]:
    if isinstance(array, pa.ExtensionArray) and array.type.extension_name != "arrow.uuid":
        array = array.storage
    stored = storage_type(array.type)
    if kind.is_integer(stored):
        return array.to_pylist()
    if kind.is_null(stored):
        return [None] * len(array)
    is_uuid = isinstance(array, pa.ExtensionArray)
    if not is_uuid and kind.is_fixed_size_binary(stored):
        return [value.hex() if value else None for value in _as_bytes(array).to_pylist()]
    if not is_uuid and (is_string(stored) or is_binary(stored)):
        return [id_from_bytes(value) for value in _as_bytes(array).to_pylist()]
    return [scalar_text(value) or None for value in array]


def _document(
    source: SourceFile,
    spec: InputSpec,
    row: int,
    row_id: str | int | None,
    data: bytes | None,
    values: RowValues,
    problem: tuple[str, str] | None,
    row_bytes: int,
) -> Document:
    name = spec.text_name
    num_bytes = row_bytes + len(data or b"")
    text = code = reason = None
    if data is None:
        code, reason = "empty_text", f"{name!r} is null"
    elif len(data) > spec.max_row_bytes:
        code = "row_too_large"
        reason = f"the text has {len(data):,} bytes, over max_row_bytes = {spec.max_row_bytes:,}"
    else:
        try:
            text = data.decode("utf-8", "strict" if spec.encoding_errors == "reject" else "replace")
            if is_blank(text):
                code = "empty_text"
                reason = f"{name!r} holds nothing but white space and invisible characters"
        except UnicodeDecodeError as error:
            code, reason = "bad_utf8", f"byte {error.start + 1} of {name!r} is not UTF-8 ({error.reason})"
    if problem is not None:
        code, reason = problem
    if row_id is None:
        row_id = made_up_id(source.label, row, data or b"")
    if code is None:
        return Document(source.path, row, row_id, text, "ok", None, None, values, None, num_bytes)
    message = f"{source.path}:{row}: {reason}"
    raw = None if data is None else data[:RAW_BYTES]
    return Document(source.path, row, row_id, text, "rejected", code, message, values, raw, num_bytes)
