"""The errors a user can meet, each with the exit code that the command line answers.

KvbatchError            70  internal: a rerun may succeed
├── Skipped              0  another run of the job goes on, and that is no failure
├── LimitExceeded       65  finished, but over a limit
├── InputError          66  input missing or unreadable
│   └── Damaged         66  a file of a run is not what was written
├── ModelUnavailable    69  model, device or library unavailable
├── OutputError         73  cannot write
├── Interrupted         75  stopped by a signal, a deadline or a lock; a rerun continues
└── JobFileError        78  bad job file
    └── JobChanged      78  it is not the one whose run should be continued
"""

import os
import traceback
from importlib.util import find_spec


class KvbatchError(Exception):
    """Base of every error that reuses a message meant for the user.

    Args:
        lines: of the message. A line break within one is part of what it quotes, and shown as such.
    """

    exit_code = 70

    def __init__(self, *lines: str):
        super().__init__(*lines)

    def __str__(self) -> str:
        return "\n".join(map(str, self.args))


def is_fault(error: BaseException) -> bool:
    """Tell whether an error is the program's own or a library's, rather than one of the job or a wish to stop."""
    is_panic = type(error).__name__ == "PanicException"  # of polars, and no Exception
    return is_panic or (isinstance(error, Exception) and not isinstance(error, KvbatchError))


def fault(error: BaseException) -> str:
    """Name such an error and where it arose; its message is left out, for it may quote a document."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}{where}"


# Libraries that only some jobs need, by the extra of this package that installs them.
_EXTRAS = {"report": ("matplotlib",), "gguf": ("gguf",), "grammar": ("llguidance", "jsonschema")}


def missing_extra(extra: str, purpose: str) -> str | None:
    """Return the message that an extra is not installed, or None if it is.

    Args:
        purpose: what needs it.
    """
    missing = [name for name in _EXTRAS[extra] if find_spec(name) is None]
    if not missing:
        return None
    return f"{purpose} needs {' and '.join(missing)}, not installed here; pip install 'kvbatch[{extra}]'"


class Skipped(KvbatchError):
    """Another process runs the job, and the caller wanted to leave it at that."""

    exit_code = 0


class LimitExceeded(KvbatchError):
    """The job finished and its outputs are committed, but they are not what a job is run for."""

    exit_code = 65


class InputError(KvbatchError):
    """An input file or directory is missing or cannot be read at all."""

    exit_code = 66


class Damaged(InputError):
    """A file of a run directory is missing or not what was written.

    Args:
        path: of the file.
        problem: what is wrong with it.
        remedy: what the user can do.
    """

    def __init__(self, path: object, problem: str, remedy: str):
        super().__init__(f"{path} {problem}; {remedy}")
        self.path, self.problem, self.remedy = path, problem, remedy


class ModelUnavailable(KvbatchError):
    """The model, the device or the library asked for cannot be used here."""

    exit_code = 69


class OutputError(KvbatchError):
    """The run directory cannot be written."""

    exit_code = 73


class Interrupted(KvbatchError):
    """The run was stopped before its end; what was committed stays."""

    exit_code = 75


class JobFileError(KvbatchError):
    """The job file is wrong: unknown key, bad value, contradiction."""

    exit_code = 78


class JobChanged(JobFileError):
    """A run cannot be continued: the job, its model or its input is another one than it began with."""


class ReaderLeft(Exception):
    """Nobody reads what is printed any more, and that is no failure."""
