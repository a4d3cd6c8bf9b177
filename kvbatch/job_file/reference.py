"""What a job file may hold, told from its models: as a JSON schema for editors and as a table for people."""

from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from kvbatch.job_file import extends
from kvbatch.job_file.load import section_model
from kvbatch.job_file.sections import Job

_MARKS = ("<!-- keys: kvbatch schema --markdown -->", "<!-- end of keys -->")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of job files.

    What a job must have is not asked for in a file that extends another; inside a section it is left to kvbatch.
    """
    schema = Job.model_json_schema()
    for section in schema["$defs"].values():
        section.pop("required", None)
    needed = schema.pop("required")
    properties = {extends.KEY: {"type": "string", "description": extends.DESCRIPTION}} | schema.pop(
        "properties"
    )
    head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "kvbatch job file"}
    needs = {"anyOf": [{"required": needed}, {"required": [extends.KEY]}]}
    return head | schema | {"properties": properties} | needs


def markdown() -> str:
    """Return the table of all keys, between the marks that surround it in `docs/job_file.md`."""
    lines = [_MARKS[0], "| key | values | default | |", "|---|---|---|---|"]
    lines.append(f"| `{extends.KEY}` | text | | {extends.DESCRIPTION} |")
    for key, spec, is_required in _keys(Job, ""):
        meaning = " ".join(spec.get("description", "").split())
        default = "**required**" if is_required else _shown_default(spec)
        lines.append(f"| `{key}` | {_values(spec)} | {default} | {meaning} |")
    return "\n".join([*lines, _MARKS[1]])


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield every key with its part of the JSON schema, and whether it has to be there."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if section := section_model(field.annotation):
            yield from _keys(section, f"{prefix}{name}.")
        else:
            yield prefix + name, schema["properties"][name], field.is_required()


def _shown_default(spec: dict[str, Any]) -> str:
    default = spec.get("default")
    if default is None or default == []:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _values(spec: dict[str, Any]) -> str:
    """Say which values a key takes."""
    if "anyOf" in spec:
        return ", or ".join(_values(each) for each in spec["anyOf"] if each.get("type") != "null")
    if "enum" in spec or "const" in spec:
        return ", ".join(f"`{value}`" for value in spec.get("enum", [spec.get("const")]))
    kind = spec.get("type", "any")
    if kind == "array":
        if "prefixItems" in spec:
            return "[" + ", ".join(map(_values, spec["prefixItems"])) + "]"
        return f"list of {_values(spec['items'])}"
    words = {"string": "text", "boolean": "`true`, `false`", "object": "mapping"}
    bounds = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}
    limits = "".join(f" {sign} {spec[name]:g}" for name, sign in bounds.items() if name in spec)
    return words.get(kind, kind) + limits
