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

    wait_s: float = 0.5  # longer than `lock_holder` holds it
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


@dataclass(frozen=True)
class Holder:
    """Say who holds a lock: a process, and the command that it reuses out, `run` or `plan`."""

    pid: int | None
    command: str

    def __str__(self) -> str:
        return f"kvbatch {self.command}, process {self.pid or 'unknown'}"


@dataclass(frozen=True)
class HeldLock:
    """Tell whether a lock still keeps others out: whoever removes `LOCK` lets them in."""

    path: Path
    handle: int

    @property
    def is_held(self) -> bool:
        """Whether the file is still the one that was locked."""
        return _is_same_file(self.handle, self.path)

    def check(self) -> None:
        """Prove it.

        Raises:
            Interrupted: It was removed or replaced.
        """
        if not self.is_held:
            raise Interrupted(
                f"{self.path} was removed or replaced while this process held it, so that another one may have "
                "begun; nothing more is written, finished rows are kept, start again to continue"
            )


@contextmanager
def job_lock(home: Path, if_locked: IfLocked, command: str = "run") -> Iterator[HeldLock]:
    """Hold a job's directory, which is made if need be.

    Args:
        command: what for; see `Holder`.

    Raises:
        Interrupted: Another process holds it.
        Skipped: The same, and that is no failure.
        OutputError: The lock cannot be written.
    """
    path = home / "LOCK"
    handle = _open(path)
    try:
        given_up_s = time.monotonic() + if_locked.wait_s
        while not (_try_lock(handle, path) and _is_same_file(handle, path)):
            if not _is_same_file(handle, path):  # removed since it was opened
                os.close(handle)
                handle = _open(path)
                continue
            if time.monotonic() >= given_up_s:
                message = f"{home} is held by {_read(handle)}"
                if if_locked.skips:
                    raise Skipped(f"{message}; nothing was done")
                raise Interrupted(f"{message}; start again when it has ended, or wait: --if-locked wait:600")
            time.sleep(_POLL_INTERVAL_S)
        os.ftruncate(handle, 0)
        os.pwrite(handle, f"{os.getpid()} {command}\n".encode(), 0)
        yield HeldLock(path, handle)
    finally:
        os.close(handle)  # frees the lock; the file stays, since a waiting process may have it open


def lock_holder(home: Path) -> Holder | None:
    """Return who holds a job's directory; None if nobody does."""
    try:
        handle = os.open(home / "LOCK", os.O_RDWR)
    except OSError:
        return None
    try:
        return None if _try_lock(handle, home / "LOCK") else _read(handle)
    except OutputError:
        return None
    finally:
        os.close(handle)


def _open(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; change output.dir") from error


def _is_same_file(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except OSError:
        return False


def _read(handle: int) -> Holder:
    """Return what the holder wrote; it may not have come to it yet."""
    pid, _, command = os.pread(handle, 40, 0).decode(errors="replace").strip().partition(" ")
    return Holder(int(pid) if pid.isdecimal() else None, command or "run")


def _try_lock(handle: int, path: Path) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise OutputError(f"cannot lock {path}: {error.strerror}; change output.dir") from error
    return True
