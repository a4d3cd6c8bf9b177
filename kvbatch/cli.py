"""The command line: data on stdout, progress and messages on stderr, one exit code per kind of failure.

Commands import what they need when they run, so that help, reports and runs with nothing new start at once.
"""

import importlib
import json
import logging
import operator
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kvbatch import __version__
from kvbatch.errors import Interrupted, JobFileError, KvbatchError, LimitExceeded

if TYPE_CHECKING:
    from kvbatch.job import Job, QualityGuardSection

EXIT_INTERNAL = KvbatchError.exit_code
EXIT_INTERRUPTED = Interrupted.exit_code


class _ToStderr(logging.Handler):
    """Write a message as a line of its own, also while a progress bar stands on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        from tqdm import tqdm

        tqdm.write(record.getMessage(), file=sys.stderr)


def main() -> None:
    """Run the command line and exit."""
    for name in ("kvbatch", "engine", "kvcache"):  # what takes long or falls back says so
        logger = logging.getLogger(name)
        logger.setLevel(logging.INFO)
        logger.addHandler(_ToStderr())
    cli.main(prog_name="kvbatch")


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="kvbatch")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Batch LLM jobs over long documents, from a job file to Parquet."""
    context.obj = debug


def _guarded(context: click.Context, command: Callable[[], int]) -> None:
    """Run a command; answer its exit code, or an error's message and code."""
    try:
        code = command()
        sys.stdout.flush()
    except KvbatchError as error:
        if context.obj:
            raise
        click.echo(f"kvbatch: {error}", err=True)
        code = error.exit_code
    except KeyboardInterrupt:  # outside of a run, which obeys signals in its own way
        click.echo("kvbatch: stopped by SIGINT", err=True)
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output left; say nothing more
        code = 0
    except Exception as error:
        if context.obj:
            raise
        click.echo(
            f"kvbatch: internal error, {type(error).__name__}: {error} (--debug shows where)", err=True
        )
        code = EXIT_INTERNAL
    context.exit(code)


