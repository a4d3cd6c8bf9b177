"""Parse one JSON record without losing a digit, and write values back as JSON text.

Floats stay the text they were (`NumberText`), so that an id `1.0` and a field `1.10` come out as they went
in. NaN and Infinity are read as floats and written as null.
"""

import json
import math
import re
from collections import Counter
from collections.abc import Mapping, MutableSequence
from decimal import Decimal

MAX_INT_DIGITS = 4300  # Python refuses to parse more
MAX_DEPTH = 256  # of nested values; far deeper ones end Python's stack, sooner the deeper the caller's own is
MAX_EXACT_CHARS = 16  # a plain decimal number this short has at most 15 digits: a double holds it
INT64_RANGE = range(-(1 << 63), 1 << 63)
# An escape with what it needs to be read; the group is half of a surrogate pair that stands alone.
LONE_SURROGATE = re.compile(
    r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)"
)


class NumberText(str):
    """The text of a JSON number that is not an int."""


class BadRecord(Exception):
    """A line cannot be used as a record."""

    def __init__(self, code: str, reason: str):
        super().__init__(reason)
        self.code = code


def _parse_int(text: str) -> int | NumberText:
    return int(text) if len(text) <= MAX_INT_DIGITS else NumberText(text)


def replace_lone_surrogates(text: str) -> str:
    """Let every lone surrogate that JSON text spells be U+FFFD."""
    return LONE_SURROGATE.sub(lambda match: "\\ufffd" if match[1] else match[0], text)


def parse_record(text: str, repeated: MutableSequence[str]) -> dict:
    """Parse one line of JSONL; of a key that occurs twice in an object the last value counts.

    Args:
        repeated: gets the keys that occur twice.

    Raises:
        BadRecord: it is not JSON (`bad_json`) or not an object (`not_an_object`).
    """

    def to_dict(pairs: list[tuple[str, object]]) -> dict:
        record = dict(pairs)
        if len(record) < len(pairs):
            counts = Counter(key for key, _ in pairs)
            repeated.extend(key for key, count in counts.items() if count > 1)
        return record

    try:
        record = json.loads(text, parse_float=NumberText, parse_int=_parse_int, object_pairs_hook=to_dict)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":
            raise BadRecord("bad_json", f"more than one JSON value, from column {error.colno} on") from None
        raise BadRecord("bad_json", f"{error.msg.removesuffix(' at')} at column {error.colno}") from None
    except ValueError as error:
        raise BadRecord("bad_json", str(error)) from None
    except RecursionError:
        raise _too_deep() from None
    if not isinstance(record, dict):
        raise BadRecord("not_an_object", f"the line is {kind_name(record)}, not an object")
    _check_depth(record)
    return record


def _check_depth(record: dict) -> None:
    """Refuse what would be too deep to be written as text; a rule of its own, so that every pass decides alike."""
    level: list[object] = [record]
    for _ in range(MAX_DEPTH + 1):
        level = [
            item
            for each in level
            if isinstance(each, dict | list)
            for item in (each.values() if isinstance(each, dict) else each)
        ]
        if not level:
            return
    raise _too_deep()


def _too_deep() -> BadRecord:
    return BadRecord("bad_json", f"objects and lists are nested more than {MAX_DEPTH} levels deep")


def kind_name(value: object) -> str:
    """Name the JSON kind of a value for a message."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float | NumberText):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "a list" if isinstance(value, list) else "an object"


def find_field(record: Mapping, name: str) -> tuple[bool, object]:
    """Look a field up by its whole name, else by a dotted path into objects.

    Returns:
        Whether it is there, and its value.
    """
    if name in record:
        return True, record[name]
    for position, char in enumerate(name):
        if char == "." and isinstance(record.get(name[:position]), dict):
            found, value = find_field(record[name[:position]], name[position + 1 :])
            if found:
                return True, value
    return False, None


def is_exact_double(text: NumberText) -> bool:
    """Tell whether a double holds this number to the last digit that was written."""
    if len(text) <= MAX_EXACT_CHARS and "e" not in text and "E" not in text:
        return True
    number = float(text)
    return math.isfinite(number) and Decimal(text) == Decimal(repr(number))


def json_text(value: object) -> str:
    """Write a parsed value as JSON: floats with their own digits, NaN and Infinity as null."""
    if isinstance(value, NumberText):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return "null"
    if isinstance(value, dict):
        members = (f"{json_text(key)}: {json_text(item)}" for key, item in value.items())
        return "{" + ", ".join(members) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(json_text(item) for item in value) + "]"
    return json.dumps(value, ensure_ascii=False)


def has_lone_surrogate(value: object) -> bool:
    """Tell whether some string in a value cannot be written as UTF-8."""
    try:
        json_text(value).encode()
    except UnicodeEncodeError:
        return True
    return False
