"""Standard streams of many kinds, for command lines that run in this process or in one of their own."""

import os
import pty
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from kvbatch.cli import invoke
from kvbatch.progress.display import Progress
from kvcache.config import KVCacheConfig

ROOT = Path(__file__).parents[2]
RUN = "runs/test"


def make_stream(kind):
    """Return a text stream of a kind."""
    if kind == "absent":  # closed when Python started
        return None
    if kind == "full":
        return open("/dev/full", "w")
    if kind == "whole":
        return open(os.memfd_create("whole"), "w+")
    if kind == "lost":  # a terminal that is gone: EIO
        leader, follower = pty.openpty()
        stream = os.fdopen(follower, "w")
        assert stream.isatty()
        os.close(leader)
        return stream
    reader, writer = os.pipe()
    stream = os.fdopen(writer, "w")
    if kind == "stuck":  # a reader that does not read; its end stays open
        os.set_blocking(writer, False)
        try:
            while True:
                os.write(writer, b"x" * 4096)
        except BlockingIOError:
            return stream
    os.close(reader)
    if kind == "closed":
        stream.close()
    return stream


def written(stream):
    """Return what a whole stream got."""
    stream.seek(0)
    return stream.read()


def code_with(monkeypatch, arguments, out, err):
    """Run a command line in this process on two streams; return its exit code."""
    with monkeypatch.context() as streams:
        streams.setattr(sys, "stdout", out)
        streams.setattr(sys, "stderr", err)
        return invoke(arguments)


def in_process(command, **streams):
    """Run a command line in a process of its own."""
    return subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, check=False, timeout=120, **streams
    )


@contextmanager
def opened(job, **_):
    """Open a job without its model."""
    with Progress() as progress:
        found = SimpleNamespace(job=job, plan_memory=lambda: None, policy=KVCacheConfig())
        found.with_basis = lambda basis: found
        yield found, progress
