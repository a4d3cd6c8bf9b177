"""`-s a.b=c`: single values set from the command line, over those of the job file."""

from collections.abc import Sequence

from kvbatch.errors import JobFileError
from kvbatch.job_file.yaml_source import Source, dotted, item_texts, parse_scalar


def apply_overrides(source: Source, overrides: Sequence[str]) -> None:
    """Set `a.b` to the YAML value `c` for every `a.b=c`, creating sections as needed.

    Raises:
        JobFileError: An override has no `=`, an empty key, or goes through a value that is no section.
    """
    for override in overrides:
        name, equals, text = override.partition("=")
        parts = tuple(name.strip().split("."))
        if not equals or not all(parts):
            raise JobFileError(f"-s {override}: write section.key=value, for example -s input.limit=5")
        section = source.data
        for depth, part in enumerate(parts[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            section = section[part]
            if not isinstance(section, dict):
                raise JobFileError(f"-s {override}: '{dotted(parts[:depth])}' is a value, not a section")
        section[parts[-1]] = parse_scalar(text)
        for places in (source.lines, source.texts):  # of what stood there before
            for key in [key for key in places if key[: len(parts)] == parts]:
                del places[key]
        source.texts |= item_texts(text, parts)
        source.overrides[parts] = override
