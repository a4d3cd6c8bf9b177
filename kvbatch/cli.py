"""The command line: data on stdout, progress and messages on stderr, one exit code per kind of failure.

Commands import what they need when they run, so that help, reports and runs with nothing new start at once.
"""

import json
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from kvbatch import __version__
from kvbatch.errors import Interrupted, KvbatchError

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


@cli.command()
@click.argument("job_file", type=click.Path(path_type=Path))
@click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key: -s input.limit=5."
)
@click.option("--new-run", is_flag=True, help="Run again even if nothing is new.")
@click.pass_context
def run(context: click.Context, job_file: Path, overrides: tuple[str, ...], new_run: bool) -> None:
    """Run the job of JOB_FILE."""

    def command() -> int:
        from kvbatch.config import load_job
        from kvbatch.run import run_job
        from kvbatch.stop import stop_on_signals

        with stop_on_signals() as stopper:
            outcome = run_job(load_job(job_file, overrides), new_run=new_run, stopper=stopper)
        if not outcome.is_new:
            click.echo(f"Nothing new: job, model and input are those of the run in {outcome.run.path}.")
            click.echo(f"Output: {outcome.run.shards}/part-*.parquet (--new-run runs the job again)")
            return 0
        click.echo(_rendered(outcome.run.path))
        return 0

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
