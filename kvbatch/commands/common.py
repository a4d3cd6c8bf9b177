"""What commands share: one exit code per kind of failure, what becomes of their output, and options."""

import functools
import importlib
import json
import operator
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import click

from kvbatch.errors import Interrupted, KvbatchError, ReaderLeft, fault, is_fault
from kvbatch.progress.streams import Product, outlets
from kvbatch.signals import obey_signals
from kvbatch.text import escaped

_PATIENCE_S = 10.0  # with a reader of a job's summary


def guarded(command: Callable[..., int]) -> Callable[..., None]:
    """Let a command exit with the code that it returns, or with an error's message and code.

    What it prints is its product: see `printed`.
    """

    def obedient(*args: Any, **options: Any) -> int:
        with obey_signals():
            return command(*args, **options)

    return _guarded(command, obedient, printed)


def guarded_job(command: Callable[..., int]) -> Callable[..., None]:
    """Guard a command whose product is a run: its exit code is the job's own, whatever becomes of its output.

    It obeys signals when it is ready to tell how it ended.
    """

    def patient(*args: Any, **options: Any) -> int:
        with outlets() as out:
            out.wait_at_most(_PATIENCE_S)
            return command(*args, **options)

    def unread(code: int, out: Product) -> int:
        out.flush()
        out.clear_failure()
        return code

    return _guarded(command, patient, unread)


def printed(code: int, out: Product) -> int:
    """Return a command's exit code once its output is out.

    It stays what it is if the reader left. If the output could not be written, a success becomes that error.
    """
    out.flush()
    if code or not isinstance(out.failure, KvbatchError):
        return code
    say(*out.failure.args)
    return out.failure.exit_code


def say(first: str, *more: str) -> None:
    """Show a message on standard error, line by line."""
    for line in (f"kvbatch: {first}", *more):
        print(escaped(line), file=sys.stderr)


def wants_json(flag: bool) -> bool:
    """Tell whether a command prints JSON: when `--json` asks for it, or when stdout is no terminal."""
    return flag or not sys.stdout.isatty()


def print_json(value: object) -> None:
    """Print a value as one line of JSON."""
    print(json.dumps(value, ensure_ascii=False))


def _guarded(
    command: Callable[..., int], obedient: Callable[..., int], ended: Callable[[int, Product], int]
) -> Callable[..., None]:
    @click.pass_context
    @functools.wraps(command)
    def run(context: click.Context, *args: Any, **options: Any) -> None:
        with outlets() as out:
            try:
                code = obedient(*args, **options)
            except ReaderLeft:
                code = 0
            except BaseException as error:
                if isinstance(error, click.ClickException):  # a bad command line: click says so, exit code 2
                    raise
                if not isinstance(error, KvbatchError | KeyboardInterrupt) and not is_fault(error):
                    raise
                if context.obj:  # --debug
                    traceback.print_exc()
                say(*_message(error))
                code = _code(error)
            code = ended(code, out)
        context.exit(code)

    return run


def _message(error: BaseException) -> Sequence[str]:
    if isinstance(error, KvbatchError):
        return [str(line) for line in error.args] or [type(error).__name__]
    if isinstance(error, KeyboardInterrupt):  # outside of a run, which obeys signals in its own way
        return [f"stopped by {error or 'SIGINT'}"]
    return [f"internal error, {fault(error)} (--debug shows more)"]


def _code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return Interrupted.exit_code
    return error.exit_code if isinstance(error, KvbatchError) else KvbatchError.exit_code


OVERRIDES = click.option(
    "-s", "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key: -s cache.preset=logs."
)


class Parsed(click.ParamType):
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
