"""SIGINT and SIGTERM: stop between two writes, never within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from kvbatch.errors import Interrupted


class StopSignal(KeyboardInterrupt):
    """Raised in the main thread; no `except Exception` on the way swallows it."""


class Stopper:
    """Turn signals into `StopSignal`, held back while a block is shielded."""

    def __init__(self) -> None:
        self.obeyed: str | None = None  # the signal that stopped the main thread
        self._shields = 0
        self._pending: str | None = None

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Receive a signal."""
        self._pending = signal.Signals(number).name
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
def stop_on_signals() -> Iterator[Stopper]:
    """Obey SIGINT and SIGTERM inside the block.

    Raises:
        Interrupted: A signal came.
    """
    stopper = Stopper()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set handlers
        yield stopper
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, stopper.handle) for number in numbers]
    try:
        yield stopper
    except (StopSignal, Exception) as error:
        if stopper.obeyed is None:
            raise
        # A signal comes between any two statements, so what cleans up behind it may meet half a change and fail.
        raise Interrupted(
            f"stopped by {stopper.obeyed}; finished shards stay, a rerun starts the job again"
        ) from error
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
