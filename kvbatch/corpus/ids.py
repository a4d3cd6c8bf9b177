"""Convert the value of an id column into the id of a row, or into None if the value cannot be an id."""

import json


def id_from_json(value: object) -> str | int | None:
    """Return the id that a JSON value stands for: ints and strings as they are, other numbers as their text.

    The text of a float stays a NumberText, which distinguishes it from a string.

    Returns:
        None for what cannot be an id (null, an empty string, a list, an object): the row gets one made up.
    """
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):  # NaN and Infinity; other floats are NumberText
        return json.dumps(value)
    return value if isinstance(value, int) or (isinstance(value, str) and value) else None


def id_from_bytes(value: bytes | None) -> str | None:
    """Return a binary id as its UTF-8 text, or as hex where it is not UTF-8."""
    if not value:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.hex()
