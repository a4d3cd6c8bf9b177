"""Control characters, and those that turn text around, are shown instead of sent to a terminal.

Ids, file names and messages come from whoever wrote the input; a raw escape sequence of theirs could rewrite what
stands on the screen. The notation is that of JSON strings, so that a line of JSON stays one.
"""

import codecs
import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar, cast

# C0, DEL, C1; Arabic letter mark and the bidi marks, embeddings, overrides and isolates; line and paragraph separator;
# interlinear annotation, tag characters; lone surrogates, which stand for bytes of a file name that are not UTF-8
_CONTROLS = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"
)

_Value = TypeVar("_Value")


def escaped(text: str, keep: str = "") -> str:
    """Return a text that any terminal shows in one line.

    Args:
        keep: control characters that stay.
    """
    return _CONTROLS.sub(lambda found: found[0] if found[0] in keep else _notation(found[0]), text)


def all_escaped(value: _Value) -> _Value:
    """Return a nested value with every text in it escaped."""
    return cast(_Value, _escaped(value))


def _escaped(value: object) -> object:
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, dict):
        return {_escaped(key): _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    return value


def _notation(text: str) -> str:
    """Return characters as they stand in a JSON string, in ASCII."""
    return json.dumps(text)[1:-1].replace("\x7f", r"\u007f")  # DEL is the only control that JSON lets through


def _unencodable(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return _notation(error.object[error.start : error.end]), error.end


ENCODING_ERRORS = "kvbatch.escaped"  # characters that a terminal's encoding lacks, in the same notation
codecs.register_error(ENCODING_ERRORS, _unencodable)


def counted(number: int, noun: str) -> str:
    """Return so many of a noun."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def format_bytes(num_bytes: float) -> str:
    """Return a size as people read it."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024 or unit == "GiB":
            return f"{num_bytes:,.0f} {unit}" if unit == "bytes" else f"{num_bytes:,.1f} {unit}"
        num_bytes /= 1024
    raise AssertionError


def digest(keys: Mapping[str, Any]) -> str:
    """Return a hash over keys and values, in hex digits."""
    return hashlib.sha256(json.dumps(keys, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
