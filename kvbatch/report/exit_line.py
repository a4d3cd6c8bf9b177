"""How a run of the command line ended: a summary for people, one line of JSON for programs, and the metrics file."""

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from kvbatch.errors import Interrupted, KvbatchError, LimitExceeded, OutputError, Skipped
from kvbatch.job_file.sections import Job
from kvbatch.report.prometheus import write_metrics
from kvbatch.run_dir.directory import RunDirectory
from kvbatch.text import all_escaped

COUNTS = (
    *("answers", "ended", "cut", "advice", "rows", "ok", "errors", "rejected", "carried", "truncated"),
    *("left_out", "skipped_files", "skipped"),
)
MEASURES = ("prompt_tokens", "completion_tokens", "tokens_per_s", "kv_peak_bytes_measured", "kv_kept_ratio")


@dataclass
class ExitReport:
    """Collect what is reported at the end; filled in while the job runs.

    Args:
        out: standard output.
        for_people: whether the text for people is printed.
        for_programs: whether the line of JSON is printed.
        job: once it was read.
        run: the run directory, once there is one.
        is_new: whether that run was made or continued now.
    """

    out: TextIO
    for_people: bool = True
    for_programs: bool = True
    job: Job | None = None
    run: RunDirectory | None = None
    is_new: bool = False
    started_s: float = field(default_factory=time.monotonic)

    def begin(self, run: RunDirectory) -> None:
        """Say which run directory is written."""
        self.run, self.is_new = run, True

    def print(self, text: str) -> None:
        """Print a text for people."""
        if self.for_people:
            print(text, file=self.out)

    def close(self, error: BaseException | None) -> None:
        """Print the summary of a run that came to its end, write the metrics, print the line of JSON.

        Args:
            error: by which the run ended.

        Raises:
            KvbatchError: The metrics cannot be written, or the summary not read, and there was no error before.
        """
        problem = None
        is_end = error is None or isinstance(error, LimitExceeded)
        if self.run and self.is_new and is_end and self.run.read_summary():
            from kvbatch.report.summary import load_summary
            from kvbatch.report.summary_text import render

            try:
                self.print(render(all_escaped(load_summary(self.run.path))))
            except KvbatchError as unreadable:
                problem = unreadable
        facts = self._facts(error or problem)
        if self.job and self.job.output.metrics and not isinstance(error, Skipped):
            try:
                write_metrics(Path(os.path.expanduser(self.job.output.metrics)), facts)
            except OutputError as unwritable:
                problem = problem or unwritable
        if problem and error is None:
            facts = self._facts(problem)
        if self.for_programs:
            print(json.dumps(facts, ensure_ascii=False, default=str), file=self.out, flush=True)
        if problem and error is None:
            raise problem

    def _facts(self, error: BaseException | None) -> dict[str, Any]:
        message = str(error) if isinstance(error, KvbatchError) else error and type(error).__name__
        facts: dict[str, Any] = {
            "job": self.job.name if self.job else None,
            "run_id": self.run.run_id if self.run else None,
            "status": _status(error, self.is_new),
            "exit_code": _exit_code(error),
            "message": message,
            "wall_s": round(time.monotonic() - self.started_s, 3),
        }
        summary: dict[str, Any] = {}
        with suppress(KvbatchError):  # a summary that cannot be read does not hide how the run ended
            summary = self.run.read_summary() if self.run else {}
        facts |= {name: summary.get(name) for name in COUNTS}
        facts |= {name: summary.get(name) if self.is_new else None for name in MEASURES}
        return facts | {"output": str(self.run.shards) if self.run else None}


@contextmanager
def exit_report(out: TextIO, *, for_people: bool = True, for_programs: bool = True) -> Iterator[ExitReport]:
    """Report how the block ended, with or without an error; raises as `ExitReport.close`."""
    report = ExitReport(out, for_people, for_programs)
    try:
        yield report
    except BaseException as error:
        report.close(error)
        raise
    report.close(None)


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    return getattr(error, "exit_code", KvbatchError.exit_code)


def _status(error: BaseException | None, is_new: bool) -> str:
    if error is None:
        return "complete" if is_new else "nothing_new"
    if isinstance(error, Skipped):
        return "skipped"
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "stopped"
    return "over_limits" if isinstance(error, LimitExceeded) else "failed"
