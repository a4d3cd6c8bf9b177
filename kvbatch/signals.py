"""What stops a run before its end: SIGINT, SIGTERM, SIGHUP, a deadline. Between two writes, never within one.

Rows that have ended are in their shard's file or write-ahead file by then; rows in the engine are run again.
A process holds signals back from its start until a command is ready to obey them, so that even the first moment has
an ending that is told. This module is imported before any other and imports little.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import datetime, timedelta
from types import FrameType
from typing import Any

from kvbatch.errors import Interrupted

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class StopSignal(KeyboardInterrupt):
    """Raised in the main thread; no `except Exception` on the way swallows it."""


class Stopper:
    """Turn signals into `StopSignal`, held back while a block is shielded. A second signal ends the process.

    The second one must be meant: of one lost terminal both the shell and the kernel tell, so SIGHUP never is.
    """

    def __init__(self) -> None:
        self.obeyed: str | None = None  # what stopped the main thread
        self.alarm = "the alarm"  # what a SIGALRM means
        self._shields = 0
        self._pending: str | None = None
        self._is_meant = False

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Receive a signal."""
        if self._is_meant and number != signal.SIGHUP:
            with suppress(OSError):
                os.write(2, b"kvbatch: stopped at once\n")
            os._exit(Interrupted.exit_code)  # what this leaves is what a kill leaves
        self._is_meant |= number != signal.SIGHUP
        if self.obeyed or self._pending:
            return
        self._pending = self.alarm if number == signal.SIGALRM else signal.Signals(number).name
        if not self._shields:
            self._raise()

    def hold(self) -> None:
        """Hold signals back until `obeying`."""
        self._shields += 1

    @contextmanager
    def obeying(self) -> Iterator[None]:
        """Obey signals in the block, those held back first."""
        held, self._shields = self._shields, 0
        try:
            self._obey()
            yield
        finally:
            self._shields = held

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Let a block end before a signal that comes in it is obeyed."""
        if self.obeyed:  # the exception met a destructor or a callback, where Python drops it
            raise StopSignal(self.obeyed)
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        self._obey()

    def _obey(self) -> None:
        if self._pending and not self._shields:
            self._raise()

    def _raise(self) -> None:
        self.obeyed, self._pending = self._pending, None
        raise StopSignal(self.obeyed)


def hold_signals() -> None:
    """Catch the signals that stop a job from now on, and hold them back until a command obeys them."""
    if _installed() is None:
        stopper = Stopper()
        stopper.hold()
        _install(stopper)
        # In the background, a terminal with `stty tostop` would stop the job for its progress lines.
        signal.signal(signal.SIGTTOU, signal.SIG_IGN)


@contextmanager
def obey_signals() -> Iterator[Stopper]:
    """Let signals raise `StopSignal` in the block, if they are caught."""
    stopper = _installed() or Stopper()
    with stopper.obeying():
        yield stopper


@contextmanager
def stop_on_signals(*, stop_at: tuple[float, str] | None = None) -> Iterator[Stopper]:
    """Obey SIGINT, SIGTERM, SIGHUP and a deadline inside the block.

    A SIGHUP that was ignored before, as nohup does, stays so.

    Args:
        stop_at: seconds until the block is stopped, and what to call that.

    Raises:
        Interrupted: A signal came, or the time is up.
    """
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield Stopper()
        return
    stopper = _installed() or Stopper()
    before = _install(stopper)
    if stop_at:
        stopper.alarm = stop_at[1]
        signal.setitimer(signal.ITIMER_REAL, max(stop_at[0], 1e-3))
    try:
        with stopper.obeying():
            yield stopper
    except (StopSignal, Exception) as error:
        if stopper.obeyed is None:
            raise
        # A signal comes between any two statements, so what cleans up behind it may meet half a change and fail.
        raise Interrupted(
            f"stopped by {stopper.obeyed}; finished rows are kept, start again to continue"
        ) from error
    finally:
        if stop_at:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)


def _install(stopper: Stopper) -> dict[int, Any]:
    """Give a stopper the signals; return the handlers before."""
    numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGALRM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    return {number: signal.signal(number, stopper.handle) for number in numbers}


def _installed() -> Stopper | None:
    stopper = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    return stopper if isinstance(stopper, Stopper) else None


def parse_duration(text: str) -> float:
    """Return the seconds of `90s`, `30m`, `5h`, `1d` or `1h30m`.

    Raises:
        ValueError: It is nothing of the kind.
    """
    parts = re.findall(r"(\d+(?:\.\d+)?)([smhd])", text)
    if not parts or "".join(map("".join, parts)) != text:
        raise ValueError(f"{text!r} is no duration such as 90s, 30m or 1h30m")
    return sum(float(number) * _UNIT_S[unit] for number, unit in parts)


def seconds_until(text: str, now: datetime | None = None) -> float:
    """Return the seconds until the next `HH:MM` of the local clock.

    Raises:
        ValueError: It is no time of day.
    """
    now = now or datetime.now()
    try:
        clock = datetime.strptime(text, "%H:%M")
    except ValueError:
        raise ValueError(f"{text!r} is no time of day such as 06:00") from None
    then = now.replace(hour=clock.hour, minute=clock.minute, second=0, microsecond=0)
    if then <= now:
        then += timedelta(days=1)
    return then.timestamp() - now.timestamp()  # a naive time is local: a change of the clock is counted
