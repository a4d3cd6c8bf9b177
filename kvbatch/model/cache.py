"""Converted models in the user's cache: each is made once, whole, and known to be what was made.

A conversion happens in a temporary directory and is renamed into place under a lock, so two processes or a kill never
leave half a model. The hashes of its files lie with it; what does not fit them any more is converted again.
"""

import fcntl
import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvbatch.errors import ModelUnavailable
from kvbatch.model.file_hashes import FileHashes, sha256_of

# Raise it when the conversion changes: models converted by an older one are then converted again.
CONVERTER_VERSION = 1
SUMS_NAME = "SHA256SUMS"  # as sha256sum writes and checks it

_log = logging.getLogger(__name__)


class ModelAbsent(ModelUnavailable):
    """The model would have to be fetched or converted first."""


def cached_model(cache: Path, key: str, build: Callable[[Path], None], look_only: bool) -> Path:
    """Return the cached directory of a key, building it once however many processes ask.

    Args:
        build: writes the model into an empty directory; checks it, too.
        look_only: build nothing.

    Raises:
        ModelUnavailable: The cache cannot be written, or what `build` raises.
        ModelAbsent: With `look_only`, it is not there.
    """
    final = cache / "models" / f"{key}-v{CONVERTER_VERSION}"
    hashes = FileHashes(cache)
    if _is_whole(final, hashes):
        return final
    if look_only:
        raise ModelAbsent(f"it is fetched or converted by the first run, into {final}")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with _locked(final.parent / f".{final.name}.lock"):
            if _is_whole(final, hashes):  # another process built it while this one waited
                return final
            if final.exists():
                _log.info("%s is not what was converted; it is converted again", final)
            for leftover in final.parent.glob(f".{final.name}-*"):  # of a killed build: its lock is gone
                shutil.rmtree(leftover)
            partial = Path(tempfile.mkdtemp(dir=final.parent, prefix=f".{final.name}-"))
            try:
                build(partial)
                _write_sums(partial)
                partial.chmod(0o755)
                shutil.rmtree(final, ignore_errors=True)
                partial.rename(final)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise ModelUnavailable(
            f"the model cache {cache} cannot be written ({error}); set KVBATCH_CACHE to a place with room"
        ) from error
    return final


def _write_sums(directory: Path) -> None:
    lines = [f"{sha256_of(file)}  {file.name}\n" for file in sorted(directory.iterdir())]
    (directory / SUMS_NAME).write_text("".join(lines), encoding="utf-8")


def _is_whole(directory: Path, hashes: FileHashes) -> bool:
    if not (directory / SUMS_NAME).exists():
        return (directory / "config.json").exists()  # made before there were sums
    lines = (directory / SUMS_NAME).read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = {directory / name: sha256 for sha256, _, name in (line.partition("  ") for line in lines)}
    is_complete = {*wanted, directory / SUMS_NAME} == {*directory.iterdir()}
    return is_complete and hashes.of([*wanted]) == [*wanted.values()]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # the kernel frees it with the process
        yield
