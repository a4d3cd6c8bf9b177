"""One process a job: a lock on `LOCK` in the job's directory, which the kernel frees with the process."""

import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kvbatch.errors import Interrupted, OutputError, Skipped

_POLL_INTERVAL_S = 0.2


@dataclass(frozen=True)
class IfLocked:
    """What a start does that meets another run of its job: fail at once, after a while, or leave with success."""

    wait_s: float = 0.5  # longer than `is_locked` holds it
    skips: bool = False

    @classmethod
    def parse(cls, text: str) -> "IfLocked":
        """Read `fail`, `skip` or `wait:SECONDS`.

        Raises:
            ValueError: It is none of these.
        """
        if match := re.fullmatch(r"wait:(\d+(?:\.\d+)?)", text):
            return cls(wait_s=float(match[1]))
        if text not in ("fail", "skip"):
            raise ValueError(f"{text!r} is none of fail, skip and wait:SECONDS")
        return cls(skips=text == "skip")


@contextmanager
def job_lock(home: Path, if_locked: IfLocked) -> Iterator[None]:
    """Hold a job's directory, which is made if need be.

    Raises:
        Interrupted: Another process holds it.
        Skipped: The same, and that is no failure.
        OutputError: The lock cannot be written.
    """
    path = home / "LOCK"
    try:
        home.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; change output.dir") from error
    try:
        given_up_s = time.monotonic() + if_locked.wait_s
        while not _try_lock(handle, path):
            if time.monotonic() >= given_up_s:
                holder = os.pread(handle, 20, 0).decode(errors="replace").strip()
                message = f"{home} is held by another run, process {holder or 'unknown'}"
                if if_locked.skips:
                    raise Skipped(f"{message}; nothing was done")
                raise Interrupted(f"{message}; start again when it has ended, or wait: --if-locked wait:600")
            time.sleep(_POLL_INTERVAL_S)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(handle)  # frees the lock; the file stays, since a waiting process may have it open


def is_locked(home: Path) -> bool:
    """Tell whether a process holds a job's directory."""
    try:
        handle = os.open(home / "LOCK", os.O_RDWR)
    except OSError:
        return False
    try:
        return not _try_lock(handle, home / "LOCK")
    except OutputError:
        return False
    finally:
        os.close(handle)


def _try_lock(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OutputError(f"cannot lock {path}: {error.strerror}; change output.dir") from error
    return True
