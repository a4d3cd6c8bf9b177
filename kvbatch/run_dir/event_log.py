"""What a run says of itself while it runs: `logs/run.jsonl` and `heartbeat.json`. Never document text."""

import json
import os
import traceback
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbatch.atomic_file import write_json
from kvbatch.errors import KvbatchError, OutputError


class RunLog:
    """Append events to a run's log, one JSON object a line.

    Args:
        hide: what is to be made of each text of an event.

    Raises:
        OutputError: The file cannot be opened.
    """

    def __init__(self, path: Path, hide: Callable[[str], str] = str):
        self._path, self._hide = path, hide
        try:  # without a buffer, so that on a full disk nothing is left for close() to write
            self._stream = path.open("ab", buffering=0)
        except OSError as error:
            raise self._problem(error) from error

    def event(self, name: str, **values: Any) -> None:
        """Write one event.

        Raises:
            OutputError: The file cannot be written.
        """
        values = {key: self._hide(each) if isinstance(each, str) else each for key, each in values.items()}
        line = {"time": _now(), "event": name} | values
        try:
            self._stream.write((json.dumps(line, ensure_ascii=False, default=str) + "\n").encode())
        except OSError as error:
            raise self._problem(error) from error

    def failure(self, error: BaseException) -> None:
        """Write an exception; the message of a foreign one may quote a document and is left out."""
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        message = str(error) if isinstance(error, KvbatchError) else None
        with suppress(OutputError):  # a full disk is reported on the terminal only
            self.event("failed", kind=type(error).__name__, message=message, frames=frames)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()

    def _problem(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write {self._path}: {error.strerror or error}; free space or change output.dir"
        )


def write_heartbeat(path: Path, phase: str, **values: Any) -> None:
    """Say that the process lives and what it is at."""
    write_json(path, {"time": _now(), "pid": os.getpid(), "phase": phase} | values)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
