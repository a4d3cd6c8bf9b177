"""Progress on stderr: a bar on a terminal, elsewhere a line every half minute; the same thread writes the heartbeat."""

import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any, TextIO

from kvbatch.errors import OutputError
from kvbatch.progress.streams import messages
from kvbatch.text import escaped

LINE_INTERVAL_S = 30.0
BEAT_INTERVAL_S = 10.0
PHASES_WITH_ROWS = ("planning", "comparing", "running")


class Progress:
    """Count rows and tokens of the current phase and show them.

    A thread keeps the display and the heartbeat alive while the engine computes.

    Args:
        stream: where it is shown, stderr by default.
        beat: called every ten seconds with phase, rows, tokens and the seconds that they took.
        hide: removes secrets from a text before it is shown.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        beat: Callable[..., None] | None = None,
        hide: Callable[[str], str] = str,
    ):
        self._stream = messages(stream or sys.stderr)
        self.beat, self._hide = beat, hide
        # describes the engine's progress between rows, given the seconds of the phase; it includes the speed
        self.live: Callable[[float], str] | None = None
        self.phase_s: dict[str, float] = {}
        self._is_terminal = self._stream.isatty()
        self._bar: Any = None
        self._phase = self._step = ""
        self._rows = self._tokens = 0
        self._total: int | None = None
        self._started_s = self._shown_s = self._beaten_s = time.monotonic()
        self._lock = threading.RLock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Progress":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end(is_complete=error is None)
        self._closed.set()
        self._thread.join()

    def start(self, phase: str, total_rows: int | None = None) -> None:
        """End the phase before and begin another."""
        self.end()
        with self._lock:
            self._phase, self._total, self._rows, self._tokens = phase, total_rows, 0, 0
            self._step = ""
            self._started_s = self._shown_s = time.monotonic()
            if self._is_terminal and phase in PHASES_WITH_ROWS:
                from tqdm import tqdm

                self._bar = tqdm(
                    total=total_rows, desc=phase, unit="row", file=self._stream, dynamic_ncols=True
                )
            else:
                self._line("…")

    def expect(self, total_rows: int) -> None:
        """Say how many rows this phase has, once that is known."""
        with self._lock:
            self._total = total_rows
            if self._bar is not None:
                self._bar.total = total_rows

    def step(self, text: str) -> None:
        """Say what the phase does at the moment, as loading weights or answering from one of several caches.

        It is shown with the rows until the next step, or until the phase ends.
        """
        with self._lock:
            self._step = self._hide(text)

    def advance(self, num_rows: int, num_tokens: int) -> None:
        """Count rows that are done in this phase."""
        with self._lock:
            self._rows += num_rows
            self._tokens += num_tokens
            if self._bar is not None:
                self._bar.update(num_rows)

    def note(self, text: str) -> None:
        """Show a line beside the progress."""
        text = self._hide(text)
        with self._lock:
            if self._bar is not None:
                self._bar.write(escaped(text), file=self._stream)
            else:
                print(escaped(text), file=self._stream, flush=True)

    def end(self, is_complete: bool = True) -> None:
        """End the current phase, if there is one, and note its seconds."""
        with self._lock:
            if not self._phase:
                return
            self.phase_s[self._phase] = time.monotonic() - self._started_s
            self._step = ""
            if self._bar is not None:
                self._bar.set_postfix_str(self._figures(), refresh=True)
                self._bar.close()
                self._bar = None
            elif is_complete and self._rows:
                self._line(self._figures())
            self._phase = ""

    def _tick(self) -> None:
        while not self._closed.wait(1.0):
            now = time.monotonic()
            with self._lock:
                if self._bar is not None:
                    self._bar.set_postfix_str(self._figures(), refresh=True)
                elif self._phase and now - self._shown_s >= LINE_INTERVAL_S:
                    self._shown_s = now
                    self._line(self._figures())
                phase, rows, tokens = self._phase, self._rows, self._tokens
                started_s = self._started_s
            beat = self.beat  # the main thread may take it away meanwhile
            if beat and phase and now - self._beaten_s >= BEAT_INTERVAL_S:
                self._beaten_s = now
                with suppress(OutputError):  # a full disk is reported when a shard cannot be written
                    beat(phase, rows=rows, tokens=tokens, elapsed_s=now - started_s)

    def _figures(self) -> str:
        elapsed_s = max(1e-6, time.monotonic() - self._started_s)
        parts = []
        if self._phase not in PHASES_WITH_ROWS:
            parts.append(f"{elapsed_s:,.0f} s")
        elif self._bar is None:
            parts.append(f"{self._rows:,} of {self._total:,} rows" if self._total else f"{self._rows:,} rows")
        if self._step:
            parts.append(escaped(self._step))
        if self.live:
            parts.append(self.live(elapsed_s))
        elif self._tokens:
            parts.append(f"{self._tokens / elapsed_s:,.0f} tokens/s")
        return ", ".join(parts)

    def _line(self, text: str) -> None:
        print(f"{self._phase}: {text}", file=self._stream, flush=True)