class _Parsed(click.ParamType):
    """Read an option by a function of another module, which is imported only then."""

    def __init__(self, module: str, function: str):
        self.name, self._module, self._function = function, module, function

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType.convert`."""
        if not isinstance(value, str):
            return value
        read = operator.attrgetter(self._function)(importlib.import_module(self._module))
        try:
            return read(value)
        except ValueError as error:
            self.fail(str(error), param, ctx)


def _run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what `run` and `resume` share."""
    options = (
        click.option(
            "-s",
            "--set",
            "overrides",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set a key: -s input.limit=5.",
        ),
        click.option(
            "--if-locked",
            type=_Parsed("kvbatch.lock", "IfLocked.parse"),
            default="fail",
            metavar="fail|skip|wait:SECONDS",
            help="What to do while another process runs the job: exit 75 (fail), exit 0 (skip), wait.",
        ),
        click.option(
            "--deadline",
            type=_Parsed("kvbatch.stop", "seconds_until"),
            metavar="HH:MM",
            help="Stop at this time of the local clock, exit 75.",
        ),
        click.option(
            "--max-runtime",
            type=_Parsed("kvbatch.stop", "parse_duration"),
            metavar="5h",
            help="Stop after this time, exit 75.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _run(
    load: "Callable[[], Job]",
    nothing: str,
    deadline: float | None = None,
    max_runtime: float | None = None,
    **how: Any,
) -> int:
    """Run a job; tell on stdout what came of it, for people and, in the last line, for machines.

    Args:
        nothing: what to say of a run that leaves nothing to do.
    """
    from kvbatch.ending import told
    from kvbatch.run import run_job
    from kvbatch.stop import stop_on_signals

    limits = [(deadline, "--deadline"), (max_runtime, "--max-runtime")]
    stop_at = min((limit for limit in limits if limit[0] is not None), default=None)
    with told(sys.stdout) as ending:
        with stop_on_signals(stop_at=stop_at) as stopper:
            ending.job = load()
            outcome = run_job(ending.job, stopper=stopper, on_run=ending.begin, **how)
        if not outcome.is_new:
            ending.run = outcome.run
            click.echo(nothing.format(run=outcome.run.path, output=f"{outcome.run.shards}/part-*.parquet"))
    return 0


@cli.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("--new-run", is_flag=True, help="Begin anew, whatever there is.")
@_run_options
@click.pass_context
def run(context: click.Context, job_file: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Run the job of JOB_FILE, or go on with its latest run if that was stopped."""

    def command() -> int:
        from kvbatch.config import load_job

        nothing = (
            "Nothing new: job, model and input are those of the run in {run}.\n"
            "Output: {output} (--new-run runs the job again)"
        )
        return _run(lambda: load_job(job_file, overrides), nothing, **options)

    _guarded(context, command)


@cli.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@_run_options
@click.pass_context
def resume(context: click.Context, run_path: Path, overrides: tuple[str, ...], **options: Any) -> None:
    """Go on with RUN, runs/<job> or runs/<job>/<run id>, with the job it keeps."""

    def command() -> int:
        from kvbatch.config import load_job
        from kvbatch.manifest import open_run

        found = open_run(run_path)
        job_file = found.path / "job.resolved.yaml"
        nothing = "Nothing to do: {run} is complete.\nOutput: {output}"
        return _run(lambda: load_job(job_file, overrides), nothing, resume=found, **options)

    _guarded(context, command)


def _finish_reasons(context: click.Context, option: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    known = ("error", "length", "repetition", "stop")
    for name in names:
        if name not in known:
            raise click.BadParameter(f"{name!r} is none of {', '.join(known)}")
    return names


@cli.command()
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
@_run_options
@click.pass_context
def retry(
    context: click.Context,
    run_path: Path,
    redo: tuple[str, ...],
    max_new_tokens: int | None,
    overrides: tuple[str, ...],
    **options: Any,
) -> None:
    """Do some rows of RUN again, in a new run that carries the others over."""

    def command() -> int:
        from kvbatch.carry import Carry
        from kvbatch.config import load_job
        from kvbatch.manifest import open_run

        found = open_run(run_path)
        more = () if max_new_tokens is None else (f"generation.max_new_tokens={max_new_tokens}",)
        nothing = f"Nothing to do: no row of {{run}} ended with {' or '.join(redo)}.\nOutput: {{output}}"
        return _run(
            lambda: load_job(found.path / "job.resolved.yaml", (*overrides, *more)),
            nothing,
            carry=Carry((str(found.path),), redo, same_input=True),
            **options,
        )

    _guarded(context, command)


@cli.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option("-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def validate(context: click.Context, job_file: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check the job of JOB_FILE, its input, model and output; needs no GPU and no weights."""

    def command() -> int:
        from kvbatch.validate import run_validate

        return run_validate(job_file, overrides, as_json=as_json, out=sys.stdout)

    _guarded(context, command)


_OVERRIDES = click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key: -s cache.preset=logs."
)
_SAMPLE = click.option(
    "--sample", type=click.IntRange(min=1), help="Rows to compare; as the job says, or 20."
)


def _limits(job: "Job", **given: Any) -> "QualityGuardSection":
    """Return the job's quality guard, or the default one, with what the command line changes."""
    from kvbatch.job import QualityGuardSection

    guard = job.quality_guard or QualityGuardSection()
    return guard.model_copy(update={name: value for name, value in given.items() if value is not None})


@cli.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@_OVERRIDES
@click.option(
    "--what-if", "what_if", multiple=True, metavar="KEY=VALUE", help="Compare: cache.keep_ratio=0.3."
)
@click.option("--calibrate", is_flag=True, help="Measure the speed on a few rows, with the weights.")
@click.option("--price-per-hour", type=click.FloatRange(min=0), metavar="PRICE", help="Say what it costs.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def plan(
    context: click.Context,
    job_file: Path,
    overrides: tuple[str, ...],
    what_if: tuple[str, ...],
    calibrate: bool,
    price_per_hour: float | None,
    as_json: bool,
) -> None:
    """Say what the job of JOB_FILE will do, need and take; the next run uses this plan."""

    def command() -> int:
        from kvbatch.config import load_job
        from kvbatch.planning import plan_job, render, to_json
        from kvbatch.stop import stop_on_signals

        job = load_job(job_file, overrides)
        other = load_job(job_file, (*overrides, *what_if)) if what_if else None
        with stop_on_signals() as stopper:
            view = plan_job(job, what_if=what_if, other=other, calibrate=calibrate, stopper=stopper)
        if as_json:
            click.echo(json.dumps(to_json(view, price_per_hour), ensure_ascii=False))
        else:
            click.echo(render(view, price_per_hour))
        return 0

    _guarded(context, command)


@cli.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@_OVERRIDES
@_SAMPLE
@click.option("--json", "as_json", is_flag=True, help="One JSON object, with every sampled row.")
@click.pass_context
def quality(
    context: click.Context, job_file: Path, overrides: tuple[str, ...], sample: int | None, as_json: bool
) -> None:
    """Compare the cache of JOB_FILE with the full one, on a sample of its rows; exit 65 over a limit."""

    def command() -> int:
        from kvbatch.config import load_job
        from kvbatch.quality import QualitySample, judge
        from kvbatch.run import opened_job
        from kvbatch.stop import stop_on_signals

        job = load_job(job_file, overrides)
        policy, limits = job.cache.policy, _limits(job, sample=sample)
        if not policy.compresses:
            raise JobFileError("the job keeps the full cache, so nothing can be lost; set cache.preset")
        with stop_on_signals() as stopper, opened_job(job, stopper=stopper) as runner:
            runner.progress.start("judging", limits.sample)
            rows = QualitySample(runner, limits.sample, runner.progress.advance).compare({"job": policy})
        verdict = judge(rows, limits)
        if as_json:
            click.echo(json.dumps(asdict(verdict) | {"rows": rows}, ensure_ascii=False))
        else:
            click.echo(f"quality      {verdict}")
            for problem in verdict.problems:
                click.echo(f"limit        {problem}")
        return 0 if verdict.holds else LimitExceeded.exit_code

    _guarded(context, command)


@cli.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@_OVERRIDES
@_SAMPLE
@click.option("--max-nll-delta", type=float, metavar="NATS", help="Limit; as the job says, or 0.03.")
@click.option("--plot", "plot_file", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw it.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def tune(
    context: click.Context,
    job_file: Path,
    overrides: tuple[str, ...],
    plot_file: Path | None,
    as_json: bool,
    **given: Any,
) -> None:
    """Find the cheapest cache that keeps the quality limits on a sample of the rows of JOB_FILE."""

    def command() -> int:
        from kvbatch import tune
        from kvbatch.config import load_job
        from kvbatch.run import opened_job
        from kvbatch.stop import stop_on_signals

        job = load_job(job_file, overrides)
        limits = _limits(job, **given)
        with stop_on_signals() as stopper, opened_job(job, stopper=stopper) as runner:
            runner.progress.start("judging", limits.sample)
            found = tune.tune(runner, limits)
        if plot_file:
            tune.plot(found, plot_file)
        best = tune.cheapest(found)
        if as_json:
            candidates = [
                {"name": c.name, "cache": dict(c.keys), "holds": c.verdict.holds, **asdict(c.verdict)}
                for c in found
            ]
            click.echo(json.dumps({"best": best and best.name, "candidates": candidates}, ensure_ascii=False))
        else:
            click.echo(tune.render(found))
        return 0 if best else LimitExceeded.exit_code

    _guarded(context, command)


@cli.command()
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--id", "id_column", metavar="COLUMN", help="Column of the row ids.")
@click.option("--text", "text_column", metavar="COLUMN", help="Column of the texts, 'text' by default.")
@click.option(
    "--format",
    "format_",
    type=click.Choice(["auto", "jsonl", "parquet", "openai-batch"]),
    default="auto",
    show_default=True,
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line, a summary last.")
@click.pass_context
def inspect(
    context: click.Context,
    inputs: tuple[str, ...],
    id_column: str | None,
    text_column: str | None,
    format_: Any,
    as_json: bool,
) -> None:
    """Show what would be read from INPUT..., without loading a model."""

    def command() -> int:
        from kvbatch.corpus import InputSpec
        from kvbatch.inspect import run_inspect

        spec = InputSpec(paths=inputs, format=format_, id_column=id_column, text_column=text_column)
        return run_inspect(spec, as_json=as_json, out=sys.stdout, err=sys.stderr)

    _guarded(context, command)


@cli.command()
@click.option("--markdown", "as_markdown", is_flag=True, help="The table of all keys instead.")
@click.pass_context
def schema(context: click.Context, as_markdown: bool) -> None:
    """Print the JSON schema of job files, for editors to complete and check them by."""

    def command() -> int:
        from kvbatch.schema import json_schema, markdown

        click.echo(markdown() if as_markdown else json.dumps(json_schema(), indent=2, ensure_ascii=False))
        return 0

    _guarded(context, command)


@cli.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def status(context: click.Context, run_path: Path, as_json: bool) -> None:
    """Say what RUN is at: runs/<job> for the latest run, or runs/<job>/<run id>."""

    def command() -> int:
        from kvbatch.status import load_status, render_status

        found = load_status(run_path)
        click.echo(json.dumps(found, ensure_ascii=False) if as_json else render_status(found))
        return 0

    _guarded(context, command)


@cli.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def report(context: click.Context, run_path: Path, as_json: bool) -> None:
    """Print the summary of RUN and write its page: runs/<job> for the latest run, or runs/<job>/<run id>."""

    def command() -> int:
        if as_json:
            from kvbatch.report import load_summary

            click.echo(json.dumps(load_summary(run_path), ensure_ascii=False))
        else:
            from kvbatch.manifest import open_run
            from kvbatch.page import write_page

            try:
                write_page(open_run(run_path))
            finally:  # the summary can be told of a run whose directory cannot be written
                click.echo(_rendered(run_path))
        return 0

    _guarded(context, command)


@cli.command()
@click.argument("run_a", type=click.Path(path_type=Path))
@click.argument("run_b", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
@click.pass_context
def diff(context: click.Context, run_a: Path, run_b: Path, as_json: bool) -> None:
    """Compare RUN_A and RUN_B row by row: memory, speed, answers, quality."""

    def command() -> int:
        from kvbatch.diff import compare, render_diff
        from kvbatch.manifest import open_run

        found = compare(open_run(run_a), open_run(run_b))
        click.echo(json.dumps(found, ensure_ascii=False) if as_json else render_diff(found))
        return 0

    _guarded(context, command)


@cli.command()
@click.argument("run_path", metavar="RUN", type=click.Path(path_type=Path))
@click.option(
    "--format",
    "format_",
    type=click.Choice(["jsonl", "openai-batch", "csv"]),
    default="jsonl",
    show_default=True,
)
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="A file, which appears when it is whole."
)
@click.pass_context
def export(context: click.Context, run_path: Path, format_: str, output: Path | None) -> None:
    """Write the rows of RUN in another format, to stdout or a file."""

    def command() -> int:
        from kvbatch.export import export_rows
        from kvbatch.manifest import open_run
        from kvbatch.writer import atomic_file

        run = open_run(run_path)
        if output:
            with atomic_file(output) as stream:
                export_rows(run, format_, stream)
        else:
            export_rows(run, format_, sys.stdout.buffer)
        return 0

    _guarded(context, command)


def _rendered(run_path: Path) -> str:
    from kvbatch.report import load_summary, render

    return render(load_summary(run_path))
