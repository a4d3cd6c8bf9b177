"""Show Arrow values as text, for prompts and ids: ISO dates, plain decimals, UTF-8 or hex bytes, JSON."""

import json
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from decimal import Decimal
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

import numpy as np
import pyarrow as pa
from pyarrow import types as kind

TICKS_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def scalar_text(scalar: pa.Scalar) -> str:
    """Return a value as text; null is the empty string."""
    if not scalar.is_valid:
        return ""
    plain = plain_value(scalar)
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def plain_value(scalar: pa.Scalar) -> object:
    """Return a value as what JSON can hold, with text for everything that JSON has no kind for."""
    if not scalar.is_valid:
        return None
    type_ = scalar.type
    if kind.is_dictionary(type_):
        return plain_value(scalar.value)  # the decoded value
    if kind.is_date(type_):
        return _date_text(scalar)
    if kind.is_timestamp(type_):
        return _timestamp_text(scalar.value, type_.unit, type_.tz)
    if kind.is_time(type_):
        seconds, ticks = divmod(scalar.value, TICKS_PER_SECOND[type_.unit])
        clock = time(seconds // 3600 % 24, seconds // 60 % 60, seconds % 60)
        return clock.isoformat() + _fraction(ticks, type_.unit)
    if kind.is_duration(type_):
        seconds, ticks = divmod(abs(scalar.value), TICKS_PER_SECOND[type_.unit])
        sign = "-" if scalar.value < 0 else ""
        return f"{sign}PT{seconds}{_fraction(ticks, type_.unit)}S"
    if kind.is_struct(type_):
        return {field.name: plain_value(scalar[position]) for position, field in enumerate(type_)}
    if kind.is_map(type_):
        return {scalar_text(key): plain_value(item) for key, item in _map_items(scalar)}
    if kind.is_nested(type_):
        return [plain_value(item) for item in scalar.values]
    if isinstance(scalar, pa.StringScalar | pa.LargeStringScalar):
        return scalar.as_buffer().to_pybytes().decode("utf-8", "replace")  # Parquet does not promise UTF-8
    if kind.is_float16(type_) or kind.is_float32(type_):
        narrow = np.float16 if kind.is_float16(type_) else np.float32
        return _simple(float(str(narrow(scalar.as_py()))))  # 0.1, not the digits of the nearest double
    if kind.is_fixed_size_binary(type_) and not isinstance(type_, pa.BaseExtensionType):
        return scalar.as_py().hex()  # keys and digests, whose bytes may be UTF-8 by chance
    return _simple(scalar.as_py())


def _map_items(scalar: pa.MapScalar) -> list[tuple[pa.Scalar, pa.Scalar]]:
    return [(entry[0], entry[1]) for entry in scalar.values]


def _simple(value: object) -> object:
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, UUID):
        return str(value)
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value.hex()
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return str(value)  # JSON has no such number
    return value if isinstance(value, str | bool | int | float | None) else str(value)


def _fraction(ticks: int, unit: str) -> str:
    digits = len(str(TICKS_PER_SECOND[unit])) - 1
    return "." + f"{ticks:0{digits}d}" if ticks else ""


def _date_text(scalar: pa.Scalar) -> str:
    try:
        return scalar.as_py().isoformat()
    except OverflowError:  # outside the years 1 to 9999
        return f"{scalar.value} {'days' if kind.is_date32(scalar.type) else 'ms'} since 1970"


def _timestamp_text(value: int, unit: str, zone: str | None) -> str:
    """Write a timestamp in ISO form with all its digits, which datetime would cut at microseconds."""
    seconds, ticks = divmod(value, TICKS_PER_SECOND[unit])
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds)
    except OverflowError:  # outside the years 1 to 9999
        return f"{value} {unit} since 1970"
    if zone is None:
        return moment.replace(tzinfo=None).isoformat() + _fraction(ticks, unit)
    # no time zone data, a bare offset, or a local time outside the years: it stays UTC
    with suppress(ZoneInfoNotFoundError, ValueError, OverflowError):
        moment = moment.astimezone(ZoneInfo(zone))
    text = moment.isoformat()
    return text[:19] + _fraction(ticks, unit) + text[19:]
