"""The write-ahead file of an open shard: its finished rows, so that a killed run redoes none of them.

An Arrow IPC stream of one batch a row. A kill leaves whole rows and at most one torn tail, which is cut off; a power
failure may leave pages of zeros, which each row's checksum tells.
"""

import json
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pyarrow as pa

from kvbatch.atomic_file import fsync_directory
from kvbatch.errors import OutputError

_PLACE, _CHECKSUM = "kvb_place", "kvb_checksum"
_SYNC_SHARE = 0.1  # of the time between rows that may be spent on making them durable


class WriteAheadFile:
    """Append finished rows to a file, made when the first one comes.

    A row survives the process once `append` returns, and the machine's failure soon after, or after `close`.

    Args:
        path: of the file; what it holds stays and must end with a whole row (`read_rows` cuts it).
        fields: the columns of a row.
    """

    def __init__(self, path: Path, fields: list[pa.Field]):
        self._path = path
        self._schema = _schema(fields)
        self._row, self._marked_row = pa.struct(fields), pa.struct(self._schema)
        self._stream: Any = None
        self._good_bytes = 0
        self._next_sync_s = 0.0

    def append(self, place: int, row: Mapping[str, Any]) -> None:
        """Write one row.

        Args:
            place: of the row in its shard.

        Raises:
            OutputError: It cannot be written; the rows before it stay readable.
        """
        # as it will be read, for the checksum is of that: a field that an answer leaves out comes back as null
        stored: dict[str, Any] = pa.scalar(row, self._row).as_py()
        marked = stored | {_PLACE: place, _CHECKSUM: _checksum(place, stored)}
        columns = pa.array([marked], self._marked_row)  # of one struct, far faster than column by column
        data = pa.RecordBatch.from_struct_array(columns).serialize().to_pybytes()
        try:
            if self._stream is None:
                data = self._open() + data
            self._write(data)
            if time.monotonic() >= self._next_sync_s:
                self._sync()
        except OSError as error:
            if self._stream is not None:
                with suppress(OSError):
                    self._stream.truncate(self._good_bytes)
            raise self._problem(error) from error

    def create(self) -> None:
        """Make the file even if no row was appended: as long as it exists, its shard is not committed.

        Raises:
            OutputError: It cannot be written.
        """
        if self._stream is not None or self._path.exists():
            return
        try:
            self._path.parent.mkdir(exist_ok=True)
            self._path.touch()
            fsync_directory(self._path.parent)
        except OSError as error:
            raise self._problem(error) from error

    def close(self) -> None:
        """Make the rows durable and close the file; raises as `append`."""
        if self._stream is None:
            return
        try:
            with self._stream:
                self._sync()
        except OSError as error:
            raise self._problem(error) from error
        finally:
            self._stream = None

    def _open(self) -> bytes:
        """Open the file; return what it has to begin with."""
        self._path.parent.mkdir(exist_ok=True)
        self._stream = self._path.open("ab", buffering=0)  # without a buffer: a kill loses nothing
        self._good_bytes = self._stream.tell()
        fsync_directory(self._path.parent)
        return b"" if self._good_bytes else self._schema.serialize().to_pybytes()

    def _write(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[self._stream.write(rest) :]
        self._good_bytes += len(data)

    def _sync(self) -> None:
        started_s = time.monotonic()
        os.fsync(self._stream.fileno())
        ended_s = time.monotonic()
        self._next_sync_s = ended_s + (ended_s - started_s) * (1 / _SYNC_SHARE - 1)

    def _problem(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write {self._path}: {error.strerror or error}; free space or change output.dir"
        )


def read_rows(path: Path, fields: list[pa.Field], *, cut: bool = False) -> dict[int, dict[str, Any]]:
    """Return the whole rows of a write-ahead file by their place in the shard; none if there is no such file.

    Args:
        cut: also cut off what is torn, so that rows can be appended.

    Raises:
        OSError: It cannot be read, or not be cut.
    """
    if not path.exists():
        return {}
    data = path.read_bytes()
    rows, good_bytes = _whole_rows(data, _schema(fields))
    if cut and good_bytes < len(data):
        os.truncate(path, good_bytes)
    return rows


def _whole_rows(data: bytes, schema: pa.Schema) -> tuple[dict[int, dict[str, Any]], int]:
    """Return the rows up to the first that is torn, and the bytes that they take."""
    rows: dict[int, dict[str, Any]] = {}
    good_bytes = 0
    source = pa.BufferReader(data)
    with suppress(
        pa.ArrowException, OSError, StopIteration
    ):  # Arrow raises any of its errors at a torn message
        stream = pa.ipc.open_stream(source)
        if stream.schema != schema:  # torn, or of another version: nothing of it can be used
            return {}, 0
        while True:
            batch = stream.read_next_batch()
            batch.validate(full=True)
            for row in batch.to_pylist():
                place, checksum = row.pop(_PLACE), row.pop(_CHECKSUM)
                if _checksum(place, row) != checksum:
                    return rows, good_bytes
                rows[place] = row
            good_bytes = source.tell()
    return rows, good_bytes


def _schema(fields: list[pa.Field]) -> pa.Schema:
    return pa.schema([pa.field(_PLACE, pa.int32()), pa.field(_CHECKSUM, pa.int64()), *fields])


def _checksum(place: int, row: Mapping[str, Any]) -> int:
    return zlib.crc32(json.dumps([place, row], sort_keys=True).encode())
