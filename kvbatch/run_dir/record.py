"""JSON files of a run directory that tell damage: the last key is a checksum over the content.

Each says the format of run directories that it belongs to, and every command refuses another one.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvbatch.atomic_file import write_text
from kvbatch.errors import Damaged, InputError

FORMAT = 3  # of run directories: names and columns of their files


def write_record(path: Path, values: dict[str, Any]) -> None:
    """Write a whole record; raises as `atomic_file`."""
    values = {"format": FORMAT} | values | {"format": FORMAT}
    values = json.loads(json.dumps(values, allow_nan=False, default=str))  # as it will be read
    values.pop("checksum", None)
    text = json.dumps(values | {"checksum": _checksum(values)}, indent=2, ensure_ascii=False)
    write_text(path, text + "\n")


def read_record(path: Path, remedy: str) -> dict[str, Any]:
    """Return what `write_record` was given, and the `format`.

    Args:
        remedy: what the user can do about a damaged file.

    Raises:
        Damaged: It is missing, or not what was written.
        InputError: A kvbatch of another format wrote it.
    """
    try:
        values = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise Damaged(path, "is missing", remedy) from error
    except OSError as error:
        raise Damaged(path, f"cannot be read ({error.strerror})", remedy) from error
    except (ValueError, RecursionError) as error:
        raise Damaged(path, "is damaged: it is no JSON", remedy) from error
    if not isinstance(values, dict):
        raise Damaged(path, "is damaged: it is no JSON object", remedy)
    checksum = values.pop("checksum", None)
    written = values.get("format")
    if isinstance(written, int) and written != FORMAT:
        age = "newer: update kvbatch" if written > FORMAT else "older: kvbatch run --new-run starts afresh"
        raise InputError(
            f"{path} is of run directories of format {written}, this kvbatch has {FORMAT}; it is {age}"
        )
    if checksum is None:
        raise Damaged(path, "is damaged: its checksum is missing", remedy)
    if checksum != _checksum(values):
        raise Damaged(path, "is damaged: its checksum does not fit its content", remedy)
    return values


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
