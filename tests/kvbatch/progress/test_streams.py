"""No command depends on a stream: closed, full, broken, lost or stuck, its work is done and its exit code its own."""

import io
import json
import os
import queue
import subprocess
import sys
import threading
from contextlib import ExitStack
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvbatch.errors import InputError
from kvbatch.progress.display import Progress
from kvbatch.progress.streams import Messages, outlets
from kvbatch.report.exit_line import exit_report
from tests.kvbatch.streams import RUN, code_with, in_process, make_stream, written

# what works: its product is a run
JOBS = {
    "run": (["run", "job.yaml", "--new-run"], 0),
    "run, nothing new": (["run", "job.yaml"], 0),
    "run, no job": (["run", "nowhere.yaml"], 78),
    "resume": (["resume", RUN], 0),
    "resume, no run": (["resume", "nowhere"], 66),
    "retry": (["retry", RUN, "--status", "stop"], 0),
}
# what prints: its product is what it prints
PRINTERS = {
    "validate": (["validate", "job.yaml"], 0),
    "validate, no job": (["validate", "nowhere.yaml", "--json"], 78),
    "plan": (["plan", "job.yaml"], 0),
    "quality": (["quality", "job.yaml", "-s", "cache.preset=default"], 0),
    "tune": (["tune", "job.yaml"], 0),
    "inspect": (["inspect", "in.jsonl"], 0),
    "inspect, no file": (["inspect", "nowhere.jsonl"], 66),
    "schema": (["schema"], 0),
    "status": (["status", RUN], 0),
    "report": (["report", RUN, "--json"], 0),
    "diff": (["diff", RUN, RUN], 0),
    "export": (["export", RUN], 0),
    "export, no run": (["export", "nowhere"], 66),
    "help": (["--help"], 0),
}
NEITHER = {"no command": (["fly"], 2)}
COMMANDS = JOBS | PRINTERS | NEITHER
NOT_WRITABLE = ("absent", "closed", "full")  # a reader that left, on the other hand, has what it wanted


def check(monkeypatch, name, kind, error_kind):
    """Hold a command to its exit code and to its work, on streams of two kinds."""
    arguments, own = COMMANDS[name]
    out, err = make_stream(kind), make_stream(error_kind)
    runs = set(Path(RUN).glob("2*"))
    code = code_with(monkeypatch, arguments, out, err)
    is_lost = name in PRINTERS and kind in NOT_WRITABLE
    assert code == (own or (73 if is_lost else 0)), (name, kind, error_kind)
    if name in ("run", "retry"):
        [new] = set(Path(RUN).glob("2*")) - runs
        assert (new / "_SUCCESS").exists(), (name, kind, error_kind)
    if error_kind == "whole":
        text = written(err)
        assert "Traceback" not in text and "Exception ignored" not in text
        assert ("cannot write to standard output" in text) == (is_lost and not own), (name, kind)


@pytest.mark.parametrize("kind", ["absent", "full", "broken"])
def test_every_command_on_streams_of_no_use(kind, ran, monkeypatch):
    for name in COMMANDS:
        check(monkeypatch, name, kind, kind)
    monkeypatch.setattr("kvbatch.commands.common._PATIENCE_S", 0.01)
    check(monkeypatch, "run, nothing new", "stuck", kind)
    for name in ("run, no job", "validate", "inspect", "status", "export", "help", "no command"):
        check(monkeypatch, name, kind, "whole")


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_on_every_pair_of_streams(name, ran, monkeypatch):
    kinds = ("whole", "absent", "closed", "full", "broken", "lost")
    monkeypatch.setattr("kvbatch.commands.common._PATIENCE_S", 0.01)
    for kind, error_kind in product(kinds + ("stuck",) * (name in JOBS), (*kinds, "stuck")):
        check(monkeypatch, name, kind, error_kind)


