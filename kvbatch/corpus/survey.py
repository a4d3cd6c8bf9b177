"""Look at documents that nobody has described: which column is the text, which one names a row, what else there is.

The first records of every file decide. Whether the choice holds for all rows is for a pass over the corpus to tell.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from statistics import median

import pyarrow as pa

from kvbatch.corpus.compression import StreamError, open_stream
from kvbatch.corpus.discovery import SourceFile, discover
from kvbatch.corpus.json_values import BadRecord, NumberText, parse_record
from kvbatch.corpus.lines import iter_lines
from kvbatch.corpus.openai_batch import ID_NAME, TEXT_NAME
from kvbatch.corpus.parquet_schema import PANDAS_INDEX, open_parquet, parquet_error
from kvbatch.corpus.sniff import not_jsonl
from kvbatch.corpus.spec import is_reserved
from kvbatch.corpus.strings import plain_value
from kvbatch.errors import InputError

SAMPLED_ROWS = 100  # of one file
SAMPLED_FILES = 32
MAX_LINE_BYTES = 64 << 20
MAX_SMALL_CHARS = 200  # of a value that is worth copying to the output
MAX_PASSTHROUGH = 8
MAX_DEPTH = 3  # of objects within objects that may hold the text
TEXT_NAMES = ("text", "content", "body", "document", "article", "page_content", "raw_content", "markdown")
ID_NAMES = (
    "id",
    "_id",
    "uuid",
    "guid",
    "doc_id",
    "document_id",
    "key",
    "url",
    "path",
    "file",
    "filename",
    "name",
)
_SENTENCE_CHARS = 64  # a shorter value without white space is a name or a code

Record = Mapping[str, object]


@dataclass(frozen=True)
class Survey:
    """What the documents are.

    Args:
        files: those that would be read.
        format: `openai-batch` or `auto`.
        text_column: name or dotted path of the documents' text; of openai-batch, the request.
        id_columns: columns that may name a row, the likeliest first.
        passthrough: small columns.
        skipped: files and directories that are not read.
    """

    files: tuple[SourceFile, ...]
    format: str
    text_column: str
    id_columns: tuple[str, ...]
    passthrough: tuple[str, ...]
    skipped: int


def survey(paths: Sequence[str]) -> Survey:
    """Look at the first records of every file.

    Raises:
        InputError: A file cannot be read, there is no row, no column of text, or files have their text in columns
            of different names.
    """
    found = discover(paths, "auto", "text")
    problems = [f"{bad.path}: {bad.message}" for bad in (*found.missing, *found.unreadable)]
    if problems:
        head = [] if len(problems) == 1 else [f"{len(problems)} problems with the documents:"]
        raise InputError(*head, *(f"{'  ' if head else ''}{problem}" for problem in problems))
    samples = {file.path: list(_sample(file)) for file in found.files[:SAMPLED_FILES]}
    samples = {path: records for path, records in samples.items() if records}
    if not samples:
        for file in found.files[:SAMPLED_FILES]:
            if file.format == "jsonl" and file.num_bytes:
                raise not_jsonl(file.path)
        raise InputError(f"{', '.join(paths)}: the documents have no rows; name files with rows in them")
    rows = [record for records in samples.values() for record in records]
    if all(isinstance(row.get(TEXT_NAME), Mapping) and ID_NAME in row for row in rows):
        small = _small(rows, {TEXT_NAME, ID_NAME, "method", "url"})
        return Survey(tuple(found.files), "openai-batch", TEXT_NAME, (ID_NAME,), small, len(found.skipped))
    text = _text_column(samples)
    ids = _id_columns(rows, text)
    passthrough = _small(rows, {text, *ids[:1]})
    return Survey(tuple(found.files), "auto", text, ids, passthrough, len(found.skipped))


def _sample(file: SourceFile) -> Iterator[Record]:
    """Yield the first records of a file, of JSONL those that can be read."""
    partitions = dict(file.partitions)
    if file.format == "parquet":
        with open_parquet(file) as parquet:
            try:
                batch = next(parquet.iter_batches(batch_size=SAMPLED_ROWS, use_threads=False), None)
            except (OSError, pa.ArrowException) as error:
                raise parquet_error(file.path, error) from error
        if batch is not None:
            names = batch.schema.names
            for row in range(len(batch)):
                yield {
                    **{name: plain_value(batch.column(i)[row]) for i, name in enumerate(names)},
                    **partitions,
                }
        return
    try:
        stream, _ = open_stream(file.path, file.num_bytes)
        with stream:
            for line in islice(iter_lines(stream, MAX_LINE_BYTES), SAMPLED_ROWS):
                try:
                    yield {**parse_record((line.data or b"").decode(errors="replace"), []), **partitions}
                except BadRecord:
                    continue
    except (OSError, StreamError) as error:
        raise InputError(f"{file.path}: {getattr(error, 'strerror', None) or error}") from error


def _text_column(samples: Mapping[str, Sequence[Record]]) -> str:
    """Return the column that holds the documents: the longest text, or one of a usual name that is half as long.

    Raises:
        InputError: No column holds text, or not the same one in every file.
    """
    rows = [record for records in samples.values() for record in records]
    lengths = {name: length for name, length in _text_lengths(rows).items() if length}
    if not lengths:
        raise InputError(
            f"{next(iter(samples))}: no column holds a text; the columns are {', '.join(rows[0]) or 'none'}. Write "
            'rows such as {"id": "a", "text": "the document"}'
        )
    longest = max(lengths.values())
    usual = [name for name in lengths if name.rpartition(".")[2].lower() in TEXT_NAMES]
    usual = [name for name in usual if 2 * lengths[name] >= longest]
    best = max(usual or lengths, key=lambda name: lengths[name])
    for path, records in samples.items():
        if best not in _text_lengths(records):
            own = ", ".join(records[0])
            raise InputError(
                f"{path}: there is no text column {best!r}, which other files have; its columns are {own}. Name files "
                "of one kind, and write a job for each kind"
            )
    return best


def _text_lengths(rows: Sequence[Record]) -> dict[str, float]:
    """Return the median length of every column that holds text, by name or dotted path."""
    values: dict[str, list[str]] = {}
    others: Counter[str] = Counter()
    for row in rows:
        for name, value in _leaves(row):
            if isinstance(value, str) and not isinstance(value, NumberText):
                values.setdefault(name, []).append(value)
            elif value is not None:
                others[name] += 1
    return {
        name: median(map(len, texts))
        for name, texts in values.items()
        if len(texts) > others[name] and not is_reserved(name, "") and any(map(_is_prose, texts))
    }


def _leaves(record: Record, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Yield the values of a record and of the objects in it, by dotted path."""
    for name, value in record.items():
        if isinstance(value, Mapping) and depth < MAX_DEPTH:
            yield from _leaves(value, f"{prefix}{name}.", depth + 1)
        else:
            yield prefix + name, value


