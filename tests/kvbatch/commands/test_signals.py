"""What stops a job, and when: signals in a run, before it and beside it."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from kvbatch.errors import Interrupted
from kvbatch.signals import Stopper, hold_signals, stop_on_signals
from tests.kvbatch.streams import RUN, code_with, in_process, make_stream, written


@pytest.fixture
def handlers(monkeypatch):
    """Signals as Python starts with them; what a test sets is taken back."""
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGTTOU)
    before = {number: signal.signal(number, signal.SIG_DFL) for number in numbers}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_hang_up_stops_a_job_unless_it_was_ignored(handlers):
    with pytest.raises(Interrupted, match="SIGHUP"), stop_on_signals():
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # nohup, disown
    with stop_on_signals():
        os.kill(os.getpid(), signal.SIGHUP)


def test_one_lost_terminal_is_told_of_twice(monkeypatch):
    exits = []
    monkeypatch.setattr(os, "_exit", exits.append)
    stopper = Stopper()
    with pytest.raises(KeyboardInterrupt, match="SIGHUP"), stopper.shield():
        stopper.handle(signal.SIGHUP, None)
        stopper.handle(signal.SIGHUP, None)  # from the shell and from the kernel
        stopper.handle(signal.SIGTERM, None)  # and from who ends the session
        stopper.handle(signal.SIGHUP, None)
        assert not exits
        stopper.handle(signal.SIGINT, None)
        assert exits == [75]
    with pytest.raises(KeyboardInterrupt, match="SIGHUP"), stopper.shield():
        pytest.fail("it was stopped, and the exception got lost on the way")


@pytest.mark.parametrize(
    ("arguments", "is_told"),
    [
        (["run", "job.yaml"], True),
        (["resume", RUN], True),
        (["status", RUN], False),
        (["plan", "job.yaml"], False),
    ],
)
def test_signals_of_the_first_moment_are_obeyed_when_an_ending_can_be_told(
    arguments, is_told, ran, handlers, monkeypatch
):
    hold_signals()
    os.kill(os.getpid(), signal.SIGHUP)  # while Python still imports
    out, err = make_stream("whole"), make_stream("whole")
    assert code_with(monkeypatch, arguments, out, err) == 75
    assert "stopped by SIGHUP" in written(err)
    if is_told:
        facts = json.loads(written(out).splitlines()[-1])
        assert (facts["job"], facts["status"], facts["exit_code"]) == ("test", "stopped", 75)
    assert not written(out) or is_told


def test_a_process_is_stopped_in_its_first_moment_without_streams(ran):
    code = (
        "import os, signal, sys, kvbatch.__main__ as process\n"
        "hold = process.hold_signals\n"
        "process.hold_signals = lambda: (hold(), os.kill(os.getpid(), signal.SIGTERM))\n"
        "process.main()"
    )
    line = 'exec "$0" -c "$1" run job.yaml -s output.metrics=test.prom <&- >&- 2>&-'
    done = in_process(["bash", "-c", line, sys.executable, code])
    assert done.returncode == 75
    assert 'kvbatch_last_run_exit_code{job_name="test"} 75' in Path("test.prom").read_text()
