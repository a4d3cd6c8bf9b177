"""What a run depends on: keys that decide its output, and keys that decide only where and how fast it is made.

A run may be continued as long as the first and the content of its input are what they were.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any, Protocol

from kvbatch.corpus.compression import open_file
from kvbatch.errors import InputError
from kvbatch.job_file.sections import Job
from kvbatch.text import digest

SEMANTIC_SECTIONS = ("input", "model", "prompt", "generation", "long_document", "cache", "quality_guard")
_NO_CONTENT = ("input.path", "input.incremental")  # of the input section, what says nothing of its rows
RENDERED = "rendered chat template"  # the key of what the model's chat template makes of fixed conversations
_SHOWN_CHARS = 100


class InputFile(Protocol):
    """What identifies an input file; `label` is its name within the input."""

    @property
    def path(self) -> str: ...
    @property
    def label(self) -> str: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def mtime_ns(self) -> int: ...


@dataclass(frozen=True)
class Fingerprint:
    """Name the keys that a job depends on, dotted, with their values.

    Args:
        semantic: decide the output.
        operational: decide where and how fast: device, batch, paths.
    """

    semantic: Mapping[str, Any]
    operational: Mapping[str, Any]

    def with_found(self, semantic: Mapping[str, Any], machine: Mapping[str, Any]) -> "Fingerprint":
        """Return it with what is known only once the model is open; to be deterministic, the machine decides too."""
        if self.semantic["engine.deterministic"]:
            return Fingerprint(_plain({**self.semantic, **semantic, **machine}), self.operational)
        return Fingerprint(_plain({**self.semantic, **semantic}), _plain({**self.operational, **machine}))


def job_fingerprint(job: Job) -> Fingerprint:
    """Return the keys of a job file, of values from the environment a keyed hash.

    In a deterministic job every engine setting decides the output.
    """
    values = _flat(job.model_dump(mode="json", exclude={"version", "name", "cache"}))
    values |= {
        f"cache.{key}": value for key, value in asdict(job.cache.policy).items()
    }  # not a preset's name
    if promise := job.cache.promise:
        values["cache.promise"] = f"{promise.measure} {promise.limit:g}"
    values = {key: job.environment.kept(key, value) for key, value in values.items()}
    sections = SEMANTIC_SECTIONS + (("engine",) if job.engine.deterministic else ())
    semantic = {
        key: value
        for key, value in values.items()
        if key.split(".")[0] in sections and key not in _NO_CONTENT or key == "engine.deterministic"
    }
    return Fingerprint(
        _plain(semantic), _plain({key: value for key, value in values.items() if key not in semantic})
    )


def config_hash(job: Job) -> str:
    """Return 12 hex digits over everything in the job that decides its output."""
    return digest(job_fingerprint(job).semantic)[:12]


def hash_files(
    files: Iterable[InputFile],
    known: Iterable[Mapping[str, Any]] = (),
    hashes: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, str]:
    """Return by label the SHA-256 of every file, of the bytes that it had when it was found.

    Args:
        known: path, size and modification time of files whose hash is in `hashes`: they are not read again.

    Raises:
        InputError: A file cannot be read.
    """
    trusted = {(item["path"], item["num_bytes"], item["mtime_ns"]) for item in known}
    found = {}
    for file in files:
        if (str(file.path), file.num_bytes, file.mtime_ns) in trusted and file.label in hashes:
            found[file.label] = hashes[file.label]
            continue
        try:
            with open_file(file.path, file.num_bytes) as stream:
                found[file.label] = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            raise InputError(f"{file.path} cannot be read: {error.strerror}") from error
    return found


class InputHashes:
    """Hash a job's input files once, when the hashes are first needed."""

    def __init__(self, files: Iterable[InputFile]):
        self._files = tuple(files)
        self._hashes: dict[str, str] | None = None

    def hashes(
        self, known: tuple[Iterable[Mapping[str, Any]], Mapping[str, str]] = ((), {})
    ) -> dict[str, str]:
        """Return the SHA-256 of every file by its label; raises as `hash_files`.

        Args:
            known: input files and hashes of an earlier run; a file that did not change is not read again.
        """
        if self._hashes is None:
            self._hashes = hash_files(self._files, *known)
        return self._hashes


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Say what differs, one line a key, with the value of before and of now."""
    return [
        f"{key}: {_shown(old, key)} before, {_shown(new, key)} now"
        for key in dict.fromkeys([*old, *new])
        if (key in old, old.get(key)) != (key in new, new.get(key))
    ]


def _shown(keys: Mapping[str, Any], key: str) -> str:
    if key not in keys:
        return "nothing"
    text = json.dumps(keys[key], ensure_ascii=False)
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}… ({len(text):,} characters)"


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in values.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values as JSON gives them back, so that they can be compared with those of a manifest."""
    return json.loads(json.dumps(values, default=str))
