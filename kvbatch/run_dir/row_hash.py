"""What of a row decides its answer, and what of it decides its output, as hashes."""

import hashlib
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvbatch.corpus.document import HASH_DIGITS

if TYPE_CHECKING:
    from kvbatch.corpus import Document


def prompt_content(document: "Document", columns: Sequence[str]) -> str | None:
    """Return the hash of all that a row puts into its prompt; None for a row without a usable text.

    Args:
        columns: those that the prompt uses beside the text.
    """
    if not columns or document.sha1 is None:
        return document.sha1
    values = document.columns
    text = json.dumps([document.sha1, *(values.get(name) for name in columns)])
    return hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()[:HASH_DIGITS]


def row_line(document: "Document") -> bytes:
    """Return what a row adds to the hash of its file: all of it that the output shows or depends on."""
    values = json.dumps(list(document.columns.items()))
    return f"{document.row_id}\0{document.sha1}\0{values}\n".encode()
