"""`extends: other.yaml`: a job file that starts from another one and says only what differs."""

import os
from pathlib import Path
from typing import Any

from kvbatch.errors import JobFileError
from kvbatch.job_file.yaml_source import KeyPath, Source, read_source

KEY = "extends"
DESCRIPTION = (
    "Job file to start from, its path relative to this one. Its keys hold unless they are set here; a key of a "
    "section is replaced as a whole."
)


def read_job_source(path: Path) -> Source:
    """Read a job file and those that it extends.

    Raises:
        JobFileError: One of them is wrong, or they extend each other in a circle.
    """
    return _read(path, ())


def _read(path: Path, chain: tuple[Path, ...]) -> Source:
    source = read_source(path)
    if KEY not in source.data:
        return source
    place = source.place((KEY,))
    name = source.data.pop(KEY)
    if not isinstance(name, str):
        raise JobFileError(f"{place}: key '{KEY}' is the path of a job file, not {name!r}")
    base = path.parent / os.path.expanduser(name)
    chain = (*chain, path)
    if any(base.resolve() == each.resolve() for each in chain):
        circle = " → ".join(map(str, (*chain, base)))
        raise JobFileError(f"{place}: job files extend each other in a circle: {circle}; cut it")
    if not base.is_file():
        raise JobFileError(
            f"{place}: key '{KEY}': there is no job file {base}; paths start at this file's folder"
        )
    return _over(_read(base, chain), source)


def _over(base: Source, source: Source) -> Source:
    """Put a job file over the one that it extends, section by section and key by key, places included."""
    data: dict[str, Any] = dict(base.data)
    replaced: set[tuple[str, ...]] = set()  # (section,) or (section, key)
    for name, value in source.data.items():
        if isinstance(value, dict) and isinstance(data.get(name), dict):
            data[name] = data[name] | value
            replaced |= {(name, key) for key in value}
        else:
            data[name] = value
            replaced.add((name,))

    def stays(key: KeyPath) -> bool:
        return key[:1] not in replaced and key[:2] not in replaced

    kept = {key: line for key, line in base.lines.items() if stays(key)}
    texts = {key: text for key, text in base.texts.items() if stays(key)}
    files = {key: base.files.get(key, base.path) for key in kept if key not in source.lines}
    return Source(
        source.path, data, kept | source.lines, files=files | source.files, texts=texts | source.texts
    )
