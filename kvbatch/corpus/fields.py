"""Decide one Arrow type for each passthrough field of JSONL records, and build its arrays.

All strings: string. All booleans: bool. All integers that fit: int64. Integers and floats that a double
holds to the last digit: float64. Anything else (lists, objects, mixed kinds, larger numbers): the JSON text
of every value. Nulls and missing fields are null and decide nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from kvbatch.corpus.json_values import INT64_RANGE, NumberText, is_exact_double, json_text

MAX_EXACT_INT = 1 << 53  # a double holds every integer up to here


@dataclass(frozen=True)
class JsonRow:
    """The passthrough values of one JSONL record."""

    record: dict

    def strings(self) -> Mapping[str, str]:
        """Return every value as text: strings bare, null empty, everything else as JSON."""
        return {name: _bare_text(value) for name, value in self.record.items()}


def _bare_text(value: object) -> str:
    if value is None:
        return ""
    return str(value) if isinstance(value, str | float) else json_text(value)


@dataclass(frozen=True)
class FieldType:
    """The type of a field; `as_json`: its values are written as JSON text."""

    arrow: pa.DataType
    as_json: bool = False

    def array(self, values: Iterable[Any]) -> pa.Array:
        """Build the array of a column."""
        convert = json_text if self.as_json else float if pa.types.is_floating(self.arrow) else None
        if convert is not None:
            values = [None if value is None else convert(value) for value in values]
        return pa.array(values, self.arrow)


@dataclass
class FieldTypes:
    """Collect the kinds of value that every field holds, over a whole pass."""

    kinds: dict[str, set[str]] = field(default_factory=dict)

    def note(self, record: Mapping[str, object]) -> None:
        """Take one record's values into account."""
        for name, value in record.items():
            kinds = self.kinds.setdefault(name, set())
            if value is not None:
                kinds.add(_kind(value))

    def types(self) -> dict[str, FieldType]:
        """Return the type of every field seen, in the order in which they first came."""
        return {name: _decide(kinds) for name, kinds in self.kinds.items()}


def _kind(value: object) -> str:
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, int):
        if value not in INT64_RANGE:
            return "other"
        return "int" if abs(value) <= MAX_EXACT_INT else "long int"
    if isinstance(value, NumberText):
        return "float" if is_exact_double(value) else "other"
    if isinstance(value, float):
        return "float"
    return "string" if isinstance(value, str) else "other"


def _decide(kinds: set[str]) -> FieldType:
    if not kinds:
        return FieldType(pa.null())
    if kinds == {"string"}:
        return FieldType(pa.string())
    if kinds == {"bool"}:
        return FieldType(pa.bool_())
    if kinds <= {"int", "long int"}:
        return FieldType(pa.int64())
    if kinds <= {"int", "float"}:
        return FieldType(pa.float64())
    return FieldType(pa.string(), as_json=True)
