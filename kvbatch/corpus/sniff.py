"""Detect the format and compression of a file from its first bytes.

Also names the reason why a file cannot be read, or why a file of a directory is skipped.
"""

import os
import re

from kvbatch.corpus.compression import StreamError, open_stream
from kvbatch.corpus.convert import how_to_convert
from kvbatch.corpus.json_values import BadRecord, find_field, parse_record
from kvbatch.errors import InputError

HEAD_BYTES = 4096
SNIFFED_BYTES = 1 << 16  # read of a file whose suffix is neither that of JSONL nor of Parquet
SNIFFED_LINES = 20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".json")
COMPRESSION_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz", ".lz4")
UNFINISHED_SUFFIXES = (
    ".tmp",
    ".temp",
    ".part",
    ".partial",
    ".filepart",
    ".crdownload",
    ".inprogress",
    ".swp",
    "~",
)
REFUSED = {
    b"PK\x03\x04": "a zip archive",
    b"ARROW1": "an Arrow IPC file",
    b"ORC": "an ORC file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3": "an SQLite database",
    b"\x02\x21\x4c\x18": "compressed with the legacy format of lz4",
    b"\xff\x06\0\0sNaPpY": "compressed with snappy",
    b"\x1f\x9d": "compressed with compress",
    b"]\0\0": "compressed with lzma",
    b"7z\xbc\xaf": "a 7z archive",
    b"Rar!": "a RAR archive",
    b"%PDF": "a PDF",
}
NO_DATA = "neither JSONL nor Parquet by name or content"
CONVERTIBLE = (NO_DATA, *REFUSED.values())  # reasons for which a file is skipped that could be converted
TAR_MAGIC = slice(257, 262), b"ustar"
# Byte-order marks, longest first; without one, JSON shows its encoding by where its first bytes are zero.
WIDE_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32LE"),
    (b"\0\0\xfe\xff", "UTF-32BE"),
    (b"\xff\xfe", "UTF-16LE"),
    (b"\xfe\xff", "UTF-16BE"),
)
WIDE_ZEROS: dict[tuple[bool, ...], str] = {
    (False, True, True, True): "UTF-32LE",
    (True, True, True, False): "UTF-32BE",
    (False, True, False, True): "UTF-16LE",
    (True, False, True, False): "UTF-16BE",
}


def identify(path: str, wanted: str) -> tuple[str, tuple[str, ...]]:
    """Look at a file's first bytes, never at its suffix alone.

    Args:
        wanted: the job's input.format.

    Returns:
        Its format ("jsonl" or "parquet") and its compression, from the outside in.

    Raises:
        InputError: it cannot be opened, is empty where it must not be, or is something else.
    """
    try:
        if not os.path.isfile(path):
            where = "" if os.path.isabs(path) else f" in {os.getcwd()}"
            raise InputError(
                f"{path}: {'not a regular file' if os.path.exists(path) else f'no such file{where}'}"
            )
        stream, layers = open_stream(path)
        with stream:
            head = stream.read(HEAD_BYTES)
    except OSError as error:
        raise InputError(f"{path}: cannot be opened: {error.strerror or error}") from error
    except StreamError as error:
        raise InputError(f"{path}: {error}") from error
    found = _format_of(path, head, layers)
    if wanted not in ("auto", found):
        true_type = "Parquet" if found == "parquet" else "text"
        raise InputError(f"{path}: input.format is {wanted}, but the file is {true_type}")
    return found, layers


