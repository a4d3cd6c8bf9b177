"""JSON files of a run directory that tell damage: the last key is a checksum over the content.

A file of an older release has no checksum and is read as it stands; its format tells it from a file that lost one.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

from kvbatch.atomic_file import write_text
from kvbatch.errors import Damaged, InputError

FORMAT = 2  # 1 had neither checksums nor hashes


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
        InputError: A newer release wrote it.
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
    if checksum is None and values.get("format", 1) != 1:
        raise Damaged(path, "is damaged: its checksum is gone", remedy)
    if checksum is not None and checksum != _checksum(values):
        raise Damaged(path, "is damaged: its checksum does not fit its content", remedy)
    if values.get("format", 1) not in range(FORMAT + 1):
        raise InputError(f"{path} is of a newer kvbatch (format {values['format']}); update kvbatch")
    return values


def _checksum(values: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
