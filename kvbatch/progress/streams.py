"""Standard output and standard error, on which no job depends.

Messages that cannot be written are dropped: a full disk, a closed pipe or a lost terminal costs lines and nothing else.
The first failure to write a command's product is kept, for the exit code. Control characters are shown as escapes in
both.
"""

import codecs
import errno
import io
import os
import select
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, TextIO, cast

from kvbatch.errors import OutputError, ReaderLeft
from kvbatch.text import ENCODING_ERRORS, escaped

PATIENCE_S = 1.0  # how long a message waits for a reader that took the last one
_BUFFER_BYTES = 1 << 16
_CURSOR_UP = "\x1b[A"  # between the bars of tqdm, the only sequence that goes out


class _Raw(io.RawIOBase):
    """Bytes to the file descriptor of a text stream, or into the stream itself where it has none."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream
        self._fd: int | None = None
        self._is_terminal = self._is_device = False
        with suppress(
            AttributeError, OSError, ValueError
        ):  # a stream in memory, a closed one, one of another kind
            if stream is None:
                raise io.UnsupportedOperation("no stream")
            stream.flush()
            self._fd = stream.fileno()
            self._is_terminal = stream.isatty()
            # still true of a terminal that is gone
            self._is_device = stat.S_ISCHR(os.fstat(self._fd).st_mode)
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def writable(self) -> bool:
        return True

    @property
    def has_descriptor(self) -> bool:
        return self._fd is not None

    def isatty(self) -> bool:
        return self._is_terminal

    def fileno(self) -> int:
        if self._fd is None:
            raise io.UnsupportedOperation("fileno")
        return self._fd

    def _put(self, data: bytes) -> int:
        if self._stream is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if self._fd is not None:
            return os.write(self._fd, data)
        self._stream.write(self._decode(data))
        self._stream.flush()
        return len(data)

    def _is_free(self, seconds: float | None) -> bool:
        """Wait until something can be written; an error counts as that."""
        if self._fd is None:
            return True
        poll = select.poll()
        poll.register(self._fd, select.POLLOUT)
        return bool(poll.poll(None if seconds is None else seconds * 1000))


class _Lossy(_Raw):
    """Write what can be written now and drop the rest, so that a reader that stops reading delays nothing."""

    def __init__(self, stream: TextIO | None):
        super().__init__(stream)
        self._flows = True

    def write(self, data: Any) -> int:
        with suppress(OSError, ValueError):
            self._flows = self._is_free(PATIENCE_S if self._flows else 0)
            if self._flows:
                return self._put(bytes(data[: select.PIPE_BUF]))  # so much a pipe takes at once
        return len(data)


class _Whole(_Raw):
    """Write everything; after a failure, keep its reason and drop what follows."""

    failure: OutputError | ReaderLeft | None = None
    raises = False
    patience_s: float | None = None

    def write(self, data: Any) -> int:
        while self.failure is None:
            try:
                if not self._is_free(self.patience_s):
                    raise TimeoutError(errno.ETIMEDOUT, "it is not read")
                return self._put(bytes(data[: select.PIPE_BUF] if self.patience_s else data))
            except BlockingIOError:
                continue
            except (OSError, ValueError) as error:
                self.failure = self._named(error)
        if self.raises:
            raise self.failure
        return len(data)

    def _named(self, error: OSError | ValueError) -> OutputError | ReaderLeft:
        if (
            self._is_device
            and getattr(error, "errno", None) == errno.EIO
            or isinstance(error, ConnectionError)
        ):
            return ReaderLeft("nobody reads standard output")
        return OutputError(f"cannot write to standard output: {getattr(error, 'strerror', None) or error}")


class _Outlet(io.TextIOWrapper):
    """A text stream that shows control characters; its `buffer` takes bytes as they are."""

    def __init__(self, raw: _Raw, encoding: str | None, line_buffering: bool):
        if encoding is None or not raw.has_descriptor:
            encoding = "utf-8"
        buffer = io.BufferedWriter(raw, _BUFFER_BYTES)
        super().__init__(buffer, encoding, ENCODING_ERRORS, line_buffering=line_buffering)


class Messages(_Outlet):
    """Progress, notes and errors for a stream, or for no stream. Writing never fails."""

    def __init__(self, stream: TextIO | None):
        super().__init__(_Lossy(stream), getattr(stream, "encoding", None), line_buffering=True)

    def write(self, text: str) -> int:
        """See `io.TextIOBase.write`."""
        parts = text.split(_CURSOR_UP)
        return super().write(_CURSOR_UP.join(escaped(part, keep="\r\n\t") for part in parts))


class Product(_Outlet):
    """What a command prints as its product.

    A failure is kept in `failure`; inside of `raising` it is raised too, for commands that should stop then.
    """

    def __init__(self, stream: TextIO | None):
        self._whole = _Whole(stream)
        super().__init__(self._whole, getattr(stream, "encoding", None), self._whole.isatty())

    @property
    def failure(self) -> OutputError | ReaderLeft | None:
        """Why something could not be written."""
        return self._whole.failure

    @property
    def data(self) -> IO[bytes]:
        """A stream that takes whole lines of UTF-8; on a terminal their control characters are shown as escapes."""
        return _Shown(self) if self.isatty() else cast(IO[bytes], self.buffer)

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise ReaderLeft or OutputError as soon as something cannot be written."""
        self._whole.raises = True
        try:
            yield
        finally:
            self._whole.raises = False

    def wait_at_most(self, seconds: float) -> None:
        """Treat a reader that takes nothing for so long as a failure; by default a write waits for its reader."""
        self._whole.patience_s = seconds

    def clear_failure(self) -> None:
        """Forget a failure, for a command whose product is not what it prints."""
        self._whole.failure = None

    def write(self, text: str) -> int:
        """See `io.TextIOBase.write`."""
        return super().write(escaped(text, keep="\n\t"))


class _Shown(io.BytesIO):
    """Write lines of UTF-8 to a text stream."""

    def __init__(self, out: TextIO):
        super().__init__()
        self._out = out

    def write(self, data: Any) -> int:
        self._out.write(bytes(data).decode().replace("\r\n", "\n"))
        return len(data)


def messages(stream: TextIO | None) -> Messages:
    """Return a stream as one for messages."""
    return stream if isinstance(stream, Messages) else Messages(stream)


@contextmanager
def outlets() -> Iterator[Product]:
    """Let standard output be a `Product` and standard error `Messages` in the block; a nested one changes nothing."""
    before = sys.stdout, sys.stderr
    out = sys.stdout if isinstance(sys.stdout, Product) else Product(sys.stdout)
    sys.stdout, sys.stderr = out, messages(sys.stderr)
    try:
        yield out
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        sys.stdout, sys.stderr = before


def open_missing_descriptors() -> None:
    """Give the standard descriptors that are closed to the null device, before a file of a run gets their number."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
