"""Files that are whole or not there: temp file, fsync, rename, fsync of the directory."""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from kvbatch.errors import OutputError

if TYPE_CHECKING:
    import pyarrow as pa


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


def write_json(path: Path, value: object) -> None:
    """Write a whole JSON file; raises as `atomic_file`."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=str) + "\n")


class _Hashing:
    """Pass bytes on to a stream and hash them on the way."""

    def __init__(self, stream: IO[bytes]):
        self._stream, self.digest = stream, hashlib.sha256()

    def write(self, data: Any) -> int:
        """See `io.RawIOBase.write`."""
        self.digest.update(data)
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def described_file(path: Path) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Open a file as `atomic_file` does, with a dictionary that describes it once the block has ended.

    It gets size, modification time and SHA-256 of what was written; see `kvbatch.run_dir.checked_file`.
    """
    facts: dict[str, Any] = {}
    with atomic_file(path) as stream:
        hashing = _Hashing(stream)
        yield hashing, facts
    found = path.stat()
    facts |= {"num_bytes": found.st_size, "mtime_ns": found.st_mtime_ns}
    facts["sha256"] = hashing.digest.hexdigest()


def write_table(table: "pa.Table", path: Path) -> dict[str, Any]:
    """Write a whole Parquet file and return what describes it; raises as `atomic_file`."""
    import pyarrow.parquet as pq

    with described_file(path) as (stream, facts):
        pq.write_table(table, stream, compression="zstd", write_page_checksum=True)
    return {"rows": len(table)} | facts
