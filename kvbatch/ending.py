"""How a run ended, told to machines: one JSON object as the last line of stdout, and a textfile for Prometheus."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kvbatch.errors import Interrupted, KvbatchError, LimitExceeded
from kvbatch.job import Job
from kvbatch.manifest import RunDirectory
from kvbatch.prometheus import write_metrics

COUNTS = ("rows", "ok", "errors", "rejected", "carried", "truncated")
MEASURES = ("prompt_tokens", "completion_tokens", "tokens_per_s", "kv_peak_bytes_measured", "kv_kept_ratio")


@dataclass
class Ending:
    """Collect what will be told; filled while the job runs.

    Args:
        job: once it was read.
        run: the run directory, once there is one.
        is_new: whether that run was made now.
    """

    job: Job | None = None
    run: RunDirectory | None = None
    is_new: bool = True
    started_s: float = field(default_factory=time.monotonic)

    def note(self, run: RunDirectory) -> None:
        """Say which run directory is written."""
        self.run = run

    def facts(self, error: BaseException | None) -> dict[str, Any]:
        """Return what is told, flat.

        Args:
            error: by which the run ended.
        """
        exit_code = _exit_code(error)
        facts: dict[str, Any] = {
            "job": self.job.name if self.job else None,
            "run_id": self.run.run_id if self.run else None,
            "status": _status(error, self.is_new),
            "exit_code": exit_code,
            "message": str(error)
            if isinstance(error, KvbatchError)
            else type(error).__name__
            if error
            else None,
            "wall_s": round(time.monotonic() - self.started_s, 3),
        }
        summary = self.run.read_summary() if self.run else {}
        facts |= {name: summary.get(name) for name in COUNTS}
        facts |= {name: summary.get(name) if self.is_new else None for name in MEASURES}
        return facts | {"output": str(self.run.shards) if self.run else None}


@contextmanager
def told(out: TextIO) -> Iterator[Ending]:
    """Print how the block ended, whatever way it did, and write the job's metrics.

    Raises:
        OutputError: The metrics cannot be written; what the block raised comes first.
    """
    ending = Ending()
    error: BaseException | None = None
    try:
        yield ending
    except BaseException as caught:
        error = caught
        raise
    finally:
        facts = ending.facts(error)
        try:
            if ending.job and ending.job.output.metrics:
                write_metrics(Path(ending.job.output.metrics).expanduser(), facts)
        except KvbatchError as problem:
            if error is None:
                facts = ending.facts(problem)
                raise
        finally:
            print(json.dumps(facts, ensure_ascii=False, default=str), file=out, flush=True)


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    return getattr(error, "exit_code", KvbatchError.exit_code)


def _status(error: BaseException | None, is_new: bool) -> str:
    if error is None:
        return "complete" if is_new else "nothing_new"
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "stopped"
    return "over_limits" if isinstance(error, LimitExceeded) else "failed"
