"""Compiles C++ kernels once per machine into the user's cache and loads them.

The library's name is a hash of all that shapes it (sources, flags, compiler, CPU), so a cache shared by
several machines holds one library for each kind of machine, and a stale one is never loaded. A hash of the library
itself follows, so that a damaged file is detected before it is loaded: the loader crashes on a truncated file.
"""

import contextlib
import ctypes
import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvcache.user_cache import user_cache

COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 300
HERE = Path(__file__).parent


@functools.cache
def library(folder: Path = HERE) -> ctypes.CDLL | None:
    """Return a folder's kernels, compiled if need be; None, with one warning, where that cannot be done.

    `KVBATCH_NATIVE=0` switches them off, `CXX` names the compiler, `KVBATCH_CACHE` the cache. Headers beside this file
    are for all.
    """
    if os.environ.get("KVBATCH_NATIVE", "1") == "0":
        return None
    try:
        compiler = find_compiler()
        try:
            return compile_and_load(compiler, cache_folder(), sources=folder)
        except OSError as error:  # no home, or none that can be written or run from
            with tempfile.TemporaryDirectory(prefix="kvbatch-") as temporary:  # once loaded, the file may go
                found = compile_and_load(compiler, Path(temporary), sources=folder)
            _warn(
                f"CPU kernels cannot be kept ({_first_line(error)}), each run compiles them anew; "
                "set KVBATCH_CACHE to a directory that can be written"
            )
            return found
    except (OSError, subprocess.SubprocessError) as error:
        _warn(
            f"CPU kernels cannot be compiled ({_first_line(error)}); "
            "torch takes over, at a fraction of the decode speed"
        )
        return None


@functools.cache
def _warn(message: str) -> None:
    """Warn once, of however many libraries."""
    logging.getLogger(__name__).warning(message)


def _first_line(error: Exception) -> str:
    text = (getattr(error, "stderr", None) or str(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__


def find_compiler() -> list[str]:
    """Return the command of a C++ compiler.

    Raises:
        FileNotFoundError: There is none.
    """
    if os.environ.get("CXX"):
        return os.environ["CXX"].split()
    for name in COMPILERS:
        if shutil.which(name):
            return [name]
    raise FileNotFoundError(f"no C++ compiler: install {' or '.join(COMPILERS[:2])}, or set CXX")


def cache_folder() -> Path:
    """Return where compiled kernels are kept; raises as `user_cache`."""
    return user_cache() / "kernels"


def compile_and_load(
    compiler: list[str], folder: Path, extra_flags: tuple[str, ...] = (), *, sources: Path = HERE
) -> ctypes.CDLL:
    """Load the library of the sources from `folder`, compiling it there first unless it is there and whole.

    Raises:
        OSError: There is no such compiler, the folder cannot be written, or what was compiled cannot be loaded.
        subprocess.SubprocessError: It cannot compile this.
    """
    version = _run([*compiler, "--version"])
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    # Not -ffast-math: vector code needs no more than this, and infinities and NaN keep their meaning.
    flags = ["-std=c++17", "-O3", native, "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
    # psabi: a note about vectors as arguments, which matters between libraries only.
    flags += ["-Wno-psabi", *extra_flags]
    texts = (path.read_text(encoding="utf-8") for path in _sources(sources))
    name = _digest(version, " ".join([*compiler, *flags]), cpu_identity(), *texts)
    # torch loaded its OpenMP runtime before; a library that wants one of that name shares it and its threads.
    if found := _load(folder, name):
        return found
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder / f"{name}.lock"):
        if found := _load(folder, name):  # another process was faster
            return found
        _compile([*compiler, *flags, f"-I{HERE}"], sources, folder, name)
        if found := _load(folder, name):
            return found
    raise OSError(f"what was compiled into {folder} cannot be loaded from there")


def _load(folder: Path, name: str) -> ctypes.CDLL | None:
    """Load a library that is there, whole and of use here."""
    for path in folder.glob(f"{name}-*.so"):
        with contextlib.suppress(OSError):  # unreadable, or made where other libraries are
            if path.stem == f"{name}-{_content_digest(path)}":
                return ctypes.CDLL(str(path))
    return None


def _compile(command: list[str], sources: Path, folder: Path, name: str) -> None:
    """Compile to a temporary file and move it to its place; on one thread where the compiler has no OpenMP."""
    with tempfile.TemporaryDirectory(dir=folder) as temporary:
        target = Path(temporary) / f"{name}.so"
        try:
            _build([*command, "-fopenmp"], sources, target)
            ctypes.CDLL(str(target))  # a runtime that is missing shows here
        except (subprocess.CalledProcessError, OSError):
            target.unlink(missing_ok=True)
            _build(command, sources, target)
        with target.open("rb") as file:
            os.fsync(file.fileno())  # else a power cut may leave the name and nothing behind it
        for useless in folder.glob(f"{name}-*.so"):
            useless.unlink()
        os.replace(target, folder / f"{name}-{_content_digest(target)}.so")


def _build(command: list[str], folder: Path, target: Path) -> None:
    """Compile all sources of a folder at once and link them."""
    sources = sorted(folder.glob("*.cpp"))
    objects = [str(target.with_name(f"{source.stem}.o")) for source in sources]
    commands = [[*command, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
    with ThreadPoolExecutor() as pool:
        list(pool.map(_run, commands))
    _run([*command, *objects, "-o", str(target)])


def _sources(folder: Path) -> list[Path]:
    """Return all files that a folder's library is made of."""
    return sorted({*folder.glob("*.cpp"), *folder.glob("*.h"), *HERE.glob("*.h")})


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT_S).stdout


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]


def cpu_name() -> str:
    """Return the name of the CPU, as the system gives it; of its architecture where it gives none."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def cpu_identity() -> str:
    """Return what `native` means here: the CPU's name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    )


def _content_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:20]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file: processes that start together compile once."""
    import fcntl

    with path.open("w", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
