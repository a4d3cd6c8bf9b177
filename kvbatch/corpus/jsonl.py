"""Read one JSONL file row by row, validate each line and reject those that cannot be used."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from kvbatch.corpus.compression import StreamError, open_stream
from kvbatch.corpus.discovery import SourceFile
from kvbatch.corpus.document import RAW_BYTES, Document, RowValues, is_blank, made_up_id
from kvbatch.corpus.fields import FieldTypes, JsonRow
from kvbatch.corpus.ids import id_from_json
from kvbatch.corpus.json_values import (
    BadRecord,
    find_field,
    has_lone_surrogate,
    json_text,
    kind_name,
    parse_record,
    replace_lone_surrogates,
)
from kvbatch.corpus.lines import Line, iter_lines
from kvbatch.corpus.openai_batch import check_request
from kvbatch.corpus.sniff import not_jsonl
from kvbatch.corpus.spec import InputSpec
from kvbatch.corpus.where import RowFilter
from kvbatch.errors import InputError

# An escape is the only way a surrogate gets into strict UTF-8; pairs are looked at more closely later.
SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
HASHED_BYTES = 1 << 16  # of a line, for a made-up id
MAX_NAMED_KEYS = 8  # of those that occur twice
SHOWN_KEY_CHARS = 60
MAX_FILTER_ROWS = 256
MAX_FILTER_BYTES = 8 << 20


@dataclass
class _Row:
    """A line on its way to a document."""

    number: int
    num_bytes: int
    content: bytes  # the start of the line: for made-up ids and dead letters; b"" for a line over the limit
    record: dict | None
    may_hold_surrogates: bool = False
    error: BadRecord | None = None


class JsonlReader:
    """Read the documents of one JSONL file, once.

    Args:
        fields: records the passthrough values of every document; their types are decided from them.
    """

    def __init__(self, source: SourceFile, spec: InputSpec, row_filter: RowFilter | None, fields: FieldTypes):
        self.source, self.spec, self._filter, self._fields = source, spec, row_filter, fields
        self.num_records = 0
        named = () if spec.passthrough == "all" else spec.passthrough
        filtered = () if row_filter is None else row_filter.columns
        self.unseen = {spec.id_name, spec.text_name, *named, *filtered}  # wanted names that no record had yet
        self._sample: dict = {}  # the first record, for messages
        self._partitions = {
            name: value for name, value in source.partitions if name not in (spec.id_name, spec.text_name)
        }
        self._may_be_jsonl = False  # whether a line was seen that starts as a record does
        self._num_lines = 0
        self._repeated: dict[str, tuple[int, int]] = {}  # keys that occur twice: first line, number of lines

    def documents(self) -> Iterator[Document]:
        """Yield a document for every line that is not blank and that `where` selects.

        Raises:
            InputError: the file cannot be read to its end, has lines but no record, or no record has the id
                column that the job names.
        """
        try:
            stream, _ = open_stream(self.source.path, self.source.num_bytes)
            with stream:
                rows = map(self._parse, iter_lines(stream, self.spec.max_row_bytes))
                for row in rows if self._filter is None else self._filtered(rows):
                    yield self._document(row)
                    del row  # the next line may be as large as this one
        except (OSError, StreamError) as error:
            raise InputError(f"{self.source.path}: {getattr(error, 'strerror', None) or error}") from error
        if self._num_lines and not self._may_be_jsonl:
            raise not_jsonl(self.source.path)
        if self.num_records and self.spec.id_column in self.unseen:
            name = self.spec.id_column
            raise InputError(
                f"{self.source.path}: no record has the id column {name!r}; {self.listed_names()}"
            )

    @property
    def warnings(self) -> list[str]:
        """What the user should know once the file was read."""
        found = [
            f"{self.source.path}:{line}: key {_shortened(key)!r} occurs twice, here and in {count - 1:,} more lines: "
            "the last value counts"
            for key, (line, count) in self._repeated.items()
        ]
        if self.num_records and self.spec.text_name in self.unseen:
            found.append(
                f"{self.source.path}: no record has the text column {self.spec.text_name!r}; "
                f"{self.listed_names()}"
            )
        return found

    def listed_names(self) -> str:
        """Say which fields the first record has, for a message."""
        names = (
            ", ".join(map(_shortened, list(self._sample)[:30])).encode("utf-8", "backslashreplace").decode()
        )
        return f"the first record has {names or 'no fields'}"

    def _parse(self, line: Line) -> _Row:
        self._num_lines += 1
        self._may_be_jsonl = self._may_be_jsonl or line.data is None or line.data.lstrip().startswith(b"{")
        if line.data is None:
            reason = (
                f"the line has {line.num_bytes:,} bytes, over max_row_bytes = {self.spec.max_row_bytes:,}"
            )
            return _Row(line.number, 0, b"", None, error=BadRecord("row_too_large", reason))
        # The line itself is needed again only where the row is rejected: never keep a large one for that.
        row = _Row(line.number, line.num_bytes, line.data[:RAW_BYTES], None)
        row.may_hold_surrogates = SURROGATE_ESCAPE.search(line.data) is not None
        try:
            text = line.data.decode("utf-8", "strict" if self.spec.encoding_errors == "reject" else "replace")
            del line
            if row.may_hold_surrogates and self.spec.encoding_errors == "replace":
                text, row.may_hold_surrogates = replace_lone_surrogates(text), False
            repeated: list[str] = []
            row.record = parse_record(text, repeated)
            for key in dict.fromkeys(repeated):
                if key in self._repeated or len(self._repeated) < MAX_NAMED_KEYS:
                    first, count = self._repeated.get(key, (row.number, 0))
                    self._repeated[key] = first, count + 1
            row.record |= {name: value for name, value in self._partitions.items() if name not in row.record}
        except UnicodeDecodeError as error:
            row.error = BadRecord(
                "bad_utf8", f"byte {error.start + 1} of the line is not UTF-8 ({error.reason})"
            )
        except BadRecord as error:
            row.error = error
        if row.record is not None:
            self.num_records += 1
            self._sample = self._sample or dict.fromkeys(row.record)
            if self.unseen:
                self.unseen = {name for name in self.unseen if not find_field(row.record, name)[0]}
        return row

    def _filtered(self, rows: Iterator[_Row]) -> Iterator[_Row]:
        """Drop the records that `where` does not select; a row that cannot be evaluated stays."""
        batch: list[_Row] = []
        num_bytes = 0
        for row in rows:
            batch.append(row)
            num_bytes += row.num_bytes
            if len(batch) == MAX_FILTER_ROWS or num_bytes > MAX_FILTER_BYTES:
                yield from self._select(batch)
                batch, num_bytes = [], 0
        yield from self._select(batch)

    def _select(self, batch: list[_Row]) -> Iterator[_Row]:
        assert self._filter is not None
        for row in batch:
            if row.record is not None and row.may_hold_surrogates:
                values = [find_field(row.record, name)[1] for name in self._filter.columns]
                if has_lone_surrogate(values):
                    reason = "a lone surrogate in a column of `where` cannot be UTF-8"
                    row.error = BadRecord("bad_unicode", reason)
        answers = iter(self._filter.keep_records([row.record or {} for row in batch if row.error is None]))
        for row in batch:
            answer = row.error is not None or next(answers)
            if isinstance(answer, str):
                row.error = BadRecord("where_type", f"`where` cannot be decided: {answer}")
            if answer:
                yield row

    def _document(self, row: _Row) -> Document:
        values: RowValues | None = None
        text = row_id = None
        error = row.error
        if row.record is not None:
            _, id_value = find_field(row.record, self.spec.id_name)
            has_text, text = find_field(row.record, self.spec.text_name)
            if self.spec.is_openai_batch and isinstance(text, dict):
                text = json_text(text)
            row_id = id_from_json(id_value)
            error = error or self._text_problem(has_text, text)
            if self.spec.is_openai_batch and error is None:
                error = _request_problem(row.record, str(text))
            values = self._values(row.record)
            if row.may_hold_surrogates:
                for what in ("text", text), ("id", row_id), ("passthrough columns", values.record):
                    if has_lone_surrogate(what[1]):
                        error = BadRecord("bad_unicode", f"a lone surrogate in the {what[0]} cannot be UTF-8")
                row_id = None if has_lone_surrogate(row_id) else row_id
                values = JsonRow({}) if has_lone_surrogate(values.record) else values
            self._fields.note(values.record)
        text = text if type(text) is str else None
        if row_id is None:
            content = row.content[:HASHED_BYTES] if text is None else text.encode("utf-8", "backslashreplace")
            row_id = made_up_id(self.source.label, row.number, content)
        path = self.source.path
        if error is None:
            return Document(path, row.number, row_id, text, "ok", None, None, values, None, row.num_bytes)
        message = f"{path}:{row.number}: {error}"
        raw = row.content or None
        return Document(
            path, row.number, row_id, text, "rejected", error.code, message, values, raw, row.num_bytes
        )

    def _text_problem(self, has_text: bool, text: object) -> BadRecord | None:
        name = self.spec.text_name
        if not has_text:
            return BadRecord("missing_text", f"there is no field {name!r}")
        if text is None:
            return BadRecord("empty_text", f"{name!r} is null")
        if type(text) is not str:
            return BadRecord("text_type", f"{name!r} is {kind_name(text)}, not a string")
        if is_blank(text):
            return BadRecord("empty_text", f"{name!r} holds nothing but white space and invisible characters")
        return None

    def _values(self, record: dict) -> JsonRow:
        if self.spec.passthrough == "all":
            hidden = (self.spec.id_name, self.spec.text_name)
            return JsonRow({name: value for name, value in record.items() if name not in hidden})
        found = ((name, find_field(record, name)) for name in self.spec.passthrough)
        return JsonRow({name: value for name, (is_there, value) in found if is_there})


def _shortened(key: str) -> str:
    """Return a key for a message, as far as it is a name: a broken record may have a text for a key."""
    return key if len(key) <= SHOWN_KEY_CHARS else f"{key[:SHOWN_KEY_CHARS]}…"


def _request_problem(record: dict, text: str) -> BadRecord | None:
    try:
        check_request(record, text)
    except BadRecord as error:
        return error
    return None
