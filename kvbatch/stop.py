"""What stops a run before its end: SIGINT, SIGTERM, a deadline. Between two writes, never within one.

Rows that have ended are in their shard's file or write-ahead file by then; rows in the engine are run again.
"""

import os
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from types import FrameType

from kvbatch.errors import Interrupted

_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class StopSignal(KeyboardInterrupt):
    """Raised in the main thread; no `except Exception` on the way swallows it."""


class Stopper:
    """Turn signals into `StopSignal`, held back while a block is shielded. A second signal ends the process."""

    def __init__(self) -> None:
        self.obeyed: str | None = None  # what stopped the main thread
        self.alarm = "the alarm"  # what a SIGALRM means
        self._shields = 0
        self._pending: str | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Receive a signal."""
        if self.obeyed or self._pending:
            os.write(2, b"kvbatch: stopped at once\n")
            os._exit(Interrupted.exit_code)  # what this leaves is what a kill leaves
        self._pending = self.alarm if number == signal.SIGALRM else signal.Signals(number).name
        if not self._shields:
            self._raise()

    @contextmanager
    def shield(self) -> Iterator[None]:
        """Let a block end before a signal that comes in it is obeyed."""
        self._shields += 1
        try:
            yield
        finally:
            self._shields -= 1
        if self._pending and not self._shields:
            self._raise()

    def _raise(self) -> None:
        self.obeyed, self._pending = self._pending, None
        raise StopSignal(self.obeyed)


@contextmanager
def stop_on_signals(*, stop_at: tuple[float, str] | None = None) -> Iterator[Stopper]:
    """Obey SIGINT, SIGTERM and a deadline inside the block.

    Args:
        stop_at: seconds until the block is stopped, and what to call that.

    Raises:
        Interrupted: A signal came, or the time is up.
    """
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stopper
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = [signal.signal(number, stopper.handle) for number in numbers]
    if stop_at:
        stopper.alarm = stop_at[1]
        signal.setitimer(signal.ITIMER_REAL, max(stop_at[0], 1e-3))
    try:
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
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


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
