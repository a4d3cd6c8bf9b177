"""The validated input settings of a job. No file is read here."""

from dataclasses import dataclass
from typing import Literal

from kvbatch.corpus import openai_batch
from kvbatch.errors import JobFileError

RESERVED_PREFIX = "kvb_"
RESERVED_NAMES = ("output", "output_json")


@dataclass(frozen=True)
class InputSpec:
    """Name the documents of a job: files, columns, and which rows of them.

    Args:
        paths: files, directories (read recursively) and glob patterns, in input order.
        format: "auto" looks at the bytes; "jsonl" and "parquet" refuse anything else;
            "openai-batch" is JSONL whose rows are requests (`kvbatch.corpus.openai_batch`).
        id_column: None takes "id" where a record has one and makes ids up where it has not.
        text_column: None means "text". A dotted path (`doc.body`) reaches into objects and structs;
            a column whose whole name holds the dot wins.
        passthrough: columns copied to the output, or "all" (every column but id, text and pandas' index).
        where: a polars SQL condition; rows that it does not select are not rows of the job.
        limit: only the first rows that `where` selects.
        max_row_bytes: a longer JSON line, or a longer Parquet text, is rejected.
        encoding_errors: what to do with bytes that are not UTF-8 and with lone surrogates: "reject" the row, or
            "replace" them by U+FFFD.
        on_bad_row: "reject" keeps a row that cannot be used in its place, without an answer; "fail" stops at the
            first one.
        on_bad_file: "fail" stops at a file that cannot be read; "skip" leaves it out as a whole, for which every file
            is read once more, before the first row.

    Raises:
        JobFileError: a value is out of range, or a passthrough column would hide an output column.
    """

    paths: tuple[str, ...]
    format: Literal["auto", "jsonl", "parquet", "openai-batch"] = "auto"
    id_column: str | None = None
    text_column: str | None = None
    passthrough: tuple[str, ...] | Literal["all"] = ()
    where: str | None = None
    limit: int | None = None
    max_row_bytes: int = 1 << 30
    encoding_errors: Literal["reject", "replace"] = "reject"
    on_bad_row: Literal["reject", "fail"] = "reject"
    on_bad_file: Literal["fail", "skip"] = "fail"

    def __post_init__(self) -> None:
        if not self.paths:
            raise JobFileError("input.path is empty: name at least one file, directory or pattern")
        if self.format not in ("auto", "jsonl", "parquet", "openai-batch"):
            raise JobFileError(f"input.format is {self.format!r}: use auto, jsonl, parquet or openai-batch")
        if self.encoding_errors not in ("reject", "replace"):
            raise JobFileError(f"input.encoding_errors is {self.encoding_errors!r}: use reject or replace")
        if self.on_bad_row not in ("reject", "fail"):
            raise JobFileError(f"input.on_bad_row is {self.on_bad_row!r}: use reject or fail")
        if self.on_bad_file not in ("fail", "skip"):
            raise JobFileError(f"input.on_bad_file is {self.on_bad_file!r}: use fail or skip")
        if self.limit is not None and self.limit < 0:
            raise JobFileError(f"input.limit is {self.limit}: use 0 or more")
        if self.max_row_bytes < 1:
            raise JobFileError(f"input.max_row_bytes is {self.max_row_bytes}: use 1 or more")
        if is_reserved(self.id_name, ""):
            raise JobFileError(
                f"input.id_column: {self.id_name!r} is the name of an output column; rename it in the input"
            )
        if isinstance(self.passthrough, str):
            if self.passthrough != "all":
                raise JobFileError(
                    f"input.passthrough is {self.passthrough!r}: use a list of columns, or all"
                )
            return
        for name in self.passthrough:
            if self.passthrough.count(name) > 1:
                raise JobFileError(f"input.passthrough names {name!r} twice")
            if is_reserved(name, self.id_name):
                raise JobFileError(
                    f"input.passthrough: {name!r} is the name of an output column; rename it in the input"
                )

    @property
    def id_name(self) -> str:
        """The name of the id column, in the input and in the output."""
        return self.id_column or (openai_batch.ID_NAME if self.is_openai_batch else "id")

    @property
    def text_name(self) -> str:
        """The name or dotted path of the text column."""
        return openai_batch.TEXT_NAME if self.is_openai_batch else self.text_column or "text"

    @property
    def is_openai_batch(self) -> bool:
        """Whether the rows are requests."""
        return self.format == "openai-batch"

    @property
    def file_format(self) -> str:
        """What the files themselves have to be: auto, jsonl or parquet."""
        return "jsonl" if self.is_openai_batch else self.format


def is_reserved(name: str, id_name: str) -> bool:
    """Tell whether an output column of this name exists already."""
    return name in (*RESERVED_NAMES, id_name) or name.startswith(RESERVED_PREFIX)


def passthrough_note(spec: InputSpec) -> str:
    """Say what `passthrough: all` leaves out."""
    return (
        f"input.passthrough all copies every column but the text, {spec.text_name!r}, which would double the output; "
        "list the columns, the text among them, to have it too"
    )
