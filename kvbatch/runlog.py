"""What a run says of itself while it runs: `logs/run.jsonl` and `heartbeat.json`. Never document text."""

import json
import os
import traceback
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from kvbatch.errors import KvbatchError
from kvbatch.writer import write_json


class RunLog:
    """Append events to a run's log, one JSON object a line."""

    def __init__(self, path: Path):
        self._stream = path.open("a", encoding="utf-8")

    def event(self, name: str, **values: Any) -> None:
        """Write one event."""
        line = {"time": _now(), "event": name} | values
        self._stream.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
        self._stream.flush()

    def failure(self, error: BaseException) -> None:
        """Write an exception; the message of a foreign one may quote a document and is left out."""
        frames = [f"{f.filename}:{f.lineno} {f.name}" for f in traceback.extract_tb(error.__traceback__)]
        message = str(error) if isinstance(error, KvbatchError) else None
        self.event("failed", kind=type(error).__name__, message=message, frames=frames)

    def close(self) -> None:
        """Close the file."""
        self._stream.close()


def write_heartbeat(path: Path, phase: str, **values: Any) -> None:
    """Say that the process lives and what it is at."""
    write_json(path, {"time": _now(), "pid": os.getpid(), "phase": phase} | values)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