def test_what_is_printed_is_whole_or_a_failure(ran, monkeypatch):
    def exported(out):
        return code_with(monkeypatch, ["export", RUN], out, make_stream("whole"))

    whole = make_stream("whole")
    assert exported(whole) == 0
    lines = written(whole)
    assert [json.loads(line)["id"] for line in lines.splitlines()] == [0, 1, 2]

    reader, writer = os.pipe()  # one that takes a little at a time, and says so
    os.set_blocking(writer, False)
    monkeypatch.setattr("kvbatch.report.export.FORMATS", {"jsonl": lambda *_: [lines] * 300})
    got = []
    slow = threading.Thread(target=lambda: got.extend(iter(lambda: os.read(reader, 50_000), b"")))
    slow.start()
    with open(writer, "w") as out:
        assert exported(out) == 0
    slow.join()
    assert b"".join(got).decode() == lines * 300

    asked = []
    monkeypatch.setattr(
        "kvbatch.report.export.FORMATS", {"jsonl": lambda *_: map(asked.append, range(9)) and rows()}
    )

    def rows():
        for number in range(1_000_000):
            asked.append(number)
            yield lines

    assert exported(make_stream("broken")) == 0
    assert len(asked) < 10_000, "nobody reads the rest"


def test_progress_outlives_its_stream(monkeypatch):
    monkeypatch.setattr("kvbatch.progress.display.LINE_INTERVAL_S", 0)
    monkeypatch.setattr("kvbatch.progress.display.BEAT_INTERVAL_S", 0)
    beats = queue.Queue()
    with ExitStack() as stack:
        kinds = {"lost", "full", "closed", "stuck"}
        for kind in kinds:
            beat = partial(beats.put, kind)
            progress = stack.enter_context(Progress(make_stream(kind), lambda *_, beat=beat, **__: beat()))
            progress.start("running", 2)
            progress.advance(1, 10)
            progress.note("halfway")
        while kinds:  # each goes on
            kinds.discard(beats.get(timeout=60))


def test_a_step_is_shown_with_the_rows_until_its_phase_ends():
    shown = io.StringIO()
    with Progress(shown, hide=lambda text: text.replace("secret", "***")) as progress:
        progress.start("comparing", 20)
        progress.step("cache secret (2 of 9)")
        progress.advance(3, 0)
        assert progress._figures() == "3 of 20 rows, cache *** (2 of 9)"
        progress.start("running", 4)
        progress.advance(4, 0)
    assert "comparing: 3 of 20 rows\n" in shown.getvalue()
    assert shown.getvalue().endswith("running: 4 of 4 rows\n")


def test_a_reader_that_stands_still_is_waited_for_once(monkeypatch):
    waits = []
    stream = Messages(make_stream("stuck"))
    raw = stream.buffer.raw
    monkeypatch.setattr(raw, "_is_free", lambda seconds: waits.append(seconds))
    for _ in range(3):
        print("working", file=stream, flush=True)
    assert waits == [1.0, 0, 0]


def test_others_may_write_to_standard_error_too(monkeypatch):
    monkeypatch.setattr(sys, "stderr", make_stream("full"))
    with outlets():
        print("what a library has to say", file=sys.stderr, flush=True)


def test_the_json_line_is_printed_whatever_cannot_be_read(monkeypatch):
    def fail(_):
        raise InputError("a shard is missing")

    monkeypatch.setattr("kvbatch.report.summary.load_summary", fail)
    out = io.StringIO()
    with pytest.raises(InputError), exit_report(out, for_people=True, for_programs=True) as ending:
        ending.begin(SimpleNamespace(read_summary=lambda: {"rows": 1}, run_id="r", shards="s", path="p"))
    assert json.loads(out.getvalue())["exit_code"] == 66


def test_a_process_whose_reader_left_ends_with_its_own_code(ran):
    reader, writer = os.pipe()
    os.close(reader)
    for arguments, own in ((["run", "nowhere.yaml"], 78), (["run", "job.yaml"], 0), (["export", RUN], 0)):
        done = in_process(
            [sys.executable, "-m", "kvbatch", *arguments], stdout=writer, stderr=subprocess.PIPE
        )
        assert done.returncode == own and b"Exception ignored" not in done.stderr, done.stderr
    os.close(writer)
