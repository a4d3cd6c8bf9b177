"""Values of a job that came from the environment: what of them may stand in files and messages.

A value may be a secret. So a run directory keeps the variable's name, as the job file has it, and in fingerprints a
keyed hash, whose key lies beside it in a file that only its owner reads: a plain hash of a short secret can be guessed.
A new run takes over the key of the job's last one, so that their fingerprints can be compared. Where the job's files
lie has to be known, so these values stand as they are, but for user and query of a URL.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvbatch.errors import InputError

if TYPE_CHECKING:
    from kvbatch.job_file.sections import Job

KeyPath = tuple[str | int, ...]

KEY_FILE = "environment.key"
PLACES: tuple[KeyPath, ...] = (("name",), ("input", "path"), ("model", "path"), ("output",))
_KEY_BYTES, _CHECK_DIGITS = 32, 16
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#\s]*@)?([^?#\s]*)(?:\?[^#\s]*)?")
_LEAST_CHARS = 3  # a shorter value would be found in half of all messages


@dataclass(frozen=True)
class Expanded:
    """A value with references to variables.

    Args:
        written: as the job file has it.
        text: what it stands for.
        variables: those that were set, by name.
    """

    written: str
    text: str = field(repr=False)
    variables: Mapping[str, str] = field(repr=False)

    @property
    def names(self) -> str:
        """The variables as they are referred to."""
        return ", ".join(f"${{{name}}}" for name in self.variables) or self.written


@dataclass(frozen=True)
class Environment:
    """What a job took from the environment, by key."""

    values: Mapping[KeyPath, Expanded] = field(default_factory=dict, compare=False)
    key: bytes = field(default=b"", compare=False, repr=False)

    @property
    def hidden(self) -> dict[KeyPath, Expanded]:
        """The values that no file may hold."""
        return {key: value for key, value in self.values.items() if not is_place(key)}

    def kept(self, name: str, value: object) -> object:
        """Return what a fingerprint keeps of the value of a dotted key."""
        if is_place(tuple(name.split("."))):
            if isinstance(value, list | tuple):
                return [without_credentials(each) for each in value]
            return without_credentials(value) if isinstance(value, str) else value
        found = [expanded for key, expanded in self.hidden.items() if _covers(key, name)]
        if not found:
            return value
        assert self.key, "the key is read or made with the job"
        text = json.dumps(value, sort_keys=True, default=str)
        digest = hmac.digest(self.key, f"{name}\0{text}".encode(), "sha256").hex()[:20]
        return f"{', '.join(dict.fromkeys(each.names for each in found))}: keyed hash {digest}"

    def as_written(self, dumped: Mapping[str, Any]) -> dict[str, Any]:
        """Return a job's values as a job file has them, with references to the environment."""

        def written(value: Any, key: KeyPath) -> Any:
            if key in self.hidden:
                return self.hidden[key].written
            if isinstance(value, Mapping):
                return {name: written(inner, (*key, name)) for name, inner in value.items()}
            if isinstance(value, list | tuple):
                return [written(inner, (*key, index)) for index, inner in enumerate(value)]
            if not isinstance(value, str):
                return value
            return (without_credentials(value) if is_place(key) else value).replace("${", "$${")

        return written(dumped, ())

    def hide(self, text: str) -> str:
        """Return a message with the names of variables in the place of their values."""
        secret: dict[str, str] = {}
        for key, value in self.values.items():
            if is_place(key):
                secret[value.text] = without_credentials(value.text)
                continue
            secret[value.text] = value.written
            secret |= {found: f"${{{name}}}" for name, found in value.variables.items()}
        for found in sorted(secret, key=len, reverse=True):
            forms = {
                found,
                json.dumps(found)[1:-1],
                json.dumps(found, ensure_ascii=False)[1:-1],
                repr(found)[1:-1],
            }
            if len(found) >= _LEAST_CHARS and secret[found] != found:
                for form in sorted(forms, key=len, reverse=True):
                    text = re.sub(rf"(?<!\w){re.escape(form)}(?!\w)", lambda _: secret[found], text)  # noqa: B023
        return text

    def quotes(self, key: KeyPath, text: str) -> bool:
        """Tell whether a message about a key repeats a word of what a variable stands for there."""
        found = [value for each in self._at(key) for value in each.variables.values()]
        words = {word for value in found for word in re.findall(rf"\w{{{_LEAST_CHARS},}}", value)}
        return any(re.search(rf"(?<!\w){word}(?!\w)", text) for word in words)

    def names_at(self, key: KeyPath) -> str:
        """Return the variables that a key refers to."""
        return ", ".join(dict.fromkeys(value.names for value in self._at(key)))

    def _at(self, key: KeyPath) -> list[Expanded]:
        """Return the values of a key, of what stands in it, or of what it stands in."""
        return [v for each, v in self.hidden.items() if all(a == b for a, b in zip(key, each, strict=False))]

    def write_key(self, folder: Path) -> None:
        """Put the key into a run directory, if a value needs it.

        Raises:
            OSError: It cannot be written.
        """
        if not self.hidden:
            return
        temp = folder / f".{KEY_FILE}.{os.getpid()}.tmp"
        try:
            handle = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(f"{self.key.hex()} {_check(self.key)}\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temp, folder / KEY_FILE)
        finally:
            temp.unlink(missing_ok=True)


def read_key(folder: Path) -> bytes:
    """Return the key that lies in a run directory.

    Raises:
        InputError: It is missing, damaged or another user's.
    """
    file = folder / KEY_FILE
    try:
        words = file.read_bytes().decode("ascii").split()
        key = bytes.fromhex(words[0])
        if len(words) == 2 and len(key) == _KEY_BYTES and words[1] == _check(key):
            return key
        problem = "it is damaged"
    except OSError as error:
        problem = error.strerror or str(error)
    except (ValueError, IndexError):
        problem = "it is damaged"
    raise InputError(
        f"{file}: {problem}; without it nobody can tell whether variables of the environment are what they were: "
        "restore it, or start afresh: kvbatch run --new-run"
    )


def job_key(home: Path) -> bytes:
    """Return the key of a job's last run, or of its plan, or a new one."""
    for name in ("latest", "plan"):
        with suppress(InputError):
            return read_key(home / name)
    return secrets.token_bytes(_KEY_BYTES)


def is_place(key: KeyPath) -> bool:
    """Tell whether a key says where something lies."""
    return any(key[: len(place)] == place for place in PLACES)


def without_credentials(text: str) -> str:
    """Return a text with user and query of URLs cut."""
    return _URL.sub(r"\1\2", text)


@contextmanager
def hiding(job: "Job") -> Iterator[None]:
    """Let no error of the block say what a variable stands for; raises what the block raises."""
    try:
        yield
    except Exception as error:
        hide = job.environment.hide
        error.args = tuple(hide(each) if isinstance(each, str) else each for each in error.args)
        raise


def _covers(key: KeyPath, name: str) -> bool:
    """Tell whether a key is that of a dotted name, within its list, or the section that it stands in."""
    names = [str(part) for part in key]
    numbers = [index for index, part in enumerate(key) if isinstance(part, int)]
    prefix = ".".join(names[: numbers[0]] if numbers else names)
    return name == prefix or name.startswith(f"{prefix}.")


def _check(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:_CHECK_DIGITS]
