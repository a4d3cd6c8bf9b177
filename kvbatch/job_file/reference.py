"""What a job file may hold, told from its models: as a JSON schema for editors and as a table for people."""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel

from kvbatch.job_file import extends
from kvbatch.job_file.load import section_model
from kvbatch.job_file.sections import CacheSection, Job
from kvcache.config import PRESETS, KVCacheConfig

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
    """Return the tables of all keys and of the presets, between the marks that enclose them in `docs/job_file.md`."""
    lines = [_MARKS[0], "| key | values | default | |", "|---|---|---|---|"]
    lines.append(f"| `{extends.KEY}` | text | | {extends.DESCRIPTION} |")
    for key, spec, is_required in _keys(Job, ""):
        meaning = " ".join(spec.get("description", "").split())
        default = "**required**" if is_required else _shown_default(key, spec)
        lines.append(f"| `{key}` | {_values(spec)} | {default} | {meaning} |")
    return "\n".join([*lines, "", *_presets(), _MARKS[1]])


def listing(num_columns: int) -> str:
    """Return every key with its values, its default and its meaning, for a terminal of that width."""
    paragraphs = []
    for key, spec, is_required in _keys(Job, ""):
        default = "required" if is_required else f"default {_shown_default(key, spec)}"
        head = f"{key}  ({_values(spec)}; {default})".replace("`", "")
        meaning = " ".join(spec.get("description", "").split())
        lines = [textwrap.fill(head, num_columns, subsequent_indent="        ")]
        lines.append(textwrap.fill(meaning, num_columns, initial_indent="    ", subsequent_indent="    "))
        paragraphs.append("\n".join(lines))
    return "\n".join(paragraphs)


def _presets() -> list[str]:
    """Return the table of what each preset sets, of the keys in which presets differ."""
    rows = {name: asdict(policy) | {"tiers": _tiers(policy)} for name, policy in PRESETS.items()}
    keys = [key for key in CacheSection.model_fields if key != "preset"]
    keys = [key for key in keys if len({str(row[key]) for row in rows.values()}) > 1]
    lines = [f"| | {' | '.join(f'`{name}`' for name in rows)} |", "|---" * (len(rows) + 1) + "|"]
    for key in keys:
        cells = (_cell(row[key]) for row in rows.values())
        lines.append(f"| `cache.{key}` | {' | '.join(cells)} |")
    return lines


def _tiers(policy: KVCacheConfig) -> list[list[float]]:
    return [[tier.ratio, tier.key_bits, tier.value_bits] for tier in policy.tiers]


def _keys(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, dict[str, Any], bool]]:
    """Yield every key with its part of the JSON schema, and whether it has to be there."""
    schema = model.model_json_schema()
    for name, field in model.model_fields.items():
        if section := section_model(field.annotation):
            yield from _keys(section, f"{prefix}{name}.")
        else:
            yield prefix + name, schema["properties"][name], field.is_required()


def _shown_default(key: str, spec: dict[str, Any]) -> str:
    default = spec.get("default")
    if default is None:  # what that means stands in the key's meaning
        return "the preset's" if key.startswith("cache.") else "–"
    return _cell(default)


def _cell(value: Any) -> str:
    """Return a value as YAML has it."""
    if value in (None, [], (), {}):
        return "–"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


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
    text = words.get(kind, kind) + (f" like `{spec['pattern']}`" if "pattern" in spec else "")
    limits = "".join(f" {sign} {spec[name]:g}" for name, sign in bounds.items() if name in spec)
    return text + limits
