"""Files that are whole or not there: temp file, fsync, rename, fsync of the directory."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from kvbatch.errors import OutputError


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a file that appears under its name only when the block ends without an exception.

    Raises:
        OutputError: The file or its directory cannot be written.
    """
    temp = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temp.open("wb") as stream:
                yield stream
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temp, path)
            fsync_directory(path.parent)
        finally:
            temp.unlink(missing_ok=True)
    except OSError as error:
        raise OutputError(
            f"cannot write {path}: {error.strerror or error}; free space or change output.dir"
        ) from error


def fsync_directory(path: Path) -> None:
    """Make the names in a directory as durable as the files they stand for."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Write a whole text file; raises as `atomic_file`."""
    with atomic_file(path) as stream:
        stream.write(text.encode())


def write_json(path: Path, value: Any) -> None:
    """Write a whole JSON file; raises as `atomic_file`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


def write_table(table: Any, path: Path) -> None:
    """Write a whole Parquet file; raises as `atomic_file`."""
    import pyarrow.parquet as pq

    with atomic_file(path) as stream:
        pq.write_table(table, stream, compression="zstd")
