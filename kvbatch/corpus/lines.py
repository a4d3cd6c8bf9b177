"""Split a byte stream into numbered lines at the byte 0x0A and nowhere else, with a limit on a line's size."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import BinaryIO

CHUNK_BYTES = 1 << 18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_REST_OF_LINE = re.compile(rb"\S[^\n]*")  # from the first byte that is no white space


@dataclass(frozen=True)
class Line:
    """One line without its end; `data` is None when it was over the limit and therefore not kept."""

    number: int
    data: bytes | None
    num_bytes: int


def iter_lines(stream: BinaryIO, max_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Line]:
    """Yield the lines of a stream that are not blank, numbered from 1 with the blank ones counted.

    One carriage return before the line feed belongs to the line's end; a byte-order mark is dropped at the
    start of the stream only. Memory is one chunk and one line. Blank lines are passed over at the speed of a search:
    a few kilobytes unpack to millions of them.

    Raises:
        OSError, StreamError: whatever the stream raises.
    """
    number = 1
    parts: list[bytes] = []  # of a line that began in an earlier chunk
    num_bytes = 0
    is_blank = True
    while chunk := stream.read(chunk_bytes):
        is_space = chunk.isspace()  # ten times as fast as the searches that it spares
        start = chunk.find(b"\n") + 1
        if start:
            parts.append(chunk[: start - 1])
            is_blank = is_blank and (is_space or not _REST_OF_LINE.search(chunk, 0, start))
            done = [] if is_blank else _finish(number, parts, num_bytes + start - 1, max_bytes)
            parts.clear()
            number, num_bytes, is_blank = number + 1, 0, True
            while done:
                yield done.pop()  # popped, so that nothing here keeps a large line alive
        end = max(start, chunk.rfind(b"\n") + 1)
        for shown in () if is_space else _REST_OF_LINE.finditer(chunk, start, end):
            begin = chunk.rfind(b"\n", start, shown.start()) + 1 or start
            number += chunk.count(b"\n", start, begin)
            parts.append(chunk[begin : shown.end()])
            yield from _finish(number, parts, shown.end() - begin, max_bytes)
            number, start = number + 1, shown.end() + 1
        number += chunk.count(b"\n", start, end)
        num_bytes += len(chunk) - end
        is_blank = is_blank and (is_space or not _REST_OF_LINE.search(chunk, end))
        if num_bytes > max_bytes:
            parts.clear()  # of a line over the limit, only the size is reported
        else:
            parts.append(chunk[end:])
    if not is_blank:
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
