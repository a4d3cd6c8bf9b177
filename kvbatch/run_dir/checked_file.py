"""Files that a record describes by size, time and SHA-256: whether they are still what was written.

Imports no pyarrow until a table is opened: whether something is new must be known at once.
"""

import hashlib
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbatch.errors import Damaged

if TYPE_CHECKING:
    import pyarrow.parquet as pq


def file_problem(path: Path, facts: Mapping[str, Any], *, deep: bool = False) -> str | None:
    """Say what is wrong with a file.

    Args:
        facts: as `described_file` gives them; those of an older release have no hash.
        deep: read the file even if its size and time are what they were.
    """
    try:
        found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            return "is no file"
        if found.st_size != facts["num_bytes"]:
            return f"is damaged: it has {found.st_size:,} bytes, {facts['num_bytes']:,} were written"
        if "sha256" not in facts or (found.st_mtime_ns == facts["mtime_ns"] and not deep):
            return None
        if describe_file(path)["sha256"] == facts["sha256"]:
            return None
        return "is damaged: its SHA-256 is not that of what was written"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read ({error.strerror})"


def describe_file(path: Path) -> dict[str, Any]:
    """Return what `file_problem` holds a file against.

    Raises:
        OSError: It cannot be read.
    """
    found = path.stat()
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {"num_bytes": found.st_size, "mtime_ns": found.st_mtime_ns, "sha256": digest}


@contextmanager
def opened_table(path: Path, remedy: str) -> "Iterator[pq.ParquetFile]":
    """Open a Parquet file; what is read of it is held against the checksums of its pages.

    Args:
        remedy: what the user can do about a damaged file.

    Raises:
        Damaged: It cannot be read.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            yield file
    except FileNotFoundError as error:
        raise Damaged(path, "is missing", remedy) from error
    except (OSError, pa.ArrowException) as error:
        raise Damaged(path, f"cannot be read ({error})", remedy) from error
