"""The command line: data on stdout, progress and messages on stderr, one exit code per kind of failure.

Commands import what they need when they run, so that help, reports and runs with nothing new start at once.
"""

import logging
import os
import sys

import click

from kvbatch import __version__
from kvbatch.commands import after, before, running


class _ToStderr(logging.Handler):
    """Write a message as a line of its own, also while a progress bar stands on the terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        """See `logging.Handler.emit`."""
        from tqdm import tqdm

        tqdm.write(record.getMessage(), file=sys.stderr)


def main() -> None:
    """Run the command line and exit."""
    # where memory is limited, polars' allocator would complain of its background thread in thousands of lines
    os.environ.setdefault("_RJEM_MALLOC_CONF", "background_thread:false")
    os.environ.setdefault("RUST_BACKTRACE", "0")
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


for _command in (
    running.run,
    running.resume,
    running.retry,
    before.validate,
    before.plan,
    before.quality,
    before.tune,
    before.inspect,
    before.schema,
    after.status,
    after.report,
    after.diff,
    after.export,
):
    cli.add_command(_command)