def _is_prose(text: str) -> bool:
    """Tell whether a value may be a document rather than a name, a code or a date."""
    return len(text) >= _SENTENCE_CHARS or len(text.split()) > 2 or not text.isascii()


def _id_columns(rows: Sequence[Record], text: str) -> tuple[str, ...]:
    """Return the columns whose values are short and differ in all rows seen, those of a usual name first."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        values = [row.get(name) for row in rows]
        is_id = all(
            isinstance(value, int | str) and not isinstance(value, bool | NumberText) and value != ""
            for value in values
        )
        if not is_id or name == text or is_reserved(name, "") or PANDAS_INDEX.fullmatch(name):
            continue
        is_short = all(len(str(value)) <= MAX_SMALL_CHARS for value in values)
        if is_short and len({str(value) for value in values}) == len(values):
            found.append(name)
    usual = {name: place for place, name in enumerate(ID_NAMES)}
    if len(rows) == 1:  # everything differs
        found = [name for name in found if name.lower() in usual]
    return tuple(sorted(found, key=lambda name: usual.get(name.lower(), len(usual))))


def _small(rows: Sequence[Record], taken: set[str]) -> tuple[str, ...]:
    """Return the columns of short values that a reader of the output may want beside the answer."""
    found = []
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in taken or is_reserved(name, "") or PANDAS_INDEX.fullmatch(name) or name == "id":
            continue
        values = [row.get(name) for row in rows if row.get(name) is not None]
        is_plain = all(isinstance(value, str | int | float) for value in values)
        if values and is_plain and all(len(str(value)) <= MAX_SMALL_CHARS for value in values):
            found.append(name)
    return tuple(found[:MAX_PASSTHROUGH])
