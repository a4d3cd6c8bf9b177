"""A job in a process of its own that dies at a chosen step: before or after it changes a file, or in the midst."""

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path

from kvbatch import atomic_file as writer
from kvbatch.cli import cli
from kvbatch.run_dir.wal import WriteAheadFile

# A server that has imported what a job needs and forks once a job: importing torch takes longer than the job.
_HEAVY = [
    "tests.kvbatch.crash",
    "torch",
    "transformers",
    "polars",
    "kvbatch.report.summary",
    "kvbatch.run.entry",
    "engine.engine_core",
]


def run_and_kill(folder: Path, job_file: Path, step: int | None) -> int:
    """Run a job that kills itself with SIGKILL at a step; return its exit code, -9 if it did."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_HEAVY)
    process = context.Process(target=_run, args=(str(folder), str(job_file), step))
    process.start()
    process.join(300)
    assert process.exitcode is not None, "the job hangs"
    return process.exitcode


def at_step(patch: Callable[[object, str, Callable], None], step: int, act: Callable[[], None]) -> list[int]:
    """Let something happen at a step: a sync, a rename, a removal or half a row written ahead; count the steps.

    Args:
        patch: as `monkeypatch.setattr`.
        step: the first is 1.
        act: what happens.
    """
    count = [0]

    def now() -> bool:
        count[0] += 1
        return count[0] == step

    def before(function: Callable, counts: Callable[..., bool] = lambda *_, **__: True) -> Callable:
        def call(*args, **kwargs):
            if counts(*args, **kwargs) and now():
                act()
            return function(*args, **kwargs)

        return call

    write = WriteAheadFile._write

    def write_half(self, data: bytes) -> None:
        if now():
            write(self, data[: len(data) // 2])
            act()
        write(self, data)

    patch(writer.os, "fsync", before(os.fsync))  # the module os itself: for everyone
    patch(writer.os, "replace", before(os.replace))
    patch(Path, "unlink", before(Path.unlink, lambda path, **_: path.exists()))
    patch(WriteAheadFile, "_write", write_half)
    return count


def _run(folder: str, job_file: str, step: int | None) -> None:
    os.chdir(folder)
    with open(os.devnull, "w") as nothing:
        os.dup2(nothing.fileno(), 1)
    if step is not None:
        at_step(setattr, step, lambda: os.kill(os.getpid(), signal.SIGKILL))
    cli.main(["run", job_file])