def _format_of(path: str, head: bytes, layers: tuple[str, ...]) -> str:
    name = path.lower()
    if head.startswith(b"PARE"):
        raise InputError(f"{path}: encrypted Parquet (encrypted footer), and there is no key to read it with")
    if head.startswith(b"PAR1"):
        if layers:
            raise InputError(f"{path}: Parquet inside {layers[-1]}: decompress the file first")
        return "parquet"
    if not head and not layers and name.endswith(PARQUET_SUFFIXES + COMPRESSION_SUFFIXES):
        raise InputError(f"{path}: the file is empty (0 bytes)")
    if what := _refused(head):
        raise InputError(
            f"{path}: it is {what}; only JSONL and Parquet can be read: {how_to_convert(what, path)}"
        )
    if encoding := _wide_encoding(head):
        remedy = f"convert it to UTF-8, for example with `iconv -f {encoding} -t UTF-8`"
        raise InputError(f"{path}: it is {encoding} text, and JSONL is UTF-8: {remedy}")
    text = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    first_line = text.split(b"\n", 1)[0].strip()
    if name.endswith(PARQUET_SUFFIXES) and not text.startswith(b"{"):
        raise InputError(f"{path}: it is not Parquet: the magic bytes PAR1 are missing")
    if first_line == b"{" or (text.startswith(b"[") and text[1:].lstrip()[:1] in (b"{", b"]", b"")):
        remedy = "write one object a line, for example with `jq -c '.[]'`"
        raise InputError(f"{path}: it is one JSON document, not JSONL: {remedy}")
    return "jsonl"


def not_jsonl(path: str) -> InputError:
    """Return the error for a text file without a JSON object, and how to convert it."""
    reason = "it is not JSONL: none of its lines is a JSON object"
    return InputError(f"{path}: {reason}; convert it: {how_to_convert('', path)}")


def _wide_encoding(head: bytes) -> str | None:
    """Name the encoding of a text whose characters take two or four bytes each."""
    for mark, encoding in WIDE_MARKS:
        if head.startswith(mark):
            return encoding
    return WIDE_ZEROS.get(tuple(byte == 0 for byte in head[:4]))


def _refused(head: bytes) -> str | None:
    """Name the kind of a file that is known and cannot be read."""
    if head[TAR_MAGIC[0]] == TAR_MAGIC[1]:
        return "a tar archive"
    return next((what for magic, what in REFUSED.items() if head.startswith(magic)), None)


def is_named_as_data(path: str) -> bool:
    """Tell whether a file's suffix, below those of compression, promises JSONL or Parquet."""
    name = os.path.basename(path).lower()
    while name.endswith(COMPRESSION_SUFFIXES):
        name = name[: name.rindex(".")]
    return name.endswith(JSONL_SUFFIXES + PARQUET_SUFFIXES)


def why_no_data(path: str, wanted: str, text_name: str) -> str | None:
    """Say why a file that is in a directory, and whose suffix promises nothing, is no input.

    Args:
        wanted: the job's input.format.
        text_name: the job's text column, which an object that stands alone in its file must have.

    Returns:
        None if its bytes are Parquet or JSONL. Also None if they cannot be read: opening the file raises the reason.
    """
    if path.lower().endswith(UNFINISHED_SUFFIXES):
        return "unfinished or a copy by its name"
    if not os.path.isfile(path):
        return "not a regular file"
    try:
        stream, _ = open_stream(path)
        with stream:
            head = stream.read(SNIFFED_BYTES)
    except (OSError, StreamError):
        return None
    if head.startswith((b"PAR1", b"PARE")):
        found = "parquet"
    elif not head.strip():
        return "empty"
    elif what := _refused(head):
        return what
    elif _holds_records(head, text_name):
        found = "jsonl"
    elif encoding := _wide_encoding(head):
        return f"{encoding} text or binary, and JSONL is UTF-8"
    else:
        return NO_DATA
    if wanted not in ("auto", found):
        return f"{'Parquet' if found == 'parquet' else 'JSONL'}, and input.format is {wanted}"
    return None


def _holds_records(head: bytes, text_name: str) -> bool:
    """Tell whether half or more of a text's first lines are JSON objects: one that was torn, or is none, may be there.

    A single object must have the text column, for it may as well be a document of its own.
    """
    *whole, last = head.removeprefix(BYTE_ORDER_MARK).split(b"\n")
    is_whole = len(head) < SNIFFED_BYTES
    if is_whole:
        whole.append(last)
    lines = [line for line in whole if line.strip()][:SNIFFED_LINES]
    if not lines:  # the first line is longer than what was read
        return re.match(rb'\s*\{\s*"', last) is not None
    records = [record for record in map(_record, lines) if record is not None]
    if is_whole and len(lines) == 1 and records:
        return find_field(records[0], text_name)[0]
    return 2 * len(records) >= len(lines)


def _record(line: bytes) -> dict | None:
    try:
        return parse_record(line.decode(errors="replace"), [])
    except BadRecord:
        return None
