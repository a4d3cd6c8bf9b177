"""Read a JSON schema that a job names by its file, and check it before anything else starts."""

import json
import os
from pathlib import Path
from typing import Any


def read_schema(path: str) -> Any:
    """Return the schema in a file.

    Raises:
        ValueError: There is no such file, or no JSON in it.
    """
    try:
        return json.loads(Path(os.path.expanduser(path)).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror or error}; check the path") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def check_schema(schema: dict[str, Any]) -> None:
    """Prove that a schema is one.

    Raises:
        ValueError: It is not, with the place of the mistake in it.
    """
    import jsonschema

    validator = jsonschema.validators.validator_for(schema)
    try:
        validator.check_schema(schema, format_checker=validator.FORMAT_CHECKER)  # proves the patterns, too
    except jsonschema.SchemaError as error:
        raise ValueError(f"no JSON schema: {error.json_path}: {error.message}") from error
