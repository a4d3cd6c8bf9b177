"""The command line: data on stdout, progress and messages on stderr, one exit code per kind of failure.

Commands import what they need when they run, so that help, reports and runs with nothing new start at once.
"""

import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import click

from kvbatch import __version__
from kvbatch.commands import after, before, cache, calibrate, init, running
from kvbatch.commands.common import printed
from kvbatch.progress.streams import open_missing_descriptors, outlets
from kvbatch.signals import hold_signals
from kvbatch.text import escaped


class _ToStderr(logging.Handler):
    """Write a message as a line of its own, also while a progress bar stands on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        from tqdm import tqdm

        tqdm.write(escaped(record.getMessage()), file=sys.stderr)


def main() -> None:
    """Run the command line and exit."""
    # where memory is limited, polars' allocator would complain of its background thread in thousands of lines
    os.environ.setdefault("_RJEM_MALLOC_CONF", "background_thread:false")
    os.environ.setdefault("RUST_BACKTRACE", "0")
    open_missing_descriptors()
    hold_signals()
    sys.exit(invoke(sys.argv[1:]))


def invoke(arguments: Sequence[str]) -> int:
    """Run a command line on whatever standard output and standard error are; return its exit code."""
    with outlets() as out, _log_shown():
        try:
            cli.main(list(arguments), prog_name="kvbatch")
        except SystemExit as end:
            return printed(int(end.code or 0), out)
        raise AssertionError("click exits")


@contextmanager
def _log_shown() -> Iterator[None]:
    """Show what takes long or falls back and says so."""
    handler = _ToStderr()
    loggers = [logging.getLogger(name) for name in ("kvbatch", "engine", "kvcache")]
    for logger in loggers:
        logger.setLevel(logging.INFO)
        logger.addHandler(handler)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="kvbatch")
@click.pass_context
def cli(context: click.Context, debug: bool) -> None:
    """Batch LLM jobs over long documents, from a job file to Parquet."""
    context.obj = debug


for _command in (
    running.run,
    running.resume,
    running.retry,
    init.init,
    before.validate,
    before.plan,
    calibrate.calibrate,
    before.quality,
    before.tune,
    before.inspect,
    before.schema,
    after.status,
    after.report,
    after.diff,
    after.export,
    after.verify,
    cache.cache,
):
    cli.add_command(_command)
