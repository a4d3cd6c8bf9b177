"""One row of the corpus, with the file and row number it came from.

Also decides which texts are blank, and derives the id of a row that has none.
"""

import hashlib
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

HASH_DIGITS = 12
RAW_BYTES = 1 << 20


class RowValues(Protocol):
    """The passthrough values of one row, in the form that its reader keeps them."""

    def strings(self) -> Mapping[str, str]:
        """Return every value as text."""


@dataclass(frozen=True)
class Document:
    """Hold one input row: its text if it can be used, else the reason.

    `row` counts from 1: the line number in a JSONL file, the record number in a Parquet file.
    A rejected row keeps its text where that is a string, and its bytes, so that it can be looked at.
    """

    file: str
    row: int
    row_id: str | int
    text: str | None
    status: Literal["ok", "rejected"]
    error_code: str | None
    error_message: str | None
    values: RowValues | None = None
    raw: bytes | None = None  # of a rejected row: the JSON line, or the Parquet text; its first RAW_BYTES
    num_bytes: int = 0  # of the line, or of text and passthrough values: about what it takes in memory

    @property
    def chars(self) -> int | None:
        """The length of the text in code points; None without a text."""
        return None if self.text is None else len(self.text)

    @cached_property
    def sha1(self) -> str | None:
        """The first 12 hex digits of the SHA-1 of the text's UTF-8; None if there is no such thing."""
        if self.text is None:
            return None
        try:
            return content_hash(self.text.encode())
        except UnicodeEncodeError:  # a lone surrogate: the row is rejected
            return None

    @property
    def columns(self) -> Mapping[str, str]:
        """The passthrough values as text, for prompt templates; a null is the empty string."""
        return {} if self.values is None else self.values.strings()


def content_hash(data: bytes) -> str:
    """Return the first 12 hex digits of the SHA-1."""
    return hashlib.sha1(data, usedforsecurity=False).hexdigest()[:HASH_DIGITS]


def made_up_id(label: str, row: int, content: bytes) -> str:
    """Make the id of a row that has none: the file's name, the row number, 8 digits of the content's hash.

    The same input gives the same id on every run, and an edited text gives another one.
    """
    return f"{label}:{row}:{content_hash(content)[:8]}"


def is_blank(text: str) -> bool:
    """Tell whether a text shows nothing: white space and invisible format characters (Unicode Cf) alone."""
    if not text or text.isspace():
        return True
    return all(char.isspace() or unicodedata.category(char) == "Cf" for char in text)
