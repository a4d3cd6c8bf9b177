"""`run`, `resume` and `retry`."""

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbatch.commands.common import OVERRIDES, Parsed, guarded_job, say, wants_json
from kvbatch.text import escaped

if TYPE_CHECKING:
    from kvbatch.job_file.sections import Job
    from kvbatch.report.exit_line import ExitReport
    from kvbatch.run_dir.directory import RunDirectory
    from kvbatch.run_dir.lock import IfLocked


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what `run` and `resume` share."""
    options = (
        OVERRIDES,
        click.option(
            "--if-locked",
            type=Parsed("kvbatch.run_dir.lock", "IfLocked.parse"),
            default="fail",
            metavar="fail|skip|wait:SECONDS",
            help="What to do while another process runs the job: exit 75 (fail), exit 0 (skip), wait.",
        ),
        click.option(
            "--deadline",
            type=Parsed("kvbatch.signals", "seconds_until"),
            metavar="HH:MM",
            help="Stop at this time of the local clock, exit 75.",
        ),
        click.option(
            "--max-runtime",
            type=Parsed("kvbatch.signals", "parse_duration"),
            metavar="5h",
            help="Stop after this time, exit 75.",
        ),
        click.option(
            "--json",
            "as_json",
            is_flag=True,
            help="Print one JSON object and nothing else; without it, one follows the text except on a terminal.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _run(
    load: "Callable[[], Job]",
    nothing: str,
    *,
    if_locked: "IfLocked",
    deadline: float | None,
    max_runtime: float | None,
    as_json: bool,
    origin: Mapping[str, Any] | None = None,
    **how: Any,
) -> int:
    """Run a job; report on stdout what came of it, for people and, in the last line, for programs.

    Args:
        nothing: what to say of a run that leaves nothing to do.
    """
    from kvbatch.run.entry import Caller, run_job
    from kvbatch.signals import stop_on_signals

    limits = [(deadline, "--deadline"), (max_runtime, "--max-runtime")]
    stop_at = min(((seconds, name) for seconds, name in limits if seconds is not None), default=None)
    with _exit_report(as_json) as report:
        report.job = load()  # before a signal is obeyed: the job says where its metrics go
        with stop_on_signals(stop_at=stop_at) as stopper:
            caller = Caller(if_locked, stopper, report.begin, origin or {})
            outcome = run_job(report.job, caller=caller, **how)
        if not outcome.is_new:
            report.run = outcome.run
            shards = f"{outcome.run.shards}/part-*.parquet"
            report.print(nothing.format(run=escaped(str(outcome.run.path)), output=escaped(shards)))
    return 0


def _exit_report(as_json: bool) -> "AbstractContextManager[ExitReport]":
    """Report how a block ends: as text on a terminal, as text and JSON elsewhere, as JSON alone if asked to."""
    from kvbatch.report.exit_line import exit_report

    return exit_report(sys.stdout, for_people=not as_json, for_programs=wants_json(as_json))


@click.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--new-run", is_flag=True, help="Begin anew, whatever there is.")
@run_options
@guarded_job
def run(job_file: Path, overrides: tuple[str, ...], **options: Any) -> int:
    """Run the job of JOB_FILE, or go on with its latest run if that was stopped."""
    from kvbatch.job_file.load import load_job

    nothing = (
        "Nothing new: job, model and input are those of the run in {run}.\n"
        "Output: {output} (--new-run runs the job again)"
    )
    origin = {"job_file": str(job_file), "overridden": tuple(_keys(overrides))}
    return _run(lambda: load_job(job_file, overrides), nothing, origin=origin, **options)


def _keys(overrides: tuple[str, ...]) -> list[str]:
    """Return the keys that -s changes."""
    return [override.partition("=")[0] for override in overrides]


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@run_options
@guarded_job
def resume(run_path: Path, overrides: tuple[str, ...], **options: Any) -> int:
    """Go on with RUN, runs/<job> or runs/<job>/<run id>, with the job it keeps."""
    found = _opened(run_path, options["as_json"])
    nothing = "Nothing to do: {run} is complete.\nOutput: {output}"
    return _run(lambda: _kept_job(found, overrides), nothing, resume=found, **options)


def _kept_job(run: "RunDirectory", overrides: tuple[str, ...]) -> "Job":
    """Return the job that a run keeps; raises as `load_job`, and `InputError` if that is damaged."""
    from kvbatch.job_file.load import load_job
    from kvbatch.run_dir.describe import check_job_file

    check_job_file(run)
    return load_job(run.job_file, overrides)


def _opened(run_path: Path, as_json: bool) -> "RunDirectory":
    """Return the run that a path names, from where it began; if there is none, report that on stdout too."""
    from kvbatch.errors import KvbatchError
    from kvbatch.run_dir.find_runs import open_run
    from kvbatch.run_dir.working_directory import enter_working_directory

    try:
        run, note = enter_working_directory(open_run(run_path))
        if note:
            say(note)
        return run
    except KvbatchError as error:
        with _exit_report(as_json):
            raise error


def _origin(run: "RunDirectory", keys: list[str]) -> dict[str, Any]:
    """Return by which command a run began, with more keys changed; nothing of a run whose manifest is damaged."""
    from kvbatch.errors import KvbatchError

    try:
        found = run.read_manifest()
    except KvbatchError:
        return {}
    return {"job_file": found.job_file, "overridden": (*found.overridden, *keys)}


def _finish_reasons(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    known = ("error", "length", "repetition", "stop")
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return names


@click.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--status",
    "redo",
    required=True,
    metavar="LIST",
    callback=_finish_reasons,
    help="Rows to do again: error, length, repetition or stop, joined by commas.",
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), help="What their answers may have now.")
@run_options
@guarded_job
def retry(
    run_path: Path,
    redo: tuple[str, ...],
    max_new_tokens: int | None,
    overrides: tuple[str, ...],
    **options: Any,
) -> int:
    """Generate some rows of RUN again, in a new run that reuses the others."""
    from kvbatch.run_dir.reuse import Reuse

    found = _opened(run_path, options["as_json"])
    more = () if max_new_tokens is None else (f"generation.max_new_tokens={max_new_tokens}",)
    nothing = f"Nothing to do: no row of {{run}} ended with {' or '.join(redo)}.\nOutput: {{output}}"
    return _run(
        lambda: _kept_job(found, (*overrides, *more)),
        nothing,
        reuse=Reuse((str(found.path),), redo, same_input=True),
        origin=_origin(found, _keys((*overrides, *more))),
        **options,
    )
