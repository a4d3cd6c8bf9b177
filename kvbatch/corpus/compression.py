"""Open a file and decompress it; the codec is detected from magic bytes.

A stream that ends inside a frame is truncated and raises `StreamError`. gzip, bz2 and xz are decompressed frame by
frame here, because the standard file classes treat any bytes after a frame as padding. zstd and lz4 are decompressed
by pyarrow, which reports a truncated frame; zstandard's stream reader does not.
"""

import bz2
import io
import lzma
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

READ_BYTES = 1 << 17
MAX_LAYERS = 4
MAGIC_BYTES = 6
MAGIC = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"\x04\x22\x4d\x18": "lz4",
}


class StreamError(Exception):
    """A compressed stream is cut or damaged; the message does not name the file."""


class _Reader(Protocol):
    def read(self, num_bytes: int) -> bytes: ...


class _Frame(Protocol):
    """One gzip member, bz2 or xz stream, as bz2's and lzma's decompressors read it."""

    @property
    def needs_input(self) -> bool: ...
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class _GzipFrame:
    """Give zlib's decompressor the interface of bz2's and lzma's."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(wbits=31)  # 31: gzip header and checked trailer
        self._filled = False

    def decompress(self, data: bytes, max_length: int) -> bytes:
        out = self._inflate.decompress(self._inflate.unconsumed_tail + data, max_length)
        self._filled = len(out) == max_length
        return out

    @property
    def needs_input(self) -> bool:
        return not self._inflate.unconsumed_tail and not self._filled

    @property
    def eof(self) -> bool:
        return self._inflate.eof

    @property
    def unused_data(self) -> bytes:
        return self._inflate.unused_data


class _FrameReader:
    """Unpack frame after frame (gzip members, bz2 and xz streams) until the source ends."""

    def __init__(self, source: BinaryIO, codec: str, new_frame: Callable[[], _Frame]):
        self._source, self._codec, self._new_frame = source, codec, new_frame
        self._padding = b"" if codec == "bzip2" else b"\0"
        self._frame: _Frame | None = None
        self._num_frames = 0
        self._pending = b""

    def read(self, num_bytes: int) -> bytes:
        try:
            return self._read(num_bytes)
        except (OSError, zlib.error, lzma.LZMAError) as error:
            raise StreamError(f"the {self._codec} data is damaged ({error})") from error

    def _read(self, num_bytes: int) -> bytes:
        while True:
            frame = self._frame or self._start_frame()
            if frame is None:
                return b""
            data, self._pending = self._pending, b""
            if not data and frame.needs_input:
                data = self._source.read(READ_BYTES)
                if not data:
                    raise StreamError(f"the {self._codec} data ends early: the file is truncated")
            out = frame.decompress(data, num_bytes)
            if frame.eof:
                self._pending, self._frame = frame.unused_data, None
            if out:
                return out

    def _start_frame(self) -> _Frame | None:
        """Open the next frame, if there is one; zero bytes between gzip members or xz streams are padding."""
        while not (data := self._pending.lstrip(self._padding)):
            self._pending = self._source.read(READ_BYTES)
            if not self._pending:
                return None
        if self._num_frames:
            while len(data) < MAGIC_BYTES and (more := self._source.read(READ_BYTES)):
                data += more
            magic = next(magic for magic, codec in MAGIC.items() if codec == self._codec)
            if not (data.startswith(magic) or magic.startswith(data)):
                raise StreamError(f"bytes that are not {self._codec} follow the {self._codec} data")
        self._pending = data
        self._frame = self._new_frame()
        self._num_frames += 1
        return self._frame


class _ArrowReader:
    """Unpack zstd or lz4, frame after frame."""

    def __init__(self, source: BinaryIO, codec: str):
        self._codec = codec
        self._stream = pa.CompressedInputStream(pa.PythonFile(source, mode="r"), codec)

    def read(self, num_bytes: int) -> bytes:
        try:
            return self._stream.read(num_bytes)
        except OSError as error:
            if "runcated" in str(error):
                raise StreamError(f"the {self._codec} data ends early: the file is truncated") from error
            if "too much memory" in str(error):
                reason = "its window is over 128 MiB (zstd --long): compress it again without --long"
                raise StreamError(f"the zstd data cannot be unpacked: {reason}") from error
            raise StreamError(f"the {self._codec} data is damaged ({error})") from error


class _First:
    """Read the first bytes of a file, however long it has become."""

    def __init__(self, source: BinaryIO, num_bytes: int):
        self._source, self._left = source, num_bytes

    def read(self, num_bytes: int) -> bytes:
        data = self._source.read(min(num_bytes, self._left))
        self._left -= len(data)
        return data


class _Raw(io.RawIOBase):
    """Fill whole buffers from a reader that may return less, so that a peek sees all magic bytes."""

    def __init__(self, reader: _Reader):
        self._reader = reader

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer") -> int:
        view = memoryview(buffer)
        filled = 0
        while filled < len(view):
            data = self._reader.read(len(view) - filled)
            if not data:
                break
            view[filled : filled + len(data)] = data
            filled += len(data)
        return filled


def codec_of(head: bytes) -> str | None:
    """Name the compression that a file's first bytes announce; None for none."""
    for magic, codec in MAGIC.items():
        if head.startswith(magic):
            return codec
    is_skippable = len(head) >= 4 and 0x50 <= head[0] <= 0x5F and head[1:4] == b"\x2a\x4d\x18"
    return "zstd" if is_skippable else None


def _unpack(source: BinaryIO, codec: str) -> _Reader:
    if codec in ("zstd", "lz4"):
        return _ArrowReader(source, codec)
    frames: dict[str, Callable[[], _Frame]] = {
        "gzip": _GzipFrame,
        "bzip2": bz2.BZ2Decompressor,
        "xz": lzma.LZMADecompressor,
    }
    return _FrameReader(source, codec, frames[codec])


def open_file(path: str, num_bytes: int | None = None) -> "io.BufferedReader[Any]":
    """Open a file, or its first bytes, as it is.

    Raises:
        OSError: it cannot be opened.
    """
    stream = io.BufferedReader(io.FileIO(path), READ_BYTES)  # the caller closes it
    return stream if num_bytes is None else _Layer(_Raw(_First(stream, num_bytes)), stream)


def open_stream(path: str, num_bytes: int | None = None) -> "tuple[io.BufferedReader[Any], tuple[str, ...]]":
    """Open a file for reading with every layer of compression taken off.

    Args:
        num_bytes: read no more of the file; None: all of it.

    Returns:
        The stream, which reads in bounded memory, and the codecs from the outside in.

    Raises:
        OSError: the file cannot be opened or read.
        StreamError: the first bytes are cut or damaged, or there are more than four layers;
            a later read raises it for what lies there.
    """
    stream = open_file(path, num_bytes)
    layers: tuple[str, ...] = ()
    try:
        while codec := codec_of(stream.peek(MAGIC_BYTES)[:MAGIC_BYTES]):
            if len(layers) == MAX_LAYERS:
                raise StreamError(f"compressed more than {MAX_LAYERS} times")
            layers += (codec,)
            stream = _Layer(_Raw(_unpack(stream, codec)), stream)
    except BaseException:
        stream.close()
        raise
    return stream, layers


class _Layer(io.BufferedReader):
    """A buffered stream that closes the one it reads from."""

    def __init__(self, raw: io.RawIOBase, source: BinaryIO):
        super().__init__(raw, buffer_size=READ_BYTES)
        self._source = source

    def close(self) -> None:
        super().close()
        self._source.close()
