"""What commands share: one exit code per kind of failure, and options."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import click

from kvbatch.errors import Interrupted, KvbatchError, fault, is_fault


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """Let a command exit with the code that it returns, or with an error's message and code."""

    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, *args: Any, **options: Any) -> None:
        debug = context.obj
        try:
            code = command(*args, **options)
            sys.stdout.flush()
        except KvbatchError as error:
            if debug:
                raise
            click.echo(f"kvbatch: {error}", err=True)
            code = error.exit_code
        except KeyboardInterrupt:  # outside of a run, which obeys signals in its own way
            click.echo("kvbatch: stopped by SIGINT", err=True)
            code = Interrupted.exit_code
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our output left; say nothing more
            code = 0
        except BaseException as error:
            if debug or not is_fault(error):
                raise
            click.echo(f"kvbatch: internal error, {fault(error)} (--debug shows more)", err=True)
            code = KvbatchError.exit_code
        context.exit(code)

    return run


OVERRIDES = click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key: -s cache.preset=logs."
)
