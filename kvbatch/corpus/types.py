"""Find the Arrow type to which a column's types in two files widen without loss; types without one clash."""

from itertools import chain

import pyarrow as pa
from pyarrow import types as kind

MAX_DECIMAL_DIGITS = {128: 38, 256: 76}
TIME_UNITS = ("s", "ms", "us", "ns")


class TypeClash(Exception):
    """No type holds both columns without retyping one."""


def widen(left: pa.DataType, right: pa.DataType) -> pa.DataType:
    """Return the type that both widen to safely.

    Widths of integers, floats, decimals and dictionary indices grow, string and large_string go together, a
    dictionary goes with its plain values, times take the finer unit, and structs get the fields of both.

    Raises:
        TypeClash: there is none.
    """
    if left == right or kind.is_null(right):
        return left
    if kind.is_null(left):
        return right
    if kind.is_dictionary(left) and kind.is_dictionary(right):
        index_type = max(left.index_type, right.index_type, key=lambda each: each.bit_width)
        values = widen(left.value_type, right.value_type)
        return pa.dictionary(index_type, values, left.ordered and right.ordered)
    if kind.is_dictionary(left):
        return widen(left.value_type, right)
    if kind.is_dictionary(right):
        return widen(left, right.value_type)
    for rule in (_widen_text, _widen_number, _widen_time, _widen_nested):
        found = rule(left, right)
        if found is not None:
            return found
    raise TypeClash(f"{left} and {right}")


def widened(array: pa.Array, type_: pa.DataType) -> pa.Array:
    """Cast an array to a type that its own was widened to.

    Raises:
        pa.ArrowInvalid: a value is out of range, as a year 9999 is in nanoseconds.
    """
    if array.type == type_:
        return array
    if kind.is_dictionary(array.type) and kind.is_dictionary(type_):
        indices, values = array.indices.cast(type_.index_type), array.dictionary.cast(type_.value_type)
        return pa.DictionaryArray.from_arrays(indices, values, ordered=type_.ordered)
    if kind.is_dictionary(array.type):
        array = array.cast(array.type.value_type)
    return array.cast(type_)


def _widen_text(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    for plain, large, view in (
        (pa.string(), pa.large_string(), pa.string_view()),
        (pa.binary(), pa.large_binary(), pa.binary_view()),
    ):
        if {left, right} <= {plain, large, view}:
            return large if large in (left, right) else plain
    return None


def _widen_number(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if kind.is_floating(left) and kind.is_floating(right):
        return max(left, right, key=lambda each: each.bit_width)
    if kind.is_integer(left) and kind.is_integer(right):
        if kind.is_signed_integer(left) == kind.is_signed_integer(right):
            return max(left, right, key=lambda each: each.bit_width)
        signed, unsigned = (left, right) if kind.is_signed_integer(left) else (right, left)
        bits = max(signed.bit_width, 2 * unsigned.bit_width)
        return {16: pa.int16(), 32: pa.int32(), 64: pa.int64()}.get(bits)
    if kind.is_decimal(left) and kind.is_decimal(right):
        scale = max(left.scale, right.scale)
        digits = scale + max(left.precision - left.scale, right.precision - right.scale)
        bits = max(left.bit_width, right.bit_width, 128)
        if digits > MAX_DECIMAL_DIGITS[bits] and digits <= MAX_DECIMAL_DIGITS[256]:
            bits = 256
        if digits <= MAX_DECIMAL_DIGITS[bits]:
            return pa.decimal128(digits, scale) if bits == 128 else pa.decimal256(digits, scale)
    return None


def _widen_time(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    def finer() -> str:
        return max(left.unit, right.unit, key=TIME_UNITS.index)

    if kind.is_timestamp(left) and kind.is_timestamp(right) and left.tz == right.tz:
        return pa.timestamp(finer(), left.tz)
    if kind.is_duration(left) and kind.is_duration(right):
        return pa.duration(finer())
    if kind.is_time(left) and kind.is_time(right):
        return pa.time64(finer()) if finer() in ("us", "ns") else pa.time32(finer())
    return None


def _widen_nested(left: pa.DataType, right: pa.DataType) -> pa.DataType | None:
    if kind.is_struct(left) and kind.is_struct(right):
        fields: dict[str, pa.DataType] = {}
        for each in chain(left, right):
            fields[each.name] = widen(fields.get(each.name, pa.null()), each.type)
        return pa.struct(list(fields.items()))
    if kind.is_map(left) and kind.is_map(right):
        return pa.map_(widen(left.key_type, right.key_type), widen(left.item_type, right.item_type))
    lists = (kind.is_list, kind.is_large_list)
    if any(is_list(left) for is_list in lists) and any(is_list(right) for is_list in lists):
        value_type = widen(left.value_type, right.value_type)
        is_large = kind.is_large_list(left) or kind.is_large_list(right)
        return pa.large_list(value_type) if is_large else pa.list_(value_type)
    return None
