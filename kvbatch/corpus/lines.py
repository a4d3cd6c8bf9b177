"""Cut a byte stream into lines at the byte 0x0A and nowhere else; owns line numbers and the size limit."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 1 << 18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Line:
    """One line without its end; `data` is None when it was over the limit and therefore not kept."""

    number: int
    data: bytes | None
    num_bytes: int


def iter_lines(stream: BinaryIO, max_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Line]:
    """Yield the lines of a stream that are not blank, numbered from 1 with the blank ones counted.

    One carriage return before the line feed belongs to the line's end; a byte-order mark is dropped at the
    start of the stream only. Memory is one chunk and one line.

    Raises:
        OSError, StreamError: whatever the stream raises.
    """
    number = 1
    parts: list[bytes] = []
    num_bytes = 0
    while chunk := stream.read(chunk_bytes):
        *ends, rest = chunk.split(b"\n")
        for piece in ends:
            parts.append(piece)
            num_bytes += len(piece)
            done = _finish(number, parts, num_bytes, max_bytes)
            number, num_bytes = number + 1, 0
            while done:
                yield done.pop()  # popped, so that nothing here keeps a large line alive
        num_bytes += len(rest)
        if num_bytes > max_bytes:
            parts.clear()  # the size is all that will be told of this line
        else:
            parts.append(rest)
    yield from _finish(number, parts, num_bytes, max_bytes)


def _finish(number: int, parts: list[bytes], num_bytes: int, max_bytes: int) -> list[Line]:
    """Join the parts of a line: one line, or none if it is blank."""
    if num_bytes > max_bytes:
        parts.clear()
        return [Line(number, None, num_bytes)]
    data = b"".join(parts)
    parts.clear()  # a line of 1 GB must not be held twice while it is used
    if number == 1:
        data = data.removeprefix(BYTE_ORDER_MARK)
    data = data.removesuffix(b"\r")
    return [] if not data or data.isspace() else [Line(number, data, num_bytes)]
