"""Read a JSON schema from the file that a job names, check it before anything else starts, and validate answers.

Numbers are decimal, as they are written: 19.9 is a multiple of 0.01. Patterns are run by llguidance, which enforces
them while an answer is written, so that both mean the same.
"""

import json
import math
import os
from collections.abc import Iterator
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

from kvbatch.errors import missing_extra

# JSON as most of it is written, with one space; free white space would let a small model write nothing else.
WRITTEN: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_MOST_DIGITS = 4000  # of an integer that Python reads from text
_FAR = 10**15  # an exponent beyond is as good as this one: no schema's number comes near it
_UNSUPPORTED = ("not supported", "escape")  # in what is said of a pattern that other engines may know


def read_schema(path: str) -> object:
    """Return the schema in a file.

    Raises:
        ValueError: There is no such file, no JSON in it, or a number that would be rounded.
    """
    try:
        text = Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig")
        return json.loads(text, parse_float=_float, parse_constant=_no_number)
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no schema: {error}") from error


def check_schema(schema: dict[str, Any]) -> None:
    """Prove that a schema is one, and that its patterns can be run.

    Raises:
        ValueError: It is not, with the place of the mistake in it; or the libraries for it are not installed.
    """
    if problem := missing_extra("grammar", "a JSON schema"):
        raise ValueError(problem)
    import jsonschema

    formats = jsonschema.FormatChecker(formats=())
    formats.checks("regex", raises=ValueError)(_check_pattern)
    try:
        json.dumps(schema, allow_nan=False)
        validator: Any = jsonschema.validators.validator_for(schema)  # its protocol has no format_checker
        validator.check_schema(schema, format_checker=formats)
    except jsonschema.SchemaError as error:
        if isinstance(error.cause, _UnsupportedPattern):
            raise ValueError(f"{error.json_path}: {error.cause}") from error
        raise ValueError(f"no JSON schema: {error.json_path}: {error.cause or error.message}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"no JSON schema: {error}") from error


class SchemaValidator:
    """Tell whether an answer is JSON of a schema.

    Args:
        schema: one that `check_schema` took.
    """

    def __init__(self, schema: dict[str, Any]):
        import jsonschema

        base = jsonschema.validators.validator_for(schema)
        types = base.TYPE_CHECKER

        def is_whole(number: Decimal) -> bool:
            """In the newer drafts, 1.0 is an integer, too."""
            return (
                number.as_tuple().exponent == 0 or types.is_type(1.0, "integer") and _is_multiple(number, 1)
            )

        with_decimals = jsonschema.validators.extend(
            base,
            validators={
                "multipleOf": _multiple_of,
                "pattern": _pattern,
                "patternProperties": _pattern_properties,
                "additionalProperties": _additional_properties,
            },
            type_checker=types.redefine_many(
                {
                    "number": lambda _, value: types.is_type(value, "number") or isinstance(value, Decimal),
                    "integer": lambda _, value: (
                        types.is_type(value, "integer") or isinstance(value, Decimal) and is_whole(value)
                    ),
                }
            ),
        )
        # a dialect that is named again further in would be read by the library's own validator
        self._validator = with_decimals(
            {key: value for key, value in _decimal(schema).items() if key != "$schema"}
        )

    def problem(self, text: str) -> str | None:
        """Return what is wrong with an answer, or None."""
        try:
            value = json.loads(text, parse_float=_number, parse_int=_number, parse_constant=_no_number)
        except (ValueError, RecursionError):
            return "is no whole JSON"
        try:
            problem = next(self._validator.iter_errors(value), None)
        except RecursionError:
            return "is nested too deeply to be held against generation.json_schema"
        if problem:
            return f"breaks {problem.validator!r} of generation.json_schema at {problem.json_path}"
        return None


class _UnsupportedPattern(ValueError):
    """A pattern is one of ECMA-262, but cannot be enforced."""


def _float(text: str) -> float:
    """Return a number of a schema, which is enforced as a float, and must be the one that is written."""
    number = float(text)
    if not math.isfinite(number) or Decimal(repr(number)) != _number(text):
        raise ValueError(f"{text} has more digits than can be enforced; round it")
    return number


def _number(text: str) -> int | Decimal:
    """Return the very number that is written; of an immense exponent, one that compares and divides alike."""
    if text.lstrip("-").isdigit() and len(text) < _MOST_DIGITS:
        return int(text)
    mantissa, _, exponent = text.lower().partition("e")
    if len(exponent.lstrip("+-0")) > len(str(_FAR)):
        text = f"{mantissa}e{'-' if exponent.startswith('-') else ''}{_FAR}"
    return Decimal(text)


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _decimal(value: Any) -> Any:
    """Return a schema whose fractions are the decimal ones that were written."""
    if isinstance(value, dict):
        return {key: _decimal(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_decimal(inner) for inner in value]
    return Decimal(repr(value)) if isinstance(value, float) else value


def _parts(number: int | Decimal) -> tuple[int, int]:
    """Return a number as digits and the power of ten that they are multiplied by."""
    if isinstance(number, int):
        return number, 0
    sign, digits, exponent = number.as_tuple()
    return int(Decimal((sign, digits, 0))), int(exponent)


def _is_multiple(number: int | Decimal, of: int | Decimal) -> bool:
    """Tell whether a number is a multiple of another, exactly, and without writing out powers of ten."""
    (digits, exponent), (divisor, its_exponent) = _parts(number), _parts(of)
    shift = exponent - its_exponent
    if not digits or shift >= 0:
        return digits % divisor * pow(10, max(shift, 0), divisor) % divisor == 0
    if -shift > math.log10(abs(digits)) + 1:  # more places behind the point than digits
        return False
    return digits % (divisor * 10**-shift) == 0


def _multiple_of(validator: Any, of: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "number") and not _is_multiple(instance, of):
        yield ValidationError(f"{instance} is not a multiple of {of}")


def _pattern(validator: Any, pattern: str, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if validator.is_type(instance, "string") and not _matches(pattern, instance):
        yield ValidationError(f"it does not match {pattern!r}")


def _pattern_properties(validator: Any, patterns: Any, instance: Any, schema: Any) -> Iterator[Any]:
    if validator.is_type(instance, "object"):
        for pattern, inner in patterns.items():
            for name, value in instance.items():
                if _matches(pattern, name):
                    yield from validator.descend(value, inner, path=name, schema_path=pattern)


def _additional_properties(validator: Any, inner: Any, instance: Any, schema: Any) -> Iterator[Any]:
    from jsonschema import ValidationError

    if not validator.is_type(instance, "object"):
        return
    for name, value in instance.items():
        if name in schema.get("properties", {}):
            continue
        if any(_matches(pattern, name) for pattern in schema.get("patternProperties", {})):
            continue
        if inner is False:
            yield ValidationError(f"{name!r} is not among its properties")
        else:
            yield from validator.descend(value, inner, path=name)


def _matches(pattern: str, text: str) -> bool:
    """Tell whether a pattern is found in a text, by the grammar that lets a model write such a text."""
    written = json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f").encode(errors="surrogatepass")
    matcher = _matcher(pattern).deep_copy()
    return matcher.try_consume_tokens(list(written)) == len(written) and matcher.is_accepting()


@lru_cache(256)
def _matcher(pattern: str) -> Any:
    """Return a matcher of JSON strings, whose tokens are bytes."""
    import llguidance

    schema = {"type": "string", "pattern": pattern}
    grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=WRITTEN)
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)


def _check_pattern(pattern: Any) -> bool:
    """Prove that a pattern can be run; what is no text is no pattern, and refused elsewhere.

    Raises:
        ValueError: It cannot.
    """
    matcher = _matcher(pattern) if isinstance(pattern, str) else None
    if matcher is None or not matcher.is_error():
        return True
    reason = matcher.get_error().strip().splitlines()[-1].removeprefix("error: ")
    if any(word in reason for word in _UNSUPPORTED):
        raise _UnsupportedPattern(f"the pattern {pattern!r} is not supported: {reason}; write it otherwise")
    raise ValueError(f"{pattern!r} is no regular expression: {reason}")
