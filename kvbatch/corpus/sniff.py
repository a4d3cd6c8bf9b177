"""Tell from a file's bytes what it is; owns the messages for what cannot be read."""

import os

from kvbatch.corpus.compression import StreamError, codec_of, open_stream
from kvbatch.errors import InputError

HEAD_BYTES = 4096
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PARQUET_SUFFIXES = (".parquet", ".pq", ".parq")
JSONL_SUFFIXES = (".jsonl", ".ndjson", ".jsonlines", ".jl", ".json")
COMPRESSION_SUFFIXES = (".gz", ".gzip", ".zst", ".zstd", ".bz2", ".xz", ".lz4")
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
TAR_MAGIC = slice(257, 262), b"ustar"
# Byte-order marks, longest first; without one, JSON shows its encoding by where its first bytes are zero.
WIDE_MARKS = (
    (b"\xff\xfe\0\0", "UTF-32LE"),
    (b"\0\0\xfe\xff", "UTF-32BE"),
    (b"\xff\xfe", "UTF-16LE"),
    (b"\xfe\xff", "UTF-16BE"),
)
WIDE_ZEROS = {
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
    what = next((what for magic, what in REFUSED.items() if head.startswith(magic)), None)
    if head[TAR_MAGIC[0]] == TAR_MAGIC[1]:
        what = "a tar archive"
    if what:
        raise InputError(f"{path}: it is {what}; only JSONL and Parquet can be read")
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


def _wide_encoding(head: bytes) -> str | None:
    """Name the encoding of a text whose characters take two or four bytes each."""
    for mark, encoding in WIDE_MARKS:
        if head.startswith(mark):
            return encoding
    return WIDE_ZEROS.get(tuple(byte == 0 for byte in head[:4]))


def looks_like_data(path: str) -> bool:
    """Tell whether a file found in a directory is input: by its name, or by unmistakable bytes."""
    name = os.path.basename(path).lower()
    while name.endswith(COMPRESSION_SUFFIXES):
        name = name[: name.rindex(".")]
    suffix = os.path.splitext(name)[1]
    if suffix in JSONL_SUFFIXES + PARQUET_SUFFIXES:
        return True
    try:
        with open(path, "rb") as file:
            head = file.read(8)
        if head.startswith((b"PAR1", b"PARE")):
            return True
        if suffix or not (head.startswith((b"{", BYTE_ORDER_MARK)) or codec_of(head)):
            return False
        stream, _ = open_stream(path)  # a name without a suffix, as Spark writes them
        with stream:
            return stream.read(HEAD_BYTES).removeprefix(BYTE_ORDER_MARK).lstrip().startswith(b"{")
    except (OSError, StreamError):
        return False
