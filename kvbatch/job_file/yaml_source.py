"""YAML with places: what a job file says, and on which line it says it.

It parses YAML, expands `${ENV}` and keeps the place of every key. What the keys mean is in `sections`.
"""

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml

from kvbatch.errors import JobFileError
from kvbatch.job_file.environment import Expanded

KeyPath = tuple[str | int, ...]

MAX_KEYS = 100_000
_KEY_TAGS = ("tag:yaml.org,2002:str", "tag:yaml.org,2002:merge")
_REFERENCE = re.compile(r"\$(?:(\$)(?=\{)|\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\})")


class _Loader(yaml.SafeLoader):
    """Read YAML as JSON's types: a date is the text it was written as, so are `=` and, as a value, `<<`."""


_Loader.yaml_implicit_resolvers = {
    first: [
        (tag, pattern)
        for tag, pattern in resolvers
        if tag not in ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
    ]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _as_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    return str(loader.construct_scalar(node))


_Loader.add_constructor("tag:yaml.org,2002:merge", _as_text)


@dataclass
class Source:
    """Hold the values of a job file and where each came from."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int] = field(default_factory=dict)
    files: dict[KeyPath, Path] = field(default_factory=dict)  # of keys from a file that this one extends
    overrides: dict[KeyPath, str] = field(default_factory=dict)  # key -> the -s argument that set it
    expanded: set[KeyPath] = field(default_factory=set)  # values that came from the environment
    environment: dict[KeyPath, Expanded] = field(default_factory=dict)  # and what they are made of
    texts: dict[KeyPath, str] = field(default_factory=dict)  # items of lists as written: no, 007, null

    def place(self, key: KeyPath) -> str:
        """Return where a key was set: a -s argument, or file and line; for a missing key, its section's."""
        while key:
            if key in self.overrides:
                return f"-s {self.overrides[key]}"
            if key in self.lines:
                return f"{self.files.get(key, self.path)}:{self.lines[key]}"
            key = key[:-1]
        return str(self.path)

    def is_overridden(self, key: KeyPath) -> bool:
        """Tell whether a -s argument set the key, or the section or list that it is in."""
        return any(key[:length] in self.overrides for length in range(1, len(key) + 1))


def read_source(path: Path) -> Source:
    """Read a job file.

    Raises:
        JobFileError: It is missing, no YAML, not a mapping, or holds a key twice.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise JobFileError(f"{path}: no such job file{_neighbours(path)}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobFileError(f"{path}: cannot be read as a job file: {error}") from error
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        if node is not None:
            _collect_lines(node, (), lines, path)
        texts = dict(_item_texts(node, ()))  # before merge keys are resolved, which changes the node
        data = loader.construct_document(node) if node is not None else None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}:{mark.line + 1}" if mark else str(path)
        problem = getattr(error, "problem", None) or error
        raise JobFileError(
            f"{where}: not valid YAML: {problem}; check quotes, colons and indentation"
        ) from error
    except RecursionError as error:
        raise JobFileError(f"{path}: nested too deeply, or an alias (*) is part of what it names") from error
    if not isinstance(data, dict):
        raise JobFileError(
            f"{path}: a job file is a mapping of sections (version, name, input, model, prompt, …)"
        )
    return Source(path, data, lines, texts=texts)


def _neighbours(path: Path) -> str:
    """Return a hint naming the nearest job file beside a missing one."""
    names = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=1, cutoff=0.4)
    return f"; did you mean {path.parent / near[0]}?" if near else "; check the path"


def _collect_lines(node: yaml.Node, key: KeyPath, lines: dict[KeyPath, int], path: Path) -> None:
    if len(lines) > MAX_KEYS:  # a few aliases of aliases make billions
        raise JobFileError(
            f"{path}: it has more than {MAX_KEYS:,} keys and items, aliases (*) counted in full"
        )
    if isinstance(node, yaml.MappingNode):
        for name, value in node.value:
            _check_key(name, path)
            inner = (*key, name.value)
            if inner in lines:
                raise JobFileError(
                    f"{path}:{name.start_mark.line + 1}: key '{dotted(inner)}' stands twice, "
                    f"first on line {lines[inner]}; keep one"
                )
            lines[inner] = name.start_mark.line + 1
            _collect_lines(value, inner, lines, path)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            lines[(*key, index)] = value.start_mark.line + 1
            _collect_lines(value, (*key, index), lines, path)


def _item_texts(node: yaml.Node | None, key: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    """Yield what is written, without quotes, as an item of a list; a merged mapping's before a mapping's own."""
    if isinstance(node, yaml.MappingNode):
        merges_first = sorted(node.value, key=lambda pair: pair[0].tag != "tag:yaml.org,2002:merge")
        for name, value in merges_first:
            if name.tag != "tag:yaml.org,2002:merge":
                yield from _item_texts(value, (*key, name.value))
            elif isinstance(value, yaml.MappingNode):
                yield from _item_texts(value, key)
            else:
                for merged in reversed(value.value):
                    yield from _item_texts(merged, key)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            if isinstance(item, yaml.ScalarNode) and item.style is None:
                yield (*key, index), item.value
            yield from _item_texts(item, (*key, index))


def _check_key(name: yaml.Node, path: Path) -> None:
    place = f"{path}:{name.start_mark.line + 1}"
    if not isinstance(name, yaml.ScalarNode):  # `template: {{text}}` is a mapping with a mapping for its key
        raise JobFileError(f"{place}: a key must be a name; put a value that begins with a brace in quotes")
    if name.tag not in _KEY_TAGS:
        kind = name.tag.rpartition(":")[2]
        raise JobFileError(f"{place}: key {name.value!r} is a {kind} to YAML; put it in quotes")


def expand_environment(source: Source, environment: Mapping[str, str] = os.environ) -> None:
    """Replace `${NAME}` and `${NAME:-default}` in all values; `$${` stays `${`.

    Raises:
        JobFileError: A variable is not set and has no default.
    """

    def expand(value: Any, key: KeyPath) -> Any:
        if isinstance(value, dict):
            return {name: expand(inner, (*key, name)) for name, inner in value.items()}
        if isinstance(value, list):
            return [expand(inner, (*key, index)) for index, inner in enumerate(value)]
        if not isinstance(value, str) or "${" not in value:
            return value

        variables: dict[str, str] = {}
        is_reference = False

        def substitute(match: re.Match[str]) -> str:
            nonlocal is_reference
            if match[1]:
                return "$"
            is_reference = True
            found = environment.get(match[2]) or match[3]  # as in a shell, :- also replaces an empty value
            if found is None:
                raise JobFileError(
                    f"{source.place(key)}: key '{dotted(key)}' needs the environment variable {match[2]}, "
                    f"which is not set; set it, or write ${{{match[2]}:-default}}, or $${{ for a literal ${{"
                )
            if environment.get(match[2]):
                variables[match[2]] = found
            return found

        source.expanded.add(key)
        text = _REFERENCE.sub(substitute, value)
        if is_reference:
            source.environment[key] = Expanded(value, text, variables)
        return text

    source.data = expand(source.data, ())


def item_texts(text: str, key: KeyPath) -> dict[KeyPath, str]:
    """Return how the items of the list `text` are written, each by its place under `key`."""
    try:
        return dict(islice(_item_texts(yaml.compose(text, _Loader), key), MAX_KEYS))
    except (yaml.YAMLError, RecursionError):
        return {}


def parse_scalar(text: str) -> object:
    """Return what YAML makes of `text`; text that is no YAML stays text."""
    try:
        return yaml.load(text, _Loader)  # a SafeLoader with fewer types
    except yaml.YAMLError:
        return text


def dotted(key: KeyPath) -> str:
    """Return a key as a person writes it: `a.b[0]`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in key).lstrip(".")
