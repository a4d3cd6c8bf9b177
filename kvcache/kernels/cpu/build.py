"""Compiles C++ kernels once per machine into the user's cache and loads them.

The library's name is a hash of all that shapes it (sources, flags, compiler, CPU), so a cache shared by
several machines holds one library for each kind of them and a stale one is never loaded.
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

COMPILERS = ("g++", "clang++", "c++")
TIMEOUT_S = 300
HERE = Path(__file__).parent
_TYPES = {"i": ctypes.c_int, "l": ctypes.c_int64, "f": ctypes.c_float, "p": ctypes.c_void_p}


@functools.cache
def library(folder: Path = HERE) -> ctypes.CDLL | None:
    """Return a folder's kernels, compiled if need be; None, with one warning, where that cannot be done.

    `KVBATCH_NATIVE=0` switches them off, `CXX` names the compiler, `KVBATCH_CACHE` the cache. Headers beside this file
    are for all.
    """
    if os.environ.get("KVBATCH_NATIVE", "1") == "0":
        return None
    try:
        return compile_and_load(find_compiler(), cache_folder(), sources=folder)
    except (OSError, subprocess.SubprocessError) as error:
        reason = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[0]
        logging.getLogger(__name__).warning(
            "CPU kernels cannot be compiled (%s); torch takes over, at a fraction of the decode speed", reason
        )
        return None


def declare(found: ctypes.CDLL, signatures: dict[str, str]) -> ctypes.CDLL:
    """Tell a library what its functions take, by letters: int, long, float or pointer.

    Wrapping each number at every call takes longer than a decode step's work.
    """
    for name, letters in signatures.items():
        getattr(found, name).argtypes = [_TYPES[letter] for letter in letters]
    return found


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
    """Return where compiled kernels are kept."""
    return Path(os.environ.get("KVBATCH_CACHE") or "~/.cache/kvbatch").expanduser() / "kernels"


def compile_and_load(
    compiler: list[str], folder: Path, extra_flags: tuple[str, ...] = (), *, sources: Path = HERE
) -> ctypes.CDLL:
    """Load the library of the sources from `folder`, compiling it there first unless it is there already.

    Raises:
        OSError: There is no such compiler, or the folder cannot be written.
        subprocess.SubprocessError: It cannot compile this.
    """
    version = _run([*compiler, "--version"])
    native = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
    # Not -ffast-math: vector code needs no more than this, and infinities and NaN keep their meaning.
    flags = ["-std=c++17", "-O3", native, "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared"]
    # psabi: a note about vectors as arguments, which matters between libraries only.
    flags += ["-Wno-psabi", *extra_flags]
    name = _digest(
        version, " ".join([*compiler, *flags]), _cpu(), *(path.read_text() for path in _sources(sources))
    )
    path = folder / f"{name}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder / f"{name}.lock"):
            if not path.exists():
                _compile([*compiler, *flags, f"-I{HERE}"], sources, path)
    # torch loaded its OpenMP runtime before; a library that wants one of that name shares it and its threads.
    return ctypes.CDLL(str(path))


def _compile(command: list[str], sources: Path, path: Path) -> None:
    """Compile to a temporary file and move it to its place; on one thread where the compiler has no OpenMP."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        target = Path(folder) / path.name
        try:
            _build([*command, "-fopenmp"], sources, target)
            ctypes.CDLL(str(target))  # a runtime that is missing shows here
        except (subprocess.CalledProcessError, OSError):
            target.unlink(missing_ok=True)
            _build(command, sources, target)
        os.replace(target, path)


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


def _cpu() -> str:
    """Return what `native` means here: the CPU's name and features."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(
        sorted({line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))})
    )


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock file: processes that start together compile once."""
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
