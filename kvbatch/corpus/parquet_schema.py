"""Find the columns that a job names in one Parquet file, and validate the file before its rows are read."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyarrow import types as kind

from kvbatch.corpus.discovery import SourceFile
from kvbatch.corpus.spec import InputSpec
from kvbatch.errors import InputError

PANDAS_INDEX = re.compile(r"__index_level_\d+__")
BUFFER_BYTES = 1 << 20


@dataclass(frozen=True)
class Column:
    """A column of a Parquet file, or a field inside its structs."""

    name: str  # as the job names it
    path: tuple[str, ...]
    field: pa.Field

    def array(self, batch: pa.RecordBatch) -> pa.Array:
        """Take the column out of a batch."""
        array = batch.column(batch.schema.get_field_index(self.path[0]))
        for name in self.path[1:]:
            array = pc.struct_field(array, name)
        return array


@dataclass(frozen=True)
class ParquetColumns:
    """The columns of one file that a job needs.

    `partitions` are those that the file does not hold itself: its directories name them.
    """

    text: Column
    id: Column | None
    passthrough: tuple[Column, ...]
    where: tuple[Column, ...]
    partitions: Mapping[str, str | None]

    @property
    def selection(self) -> list[str]:
        """The names to read: dotted paths, without those that lie inside another one."""
        columns = [self.text, *self.passthrough, *self.where] + ([self.id] if self.id else [])
        paths = {column.path for column in columns}
        return sorted(
            ".".join(path)
            for path in paths
            if path[0] not in self.partitions and not any(path[:n] in paths for n in range(1, len(path)))
        )


def open_parquet(source: SourceFile, as_dictionary: Sequence[str] = ()) -> pq.ParquetFile:
    """Open a file so that reading it streams (no read-ahead of row groups) and page checksums count.

    Args:
        as_dictionary: columns whose repeated values are held once.

    Raises:
        InputError: it is cut, damaged, encrypted or not readable.
    """
    try:
        return pq.ParquetFile(
            source.path,
            pre_buffer=False,
            buffer_size=BUFFER_BYTES,
            page_checksum_verification=True,
            read_dictionary=list(as_dictionary),
        )
    except (OSError, pa.ArrowException) as error:
        raise parquet_error(source.path, error) from error


def parquet_error(path: str, error: Exception) -> InputError:
    """Say in one line what is wrong with a Parquet file."""
    reason = str(getattr(error, "strerror", None) or error).strip().split("\n")[0]
    if "decrypt" in reason:
        return InputError(f"{path}: encrypted Parquet, and there is no key to read it with ({reason})")
    if isinstance(error, PermissionError):
        return InputError(f"{path}: cannot be opened: {reason}")
    return InputError(f"{path}: damaged, cut or unsupported Parquet: {reason}")


def find_columns(source: SourceFile, spec: InputSpec, where: Sequence[str]) -> ParquetColumns | None:
    """Find the columns that the job needs and read one row of them; None for a file without rows.

    Writers give columns without rows an arbitrary type, so the column types of such a file are ignored.

    That one row brings to light an encrypted column or a codec that is not there, before the job starts. The
    metadata of columns that are not needed is left alone: pyarrow 26 aborts the process on an encrypted one.

    Raises:
        InputError: the file cannot be read, or the id or text column is missing, ambiguous or of a wrong
            type.
    """
    file = open_parquet(source)
    with file:
        if not file.metadata.num_rows:
            return None
        schema = file.schema_arrow
        partitions = {
            name: value
            for name, value in source.partitions
            if name not in (spec.id_name, spec.text_name, *schema.names)
        }
        for name in partitions:
            schema = schema.append(pa.field(name, pa.string()))
        text = _find(source, schema, spec.text_name)
        id_ = _find(source, schema, spec.id_name)
        if text is None:
            raise _missing(source, schema, "text", spec.text_name)
        if id_ is None and spec.id_column:
            raise _missing(source, schema, "id", spec.id_name)
        if not _is_text(text.field.type):
            raise InputError(
                f"{source.path}: the text column {text.name!r} has type {text.field.type}, not text"
            )
        if id_ is not None and kind.is_nested(id_.field.type):
            if spec.id_column:
                raise InputError(
                    f"{source.path}: the id column {id_.name!r} has the nested type {id_.field.type}"
                )
            id_ = None  # nobody called it an id: ids are made up
        filtered = _present(source, schema, where)
        columns = ParquetColumns(text, id_, _passthrough(source, schema, spec), filtered, partitions)
        try:
            next(file.iter_batches(batch_size=1, columns=columns.selection, use_threads=False), None)
        except (OSError, pa.ArrowException) as error:
            raise parquet_error(source.path, error) from error
    return columns


def _missing(source: SourceFile, schema: pa.Schema, role: str, name: str) -> InputError:
    names = ", ".join(f"{field.name} ({field.type})" for field in list(schema)[:30])
    return InputError(f"{source.path}: there is no {role} column {name!r}; the file has {names}")


def _passthrough(source: SourceFile, schema: pa.Schema, spec: InputSpec) -> tuple[Column, ...]:
    if spec.passthrough != "all":
        return _present(source, schema, spec.passthrough)
    hidden = (spec.id_name, spec.text_name)
    names = [name for name in schema.names if name not in hidden and not PANDAS_INDEX.fullmatch(name)]
    return _present(source, schema, names)


def _present(source: SourceFile, schema: pa.Schema, names: Sequence[str]) -> tuple[Column, ...]:
    found = (_find(source, schema, name) for name in names)
    return tuple(column for column in found if column is not None)


def _find(source: SourceFile, schema: pa.Schema, name: str) -> Column | None:
    """Find a column by its whole name, else by a dotted path into structs."""
    count = schema.names.count(name)
    if count > 1:
        raise InputError(
            f"{source.path}: {count} columns are called {name!r}: it is not clear which one is meant"
        )
    if count:
        return Column(name, (name,), schema.field(name))
    for position, char in enumerate(name):
        root = name[:position]
        if char == "." and schema.names.count(root) == 1:
            found = _find_inside(schema.field(root), name[position + 1 :])
            if found is not None:
                path, field = found
                return Column(name, (root, *path), field)
    return None


def _find_inside(parent: pa.Field, name: str) -> tuple[tuple[str, ...], pa.Field] | None:
    if not kind.is_struct(parent.type):
        return None
    position = parent.type.get_field_index(name)
    if position >= 0:
        return (name,), parent.type.field(position)
    for dot, char in enumerate(name):
        position = parent.type.get_field_index(name[:dot]) if char == "." else -1
        if position >= 0:
            found = _find_inside(parent.type.field(position), name[dot + 1 :])
            if found is not None:
                return (name[:dot], *found[0]), found[1]
    return None


def storage_type(type_: pa.DataType) -> pa.DataType:
    """Return what a type stores: the values of a dictionary, the storage of an extension."""
    if kind.is_dictionary(type_):
        return storage_type(type_.value_type)
    return storage_type(type_.storage_type) if isinstance(type_, pa.BaseExtensionType) else type_


def is_binary(type_: pa.DataType) -> bool:
    """Tell whether a storage type is bytes without the promise that they are text."""
    return type_ in (pa.binary(), pa.large_binary(), pa.binary_view()) or kind.is_fixed_size_binary(type_)


def is_string(type_: pa.DataType) -> bool:
    """Tell whether a storage type is text."""
    return type_ in (pa.string(), pa.large_string(), pa.string_view())


def _is_text(type_: pa.DataType) -> bool:
    if getattr(type_, "extension_name", None) == "arrow.uuid":  # 16 bytes, which may be UTF-8 by chance
        return False
    stored = storage_type(type_)
    return is_string(stored) or is_binary(stored) or kind.is_null(stored)
